// Element and scale codecs on sixteen lanes; integer arithmetic, correctly rounded to even.
#pragma once

namespace {

constexpr float kE2M1Max = 6.0f;
constexpr float kE4M3Max = 448.0f;
constexpr float kHalfMax = 65504.0f;

// Rounds the bits of a non-negative normal float to `kept` mantissa bits, as (exponent, mantissa).
template <int kept>
inline I16 round_mantissa(I16 bits) {
  const I16 odd = and_i(shift_right<23 - kept>(bits), splat_i(1));
  const I16 bias = splat_i((1 << (22 - kept)) - 1);
  return shift_right<23 - kept>(add_i(add_i(bits, bias), odd));
}

// Codes of a minifloat with `mantissa` bits and exponent bias `bias` for 0 <= value <= its maximum.
// Below twice the least normal number the spacing is constant: adding 2^22 steps rounds to it.
template <int mantissa, int bias>
inline I16 encode_minifloat(F16 value) {
  constexpr int shifter_exponent = 127 + 1 - bias - mantissa + 23;  // ulp = least subnormal
  const I16 shifter = splat_i(shifter_exponent << 23);
  const I16 small = sub_i(bits_of(add(value, floats_of_bits(shifter))), shifter);
  const I16 normal = sub_i(round_mantissa<mantissa>(bits_of(value)), splat_i((127 - bias) << mantissa));
  return max_i(min_i(small, splat_i(2 << mantissa)), normal);
}

// Values of minifloat codes without a sign.
template <int mantissa, int bias>
inline F16 decode_minifloat(I16 code) {
  const float step = float_of_bits((uint32_t)(127 + 1 - bias - mantissa) << 23);
  const F16 small = mul(to_float(code), splat(step));
  const I16 bits = add_i(shift_left<23 - mantissa>(code), splat_i((127 - bias) << 23));
  return select_less_i(code, splat_i(2 << mantissa), small, floats_of_bits(bits));
}

// E2M1: 1 mantissa bit, bias 1; a zero keeps its sign.
inline I16 encode_e2m1(F16 value) {
  const I16 bits = bits_of(value);
  const F16 size = floats_of_bits(and_i(bits, splat_i(0x7FFFFFFF)));
  const I16 code = encode_minifloat<1, 1>(min_f(size, splat(kE2M1Max)));
  return or_i(code, and_i(shift_right<28>(bits), splat_i(8)));
}

// Nearest integers, ties to even, of |value| < 2^22.
inline I16 round_to_int(F16 value) {
  const F16 shifter = splat(12582912.0f);  // 1.5 * 2^23: ulp 1
  return sub_i(bits_of(add(value, shifter)), bits_of(shifter));
}
inline I16 encode_int4(F16 value) {
  return and_i(round_to_int(max_f(min_f(value, splat(7.0f)), splat(-8.0f))), splat_i(15));
}
inline I16 encode_uint4(F16 value) {
  return round_to_int(max_f(min_f(value, splat(15.0f)), splat(0.0f)));
}

// E4M3 bytes of non-negative values, saturating at 448.
inline I16 encode_e4m3(F16 value) { return encode_minifloat<3, 7>(min_f(value, splat(kE4M3Max))); }
inline F16 decode_e4m3(I16 code) { return decode_minifloat<3, 7>(code); }

// IEEE half bits of non-negative values, saturating at the largest finite half.
inline I16 encode_half(F16 value) { return encode_minifloat<10, 15>(min_f(value, splat(kHalfMax))); }
inline F16 decode_half(I16 code) { return decode_minifloat<10, 15>(code); }

// bfloat16 bits of non-negative values, saturating at the largest finite bfloat16.
inline I16 encode_bfloat16(F16 value) {
  return min_i(round_mantissa<7>(bits_of(value)), splat_i(0x7F7F));
}
inline F16 decode_bfloat16(I16 code) { return floats_of_bits(shift_left<16>(code)); }

}  // namespace
