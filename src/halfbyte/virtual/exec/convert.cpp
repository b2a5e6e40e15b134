// cvt between integers and floating-point numbers, cvt.pack, and the packed f16x2/bf16x2 forms.
//
// Conversions with a floating-point side go through f64, which holds every value of every type but
// 64-bit integers; of those it holds enough, rounded to odd. Three loops over 32 lanes follow each
// other: read, round to an integer, write. The forms that kernels use most have loops of their own.
#include <algorithm>
#include <cfenv>
#include <limits>

#include "exec/elementwise.h"
#include "exec/number_formats.h"
#include "exec/rounding_scope.h"

namespace halfbyte::gpu {
namespace {

// ---- integers to integers: wrapping, or .sat.

template <class To, class From>
Storage<To> wrap(From value) {
  return to_lane<To>(static_cast<To>(value));
}
template <class To, class From>
To clamp(From value) {
  using Limits = std::numeric_limits<To>;
  if constexpr (std::is_signed_v<From>) {
    constexpr int64_t low = std::is_signed_v<To> ? static_cast<int64_t>(Limits::min()) : 0;
    constexpr int64_t high = sizeof(To) == 8 ? std::numeric_limits<int64_t>::max()
                                             : static_cast<int64_t>(Limits::max());
    return static_cast<To>(std::clamp<int64_t>(value, low, high));
  } else {
    return static_cast<To>(std::min<uint64_t>(value, static_cast<uint64_t>(Limits::max())));
  }
}

template <class To, class From>
void register_integer_pair(const std::string& to, const std::string& from) {
  register_handler("cvt." + to + "." + from, map_lanes<wrap<To, From>>);
  register_handler("cvt.sat." + to + "." + from, map_lanes<clamp<To, From>>);
}
template <class From>
void register_integer_source(const std::string& from) {
  register_integer_pair<uint8_t, From>("u8", from);
  register_integer_pair<int8_t, From>("s8", from);
  register_integer_pair<uint16_t, From>("u16", from);
  register_integer_pair<int16_t, From>("s16", from);
  register_integer_pair<uint32_t, From>("u32", from);
  register_integer_pair<int32_t, From>("s32", from);
  register_integer_pair<uint64_t, From>("u64", from);
  register_integer_pair<int64_t, From>("s64", from);
}

// ---- the general path over f64.

// Positions in CONVERT_TYPES of ptx/forms/convert.py.
enum Type : int64_t { kU8, kS8, kU16, kS16, kU32, kS32, kU64, kS64, kF16, kBF16, kF32, kF64, kTF32 };
enum Attribute { kSource, kTarget, kRounding, kIntegral, kFlushes, kSaturates, kSatfinite, kRelu };
enum Integral : int64_t { kNotIntegral = 0, kNearest = 1, kTowardZero = 2, kDownward = 3, kUpward = 4 };

// 64-bit integers beyond 2^53: the bits that f64 has no room for leave a mark in the last place.
inline double round_to_odd(uint64_t magnitude) {
  const bool is_large = magnitude >> 53;
  const uint64_t folded = (magnitude >> 11) | ((magnitude & 0x7FF) != 0);
  return is_large ? static_cast<double>(folded) * 2048.0 : static_cast<double>(magnitude);
}

template <class T>
double integer_value(T value) {
  if constexpr (sizeof(T) < 8) return static_cast<double>(value);
  if constexpr (std::is_signed_v<T>) {
    const uint64_t magnitude = value < 0 ? 0 - static_cast<uint64_t>(value) : static_cast<uint64_t>(value);
    const double rounded = round_to_odd(magnitude);
    return value < 0 ? -rounded : rounded;
  } else {
    return round_to_odd(static_cast<uint64_t>(value));
  }
}
double f16_value(uint32_t code) { return F16::decode(code); }
double bf16_value(uint32_t code) { return BF16::decode(code); }
double f32_value(float value) { return value; }
double f32_flushed_value(float value) { return canonical(flush(value)); }

template <auto function, class Argument>
void read_lanes(double (*)(Argument), const Warp& warp, int32_t operand, double* values) {
  const Storage<Argument>* from = source<Argument>(warp, operand);
  HALFBYTE_INDEPENDENT_LANES
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = function(from_lane<Argument>(from[lane]));
}

void read_values(const Warp& warp, const Instruction& in, double* values) {
  const int32_t operand = in.operands[1];
  switch (in.attributes[kSource]) {
    case kU8: return read_lanes<integer_value<uint8_t>>(integer_value<uint8_t>, warp, operand, values);
    case kS8: return read_lanes<integer_value<int8_t>>(integer_value<int8_t>, warp, operand, values);
    case kU16: return read_lanes<integer_value<uint16_t>>(integer_value<uint16_t>, warp, operand, values);
    case kS16: return read_lanes<integer_value<int16_t>>(integer_value<int16_t>, warp, operand, values);
    case kU32: return read_lanes<integer_value<uint32_t>>(integer_value<uint32_t>, warp, operand, values);
    case kS32: return read_lanes<integer_value<int32_t>>(integer_value<int32_t>, warp, operand, values);
    case kU64: return read_lanes<integer_value<uint64_t>>(integer_value<uint64_t>, warp, operand, values);
    case kS64: return read_lanes<integer_value<int64_t>>(integer_value<int64_t>, warp, operand, values);
    case kF16: return read_lanes<f16_value>(f16_value, warp, operand, values);
    case kBF16: return read_lanes<bf16_value>(bf16_value, warp, operand, values);
    case kF32:
      return in.attributes[kFlushes] ? read_lanes<f32_flushed_value>(f32_flushed_value, warp, operand, values)
                                     : read_lanes<f32_value>(f32_value, warp, operand, values);
    default: std::memcpy(values, warp.read64(operand), kLanes * sizeof(double));
  }
}

void round_to_integers(int64_t integral, double* values) {
  switch (integral) {
    case kNearest:
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::rint(values[lane]);
      break;
    case kTowardZero:
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::trunc(values[lane]);
      break;
    case kDownward:
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::floor(values[lane]);
      break;
    case kUpward:
      for (int lane = 0; lane < kLanes; ++lane) values[lane] = std::ceil(values[lane]);
      break;
    default: break;
  }
}

// Beyond the range -> the nearest end of it. NaN (seen on an H200): of f64, and where the integer
// has 64 bits, the top bit alone; else 0.
template <class T>
void write_integers(Warp& warp, const Instruction& in, uint32_t mask, const double* values) {
  using Limits = std::numeric_limits<T>;
  constexpr double low = static_cast<double>(Limits::min());
  constexpr double beyond = 2.0 * static_cast<double>(static_cast<uint64_t>(Limits::max()) / 2 + 1);
  using Work = std::conditional_t<sizeof(T) == 8, T, int64_t>;
  Storage<T>* to = destination<T>(warp, in.operands[0]);
  const bool marks_nan = sizeof(T) == 8 || in.attributes[kSource] == kF64;
  const T of_nan = static_cast<T>(static_cast<uint64_t>(marks_nan) << (8 * sizeof(T) - 1));
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const double value = values[lane];
    const bool fits = value > low && value < beyond;  // false for NaN
    const T inside = static_cast<T>(static_cast<Work>(fits ? value : 0.0));
    T result = value >= beyond ? Limits::max() : inside;
    result = value <= low ? Limits::min() : result;
    result = value != value ? of_nan : result;
    to[lane] = to_lane<T>(result);
  });
}

