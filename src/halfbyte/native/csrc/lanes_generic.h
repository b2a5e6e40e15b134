// Sixteen float / int32 lanes in plain loops: the baseline for every CPU.
// Every operation is a correctly rounded IEEE operation, so all lane files give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int kRegisterRows = 2;  // rows of float sums that fit in registers

struct F16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};

#define EACH for (int i = 0; i < 16; ++i)

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float float_of_half(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7FFF;
  if (rest >= 0x7C00) return float_of_bits(sign | 0x7F800000 | ((rest & 0x3FF) << 13));
  if (rest < 0x400) {  // subnormal half: rest * 2^-24, exact in float32
    const float value = (float)rest * 0x1p-24f;
    return float_of_bits(bits_of_float(value) | sign);
  }
  return float_of_bits(sign | ((rest << 13) + (112u << 23)));
}

inline F16 load_f32(const float* p) {
  F16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline F16 load_bf16(const uint16_t* p) {
  F16 r;
  EACH r.v[i] = float_of_bits((uint32_t)p[i] << 16);
  return r;
}
inline F16 load_f16(const uint16_t* p) {
  F16 r;
  EACH r.v[i] = float_of_half(p[i]);
  return r;
}
inline void store_f32(float* p, F16 a) { std::memcpy(p, a.v, 64); }
inline I16 load_i32(const int32_t* p) {
  I16 r;
  std::memcpy(r.v, p, 64);
  return r;
}
inline void store_i32(int32_t* p, I16 a) { std::memcpy(p, a.v, 64); }

inline F16 splat(float x) {
  F16 r;
  EACH r.v[i] = x;
  return r;
}
inline I16 splat_i(int32_t x) {
  I16 r;
  EACH r.v[i] = x;
  return r;
}
#define LANE_OP(name, expression)       \
  inline F16 name(F16 a, F16 b) {       \
    F16 r;                              \
    EACH r.v[i] = expression;           \
    return r;                           \
  }
LANE_OP(add, a.v[i] + b.v[i])
LANE_OP(sub, a.v[i] - b.v[i])
LANE_OP(mul, a.v[i] * b.v[i])
LANE_OP(div, a.v[i] / b.v[i])
LANE_OP(min_f, a.v[i] < b.v[i] ? a.v[i] : b.v[i])  // b where either is NaN, as MINPS
LANE_OP(max_f, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
#undef LANE_OP
inline F16 mul_add(F16 a, F16 b, F16 c) {  // may round once or twice: only for GEMM sums
  F16 r;
  EACH r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}
// x - q * d, with one rounding where kHasFusedMultiply.
constexpr bool kHasFusedMultiply = false;
inline F16 fused_residual(F16 x, F16 q, F16 d) {
  EACH x.v[i] -= q.v[i] * d.v[i];
  return x;
}
#define LANE_OP(name, expression)       \
  inline I16 name(I16 a, I16 b) {       \
    I16 r;                              \
    EACH r.v[i] = expression;           \
    return r;                           \
  }
LANE_OP(add_i, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i]))
LANE_OP(sub_i, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i]))
LANE_OP(and_i, a.v[i] & b.v[i])
LANE_OP(or_i, a.v[i] | b.v[i])
LANE_OP(min_i, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
LANE_OP(max_i, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
#undef LANE_OP
template <int n>
inline I16 shift_left(I16 a) {
  EACH a.v[i] = (int32_t)((uint32_t)a.v[i] << n);
  return a;
}
template <int n>
inline I16 shift_right(I16 a) {  // logical
  EACH a.v[i] = (int32_t)((uint32_t)a.v[i] >> n);
  return a;
}
inline I16 bits_of(F16 a) {
  I16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline F16 floats_of_bits(I16 a) {
  F16 r;
  std::memcpy(r.v, a.v, 64);
  return r;
}
inline F16 to_float(I16 a) {
  F16 r;
  EACH r.v[i] = (float)a.v[i];
  return r;
}
// a < b ? x : y, lane by lane.
inline I16 select_less(F16 a, F16 b, I16 x, I16 y) {
  EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
inline F16 select_less(F16 a, F16 b, F16 x, F16 y) {
  EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
inline F16 select_less_i(I16 a, I16 b, F16 x, F16 y) {
  EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
inline int32_t largest(I16 a) {
  int32_t r = a.v[0];
  EACH r = a.v[i] > r ? a.v[i] : r;
  return r;
}
inline int32_t total(I16 a) {
  int32_t r = 0;
  EACH r += a.v[i];
  return r;
}
inline float sum_lanes(F16 a) {
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  }
  return a.v[0];
}
// table[index], index in 0..15.
inline F16 lookup16(const float* table, I16 index) {
  F16 r;
  EACH r.v[i] = table[index.v[i]];
  return r;
}
// Low nibbles of 16 lanes -> 8 bytes, the even lane in the low nibble.
inline void store_nibbles(uint8_t* p, I16 a) {
  for (int i = 0; i < 8; ++i) p[i] = (uint8_t)(a.v[2 * i] | (a.v[2 * i + 1] << 4));
}
// 4-byte words at p + i * stride.
inline I16 load_strided(const uint8_t* const* rows, int64_t offset) {
  I16 r;
  EACH std::memcpy(&r.v[i], rows[i] + offset, 4);
  return r;
}
// Replaces each byte (0..15) of the lanes by table[byte].
inline I16 lookup_bytes(const uint8_t* table, I16 a) {
  uint8_t bytes[64];
  std::memcpy(bytes, a.v, 64);
  for (int i = 0; i < 64; ++i) bytes[i] = table[bytes[i] & 15];
  std::memcpy(a.v, bytes, 64);
  return a;
}
// 16 nibbles of 8 bytes, the low nibble first.
inline I16 load_nibbles(const uint8_t* p) {
  I16 r;
  EACH r.v[i] = (p[i / 2] >> (4 * (i % 2))) & 15;
  return r;
}
// Float16 with overflow to infinity, as a cast does.
inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  const uint32_t size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return sign | 0x7E00;
  if (size >= 0x477FF000) return sign | 0x7C00;  // 65520 and above round to infinity
  if (size < 0x38800000) {  // below 2^-14: adding 1/2 rounds to multiples of 2^-24
    return sign | (uint16_t)(bits_of_float(float_of_bits(size) + 0.5f) - 0x3F000000);
  }
  return sign | (uint16_t)((size - 0x38000000 + 0xFFF + ((size >> 13) & 1)) >> 13);
}
inline void store_f16(uint16_t* p, F16 a) { EACH p[i] = half_of_float(a.v[i]); }
inline void store_low_halves(uint16_t* p, I16 a) { EACH p[i] = (uint16_t)a.v[i]; }
// sums + products of 16 columns with 4 * quads unsigned weights each (layout [quad][16][4], at
// most 24 in size) by signed activations (at most 15 in size).
template <int quads>
inline I16 dot_block(I16 sums, const uint8_t* weights, const int8_t* a) {
  for (int q = 0; q < quads; ++q, weights += 64, a += 4) {
    for (int c = 0; c < 16; ++c) {
      const uint8_t* w = weights + 4 * c;
      sums.v[c] += w[0] * a[0] + w[1] * a[1] + w[2] * a[2] + w[3] * a[3];
    }
  }
  return sums;
}
#undef EACH

}  // namespace
