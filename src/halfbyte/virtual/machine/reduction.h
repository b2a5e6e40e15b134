// Read-modify-write arithmetic of atom, red, red.async and cp.reduce.async.bulk.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "machine/lanes.h"

namespace halfbyte::gpu {

// As the forms number them.
enum class Reduction : int64_t { kAdd, kMin, kMax, kInc, kDec, kAnd, kOr, kXor, kExchange, kCompareSwap };
enum class Element : int64_t { kU32, kS32, kU64, kS64, kF16, kBf16, kF32, kF64, kF32Flush };

// A 16-bit float kept as its bits: `Mantissa` stored bits, the least normal exponent, the bias.
template <int Mantissa, int LeastExponent, int Bias>
struct NarrowFloat {
  uint16_t bits;
  static constexpr uint16_t kInfinity = static_cast<uint16_t>(((2 * Bias + 1) << Mantissa));

  double value() const {
    const int exponent = (bits & 0x7FFF) >> Mantissa;
    const double sign = bits >> 15 ? -1.0 : 1.0;
    const int fraction = bits & ((1 << Mantissa) - 1);
    if (exponent == 2 * Bias + 1) {
      return fraction ? std::numeric_limits<double>::quiet_NaN()
                      : sign * std::numeric_limits<double>::infinity();
    }
    if (exponent == 0) return sign * std::ldexp(fraction, LeastExponent - Mantissa);
    return sign * std::ldexp(fraction | 1 << Mantissa, exponent - Bias - Mantissa);
  }

  // To nearest, ties to even.
  static NarrowFloat round(double value) {
    const uint64_t whole = bit_cast<uint64_t>(value);
    const auto sign = static_cast<uint16_t>(whole >> 63 << 15);
    if (std::isnan(value)) return {0x7FFF};
    if (std::isinf(value)) return {static_cast<uint16_t>(sign | kInfinity)};
    const int exponent = static_cast<int>(whole >> 52 & 0x7FF) - 1023;
    const uint64_t mantissa = (whole & ((1ull << 52) - 1)) | 1ull << 52;
    const int shift = 52 - Mantissa + (exponent < LeastExponent ? LeastExponent - exponent : 0);
    if (shift > 60 || exponent == -1023) return {sign};
    uint64_t kept = mantissa >> shift;
    const uint64_t rest = mantissa & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    if (exponent >= LeastExponent) kept += static_cast<uint64_t>(exponent + Bias - 1) << Mantissa;
    return {static_cast<uint16_t>(sign | (kept < kInfinity ? kept : kInfinity))};
  }
};

using Float16 = NarrowFloat<10, -14, 15>;
using Bfloat16 = NarrowFloat<7, -126, 127>;

template <class Value> struct IsNarrowFloat : std::false_type {};
template <> struct IsNarrowFloat<Float16> : std::true_type {};
template <> struct IsNarrowFloat<Bfloat16> : std::true_type {};

// A float whose addition flushes subnormal inputs and results to zero of their sign.
struct FlushedFloat {
  float value;
};

inline float flush_subnormal(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// min and max of floats: a NaN loses against a number, -0 is less than +0.
template <class Value>
inline Value choose_extreme(Value a, Value b, double first, double second, bool wants_less) {
  if (std::isnan(first)) return std::isnan(second) ? Value{0x7FFF} : b;
  if (std::isnan(second)) return a;
  const bool is_less = first < second || (first == second && std::signbit(first));
  return is_less == wants_less ? a : b;
}

template <Reduction Operation, class Value>
inline Value combine(Value old, Value value) {
  if constexpr (std::is_same_v<Value, FlushedFloat>) {
    const float sum = flush_subnormal(flush_subnormal(old.value) + flush_subnormal(value.value));
    return {sum != sum ? bit_cast<float>(0x7FFFFFFFu) : sum};
  } else if constexpr (IsNarrowFloat<Value>::value) {
    if constexpr (Operation == Reduction::kAdd) return Value::round(old.value() + value.value());
    return choose_extreme(old, value, old.value(), value.value(), Operation == Reduction::kMin);
  } else if constexpr (Operation == Reduction::kAdd && std::is_same_v<Value, double>) {
    // NaN as it is, not made quiet (seen on an H200).
    return old != old ? old : value != value ? value : old + value;
  } else if constexpr (Operation == Reduction::kAdd && std::is_same_v<Value, float>) {
    const float sum = old + value;
    return sum != sum ? bit_cast<float>(0x7FFFFFFFu) : sum;
  } else if constexpr (Operation == Reduction::kAdd) {
    using Bits = std::make_unsigned_t<Value>;
    return static_cast<Value>(static_cast<Bits>(old) + static_cast<Bits>(value));
  } else if constexpr (Operation == Reduction::kMin) {
    return value < old ? value : old;
  } else if constexpr (Operation == Reduction::kMax) {
    return old < value ? value : old;
  } else if constexpr (Operation == Reduction::kInc) {
    return old >= value ? 0 : old + 1;
  } else if constexpr (Operation == Reduction::kDec) {
    return old == 0 || old > value ? value : old - 1;
  } else if constexpr (Operation == Reduction::kAnd) {
    return old & value;
  } else if constexpr (Operation == Reduction::kOr) {
    return old | value;
  } else {
    return old ^ value;
  }
}

// Reduces `count` elements of `source` into `target`; neither need be aligned.
using ReduceElements = void (*)(uint8_t* target, const uint8_t* source, uint64_t count);

// nullptr when the PTX ISA has no such pair of operation and type.
ReduceElements find_reduction(Reduction operation, Element element);
uint32_t element_bytes(Element element);

}  // namespace halfbyte::gpu