template <class Format, Rounding rounding>
void encode_lanes(const double* values, EncodeOptions options, uint32_t* codes) {
  for (int lane = 0; lane < kLanes; ++lane) codes[lane] = encode<Format, rounding>(values[lane], options);
}
template <class Format>
void encode_values(int64_t rounding, const double* values, EncodeOptions options, uint32_t* codes) {
  switch (static_cast<Rounding>(rounding)) {
    case Rounding::kZero: return encode_lanes<Format, Rounding::kZero>(values, options, codes);
    case Rounding::kDown: return encode_lanes<Format, Rounding::kDown>(values, options, codes);
    case Rounding::kUp: return encode_lanes<Format, Rounding::kUp>(values, options, codes);
    case Rounding::kNearestAway: return encode_lanes<Format, Rounding::kNearestAway>(values, options, codes);
    default: return encode_lanes<Format, Rounding::kNearestEven>(values, options, codes);
  }
}

// The code of NaN for an f64 source: its sign and the top of its payload, made quiet (seen on an H200).
template <class Format>
uint32_t keep_nan(double value) {
  constexpr int drop = 52 - Format::mantissa_bits;
  const uint64_t bits = float_bits(value);
  const uint32_t payload = static_cast<uint32_t>(bits >> drop) & ((1u << Format::mantissa_bits) - 1);
  const uint32_t sign = bits >> 63 ? Format::sign_bit : 0;
  return sign | Format::infinity | 1u << (Format::mantissa_bits - 1) | payload;
}

uint32_t code_of_nan(const Instruction& in, double value) {
  switch (in.attributes[kTarget]) {
    case kF16: return keep_nan<FormatF16>(value);
    case kBF16: return keep_nan<FormatBF16>(value);
    default: return keep_nan<FormatF32>(value);
  }
}

