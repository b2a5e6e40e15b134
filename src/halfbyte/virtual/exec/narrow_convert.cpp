// cvt to and from the narrow formats: e4m3, e5m2, e2m3, e3m2, e2m1, ue8m0 and s2f6.
//
// The first source (or the upper half of a packed one) goes to the upper slot. FP4 slots are 4 bits
// wide, all others 8; FP6 values have two zero bits above them. Attributes of every handler here:
// .satfinite, .relu, .scaled::n2::ue8m0 (the last operand then holds a power of two per slot, upper
// byte for the upper slot, that the value is multiplied by before it is rounded).
#include <array>

#include "exec/elementwise.h"
#include "exec/number_formats.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

inline EncodeOptions options_of(const Instruction& in) {
  return {in.attributes[0] != 0, in.attributes[1] != 0};
}

// 2^(code - 127); 0xFF is NaN.
inline double decode_ue8m0(uint32_t code) {
  code &= 0xFF;
  return code == 0xFF ? NAN : bit_cast<double>(static_cast<uint64_t>(code + 896) << 52);
}

// Where the two values of a lane come from.
struct FromF32 {  // operands d, a, b
  static constexpr int num_sources = 2;
  const uint32_t *a, *b;
  FromF32(const Warp& warp, const Instruction& in)
      : a(warp.read32(in.operands[1])), b(warp.read32(in.operands[2])) {}
  float upper(int lane) const { return bit_cast<float>(a[lane]); }
  float lower(int lane) const { return bit_cast<float>(b[lane]); }
};
template <class Values>
struct FromHalves {  // operands d, a
  static constexpr int num_sources = 1;
  const uint32_t* a;
  FromHalves(const Warp& warp, const Instruction& in) : a(warp.read32(in.operands[1])) {}
  float upper(int lane) const { return Values::decode(a[lane] >> 16); }
  float lower(int lane) const { return Values::decode(a[lane] & 0xFFFF); }
};

template <class Format, Rounding rounding, class Source>
Outcome to_narrow(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int slot = Format::total_bits == 4 ? 4 : 8;
  const EncodeOptions options = options_of(in);
  const Source from(warp, in);
  uint32_t* to = warp.write32(in.operands[0]);
  if (in.attributes[2]) {
    const uint32_t* scale = warp.read32(in.operands[1 + Source::num_sources]);
    for_lanes(mask, [&](int lane) {
      const double high = from.upper(lane) * decode_ue8m0(scale[lane] >> 8);
      const double low = from.lower(lane) * decode_ue8m0(scale[lane]);
      to[lane] = encode<Format, rounding>(high, options) << slot | encode<Format, rounding>(low, options);
    });
    return Outcome::kNext;
  }
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const uint32_t high = encode<Format, rounding>(from.upper(lane), options);
    const uint32_t low = encode<Format, rounding>(from.lower(lane), options);
    to[lane] = high << slot | low;
  });
  return Outcome::kNext;
}

// Operands d, {a, b, e, f}, rbits: a goes to the highest slot. Which random bits each slot uses is
// what hardware does (measured by the authors of quack, MIT licence, on B200 and B300): byte i for
// slot i on sm_100a; on sm_103a a permutation of the bytes with the odd slots' bytes reversed.
inline uint32_t reverse_byte(uint32_t byte) {
  uint32_t result = 0;
  for (int bit = 0; bit < 8; ++bit) result |= (byte >> bit & 1) << (7 - bit);
  return result;
}
template <class Format>
Outcome to_narrow4_stochastic(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int slot = Format::total_bits == 4 ? 4 : 8;
  static constexpr int kStraight[4] = {0, 1, 2, 3};
  static constexpr int kSwapped8[4] = {1, 0, 3, 2};
  static constexpr int kSwapped4[4] = {2, 0, 3, 1};
  const bool is_swapped = warp.simulation->config.compute_capability == 103;
  const int* byte_of = !is_swapped ? kStraight : slot == 4 ? kSwapped4 : kSwapped8;
  const EncodeOptions options = options_of(in);
  const uint32_t* random = warp.read32(in.operands[5]);
  const uint32_t* from[4];
  for (int i = 0; i < 4; ++i) from[i] = warp.read32(in.operands[4 - i]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      uint32_t bits = random[lane] >> (8 * byte_of[i]) & 0xFF;
      if (is_swapped && (i & 1)) bits = reverse_byte(bits);
      result |= encode_stochastic<Format, 8>(bit_cast<float>(from[i][lane]), bits, options) << (slot * i);
    }
    to[lane] = result;
  });
  return Outcome::kNext;
}

