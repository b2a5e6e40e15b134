// Block scales of sixteen blocks at a time, from absolute maxima; loads of rows.
#pragma once
#include <cstdint>
#include <cstring>

#include "abi.h"
#include "elements.h"

namespace {

using namespace halfbyte;

constexpr int kMaxBlock = 64;
constexpr int kGroup = 16;  // blocks whose scales are chosen together, one a lane
constexpr int32_t kInfBits = 0x7F800000;

// Scales of sixteen blocks.
struct BlockScales {
  alignas(64) int32_t stored[kGroup];   // bits of the scale as stored
  alignas(64) float unrounded[kGroup];  // the scale before it was rounded
  alignas(64) float divisor[kGroup];    // values are divided (or multiplied) by this; 0: codes 0
};

inline F16 load_values(const void* x, int64_t at, int32_t type) {
  if (type == kFloat32) return load_f32((const float*)x + at);
  if (type == kBFloat16) return load_bf16((const uint16_t*)x + at);
  return load_f16((const uint16_t*)x + at);
}

inline float load_value(const void* x, int64_t at, int32_t type) {
  if (type == kFloat32) return ((const float*)x)[at];
  const uint16_t half = ((const uint16_t*)x)[at];
  return type == kBFloat16 ? float_of_bits((uint32_t)half << 16) : float_of_half(half);
}

// Where the values of a job lie, and what is done to each before it is quantized.
struct Source {
  const void* x;
  int64_t columns;
  int64_t row_stride;
  const float* smooth;
  float shift;
  int32_t has_shift;
  int32_t value_type;
};

// Copies `count` values from column `first` of a row as (x + shift) / smooth; zeros to `padded`.
inline void load_row(const Source& in, int64_t row, int64_t first, int64_t count, int64_t padded,
                     float* out) {
  const int64_t at = row * in.row_stride + first;
  const F16 shift = splat(in.shift);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    F16 value = load_values(in.x, at + i, in.value_type);
    if (in.has_shift) value = add(value, shift);
    if (in.smooth) value = div(value, load_f32(in.smooth + first + i));
    store_f32(out + i, value);
  }
  for (; i < count; ++i) {
    float value = load_value(in.x, at + i, in.value_type);
    if (in.has_shift) value += in.shift;
    if (in.smooth) value /= in.smooth[first + i];
    out[i] = value;
  }
  for (; i < padded; ++i) out[i] = 0.0f;
}

// Bits of the largest magnitude of a block (of the largest positive value for unsigned
// elements); at least kInfBits where any value is NaN or infinite.
inline int32_t block_amax(const float* values, int block_size, bool is_unsigned) {
  I16 top = splat_i(0);
  for (int i = 0; i < block_size; i += 16) {
    const I16 bits = bits_of(load_f32(values + i));
    I16 size = and_i(bits, splat_i(0x7FFFFFFF));
    if (is_unsigned) {  // negative finite values count as zero
      const I16 positive = max_i(bits, splat_i(0));
      size = bits_of(select_less_i(size, splat_i(kInfBits), floats_of_bits(positive),
                                   floats_of_bits(size)));
    }
    top = max_i(top, size);
  }
  return largest(top);
}

inline I16 choose_e8m0(F16 amax, int32_t rounding) {
  // floor 0, ceil 1, even 2, rceil 3: as formats/e8m0.py, for E2M1 (largest 6 = 1.5 * 2^2).
  I16 bits = bits_of(rounding == 3 ? div(amax, splat(kE2M1Max)) : amax);
  if (rounding == 2) bits = add_i(bits, splat_i(1 << 21));
  I16 exponent = shift_right<23>(bits);
  if (rounding == 1 || rounding == 3) {
    const I16 mantissa = and_i(bits, splat_i(0x7FFFFF));
    const I16 above_least = max_i(sub_i(bits, splat_i(1 << 22)), splat_i(0));  // 0 up to 2^-127
    exponent = add_i(exponent, min_i(min_i(mantissa, above_least), splat_i(1)));
  }
  if (rounding != 3) exponent = sub_i(exponent, splat_i(2));
  return max_i(min_i(exponent, splat_i(254)), splat_i(0));
}

inline F16 decode_e8m0(I16 code) {  // byte 0 is the subnormal 2^-127
  const F16 normal = floats_of_bits(shift_left<23>(code));
  return select_less_i(code, splat_i(1), floats_of_bits(splat_i(1 << 22)), normal);
}

inline float element_max(const QuantizeJob& job) {
  return job.element == kE2M1 ? kE2M1Max : job.element == kInt4 ? 7.0f : 15.0f;
}