// cvt.rna.tf32.f32 rounds NaN as if it were a number, down: the low bits go, quiet or not (H200).
void write_rna_tf32_nans(Warp& warp, const Instruction& in, uint32_t mask, const uint32_t* raw) {
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    if ((raw[lane] & 0x7FFFFFFFu) > 0x7F800000u) to[lane] = raw[lane] & 0xFFFFE000u;
  });
}

void write_codes(Warp& warp, const Instruction& in, uint32_t mask, const double* values) {
  const EncodeOptions options{in.attributes[kSatfinite] != 0, in.attributes[kRelu] != 0};
  const int64_t rounding = in.attributes[kRounding];
  uint32_t codes[kLanes];
  int shift = 0;
  switch (in.attributes[kTarget]) {
    case kF16: encode_values<FormatF16>(rounding, values, options, codes); break;
    case kBF16: encode_values<FormatBF16>(rounding, values, options, codes); break;
    case kTF32:
      encode_values<FormatTF32>(rounding, values, options, codes);
      shift = 13;
      break;
    default: encode_values<FormatF32>(rounding, values, options, codes);
  }
  const bool flushes = in.attributes[kFlushes] && in.attributes[kTarget] == kF32;
  if (in.attributes[kSource] == kF64) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (values[lane] != values[lane]) codes[lane] = code_of_nan(in, values[lane]);
    }
  }
  uint32_t raw[kLanes];
  const bool is_rna_tf32 = in.attributes[kTarget] == kTF32 && rounding == static_cast<int64_t>(Rounding::kNearestAway);
  if (is_rna_tf32) std::memcpy(raw, warp.read32(in.operands[1]), sizeof(raw));
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) {
    // Subnormal before rounding, as everywhere: 2^-126 - tiny becomes zero though it rounds up.
    const bool is_tiny = flushes && std::fabs(values[lane]) < 0x1p-126;
    const uint32_t code = codes[lane] << shift;
    to[lane] = is_tiny ? code & 0x80000000u : code;
  });
  if (is_rna_tf32) write_rna_tf32_nans(warp, in, mask, raw);
}

void write_doubles(Warp& warp, const Instruction& in, uint32_t mask, const double* values) {
  uint64_t* to = warp.write64(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) {
    // NaN keeps sign and payload and becomes quiet (seen on an H200).
    to[lane] = float_bits(values[lane]) | (values[lane] != values[lane] ? kQuietBit64 : 0);
  });
}

Outcome cvt(Warp& warp, const Instruction& in, uint32_t mask) {
  double values[kLanes];
  read_values(warp, in, values);
  round_to_integers(in.attributes[kIntegral], values);
  if (in.attributes[kSaturates] && in.attributes[kTarget] >= kF16) {
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = saturate(values[lane]);
  }
  switch (in.attributes[kTarget]) {
    case kU8: write_integers<uint8_t>(warp, in, mask, values); break;
    case kS8: write_integers<int8_t>(warp, in, mask, values); break;
    case kU16: write_integers<uint16_t>(warp, in, mask, values); break;
    case kS16: write_integers<int16_t>(warp, in, mask, values); break;
    case kU32: write_integers<uint32_t>(warp, in, mask, values); break;
    case kS32: write_integers<int32_t>(warp, in, mask, values); break;
    case kU64: write_integers<uint64_t>(warp, in, mask, values); break;
    case kS64: write_integers<int64_t>(warp, in, mask, values); break;
    case kF64: write_doubles(warp, in, mask, values); break;
    default: write_codes(warp, in, mask, values);
  }
  return Outcome::kNext;
}

// ---- loops of their own.

template <class To, class From>
To cast(From value) {
  return static_cast<To>(value);
}
template <class Format>
float widen(uint32_t code) {
  return Format::decode(code);
}
// A shift: NaN keeps its bits (seen on an H200).
uint32_t widen_bfloat(uint32_t code) { return code << 16; }
template <class Format>
uint32_t narrow(float value) {
  return encode<Format, Rounding::kNearestEven>(value);
}

// Attributes: satfinite, relu. a goes to the upper half, b to the lower.
template <class Format, Rounding rounding>
Outcome cvt_pair(Warp& warp, const Instruction& in, uint32_t mask) {
  const EncodeOptions options{in.attributes[0] != 0, in.attributes[1] != 0};
  const uint32_t* a = warp.read32(in.operands[1]);
  const uint32_t* b = warp.read32(in.operands[2]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const uint32_t high = encode<Format, rounding>(bit_cast<float>(a[lane]), options);
    const uint32_t low = encode<Format, rounding>(bit_cast<float>(b[lane]), options);
    to[lane] = high << 16 | low;
  });
  return Outcome::kNext;
}

