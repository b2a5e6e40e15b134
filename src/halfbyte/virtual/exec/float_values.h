// Floating-point values as PTX defines them: canonical NaNs, flushing, and the 16-bit types.
#pragma once

#include <cstdint>
#include <cmath>
#include <type_traits>

#include "machine/lanes.h"

namespace halfbyte::gpu {

// PTX ISA, "Floating Point Operations": f32 results that are NaN are this one pattern.
constexpr uint32_t kCanonicalNan32 = 0x7FFFFFFFu;
constexpr uint16_t kCanonicalNan16 = 0x7FFFu;  // f16 and bf16 alike
// The NaN that tensor copies may fill with for elements out of bounds (seen on an H200) and that
// fma.oob ignores.
constexpr uint16_t kOutOfBoundsNan16 = 0x7FF7u;
// Default NaN of f64 operations without a NaN operand.
constexpr uint64_t kDefaultNan64 = 0xFFF8000000000000ull;

constexpr uint64_t kQuietBit64 = 0x0008000000000000ull;

inline uint32_t float_bits(float value) { return bit_cast<uint32_t>(value); }
inline uint64_t float_bits(double value) { return bit_cast<uint64_t>(value); }

inline float canonical(float value) {
  return value != value ? bit_cast<float>(kCanonicalNan32) : value;
}

// Subnormal -> zero of the same sign.
inline float flush(float value) {
  const uint32_t bits = float_bits(value);
  return bit_cast<float>((bits & 0x7F800000u) == 0 ? bits & 0x80000000u : bits);
}
template <bool flushes>
inline float flush_if(float value) {
  return flushes ? flush(value) : value;
}

// .sat: NaN -> +0, everything else into [0, 1].
inline float saturate(float value) {
  const float low = value > 0.0f ? value : 0.0f;  // NaN and -0 -> +0
  return low < 1.0f ? low : 1.0f;
}
inline double saturate(double value) {
  const double low = value > 0.0 ? value : 0.0;
  return low < 1.0 ? low : 1.0;
}

inline bool is_nan16(uint32_t bits, uint32_t infinity) { return (bits & 0x7FFF) > infinity; }

// IEEE binary16. `decode` is exact; NaN becomes the canonical f32 NaN.
struct F16 {
  static constexpr uint32_t kInfinity = 0x7C00;
  static constexpr uint32_t kOne = 0x3C00;
  static constexpr uint32_t kMinNormal = 0x0400;
  static inline float decode(uint32_t code) {
    const uint32_t magnitude = code & 0x7FFF;
    const uint32_t sign = (code & 0x8000) << 16;
    const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t bits = magnitude < kMinNormal ? float_bits(subnormal) : normal;
    bits = magnitude == kInfinity ? 0x7F800000u : bits;
    bits |= sign;
    return bit_cast<float>(magnitude > kInfinity ? kCanonicalNan32 : bits);
  }
};

// bfloat16: the upper half of a binary32.
struct BF16 {
  static constexpr uint32_t kInfinity = 0x7F80;
  static constexpr uint32_t kOne = 0x3F80;
  static constexpr uint32_t kMinNormal = 0x0080;
  static inline float decode(uint32_t code) {
    const uint32_t bits = (code & 0xFFFF) << 16;
    return bit_cast<float>((bits & 0x7FFFFFFFu) > 0x7F800000u ? kCanonicalNan32 : bits);
  }
};

// Subnormal -> zero of the same sign, for a code of either 16-bit format.
template <class Format>
inline uint32_t flush16(uint32_t code) {
  return (code & 0x7FFF) < Format::kMinNormal ? code & 0x8000 : code;
}

}  // namespace halfbyte::gpu
