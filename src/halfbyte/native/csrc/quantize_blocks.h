// Block quantization of rows on sixteen lanes: scale choice, codes, counts.
#pragma once
#include <cstring>

#include "scale_search.h"

namespace {

enum Scaling { kDivide, kMultiply, kDivideNoMinusZero };

template <int32_t element, Scaling scaling>
inline void encode_block(const float* values, int block_size, float divisor,
                         uint8_t* codes) {
  const F16 wide = splat(divisor);
  for (int i = 0; i < block_size; i += 16) {
    F16 value = load_f32(values + i);
    value = scaling == kMultiply ? mul(value, wide) : div(value, wide);
    if (scaling == kDivideNoMinusZero) value = add(value, splat(0.0f));  // -0 + 0 is 0
    store_nibbles(codes + i / 2, element == kE2M1   ? encode_e2m1(value)
                                 : element == kInt4 ? encode_int4(value)
                                                    : encode_uint4(value));
  }
}

inline void encode_block_of(const QuantizeJob& job, const float* values, float divisor,
                            uint8_t* codes) {
  if (job.element == kInt4) {
    encode_block<kInt4, kDivide>(values, job.block_size, divisor, codes);
  } else if (job.element == kUint4) {
    encode_block<kUint4, kDivide>(values, job.block_size, divisor, codes);
  } else if (!job.keeps_minus_zero) {
    encode_block<kE2M1, kDivideNoMinusZero>(values, job.block_size, divisor, codes);
  } else if (job.payload_order == kReciprocal) {
    encode_block<kE2M1, kMultiply>(values, job.block_size, divisor, codes);
  } else {
    encode_block<kE2M1, kDivide>(values, job.block_size, divisor, codes);
  }
}

inline bool is_saturated(const QuantizeJob& job, float unrounded) {
  if (job.scale_rule == kE4M3Scale) return unrounded > kE4M3Max;
  return job.scale_rule == kFloatScale &&
         ((job.scale_type == kFloat16 && unrounded > kHalfMax) ||
          (job.scale_type == kBFloat16 && unrounded > 0x1.fep127f));
}

// Whether the scale of a nonzero block rounded to zero (before any replacement of that zero).
inline bool is_flushed(const QuantizeJob& job, float unrounded, int32_t stored) {
  if (job.scale_rule == kE8M0Scale) return false;
  if (job.scale_rule == kE4M3Scale) {
    if (job.flushed_scale == 0) return stored == 0;
    return unrounded <= 0x1p-10f && job.min_scale == 0.0f;  // half the least E4M3 number
  }
  if (job.scale_type == kFloat16) return unrounded <= 0x1p-25f;
  return job.scale_type == kBFloat16 ? unrounded <= 0x1p-134f : unrounded == 0.0f;
}

// Writes block `block` (an index into codes and scales) and counts what happened to it.
inline void finish_block(const QuantizeJob& job, const float* values, int32_t amax_bits,
                         const BlockScales& scales, int lane, int64_t block, int64_t* counts) {
  uint8_t* codes = job.codes + block * (job.block_size / 2);
  if (amax_bits >= kInfBits) {
    std::memset(codes, 0, job.block_size / 2);
    store_scale(job, block, nan_scale(job));
    ++counts[kNonfinite];
    return;
  }
  const float divisor = scales.divisor[lane];
  if (divisor == 0.0f) {
    std::memset(codes, 0, job.block_size / 2);
  } else {
    encode_block_of(job, values, divisor, codes);
  }
  store_scale(job, block, scales.stored[lane]);
  if (amax_bits == 0) {
    ++counts[kZero];
    return;
  }
  counts[kFlushed] += is_flushed(job, scales.unrounded[lane], scales.stored[lane]);
  counts[kSaturated] += is_saturated(job, scales.unrounded[lane]);
}

void quantize_rows(const QuantizeJob* job_pointer, int64_t first, int64_t last, int64_t* counts) {
  const QuantizeJob job = *job_pointer;
  const Source in = {job.x,     job.columns,   job.row_stride, job.smooth,
                     job.shift, job.has_shift, job.value_type};
  const int64_t blocks = (job.columns + job.block_size - 1) / job.block_size;
  alignas(64) float values[kGroup * kMaxBlock];
  alignas(64) int32_t amax_bits[kGroup];
  BlockScales scales;
  for (int64_t row = first; row < last; ++row) {
    for (int64_t start = 0; start < blocks; start += kGroup) {
      const int count = (int)(blocks - start < kGroup ? blocks - start : kGroup);
      const int64_t column = start * job.block_size;
      const int64_t padded = (int64_t)count * job.block_size;
      const int64_t left = job.columns - column;
      load_row(in, row, column, left < padded ? left : padded, padded, values);
      for (int b = 0; b < kGroup; ++b) {
        amax_bits[b] = b < count ? block_amax(values + b * job.block_size, job.block_size,
                                              job.element == kUint4)
                                 : 0;
      }
      choose_scales(job, amax_bits, &scales);
      if (job.search) search_scales(job, values, amax_bits, &scales);
      for (int b = 0; b < count; ++b) {
        finish_block(job, values + b * job.block_size, amax_bits[b], scales, b,
                     row * blocks + start + b, counts);
      }
    }
  }
}

void amax_rows(const AmaxJob* job, int64_t first, int64_t last, float* amax, int32_t* nonfinite) {
  const Source in = {job->x,     job->columns,   job->row_stride, job->smooth,
                     job->shift, job->has_shift, job->value_type};
  alignas(64) float values[512];
  I16 top = splat_i(0);
  I16 all = splat_i(0);
  for (int64_t row = first; row < last; ++row) {
    for (int64_t column = 0; column < job->columns; column += 512) {
      const int64_t left = job->columns - column;
      const int64_t count = left < 512 ? left : 512;
      const int64_t padded = (count + 15) / 16 * 16;
      load_row(in, row, column, count, padded, values);
      for (int64_t i = 0; i < padded; i += 16) {
        const I16 size = and_i(bits_of(load_f32(values + i)), splat_i(0x7FFFFFFF));
        all = max_i(all, size);
        const F16 finite = select_less_i(size, splat_i(kInfBits), floats_of_bits(size), splat(0.0f));
        top = max_i(top, bits_of(finite));
      }
    }
  }
  *amax = float_of_bits((uint32_t)largest(top));
  *nonfinite = largest(all) >= kInfBits;
}

}  // namespace