template <class Format>
std::array<float, 256> make_table() {
  std::array<float, 256> values{};
  for (uint32_t code = 0; code < 256; ++code) {
    values[code] = static_cast<float>(decode<Format>(code & (2 * Format::sign_bit - 1)));
  }
  return values;
}

template <class Format, class Target>
Outcome from_narrow(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int slot = Format::total_bits == 4 ? 4 : 8;
  static const std::array<float, 256> table = make_table<Format>();
  const EncodeOptions options = options_of(in);
  const uint32_t* a = warp.read32(in.operands[1]);
  const uint32_t* scale = in.attributes[2] ? warp.read32(in.operands[2]) : nullptr;
  uint32_t* to = warp.write32(in.operands[0]);
  const float* values = table.data();
  constexpr uint32_t part = (1u << slot) - 1;
  if (scale == nullptr) {
    for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
      const uint32_t high = encode<Target, Rounding::kNearestEven>(values[(a[lane] >> slot) & part], options);
      const uint32_t low = encode<Target, Rounding::kNearestEven>(values[a[lane] & part], options);
      to[lane] = high << 16 | low;
    });
    return Outcome::kNext;
  }
  for_lanes(mask, [&](int lane) {
    const double high = values[(a[lane] >> slot) & part] * decode_ue8m0(scale[lane] >> 8);
    const double low = values[a[lane] & part] * decode_ue8m0(scale[lane]);
    to[lane] = encode<Target, Rounding::kNearestEven>(high, options) << 16 |
               encode<Target, Rounding::kNearestEven>(low, options);
  });
  return Outcome::kNext;
}

// ue8m0: powers of two from 2^-127 (code 0) to 2^127 (0xFE); 0xFF is NaN. The sign is dropped. .rp
// takes the next power up, but nothing below 2^-127 moves past code 0.
template <bool rounds_up>
inline uint32_t encode_ue8m0(float value, bool saturates) {
  const uint32_t magnitude = float_bits(value) & 0x7FFFFFFFu;
  const bool has_fraction = (magnitude & 0x7FFFFFu) != 0 && magnitude > 0x00400000u;
  uint32_t code = magnitude >> 23;
  code += rounds_up && has_fraction && code < 0xFF;
  code = saturates && code == 0xFF && magnitude <= 0x7F800000u ? 0xFE : code;
  return magnitude > 0x7F800000u ? 0xFF : code;
}
template <bool rounds_up, class Source>
Outcome to_ue8m0(Warp& warp, const Instruction& in, uint32_t mask) {
  const bool saturates = in.attributes[0] != 0;
  const Source from(warp, in);
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    to[lane] = encode_ue8m0<rounds_up>(from.upper(lane), saturates) << 8 |
               encode_ue8m0<rounds_up>(from.lower(lane), saturates);
  });
  return Outcome::kNext;
}
Outcome from_ue8m0(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* a = warp.read32(in.operands[1]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    to[lane] = encode<FormatBF16, Rounding::kNearestEven>(decode_ue8m0(a[lane] >> 8)) << 16 |
               encode<FormatBF16, Rounding::kNearestEven>(decode_ue8m0(a[lane]));
  });
  return Outcome::kNext;
}

