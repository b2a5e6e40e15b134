// Sixteen float / int32 lanes in two AVX2 registers (x86-64-v3: AVX2, FMA, F16C).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kRegisterRows = 4;  // rows of float sums that fit in registers

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};

inline float float_of_bits(uint32_t bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)bits))); }
inline uint32_t bits_of_float(float x) { return (uint32_t)_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x))); }
inline float float_of_half(uint16_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

inline F16 load_f32(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen_bf16(const uint16_t* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F16 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline F16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline void store_f32(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline I16 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline void store_i32(int32_t* p, I16 x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I16 splat_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
#define FLOAT_OP(name, op) \
  inline F16 name(F16 x, F16 y) { return {_mm256_##op##_ps(x.a, y.a), _mm256_##op##_ps(x.b, y.b)}; }
FLOAT_OP(add, add)
FLOAT_OP(sub, sub)
FLOAT_OP(mul, mul)
FLOAT_OP(div, div)
FLOAT_OP(min_f, min)
FLOAT_OP(max_f, max)
#undef FLOAT_OP
inline F16 mul_add(F16 x, F16 y, F16 z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
constexpr bool kHasFusedMultiply = true;
inline F16 fused_residual(F16 x, F16 q, F16 d) {
  return {_mm256_fnmadd_ps(q.a, d.a, x.a), _mm256_fnmadd_ps(q.b, d.b, x.b)};
}
#define INT_OP(name, op) \
  inline I16 name(I16 x, I16 y) { return {_mm256_##op(x.a, y.a), _mm256_##op(x.b, y.b)}; }
INT_OP(add_i, add_epi32)
INT_OP(sub_i, sub_epi32)
INT_OP(and_i, and_si256)
INT_OP(or_i, or_si256)
INT_OP(min_i, min_epi32)
INT_OP(max_i, max_epi32)
#undef INT_OP
template <int n>
inline I16 shift_left(I16 x) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <int n>
inline I16 shift_right(I16 x) {
  return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)};
}
inline I16 bits_of(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline F16 floats_of_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F16 select_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline I16 select_less(F16 a, F16 b, I16 x, I16 y) {
  return bits_of(select_less(a, b, floats_of_bits(x), floats_of_bits(y)));
}
inline F16 select_less_i(I16 a, I16 b, F16 x, F16 y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.a, a.a))),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.b, a.b)))};
}
inline int32_t largest(I16 x) {
  const __m256i eight = _mm256_max_epi32(x.a, x.b);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}
inline int32_t total(I16 x) {
  const __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1));
  return _mm_cvtsi128_si32(four);
}
inline float sum_lanes(F16 x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}
inline F16 lookup16(const float* table, I16 index) {
  return {_mm256_i32gather_ps(table, index.a, 4), _mm256_i32gather_ps(table, index.b, 4)};
}
inline void store_nibbles(uint8_t* p, I16 x) {
  // Each 64-bit pair of lanes holds (even, odd): the odd nibble moves to bits 4..7 of the pair.
  const __m256i low = _mm256_or_si256(x.a, _mm256_srli_epi64(x.a, 28));
  const __m256i high = _mm256_or_si256(x.b, _mm256_srli_epi64(x.b, 28));
  const __m256i pick = _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                        -1, -1, 0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i first = _mm256_shuffle_epi8(low, pick);
  const __m256i second = _mm256_shuffle_epi8(high, pick);
  const int32_t a = _mm_cvtsi128_si32(
      _mm_or_si128(_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1)));
  const int32_t b = _mm_cvtsi128_si32(
      _mm_or_si128(_mm256_castsi256_si128(second), _mm256_extracti128_si256(second, 1)));
  std::memcpy(p, &a, 4);
  std::memcpy(p + 4, &b, 4);
}
inline I16 load_strided(const uint8_t* const* rows, int64_t offset) {
  int32_t words[16];
  for (int i = 0; i < 16; ++i) std::memcpy(&words[i], rows[i] + offset, 4);
  return load_i32(words);
}
inline I16 lookup_bytes(const uint8_t* table, I16 x) {
  const __m256i wide = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(wide, x.a), _mm256_shuffle_epi8(wide, x.b)};
}
inline I16 load_nibbles(const uint8_t* p) {
  int32_t low, high;
  std::memcpy(&low, p, 4);
  std::memcpy(&high, p + 4, 4);
  const __m256i mask = _mm256_set1_epi64x(0x0000000F0000000F);
  const __m256i a = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(low));
  const __m256i b = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(high));
  return {_mm256_and_si256(_mm256_or_si256(a, _mm256_slli_epi64(a, 28)), mask),
          _mm256_and_si256(_mm256_or_si256(b, _mm256_slli_epi64(b, 28)), mask)};
}
inline void store_f16(uint16_t* p, F16 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_low_halves(uint16_t* p, I16 x) {  // values below 2^16
  const __m256i both = _mm256_packus_epi32(x.a, x.b);
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xD8));
}
template <int quads>
inline I16 dot_block(I16 sums, const uint8_t* weights, const int8_t* a) {
  // Int16 partial sums: a pair is at most 2 * 24 * 12 (E2M1) or 2 * 15 * 15 (INT4) in size, so 8
  // quads of E2M1 (block 32) stay below 4608 and 16 of INT4 below 7200: nothing saturates.
  const __m256i* w = (const __m256i*)weights;
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int q = 0; q < quads; ++q) {
    int32_t four;
    std::memcpy(&four, a + 4 * q, 4);
    const __m256i wide = _mm256_set1_epi32(four);
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(_mm256_loadu_si256(w + 2 * q), wide));
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(_mm256_loadu_si256(w + 2 * q + 1), wide));
  }
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sums.a, _mm256_madd_epi16(low, ones)),
          _mm256_add_epi32(sums.b, _mm256_madd_epi16(high, ones))};
}

}  // namespace