// The lanes of x where `bits` is zero, else those of y.
inline I16 where_zero(I16 bits, I16 x, I16 y) {
  return bits_of(select_less_i(bits, splat_i(1), floats_of_bits(x), floats_of_bits(y)));
}

// Float scales of sixteen blocks, rounded to their type (saturating, 1 where that is zero).
inline I16 round_float_scale(const QuantizeJob& job, F16 unrounded, F16* stored) {
  I16 code = bits_of(min_f(unrounded, splat(0x1.fffffep127f)));
  I16 one = splat_i(0x3F800000);
  if (job.scale_type == kFloat16) {
    code = encode_half(unrounded);
    one = splat_i(0x3C00);
  } else if (job.scale_type == kBFloat16) {
    code = encode_bfloat16(unrounded);
    one = splat_i(0x3F80);
  }
  code = where_zero(code, one, code);
  *stored = job.scale_type == kFloat16    ? decode_half(code)
            : job.scale_type == kBFloat16 ? decode_bfloat16(code)
                                          : floats_of_bits(code);
  return code;
}

// E4M3 scales of sixteen blocks before rounding, without the floor.
inline F16 relative_scale(const QuantizeJob& job, F16 amax) {
  const F16 multiplier = splat(job.multiplier);
  if (job.scale_order == kScaleDivideProduct) return div(amax, mul(splat(kE2M1Max), multiplier));
  const F16 scale = div(amax, splat(kE2M1Max));
  return job.scale_order == kMultiplyDivisor ? mul(scale, splat(job.divisor))
                                             : div(scale, multiplier);
}

// What values are divided (kReciprocal: multiplied) by under the E4M3 bytes `stored`.
inline F16 payload_divisor(const QuantizeJob& job, I16 stored, F16 amax) {
  const F16 multiplier = splat(job.multiplier);
  const F16 scale = decode_e4m3(stored);
  const F16 product = mul(scale, multiplier);
  F16 divisor = product;
  if (job.payload_order == kReciprocal) {  // clamped: zero times infinity would be NaN
    divisor = min_f(div(div(splat(1.0f), multiplier), scale), splat(0x1.fffffep127f));
  }
  if (job.payload_order == kDivideQuotient) divisor = div(scale, splat(job.divisor));
  if (job.payload_order == kUnrounded) divisor = div(amax, splat(kE2M1Max));
  return floats_of_bits(where_zero(bits_of(product), splat_i(0), bits_of(divisor)));
}

// Scales of sixteen blocks from the bits of their largest magnitudes (finite where it matters).
inline void choose_scales(const QuantizeJob& job, const int32_t* amax_bits, BlockScales* out) {
  const I16 size = load_i32(amax_bits);
  const F16 amax = floats_of_bits(size);
  I16 stored;
  F16 unrounded = amax, divisor;
  if (job.scale_rule == kE8M0Scale) {
    stored = choose_e8m0(amax, job.e8m0_rounding);
    divisor = floats_of_bits(where_zero(size, splat_i(0), bits_of(decode_e8m0(stored))));
  } else if (job.scale_rule == kFloatScale) {
    unrounded = div(amax, splat(element_max(job)));
    stored = round_float_scale(job, unrounded, &divisor);
  } else {
    unrounded = relative_scale(job, amax);
    stored = encode_e4m3(max_f(unrounded, splat(job.min_scale)));
    stored = where_zero(stored, splat_i(job.flushed_scale), stored);
    stored = where_zero(size, splat_i(job.zero_scale), stored);
    divisor = payload_divisor(job, stored, amax);
  }
  store_i32(out->stored, stored);
  store_f32(out->unrounded, unrounded);
  store_f32(out->divisor, divisor);
}

inline int32_t nan_scale(const QuantizeJob& job) {
  if (job.scale_rule == kE4M3Scale) return 0x7F;
  if (job.scale_rule == kE8M0Scale) return 0xFF;
  return job.scale_type == kFloat16 ? 0x7E00 : job.scale_type == kBFloat16 ? 0x7FC0 : 0x7FC00000;
}

inline void store_scale(const QuantizeJob& job, int64_t at, int32_t bits) {
  if (job.scale_rule != kFloatScale) {
    ((uint8_t*)job.scales)[at] = (uint8_t)bits;
  } else if (job.scale_type == kFloat32) {
    ((int32_t*)job.scales)[at] = bits;
  } else {
    ((uint16_t*)job.scales)[at] = (uint16_t)bits;
  }
}

}  // namespace
