// f64 arithmetic.
//
// A NaN result is a NaN operand, made quiet; without one, the default NaN. Of several, the second
// operand goes before the first (seen on an H200; of div, a is asked first).
#include <cfenv>

#include "exec/elementwise.h"
#include "exec/float_values.h"
#include "exec/rounding_scope.h"

namespace halfbyte::gpu {
namespace {

constexpr uint64_t kQuietBit = 0x0008000000000000ull;
constexpr uint64_t kSign = 0x8000000000000000ull;

inline double quiet(double value) { return bit_cast<double>(float_bits(value) | kQuietBit); }

template <class... Rest>
inline double choose_nan(double result, double first, Rest... rest) {
  if (result == result) return result;
  double chosen = bit_cast<double>(kDefaultNan64);
  const double operands[] = {first, rest...};
  for (int i = static_cast<int>(sizeof...(rest)); i >= 0; --i) {
    chosen = operands[i] != operands[i] ? quiet(operands[i]) : chosen;
  }
  return chosen;
}

double add(double a, double b) { return choose_nan(a + b, b, a); }
double sub(double a, double b) { return choose_nan(a - b, b, a); }
double mul(double a, double b) { return choose_nan(a * b, b, a); }
double div(double a, double b) { return choose_nan(a / b, a, b); }
double fma(double a, double b, double c) { return choose_nan(std::fma(a, b, c), b, a, c); }
double rcp(double a) { return choose_nan(1.0 / a, a); }
double sqrt(double a) { return choose_nan(std::sqrt(a), a); }
// A NaN keeps its sign: on an H200 these are additions.
double abs(double a) { return a != a ? quiet(a) : bit_cast<double>(float_bits(a) & ~kSign); }
double neg(double a) { return a != a ? quiet(a) : bit_cast<double>(float_bits(a) ^ kSign); }
double copysign(double a, double b) {
  return bit_cast<double>((float_bits(a) & kSign) | (float_bits(b) & ~kSign));
}
template <bool is_max>
double extreme(double a, double b) {
  if (a != a) return b != b ? quiet(b) : b;
  if (b != b) return a;
  if (a == b) return bit_cast<double>(is_max ? float_bits(a) & float_bits(b) : float_bits(a) | float_bits(b));
  return (is_max ? a > b : a < b) ? a : b;
}

// PTX ISA, "rcp.approx.ftz.f64": only the upper word of the result is meant; the lower one is 0.
inline double upper_word(double value) {
  return bit_cast<double>(float_bits(value) & 0xFFFFFFFF00000000ull);
}
inline double flush64(double value) {
  return (float_bits(value) & ~kSign) < 0x0010000000000000ull ? bit_cast<double>(float_bits(value) & kSign) : value;
}
double rcp_approx(double a) { return flush64(upper_word(rcp(flush64(upper_word(a))))); }
template <bool flushes>
double rsqrt_approx(double a) {
  const double x = flushes ? flush64(upper_word(a)) : a;
  const double result = choose_nan(1.0 / std::sqrt(x), x);
  return flushes ? upper_word(result) : result;
}

template <Handler handler>
void register_rounded(const std::string& stem) {
  register_handler(stem + ".rn.f64", handler);
  register_handler(stem + ".rz.f64", with_rounding<handler, FE_TOWARDZERO>);
  register_handler(stem + ".rm.f64", with_rounding<handler, FE_DOWNWARD>);
  register_handler(stem + ".rp.f64", with_rounding<handler, FE_UPWARD>);
}

const bool registered = [] {
  register_rounded<map_lanes<add>>("add");
  register_rounded<map_lanes<sub>>("sub");
  register_rounded<map_lanes<mul>>("mul");
  register_rounded<map_lanes<div>>("div");
  register_rounded<map_lanes<fma>>("fma");
  register_rounded<map_lanes<rcp>>("rcp");
  register_rounded<map_lanes<sqrt>>("sqrt");
  return true;
}();

const HandlerTable plain({
    {"abs.f64", map_lanes<abs>},
    {"neg.f64", map_lanes<neg>},
    {"copysign.f64", map_lanes<copysign>},
    {"min.f64", map_lanes<extreme<false>>},
    {"max.f64", map_lanes<extreme<true>>},
    {"rcp.approx.ftz.f64", map_lanes<rcp_approx>},
    {"rsqrt.approx.f64", map_lanes<rsqrt_approx<false>>},
    {"rsqrt.approx.ftz.f64", map_lanes<rsqrt_approx<true>>},
});

}  // namespace
}  // namespace halfbyte::gpu
