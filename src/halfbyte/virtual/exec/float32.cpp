// f32 and f32x2 arithmetic: add, sub, mul, fma, div, rcp, sqrt, min, max, abs, neg, copysign, testp.
//
// .ftz flushes subnormal operands and results. A result counts as subnormal before rounding: a
// product that rounds up to the smallest normal number becomes zero (seen on an H200). Sums that
// small are exact, so nothing is to be told apart there.
#include <cfenv>

#include "exec/elementwise.h"
#include "exec/float_values.h"
#include "exec/rounding_scope.h"

namespace halfbyte::gpu {
namespace {

constexpr double kSmallestNormal = 0x1p-126;

// `is_tiny`: the exact result lies below the smallest normal number.
struct Add {
  static float apply(float a, float b) { return a + b; }
  static bool is_tiny(float, float) { return false; }
};
struct Sub {
  static float apply(float a, float b) { return a - b; }
  static bool is_tiny(float, float) { return false; }
};
struct Mul {
  static float apply(float a, float b) { return a * b; }
  static bool is_tiny(double a, double b) { return std::fabs(a * b) < kSmallestNormal; }
};
struct Div {
  static float apply(float a, float b) { return a / b; }
  static bool is_tiny(double a, double b) { return std::fabs(a) < std::fabs(b) * kSmallestNormal; }
};

// Zero with the sign of the value.
inline float zero_like(float value) { return bit_cast<float>(float_bits(value) & 0x80000000u); }

template <bool flushes, bool saturates>
inline float finish(float result) {
  const float value = flush_if<flushes>(canonical(result));
  return saturates ? saturate(value) : value;
}

template <class Operation, bool flushes, bool saturates>
float binary(float a, float b) {
  const float x = flush_if<flushes>(a), y = flush_if<flushes>(b);
  const float result = Operation::apply(x, y);
  const bool is_tiny = flushes && Operation::is_tiny(x, y);
  return finish<flushes, saturates>(is_tiny ? zero_like(result) : result);
}
template <bool flushes, bool saturates>
float fma(float a, float b, float c) {
  const float x = flush_if<flushes>(a), y = flush_if<flushes>(b), z = flush_if<flushes>(c);
  const float result = std::fma(x, y, z);
  const double product = static_cast<double>(x) * static_cast<double>(y);  // exact
  const bool is_tiny = flushes && std::fabs(product + static_cast<double>(z)) < kSmallestNormal;
  return finish<flushes, saturates>(is_tiny ? zero_like(result) : result);
}
template <bool flushes>
float rcp(float a) {
  return binary<Div, flushes, false>(1.0f, a);
}
template <bool flushes>
float sqrt(float a) {
  return finish<flushes, false>(std::sqrt(flush_if<flushes>(a)));
}

// Operands of 16 bits beside f32 ones (PTX ISA, "Mixed Precision Floating Point Instructions").
template <class Format, class Operation, bool saturates>
float mixed_binary(uint16_t a, float c) {
  return finish<false, saturates>(Operation::apply(Format::decode(a), c));
}
template <class Format, bool saturates>
float mixed_fma(uint16_t a, uint16_t b, float c) {
  return finish<false, saturates>(std::fma(Format::decode(a), Format::decode(b), c));
}

template <bool flushes>
float abs(float a) {
  return bit_cast<float>(float_bits(flush_if<flushes>(a)) & 0x7FFFFFFFu);
}
template <bool flushes>
float neg(float a) {
  return bit_cast<float>(float_bits(flush_if<flushes>(a)) ^ 0x80000000u);
}
// d = b with the sign of a.
float copysign(float a, float b) {
  return bit_cast<float>((float_bits(a) & 0x80000000u) | (float_bits(b) & 0x7FFFFFFFu));
}

// A number that orders bit patterns as their values, -0 before +0.
inline int32_t order_of(uint32_t bits) {
  const int32_t value = static_cast<int32_t>(bits);
  return value ^ (value >> 31 & 0x7FFFFFFF);
}
inline bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

// One NaN gives the other operand, or with .NaN the canonical NaN.
template <bool is_max, bool keeps_nan>
inline uint32_t pick(uint32_t a, uint32_t b) {
  const bool takes_a = is_max ? order_of(a) > order_of(b) : order_of(a) < order_of(b);
  uint32_t result = takes_a ? a : b;
  result = is_nan(a) ? b : result;
  result = is_nan(b) ? a : result;
  const bool gives_nan = keeps_nan ? is_nan(a) | is_nan(b) : is_nan(a) & is_nan(b);
  return gives_nan ? kCanonicalNan32 : result;
}
template <bool is_max, bool keeps_nan>
inline float pick(float a, float b) {
  return bit_cast<float>(pick<is_max, keeps_nan>(float_bits(a), float_bits(b)));
}

template <bool is_max, bool flushes, bool keeps_nan>
float extreme(float a, float b) {
  return pick<is_max, keeps_nan>(flush_if<flushes>(a), flush_if<flushes>(b));
}
// min(|a|, |b|) with the exclusive or of the signs.
template <bool is_max, bool flushes, bool keeps_nan>
float extreme_xorsign(float a, float b) {
  const float result = pick<is_max, keeps_nan>(abs<flushes>(a), abs<flushes>(b));
  const uint32_t sign = (float_bits(a) ^ float_bits(b)) & 0x80000000u;
  return result != result ? bit_cast<float>(kCanonicalNan32) : bit_cast<float>(float_bits(result) | sign);
}
template <bool is_max, bool flushes, bool keeps_nan, bool takes_abs>
float extreme3(float a, float b, float c) {
  const float x = takes_abs ? abs<flushes>(a) : flush_if<flushes>(a);
  const float y = takes_abs ? abs<flushes>(b) : flush_if<flushes>(b);
  const float z = takes_abs ? abs<flushes>(c) : flush_if<flushes>(c);
  return pick<is_max, keeps_nan>(pick<is_max, keeps_nan>(x, y), z);
}

// Attribute: 0 finite, 1 infinite, 2 number, 3 notanumber, 4 normal, 5 subnormal.
template <class Float>
bool has_property(Float value, int64_t property) {
  switch (property) {
    case 0: return std::isfinite(value);
    case 1: return std::isinf(value);
    case 2: return !std::isnan(value);
    case 3: return std::isnan(value);
    case 4: return std::isfinite(value) && std::fpclassify(value) != FP_SUBNORMAL;  // zero is
    default: return std::fpclassify(value) == FP_SUBNORMAL;
  }
}
template <class Float>
Outcome testp(Warp& warp, const Instruction& in, uint32_t mask) {
  const Storage<Float>* a = source<Float>(warp, in.operands[1]);
  const uint32_t truth = lanes_where(
      mask, [&](int lane) { return has_property(from_lane<Float>(a[lane]), in.attributes[0]); });
  warp.set_predicate(in.operands[0], truth, mask);
  return Outcome::kNext;
}

// "add" + rounding + modifiers: add.rn.ftz.sat.f32, and the same in the directed modes.
template <Handler handler>
void register_rounded(const std::string& stem, const std::string& rest) {
  register_handler(stem + ".rn" + rest, handler);
  register_handler(stem + ".rz" + rest, with_rounding<handler, FE_TOWARDZERO>);
  register_handler(stem + ".rm" + rest, with_rounding<handler, FE_DOWNWARD>);
  register_handler(stem + ".rp" + rest, with_rounding<handler, FE_UPWARD>);
}

template <class Operation, bool flushes>
void register_binary(const std::string& stem, const std::string& flush_text) {
  register_rounded<map_lanes<binary<Operation, flushes, false>>>(stem, flush_text + ".f32");
  register_rounded<map_lanes<binary<Operation, flushes, true>>>(stem, flush_text + ".sat.f32");
  register_rounded<map_pairs<binary<Operation, flushes, false>>>(stem, flush_text + ".f32x2");
}

template <bool is_max, bool flushes, bool keeps_nan>
void register_extreme(const std::string& stem, const std::string& rest) {
  register_handler(stem + rest + ".f32", map_lanes<extreme<is_max, flushes, keeps_nan>>);
  register_handler(stem + rest + ".xorsign.abs.f32",
                   map_lanes<extreme_xorsign<is_max, flushes, keeps_nan>>);
  register_handler(stem + "3" + rest + ".f32", map_lanes<extreme3<is_max, flushes, keeps_nan, false>>);
  register_handler(stem + "3" + rest + ".abs.f32", map_lanes<extreme3<is_max, flushes, keeps_nan, true>>);
}

template <bool flushes>
void register_family(const std::string& flush_text) {
  register_binary<Add, flushes>("add", flush_text);
  register_binary<Sub, flushes>("sub", flush_text);
  register_binary<Mul, flushes>("mul", flush_text);
  register_rounded<map_lanes<fma<flushes, false>>>("fma", flush_text + ".f32");
  register_rounded<map_lanes<fma<flushes, true>>>("fma", flush_text + ".sat.f32");
  register_rounded<map_pairs<fma<flushes, false>>>("fma", flush_text + ".f32x2");
  register_rounded<map_lanes<binary<Div, flushes, false>>>("div", flush_text + ".f32");
  register_rounded<map_lanes<rcp<flushes>>>("rcp", flush_text + ".f32");
  register_rounded<map_lanes<sqrt<flushes>>>("sqrt", flush_text + ".f32");
  register_handler("abs" + flush_text + ".f32", map_lanes<abs<flushes>>);
  register_handler("neg" + flush_text + ".f32", map_lanes<neg<flushes>>);
  register_extreme<false, flushes, false>("min", flush_text);
  register_extreme<false, flushes, true>("min", flush_text + ".NaN");
  register_extreme<true, flushes, false>("max", flush_text);
  register_extreme<true, flushes, true>("max", flush_text + ".NaN");
}

template <class Format, bool saturates>
void register_mixed(const std::string& rest) {
  register_rounded<map_lanes<mixed_binary<Format, Add, saturates>>>("add", rest);
  register_rounded<map_lanes<mixed_binary<Format, Sub, saturates>>>("sub", rest);
  register_rounded<map_lanes<mixed_fma<Format, saturates>>>("fma", rest);
}

const bool registered = [] {
  register_family<false>("");
  register_family<true>(".ftz");
  register_mixed<F16, false>(".f32.f16");
  register_mixed<F16, true>(".sat.f32.f16");
  register_mixed<BF16, false>(".f32.bf16");
  register_mixed<BF16, true>(".sat.f32.bf16");
  register_handler("copysign.f32", map_lanes<copysign>);
  register_handler("testp.f32", testp<float>);
  register_handler("testp.f64", testp<double>);
  return true;
}();

}  // namespace
}  // namespace halfbyte::gpu
