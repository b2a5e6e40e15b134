// Error-optimal block scales: the rule of formats/scale_search.py, sixteen blocks at a time.
//
// The blocks lie transposed (one block a lane), so that the halving tree of the squared errors
// needs no shuffles. Every rounding that the rule names happens; only the quotient is found
// another way where that is provably the same number (see `quotient`).
#pragma once

#include "block_scales.h"

namespace {

#define HALFBYTE_INLINE inline __attribute__((always_inline))

constexpr float kSafeLow = 0x1p-50f;  // global scales and amax in between: no step of `quotient`
constexpr float kSafeHigh = 0x1p50f;  // can overflow, or lose bits that a code depends on

// A block's divisor D. Where D is 0 (a flushed block) all quotients are to be 0.
struct Divisor {
  F16 value;
  F16 reciprocal;   // 1 / D, or 0
  F16 denominator;  // D, or infinity
};

// x / d, correctly rounded. With fused operations: two Newton corrections of x * (1 / d); the
// first leaves at most one unit in the last place, from where the second rounds correctly
// (P. Markstein, IBM J. Res. Dev. 34, 1990). Quotients below 2^-20 may be off; they become 0.
template <bool divides>
HALFBYTE_INLINE F16 quotient(F16 x, const Divisor& d) {
  if (divides) return div(x, d.denominator);
  const F16 first = mul(x, d.reciprocal);
  const F16 second = mul_add(fused_residual(x, first, d.value), d.reciprocal, first);
  return mul_add(fused_residual(x, second, d.value), d.reciprocal, second);
}

// The element value that the code of q means: q rounded to the element's grid.
template <int32_t element>
HALFBYTE_INLINE F16 round_to_element(F16 q) {
  if (element != kE2M1) {
    const float low = element == kInt4 ? -8.0f : 0.0f, high = element == kInt4 ? 7.0f : 15.0f;
    const F16 shifter = splat(12582912.0f);  // 1.5 * 2^23: spacing 1
    return sub(add(max_f(min_f(q, splat(high)), splat(low)), shifter), shifter);
  }
  // q >= 0 here. Spacing 1/2 below 2, 1 below 4, then 2: the shifter's exponent follows q's.
  q = min_f(q, splat(kE2M1Max));
  const I16 exponent = and_i(bits_of(q), splat_i(kInfBits));
  const F16 shifter =
      floats_of_bits(add_i(max_i(exponent, splat_i(127 << 23)), splat_i(22 << 23)));
  return sub(add(q, shifter), shifter);
}

template <int32_t element, bool divides>
HALFBYTE_INLINE F16 squared_error(const float* x, const Divisor& d) {
  const F16 value = load_f32(x);
  const F16 rounded = round_to_element<element>(quotient<divides>(value, d));
  const F16 residual = sub(value, mul(rounded, d.value));
  return mul(residual, residual);
}

// Term j of the halving tree when 16 of n are left: the sum over j, j + 16, j + 32, j + 48 in its
// order.
template <int32_t element, bool divides, int n>
HALFBYTE_INLINE F16 sixteenth(const float* x, int j, const Divisor& d) {
  F16 terms[n / 16];
  for (int i = 0; i < n / 16; ++i) {
    terms[i] = squared_error<element, divides>(x + 16 * (j + 16 * i), d);
  }
  for (int half = n / 32; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) terms[i] = add(terms[i], terms[i + half]);
  }
  return terms[0];
}

template <int32_t element, bool divides, int n>
inline F16 tree_sum(const float* x, const Divisor& d) {
  F16 terms[8];
#pragma GCC unroll 1
  for (int j = 0; j < 8; ++j) {
    terms[j] = add(sixteenth<element, divides, n>(x, j, d),
                   sixteenth<element, divides, n>(x, j + 8, d));
  }
  for (int half = 4; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) terms[i] = add(terms[i], terms[i + half]);
  }
  return terms[0];
}

template <int32_t element, int n>
inline F16 block_error(const float* x, F16 divisor, bool is_safe) {
  const I16 bits = bits_of(divisor);
  const I16 reciprocal = where_zero(bits, bits, bits_of(div(splat(1.0f), divisor)));
  const I16 denominator = where_zero(bits, splat_i(kInfBits), bits);
  const Divisor d = {divisor, floats_of_bits(reciprocal), floats_of_bits(denominator)};
  if (kHasFusedMultiply && is_safe) return tree_sum<element, false, n>(x, d);
  return tree_sum<element, true, n>(x, d);
}

// The best candidate so far of sixteen blocks.
struct Best {
  I16 stored;
  F16 divisor;
  F16 error;
};

