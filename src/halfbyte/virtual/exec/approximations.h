// ex2, lg2, tanh and their kin in f64 for the approximate instructions.
//
// PTX bounds the error of the approximate instructions and leaves their bits open. Here each gives
// its mathematical value rounded once to the destination type: the f64 value below is within a few
// units of its last place, so the rounded result can differ from the correctly rounded one only
// where the true value lies within 2^-26 of a rounding boundary. No fused operation and no libm
// function is used (but for sin and cos), so every build gives the same bits; loops vectorize.
#pragma once

#include <cmath>
#include <cstdint>

#include "machine/lanes.h"

namespace halfbyte::gpu {

constexpr double kRoundToInteger = 0x1.8p52;  // adding it leaves the nearest integer in the low bits

// e^t - 1 for |t| <= 0.35, without the constant term: relative accuracy near 0.
inline double expm1_small(double t) {
  double sum = 1.0 / 6227020800.0;
  sum = sum * t + 1.0 / 479001600.0;
  sum = sum * t + 1.0 / 39916800.0;
  sum = sum * t + 1.0 / 3628800.0;
  sum = sum * t + 1.0 / 362880.0;
  sum = sum * t + 1.0 / 40320.0;
  sum = sum * t + 1.0 / 5040.0;
  sum = sum * t + 1.0 / 720.0;
  sum = sum * t + 1.0 / 120.0;
  sum = sum * t + 1.0 / 24.0;
  sum = sum * t + 1.0 / 6.0;
  sum = sum * t + 0.5;
  return t + t * t * sum;
}

// 2^n for the integer that `shifted` = n + kRoundToInteger holds.
inline double power_of_two(double shifted) {
  return bit_cast<double>((bit_cast<uint64_t>(shifted) + 1023) << 52);
}

inline double exp2_value(double x) {
  double bounded = x < -300.0 ? -300.0 : x;
  bounded = bounded > 300.0 ? 300.0 : bounded;
  const double shifted = bounded + kRoundToInteger;
  const double fraction = bounded - (shifted - kRoundToInteger);
  return (1.0 + expm1_small(fraction * 0x1.62e42fefa39efp-1)) * power_of_two(shifted);
}

// log2 of a value that is 0, infinite, NaN or at least 2^-1022.
inline double log2_value(double x) {
  const uint64_t bits = bit_cast<uint64_t>(x);
  // Split at sqrt(1/2): the mantissa m in [sqrt(1/2), sqrt(2)), x = m * 2^exponent.
  const uint64_t offset = bits - 0x3FE6A09E667F3BCDull;
  const double exponent = static_cast<double>(static_cast<int32_t>(static_cast<int64_t>(offset) >> 52));
  const double mantissa = bit_cast<double>(bits - (offset & 0xFFF0000000000000ull));
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double z = s * s;
  double sum = 1.0 / 23.0;
  sum = sum * z + 1.0 / 21.0;
  sum = sum * z + 1.0 / 19.0;
  sum = sum * z + 1.0 / 17.0;
  sum = sum * z + 1.0 / 15.0;
  sum = sum * z + 1.0 / 13.0;
  sum = sum * z + 1.0 / 11.0;
  sum = sum * z + 1.0 / 9.0;
  sum = sum * z + 1.0 / 7.0;
  sum = sum * z + 1.0 / 5.0;
  sum = sum * z + 1.0 / 3.0;
  const double logarithm = exponent + 0x1.71547652b82fep1 * (s + s * z * sum);
  double result = x > 0.0 ? logarithm : NAN;
  result = x == 0.0 ? -HUGE_VAL : result;
  return x == HUGE_VAL ? x : result;
}

inline double tanh_value(double x) {
  const double magnitude = std::fabs(x);
  const double bounded = magnitude > 22.0 ? 22.0 : magnitude;
  // e^(2x) - 1 = (2^n - 1) + 2^n (e^r - 1), with 2x = n ln 2 + r.
  const double shifted = bounded * 0x1.71547652b82fep1 + kRoundToInteger;
  const double n = shifted - kRoundToInteger;
  const double rest = (2.0 * bounded - n * 0x1.62e42fefa39efp-1) - n * 0x1.abc9e3b39803fp-56;
  const double power = power_of_two(shifted);
  const double grown = (power - 1.0) + power * expm1_small(rest);
  return std::copysign(grown / (grown + 2.0), x);
}

inline double rsqrt_value(double x) { return 1.0 / std::sqrt(x); }

}  // namespace halfbyte::gpu
