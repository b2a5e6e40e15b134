// Rounding into every floating-point format narrower than f64, in every PTX rounding mode.
//
// One routine serves all formats: the significand is shifted to the format's precision (further for
// a subnormal result), the remainder decides whether the code grows by one, and a carry runs into
// the exponent by itself. The result is exact: a single rounding, no host rounding mode involved.
#pragma once

#include <cstdint>

#include "exec/float_values.h"

namespace halfbyte::gpu {

enum class Rounding { kNearestEven = 0, kZero = 1, kDown = 2, kUp = 3, kNearestAway = 4 };

// `finite` is the largest finite code, `infinity` the code of infinity (or 0: the format has none),
// `nan` the canonical NaN (or the largest finite code where the format has no NaN).
template <int exponent_bits_, int mantissa_bits_, int bias_, uint32_t finite_, uint32_t infinity_,
          uint32_t nan_>
struct NumberFormat {
  static constexpr int exponent_bits = exponent_bits_;
  static constexpr int mantissa_bits = mantissa_bits_;
  static constexpr int bias = bias_;
  static constexpr int total_bits = 1 + exponent_bits_ + mantissa_bits_;
  static constexpr uint32_t finite = finite_;
  static constexpr uint32_t infinity = infinity_;
  static constexpr uint32_t nan = nan_;
  static constexpr uint32_t sign_bit = 1u << (total_bits - 1);
};

using FormatF32 = NumberFormat<8, 23, 127, 0x7F7FFFFF, 0x7F800000, kCanonicalNan32>;
using FormatTF32 = NumberFormat<8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF>;  // code << 13 is the f32
using FormatF16 = NumberFormat<5, 10, 15, 0x7BFF, 0x7C00, kCanonicalNan16>;
using FormatBF16 = NumberFormat<8, 7, 127, 0x7F7F, 0x7F80, kCanonicalNan16>;
using FormatE4M3 = NumberFormat<4, 3, 7, 0x7E, 0, 0x7F>;
using FormatE5M2 = NumberFormat<5, 2, 15, 0x7B, 0x7C, 0x7F>;
using FormatE2M3 = NumberFormat<2, 3, 1, 0x1F, 0, 0x1F>;
using FormatE3M2 = NumberFormat<3, 2, 3, 0x1F, 0, 0x1F>;
using FormatE2M1 = NumberFormat<2, 1, 1, 0x7, 0, 0x7>;

// What happens beside rounding. Stochastic rounding adds `random` to the top `random_bits` of the
// discarded bits, and the carry rounds away from zero.
struct EncodeOptions {
  bool saturates_finite = false;  // .satfinite: overflow and infinity -> largest finite
  bool clamps_negative = false;   // .relu: negative -> +0
};

namespace detail {

// Layout of the source: f32 or f64.
template <class Float>
struct SourceLayout;
template <>
struct SourceLayout<float> {
  using Bits = uint32_t;
  using Signed = int32_t;
  static constexpr int mantissa_bits = 23, bias = 127, max_exponent = 255;
};
template <>
struct SourceLayout<double> {
  using Bits = uint64_t;
  using Signed = int64_t;
  static constexpr int mantissa_bits = 52, bias = 1023, max_exponent = 2047;
};

// 1 when the kept bits grow by one: `next` is the first bit dropped, `sticky` whether any later one
// is set. Numbers of one width, not truth values: that is what compilers vectorize.
template <Rounding rounding, class Bits>
inline Bits rounds_up(Bits kept, Bits next, Bits sticky, Bits is_negative) {
  switch (rounding) {
    case Rounding::kNearestEven: return next & (sticky | kept) & 1;
    case Rounding::kNearestAway: return next;
    case Rounding::kUp: return (is_negative ^ 1) & (next | sticky);
    case Rounding::kDown: return is_negative & (next | sticky);
    default: return 0;
  }
}

// The code for what does not fit: infinity or NaN of the format, or the largest finite one where
// the rounding mode turns away from infinity.
template <class Format, Rounding rounding>
inline uint32_t overflow_code(bool is_negative, bool is_infinite, bool saturates) {
  constexpr uint32_t beyond = Format::infinity ? Format::infinity : Format::nan;
  bool stays_finite = rounding == Rounding::kZero;
  if (rounding == Rounding::kUp) stays_finite = is_negative;
  if (rounding == Rounding::kDown) stays_finite = !is_negative;
  return saturates || (stays_finite && !is_infinite) ? Format::finite : beyond;
}

}  // namespace detail

// The code (sign included) of a value; branch-free so that loops over lanes vectorize.
template <class Format, Rounding rounding, class Float>
inline __attribute__((always_inline)) uint32_t encode(Float value, EncodeOptions options = {}) {
  using Layout = detail::SourceLayout<Float>;
  using Bits = typename Layout::Bits;
  using Signed = typename Layout::Signed;
  constexpr int width = 8 * sizeof(Bits);
  constexpr Bits hidden = static_cast<Bits>(1) << Layout::mantissa_bits;
  constexpr Signed smallest = 1 - Format::bias;  // exponent of the smallest normal number
  constexpr Signed drop = Layout::mantissa_bits - Format::mantissa_bits;

  const Bits bits = float_bits(value);
  const Bits magnitude = bits & ~(static_cast<Bits>(1) << (width - 1));
  const bool is_negative = bits >> (width - 1);
  const Signed field = static_cast<Signed>(magnitude >> Layout::mantissa_bits);
  const Bits significand = (magnitude & (hidden - 1)) | (field ? hidden : 0);
  const Signed exponent = (field ? field : 1) - Layout::bias;
  const Signed below = exponent < smallest ? smallest - exponent : 0;
  const Signed shift = drop + below < width - 1 ? drop + below : width - 1;
  const Bits doubled = significand >> (shift - 1);
  const Bits kept = doubled >> 1;
  const Bits sticky = (doubled << (shift - 1)) != significand ? 1 : 0;
  const Bits up = detail::rounds_up<rounding, Bits>(kept, doubled & 1, sticky, bits >> (width - 1));
  const Bits scaled = static_cast<Bits>(exponent + below - smallest) << Format::mantissa_bits;
  const Bits full_code = kept + up + scaled;

  const bool is_infinite = magnitude == static_cast<Bits>(Layout::max_exponent) << Layout::mantissa_bits;
  const bool is_nan = magnitude > static_cast<Bits>(Layout::max_exponent) << Layout::mantissa_bits;
  const bool overflows = full_code > Format::finite;
  uint32_t code = static_cast<uint32_t>(full_code);
  const uint32_t beyond =
      detail::overflow_code<Format, rounding>(is_negative, is_infinite, options.saturates_finite);
  code = overflows ? beyond : code;
  code |= is_negative ? Format::sign_bit : 0;
  code = options.clamps_negative && is_negative ? 0 : code;
  return is_nan ? Format::nan : code;
}

// Stochastic rounding with `random_bits` random bits (PTX ISA, "cvt", .rs).
template <class Format, int random_bits>
inline uint32_t encode_stochastic(double value, uint32_t random, EncodeOptions options) {
  const uint64_t magnitude = float_bits(value) & 0x7FFFFFFFFFFFFFFFull;
  const int exponent = static_cast<int>(magnitude >> 52) - 1023;
  const int smallest = 1 - Format::bias;
  // The random bits as a number beside the value: below the format's last place.
  const int last_place = (exponent > smallest ? exponent : smallest) - Format::mantissa_bits;
  const bool is_special = magnitude >= 0x7FF0000000000000ull;
  const double step = std::ldexp(static_cast<double>(random & ((1u << random_bits) - 1)),
                                 last_place - random_bits);
  // Bits of the value below the random ones cannot make a carry; the sum is exact without them.
  const double unit = std::ldexp(1.0, last_place - random_bits);
  const double truncated = is_special ? value : std::trunc(value / unit) * unit;
  const double sum = is_special ? value : truncated + std::copysign(step, value);
  return encode<Format, Rounding::kZero>(sum, options);
}

// The value of a code; formats without infinity have NaN only at `nan` (if that is not finite).
template <class Format>
inline double decode(uint32_t code) {
  const uint32_t magnitude = code & (Format::sign_bit - 1);
  const bool is_negative = code & Format::sign_bit;
  const uint32_t field = magnitude >> Format::mantissa_bits;
  const uint32_t mantissa = magnitude & ((1u << Format::mantissa_bits) - 1);
  const double significand = field ? mantissa + (1u << Format::mantissa_bits) : mantissa;
  double value = std::ldexp(significand, static_cast<int>(field ? field : 1) - Format::bias - Format::mantissa_bits);
  if (Format::infinity && magnitude == Format::infinity) value = HUGE_VAL;
  if (magnitude > Format::finite && !(Format::infinity && magnitude == Format::infinity)) value = NAN;
  return is_negative ? -value : value;
}

}  // namespace halfbyte::gpu
