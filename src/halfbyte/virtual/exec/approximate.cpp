// The approximate instructions: div, rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh.
#include "exec/approximations.h"

#include "exec/elementwise.h"
#include "exec/number_formats.h"

namespace halfbyte::gpu {
namespace {

template <bool flushes>
inline float finish(float value) {
  return flush_if<flushes>(canonical(value));
}

// PTX ISA, "div.full": the whole range. "div.approx": zero (NaN for an infinite dividend) where the
// divisor lies above 2^126, since the reciprocal it multiplies with is flushed there.
template <bool flushes>
float div_full(float a, float b) {
  return finish<flushes>(flush_if<flushes>(a) / flush_if<flushes>(b));
}
template <bool flushes>
float div_approx(float a, float b) {
  const float x = flush_if<flushes>(a), y = flush_if<flushes>(b);
  const float magnitude = std::fabs(y);
  const float reciprocal = magnitude > 0x1p126f ? std::copysign(0.0f, y) : y;
  const bool is_flushed = magnitude > 0x1p126f && magnitude < HUGE_VALF;
  return finish<flushes>(is_flushed ? x * reciprocal : x / y);
}
template <bool flushes>
float rcp(float a) {
  return finish<flushes>(1.0f / flush_if<flushes>(a));
}
template <bool flushes>
float sqrt(float a) {
  return finish<flushes>(std::sqrt(flush_if<flushes>(a)));
}
template <bool flushes>
float rsqrt(float a) {
  return finish<flushes>(static_cast<float>(rsqrt_value(static_cast<double>(flush_if<flushes>(a)))));
}
template <bool flushes>
float sine(float a) {
  return finish<flushes>(static_cast<float>(std::sin(static_cast<double>(flush_if<flushes>(a)))));
}
template <bool flushes>
float cosine(float a) {
  return finish<flushes>(static_cast<float>(std::cos(static_cast<double>(flush_if<flushes>(a)))));
}
template <bool flushes>
float lg2(float a) {
  return finish<flushes>(static_cast<float>(log2_value(static_cast<double>(flush_if<flushes>(a)))));
}
template <bool flushes>
float ex2(float a) {
  return finish<flushes>(static_cast<float>(exp2_value(static_cast<double>(flush_if<flushes>(a)))));
}
float tanh(float a) {
  return finish<false>(static_cast<float>(tanh_value(static_cast<double>(a))));
}

// 16-bit formats: decoded exactly, rounded once.
template <class Format, class Code, bool flushes>
uint32_t ex2_half(uint32_t a) {
  const uint32_t operand = flushes ? flush16<Format>(a) : a;
  const uint32_t code = encode<Code, Rounding::kNearestEven>(exp2_value(Format::decode(operand)));
  return flushes ? flush16<Format>(code) : code;
}
template <class Format, class Code>
uint32_t tanh_half(uint32_t a) {
  return encode<Code, Rounding::kNearestEven>(tanh_value(Format::decode(a)));
}

template <bool flushes>
void register_family(const std::string& suffix) {
  register_handler("div.full" + suffix, map_lanes<div_full<flushes>>);
  register_handler("div.approx" + suffix, map_lanes<div_approx<flushes>>);
  register_handler("rcp.approx" + suffix, map_lanes<rcp<flushes>>);
  register_handler("sqrt.approx" + suffix, map_lanes<sqrt<flushes>>);
  register_handler("rsqrt.approx" + suffix, map_lanes<rsqrt<flushes>>);
  register_handler("sin.approx" + suffix, map_lanes<sine<flushes>>);
  register_handler("cos.approx" + suffix, map_lanes<cosine<flushes>>);
  register_handler("lg2.approx" + suffix, map_lanes<lg2<flushes>>);
  register_handler("ex2.approx" + suffix, map_lanes<ex2<flushes>>);
}

const bool registered = [] {
  register_family<false>(".f32");
  register_family<true>(".ftz.f32");
  register_handler("tanh.approx.f32", map_lanes<tanh>);
  register_halves<ex2_half<F16, FormatF16, false>>("ex2.approx.", "f16");
  register_halves<ex2_half<BF16, FormatBF16, true>>("ex2.approx.ftz.", "bf16");
  register_halves<tanh_half<F16, FormatF16>>("tanh.approx.", "f16");
  register_halves<tanh_half<BF16, FormatBF16>>("tanh.approx.", "bf16");
  return true;
}();

}  // namespace
}  // namespace halfbyte::gpu