// Takes the candidate where it is legal (bits not 0) and its error strictly smaller.
inline void take_better(Best* best, I16 stored, F16 divisor, F16 error, I16 is_legal) {
  const I16 never = splat_i(kInfBits);
  const F16 contender = floats_of_bits(where_zero(is_legal, never, bits_of(error)));
  best->stored = select_less(contender, best->error, stored, best->stored);
  best->divisor = select_less(contender, best->error, divisor, best->divisor);
  best->error = select_less(contender, best->error, error, best->error);
}

// 1 where low <= code <= high, else 0.
inline I16 is_within(I16 code, int low, int high) {
  const I16 clamped = min_i(max_i(code, splat_i(low)), splat_i(high));
  const I16 distance = sub_i(code, clamped);
  return shift_right<31>(sub_i(and_i(or_i(distance, sub_i(splat_i(0), distance)),
                                     splat_i(0x7FFFFFFF)),
                               splat_i(1)));
}

inline void search_e4m3(const QuantizeJob& job, const float* x, I16 amax, bool is_safe, Best* best) {
  constexpr int kOffsets[] = {-2, -1, 1, 2, 3, 4, 5, 6};
  const I16 first = best->stored;
  best->error = block_error<kE2M1, 16>(x, best->divisor, is_safe);
  for (const int offset : kOffsets) {
    const I16 wanted = add_i(first, splat_i(offset));
    const I16 stored = min_i(max_i(wanted, splat_i(1)), splat_i(0x7E));
    const F16 divisor = mul(decode_e4m3(stored), splat(job.multiplier));
    const I16 is_legal = where_zero(amax, amax, is_within(wanted, 1, 0x7E));
    take_better(best, stored, divisor, block_error<kE2M1, 16>(x, divisor, is_safe), is_legal);
  }
}

inline void search_e8m0(const float* x, I16 amax, bool is_safe, Best* best) {
  constexpr int kOffsets[] = {-2, -1, 1};
  const I16 first = best->stored;
  best->error = block_error<kE2M1, 32>(x, best->divisor, is_safe);
  for (const int offset : kOffsets) {
    const I16 wanted = add_i(first, splat_i(offset));
    const I16 stored = min_i(max_i(wanted, splat_i(0)), splat_i(0xFE));
    const F16 divisor = decode_e8m0(stored);
    const I16 is_legal = where_zero(amax, amax, is_within(wanted, 0, 0xFE));
    take_better(best, stored, divisor, block_error<kE2M1, 32>(x, divisor, is_safe), is_legal);
  }
}

template <int32_t element, int n>
inline void search_float(const QuantizeJob& job, const float* x, I16 amax, bool is_safe,
                         Best* best) {
  best->error = block_error<element, n>(x, best->divisor, is_safe);
  for (int numerator = 33; numerator <= 48; ++numerator) {
    const float top = element_max(job) * ((float)numerator / 32.0f);  // exact
    F16 divisor;
    const I16 stored = round_float_scale(job, div(floats_of_bits(amax), splat(top)), &divisor);
    take_better(best, stored, divisor, block_error<element, n>(x, divisor, is_safe), amax);
  }
}

template <int n>
inline void search_integers(const QuantizeJob& job, const float* x, I16 amax, bool is_safe,
                            Best* best) {
  if (job.element == kInt4) {
    search_float<kInt4, n>(job, x, amax, is_safe, best);
  } else {
    search_float<kUint4, n>(job, x, amax, is_safe, best);
  }
}

// Replaces the scales of sixteen blocks by those with the least squared error.
inline void search_scales(const QuantizeJob& job, const float* values, const int32_t* amax_bits,
                          BlockScales* scales) {
  alignas(64) float x[kGroup * kMaxBlock];
  const I16 amax = load_i32(amax_bits);
  bool is_safe = job.multiplier > kSafeLow && job.multiplier < kSafeHigh;
  for (int b = 0; b < kGroup; ++b) {
    const float size = float_of_bits((uint32_t)amax_bits[b]);
    is_safe = is_safe && (size == 0.0f || (size > kSafeLow && size < kSafeHigh));
    const float* block = values + b * job.block_size;
    const uint32_t mask = job.element == kE2M1 ? 0x7FFFFFFF : 0xFFFFFFFF;
    for (int i = 0; i < job.block_size; ++i) {
      x[16 * i + b] = float_of_bits(bits_of_float(block[i]) & mask);
    }
  }
  Best best = {load_i32(scales->stored), load_f32(scales->divisor), splat(0.0f)};
  if (job.scale_rule == kE4M3Scale) {
    search_e4m3(job, x, amax, is_safe, &best);
  } else if (job.scale_rule == kE8M0Scale) {
    search_e8m0(x, amax, is_safe, &best);
  } else if (job.block_size == 32) {
    search_integers<32>(job, x, amax, is_safe, &best);
  } else {
    search_integers<64>(job, x, amax, is_safe, &best);
  }
  store_i32(scales->stored, best.stored);
  store_f32(scales->divisor, best.divisor);
}

}  // namespace