// s2f6: a signed byte that counts 64ths. NaN becomes 0.
inline uint32_t encode_s2f6(double value, bool clamps_negative) {
  const double scaled = std::rint(value * 64.0);
  const double bounded = scaled > 127.0 ? 127.0 : scaled < -128.0 ? -128.0 : scaled;
  const bool is_zero = value != value || (clamps_negative && value < 0.0);
  return static_cast<uint32_t>(is_zero ? 0 : static_cast<int32_t>(bounded)) & 0xFF;
}
template <class Source>
Outcome to_s2f6(Warp& warp, const Instruction& in, uint32_t mask) {
  const Source from(warp, in);
  const uint32_t* scale = in.attributes[2] ? warp.read32(in.operands[1 + Source::num_sources]) : nullptr;
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    const double high = from.upper(lane) * (scale ? decode_ue8m0(scale[lane] >> 8) : 1.0);
    const double low = from.lower(lane) * (scale ? decode_ue8m0(scale[lane]) : 1.0);
    to[lane] = encode_s2f6(high, in.attributes[1]) << 8 | encode_s2f6(low, in.attributes[1]);
  });
  return Outcome::kNext;
}
template <class Target>
Outcome from_s2f6(Warp& warp, const Instruction& in, uint32_t mask) {
  const EncodeOptions options = options_of(in);
  const uint32_t* a = warp.read32(in.operands[1]);
  const uint32_t* scale = in.attributes[2] ? warp.read32(in.operands[2]) : nullptr;
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    const double high = static_cast<int8_t>(a[lane] >> 8) / 64.0 * (scale ? decode_ue8m0(scale[lane] >> 8) : 1.0);
    const double low = static_cast<int8_t>(a[lane]) / 64.0 * (scale ? decode_ue8m0(scale[lane]) : 1.0);
    to[lane] = encode<Target, Rounding::kNearestEven>(high, options) << 16 |
               encode<Target, Rounding::kNearestEven>(low, options);
  });
  return Outcome::kNext;
}

template <class Format>
void register_format(const std::string& format) {
  const std::string pair = format + "x2";
  register_handler("cvt.rn." + pair + ".f32", to_narrow<Format, Rounding::kNearestEven, FromF32>);
  register_handler("cvt.rz." + pair + ".f32", to_narrow<Format, Rounding::kZero, FromF32>);
  register_handler("cvt.rn." + pair + ".f16x2", to_narrow<Format, Rounding::kNearestEven, FromHalves<F16>>);
  register_handler("cvt.rz." + pair + ".f16x2", to_narrow<Format, Rounding::kZero, FromHalves<F16>>);
  register_handler("cvt.rn." + pair + ".bf16x2", to_narrow<Format, Rounding::kNearestEven, FromHalves<BF16>>);
  register_handler("cvt.rz." + pair + ".bf16x2", to_narrow<Format, Rounding::kZero, FromHalves<BF16>>);
  register_handler("cvt.f16x2." + pair, from_narrow<Format, FormatF16>);
  register_handler("cvt.bf16x2." + pair, from_narrow<Format, FormatBF16>);
  register_handler("cvt.rs." + format + "x4.f32", to_narrow4_stochastic<Format>);
}

const bool registered = [] {
  register_format<FormatE4M3>("e4m3");
  register_format<FormatE5M2>("e5m2");
  register_format<FormatE2M3>("e2m3");
  register_format<FormatE3M2>("e3m2");
  register_format<FormatE2M1>("e2m1");
  return true;
}();

const HandlerTable others({
    {"cvt.rz.ue8m0x2.f32", to_ue8m0<false, FromF32>},
    {"cvt.rp.ue8m0x2.f32", to_ue8m0<true, FromF32>},
    {"cvt.rz.ue8m0x2.bf16x2", to_ue8m0<false, FromHalves<BF16>>},
    {"cvt.rp.ue8m0x2.bf16x2", to_ue8m0<true, FromHalves<BF16>>},
    {"cvt.bf16x2.ue8m0x2", from_ue8m0},
    {"cvt.s2f6x2.f32", to_s2f6<FromF32>},
    {"cvt.s2f6x2.bf16x2", to_s2f6<FromHalves<BF16>>},
    {"cvt.bf16x2.s2f6x2", from_s2f6<FormatBF16>},
    {"cvt.f16x2.s2f6x2", from_s2f6<FormatF16>},
});

}  // namespace
}  // namespace halfbyte::gpu