// PTX ISA, "cvt", .rs: `random_bits` random bits for each half, from bits 16 and 0 of the operand.
template <class Format, int random_bits>
Outcome cvt_pair_stochastic(Warp& warp, const Instruction& in, uint32_t mask) {
  const EncodeOptions options{in.attributes[0] != 0, in.attributes[1] != 0};
  const uint32_t* a = warp.read32(in.operands[1]);
  const uint32_t* b = warp.read32(in.operands[2]);
  const uint32_t* random = warp.read32(in.operands[3]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    const uint32_t bits = random[lane];
    const uint32_t high =
        encode_stochastic<Format, random_bits>(bit_cast<float>(a[lane]), bits >> 16, options);
    const uint32_t low = encode_stochastic<Format, random_bits>(bit_cast<float>(b[lane]), bits, options);
    to[lane] = high << 16 | low;
  });
  return Outcome::kNext;
}

// Attributes: bits of the target type, whether it is signed. Operands d, a, b{, c}: a and b are
// clamped and packed with b lowest; c fills the rest from below.
Outcome cvt_pack(Warp& warp, const Instruction& in, uint32_t mask) {
  const int bits = static_cast<int>(in.attributes[0]);
  const bool is_signed = in.attributes[1] != 0;
  const int32_t low = is_signed ? -(1 << (bits - 1)) : 0;
  const int32_t high = is_signed ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
  const uint32_t part = (1u << bits) - 1;
  const uint32_t* a = warp.read32(in.operands[1]);
  const uint32_t* b = warp.read32(in.operands[2]);
  const uint32_t* c = in.num_operands > 3 ? warp.read32(in.operands[3]) : nullptr;
  uint32_t* to = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    const uint32_t first = static_cast<uint32_t>(std::clamp(static_cast<int32_t>(a[lane]), low, high)) & part;
    const uint32_t second = static_cast<uint32_t>(std::clamp(static_cast<int32_t>(b[lane]), low, high)) & part;
    const uint32_t rest = c != nullptr ? c[lane] << (2 * bits) : 0;
    to[lane] = first << bits | second | rest;
  });
  return Outcome::kNext;
}

// 64-bit integers to f64 need the host's rounding mode; narrower ones are exact.
template <class From>
void register_f64_from(const std::string& from) {
  constexpr Handler handler = map_lanes<cast<double, From>>;
  register_handler("cvt.rn.f64." + from, handler);
  register_handler("cvt.rz.f64." + from, with_rounding<handler, FE_TOWARDZERO>);
  register_handler("cvt.rm.f64." + from, with_rounding<handler, FE_DOWNWARD>);
  register_handler("cvt.rp.f64." + from, with_rounding<handler, FE_UPWARD>);
}

const bool registered = [] {
  register_integer_source<uint8_t>("u8");
  register_integer_source<int8_t>("s8");
  register_integer_source<uint16_t>("u16");
  register_integer_source<int16_t>("s16");
  register_integer_source<uint32_t>("u32");
  register_integer_source<int32_t>("s32");
  register_integer_source<uint64_t>("u64");
  register_integer_source<int64_t>("s64");
  register_f64_from<uint64_t>("u64");
  register_f64_from<int64_t>("s64");
  return true;
}();

const HandlerTable conversions({
    {"cvt", cvt},
    {"cvt.pack", cvt_pack},
    {"cvt.rn.f32.s32", map_lanes<cast<float, int32_t>>},
    {"cvt.rn.f32.u32", map_lanes<cast<float, uint32_t>>},
    {"cvt.f32.f16", map_lanes<widen<F16>>},
    {"cvt.f32.bf16", map_lanes<widen_bfloat>},
    {"cvt.rn.f16.f32", map_lanes<narrow<FormatF16>>},
    {"cvt.rn.bf16.f32", map_lanes<narrow<FormatBF16>>},
    {"cvt.rn.f16x2.f32", cvt_pair<FormatF16, Rounding::kNearestEven>},
    {"cvt.rz.f16x2.f32", cvt_pair<FormatF16, Rounding::kZero>},
    {"cvt.rn.bf16x2.f32", cvt_pair<FormatBF16, Rounding::kNearestEven>},
    {"cvt.rz.bf16x2.f32", cvt_pair<FormatBF16, Rounding::kZero>},
    {"cvt.rs.f16x2.f32", cvt_pair_stochastic<FormatF16, 13>},
    {"cvt.rs.bf16x2.f32", cvt_pair_stochastic<FormatBF16, 16>},
});

}  // namespace
}  // namespace halfbyte::gpu
