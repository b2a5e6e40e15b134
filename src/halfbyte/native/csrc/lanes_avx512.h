// Sixteen float / int32 lanes in one AVX-512 register (F, BW, VL, DQ, VNNI).
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kRegisterRows = 8;  // rows of float sums that fit in registers

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};

inline float float_of_bits(uint32_t bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128((int)bits))); }
inline uint32_t bits_of_float(float x) { return (uint32_t)_mm_cvtsi128_si32(_mm_castps_si128(_mm_set_ss(x))); }
inline float float_of_half(uint16_t half) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

inline F16 load_f32(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 load_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline F16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
inline void store_f32(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
inline I16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_i32(int32_t* p, I16 a) { _mm512_storeu_si512(p, a.v); }
inline F16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline I16 splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F16 min_f(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F16 max_f(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F16 mul_add(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
constexpr bool kHasFusedMultiply = true;
inline F16 fused_residual(F16 x, F16 q, F16 d) { return {_mm512_fnmadd_ps(q.v, d.v, x.v)}; }
inline I16 add_i(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I16 sub_i(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I16 and_i(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline I16 or_i(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline I16 min_i(I16 a, I16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
inline I16 max_i(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int n>
inline I16 shift_left(I16 a) {
  return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
inline I16 shift_right(I16 a) {
  return {_mm512_srli_epi32(a.v, n)};
}
inline I16 bits_of(F16 a) { return {_mm512_castps_si512(a.v)}; }
inline F16 floats_of_bits(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
inline F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I16 select_less(F16 a, F16 b, I16 x, I16 y) {
  return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline F16 select_less(F16 a, F16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
inline F16 select_less_i(I16 a, I16 b, F16 x, F16 y) {
  return {_mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(a.v, b.v), y.v, x.v)};
}
inline int32_t largest(I16 a) { return _mm512_reduce_max_epi32(a.v); }
inline int32_t total(I16 a) { return _mm512_reduce_add_epi32(a.v); }
inline float sum_lanes(F16 a) { return _mm512_reduce_add_ps(a.v); }
inline F16 lookup16(const float* table, I16 index) {
  return {_mm512_permutexvar_ps(index.v, _mm512_loadu_ps(table))};
}
inline void store_nibbles(uint8_t* p, I16 a) {
  // Each 64-bit pair of lanes holds (even, odd): the odd nibble moves to bits 4..7 of the pair.
  const __m512i pair = _mm512_or_si512(a.v, _mm512_srli_epi64(a.v, 28));
  _mm_storel_epi64((__m128i*)p, _mm512_cvtepi64_epi8(pair));
}
inline I16 load_strided(const uint8_t* const* rows, int64_t offset) {
  const __m512i where = _mm512_set1_epi64(offset);
  const __m512i low = _mm512_add_epi64(_mm512_loadu_si512(rows), where);
  const __m512i high = _mm512_add_epi64(_mm512_loadu_si512(rows + 8), where);
  const __m256i first = _mm512_i64gather_epi32(low, nullptr, 1);
  const __m256i second = _mm512_i64gather_epi32(high, nullptr, 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)};
}
inline I16 lookup_bytes(const uint8_t* table, I16 a) {
  const __m512i wide = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return {_mm512_shuffle_epi8(wide, a.v)};
}
inline I16 load_nibbles(const uint8_t* p) {
  const __m512i pair = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)p));
  const __m512i spread = _mm512_or_si512(pair, _mm512_slli_epi64(pair, 28));
  return {_mm512_and_si512(spread, _mm512_set1_epi64(0x0000000F0000000F))};
}
inline void store_f16(uint16_t* p, F16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_low_halves(uint16_t* p, I16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v));
}
template <int quads>
inline I16 dot_block(I16 sums, const uint8_t* weights, const int8_t* a) {
  for (int q = 0; q < quads; ++q) {
    int32_t four;
    std::memcpy(&four, a + 4 * q, 4);
    const __m512i w = _mm512_loadu_si512(weights + 64 * q);
    sums.v = _mm512_dpbusd_epi32(sums.v, w, _mm512_set1_epi32(four));
  }
  return sums;
}

}  // namespace
