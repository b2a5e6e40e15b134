// f16, bf16 and their packed pairs: add, sub, mul, fma, min, max, abs, neg.
//
// Every result is the exact one rounded once. Sums of either format, and products of f16, may take
// the detour over f32: its precision is at least 2p + 2 and no subnormal of f32 comes up, so rounding
// twice is harmless (S. Figueroa, "When is double rounding innocuous?", 1995). Products of bf16 can
// be subnormal in f32 and fused sums may lie anywhere: these go over f64, the sum rounded to odd.
#include "exec/elementwise.h"
#include "exec/number_formats.h"

namespace halfbyte::gpu {
namespace {

struct Half {
  using Values = F16;
  using Codes = FormatF16;
  using Product = float;
};
struct Bfloat {
  using Values = BF16;
  using Codes = FormatBF16;
  using Product = double;
};

enum Operation { kAdd, kSub, kMul };

template <class Type, bool flushes>
inline float value_of(uint32_t code) {
  return Type::Values::decode(flushes ? flush16<typename Type::Values>(code) : code);
}

template <class Type, bool flushes, bool saturates, bool clamps, class Float>
inline uint32_t finish(Float result) {
  // A result counts as subnormal before rounding (seen on an H200).
  constexpr Float kSmallestNormal = static_cast<Float>(0x1p-14);
  const bool is_tiny = flushes && std::fabs(result) < kSmallestNormal;
  const Float kept = is_tiny ? std::copysign(static_cast<Float>(0), result) : result;
  const Float value = saturates ? saturate(kept) : kept;
  const uint32_t code =
      encode<typename Type::Codes, Rounding::kNearestEven>(value, EncodeOptions{false, clamps});
  return flushes ? flush16<typename Type::Values>(code) : code;
}

template <class Type, Operation operation, bool flushes, bool saturates>
uint32_t binary(uint32_t a, uint32_t b) {
  const float x = value_of<Type, flushes>(a), y = value_of<Type, flushes>(b);
  if constexpr (operation == kMul) {
    using Product = typename Type::Product;
    return finish<Type, flushes, saturates, false>(static_cast<Product>(x) * static_cast<Product>(y));
  } else {
    return finish<Type, flushes, saturates, false>(operation == kAdd ? x + y : x - y);
  }
}

// x * y + z with the last bit of the f64 result set when it is inexact ("round to odd"): any further
// rounding then sees on which side of a boundary the exact value lies.
inline double fma_to_odd(float x, float y, float z) {
  const double product = static_cast<double>(x) * static_cast<double>(y);  // exact
  const double sum = product + z;
  const double recovered = sum - product;
  const double error = (product - (sum - recovered)) + (static_cast<double>(z) - recovered);
  const bool is_inexact = error < 0.0 || error > 0.0;  // neither for infinities and NaN
  const bool is_too_large = (error < 0.0) != (sum < 0.0);
  const uint64_t bits = float_bits(sum);
  return bit_cast<double>(is_inexact ? (bits - is_too_large) | 1 : bits);
}

// Saturation happens before rounding; 0 and 1 are exact in both formats.
template <class Type, bool flushes, bool saturates, bool clamps, bool ignores_outside>
uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
  const double sum = fma_to_odd(value_of<Type, flushes>(a), value_of<Type, flushes>(b),
                                value_of<Type, flushes>(c));
  const uint32_t code = finish<Type, flushes, saturates, clamps>(sum);
  const bool is_outside = ignores_outside && ((a & 0x7FFF) == kOutOfBoundsNan16 ||
                                              (b & 0x7FFF) == kOutOfBoundsNan16);
  return is_outside ? 0 : code;
}

// NaN becomes the canonical one (seen on an H200).
template <class Type, bool flushes>
uint32_t abs(uint32_t a) {
  const uint32_t value = flushes ? flush16<typename Type::Values>(a) : a;
  return is_nan16(a, Type::Values::kInfinity) ? kCanonicalNan16 : value & 0x7FFF;
}
template <class Type, bool flushes>
uint32_t neg(uint32_t a) {
  const uint32_t value = flushes ? flush16<typename Type::Values>(a) : a;
  return is_nan16(a, Type::Values::kInfinity) ? kCanonicalNan16 : value ^ 0x8000;
}

// Codes ordered as their values, -0 before +0.
inline uint32_t order_of(uint32_t code) { return code & 0x8000 ? 0xFFFF - code : code + 0x8000; }

template <class Type, bool is_max, bool keeps_nan>
inline uint32_t pick(uint32_t a, uint32_t b) {
  const bool takes_a = is_max ? order_of(a) > order_of(b) : order_of(a) < order_of(b);
  const bool a_is_nan = is_nan16(a, Type::Values::kInfinity);
  const bool b_is_nan = is_nan16(b, Type::Values::kInfinity);
  uint32_t result = takes_a ? a : b;
  result = a_is_nan ? b : result;
  result = b_is_nan ? a : result;
  const bool is_nan = keeps_nan ? a_is_nan || b_is_nan : a_is_nan && b_is_nan;
  return is_nan ? kCanonicalNan16 : result;
}
template <class Type, bool is_max, bool flushes, bool keeps_nan, bool xors_signs>
uint32_t extreme(uint32_t a, uint32_t b) {
  const uint32_t x = flushes ? flush16<typename Type::Values>(a) : a;
  const uint32_t y = flushes ? flush16<typename Type::Values>(b) : b;
  if (!xors_signs) return pick<Type, is_max, keeps_nan>(x, y);
  const uint32_t result = pick<Type, is_max, keeps_nan>(x & 0x7FFF, y & 0x7FFF);
  const bool is_nan = is_nan16(result, Type::Values::kInfinity);
  return is_nan ? kCanonicalNan16 : result | ((x ^ y) & 0x8000);
}

template <class Type, bool flushes, bool saturates>
void register_arithmetic(const std::string& modifiers, const std::string& type) {
  register_halves<binary<Type, kAdd, flushes, saturates>>("add" + modifiers, type);
  register_halves<binary<Type, kSub, flushes, saturates>>("sub" + modifiers, type);
  register_halves<binary<Type, kMul, flushes, saturates>>("mul" + modifiers, type);
  register_halves<fma<Type, flushes, saturates, false, false>>("fma" + modifiers, type);
}

template <class Type, bool flushes>
void register_simple(const std::string& flush_text, const std::string& type) {
  register_halves<abs<Type, flushes>>("abs" + flush_text, type);
  register_halves<neg<Type, flushes>>("neg" + flush_text, type);
  register_halves<extreme<Type, false, flushes, false, false>>("min" + flush_text, type);
  register_halves<extreme<Type, false, flushes, true, false>>("min" + flush_text + "NaN.", type);
  register_halves<extreme<Type, false, flushes, false, true>>("min" + flush_text + "xorsign.abs.", type);
  register_halves<extreme<Type, false, flushes, true, true>>("min" + flush_text + "NaN.xorsign.abs.", type);
  register_halves<extreme<Type, true, flushes, false, false>>("max" + flush_text, type);
  register_halves<extreme<Type, true, flushes, true, false>>("max" + flush_text + "NaN.", type);
  register_halves<extreme<Type, true, flushes, false, true>>("max" + flush_text + "xorsign.abs.", type);
  register_halves<extreme<Type, true, flushes, true, true>>("max" + flush_text + "NaN.xorsign.abs.", type);
}

const bool registered = [] {
  register_arithmetic<Half, false, false>(".", "f16");
  register_arithmetic<Half, true, false>(".ftz.", "f16");
  register_arithmetic<Half, false, true>(".sat.", "f16");
  register_arithmetic<Half, true, true>(".ftz.sat.", "f16");
  register_arithmetic<Bfloat, false, false>(".", "bf16");
  register_halves<fma<Half, false, false, true, false>>("fma.relu.", "f16");
  register_halves<fma<Half, true, false, true, false>>("fma.ftz.relu.", "f16");
  register_halves<fma<Half, false, false, false, true>>("fma.oob.", "f16");
  register_halves<fma<Half, false, false, true, true>>("fma.oob.relu.", "f16");
  register_halves<fma<Bfloat, false, false, true, false>>("fma.relu.", "bf16");
  register_halves<fma<Bfloat, false, false, false, true>>("fma.oob.", "bf16");
  register_halves<fma<Bfloat, false, false, true, true>>("fma.oob.relu.", "bf16");
  register_simple<Half, false>(".", "f16");
  register_simple<Half, true>(".ftz.", "f16");
  register_simple<Bfloat, false>(".", "bf16");
  return true;
}();

}  // namespace
}  // namespace halfbyte::gpu
