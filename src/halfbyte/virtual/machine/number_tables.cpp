#include "machine/number_tables.h"

#include <cmath>
#include <cstring>

#include "machine/lanes.h"

namespace halfbyte::gpu {
namespace {

// The value of an IEEE-like small float without infinities.
float decode_small(uint32_t bits, uint32_t exponent_bits, uint32_t mantissa_bits, int bias) {
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
  const int exponent = static_cast<int>((bits >> mantissa_bits) & ((1u << exponent_bits) - 1));
  const bool is_negative = (bits >> (mantissa_bits + exponent_bits)) & 1;
  const float fraction = static_cast<float>(mantissa) / static_cast<float>(1u << mantissa_bits);
  const float magnitude = exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                        : std::ldexp(1.0f + fraction, exponent - bias);
  return is_negative ? -magnitude : magnitude;
}

struct Tables {
  float e4m3[256], e5m2[256], e2m3[256], e3m2[256], e2m1[256], signed8[256], unsigned8[256];
  float e2m1_pairs[256][2], signed4_pairs[256][2], unsigned4_pairs[256][2];
  float ue4m3[256], ue8m0[256];

  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      e4m3[byte] = (byte & 0x7F) == 0x7F ? std::nanf("") : decode_small(byte, 4, 3, 7);
      e5m2[byte] = decode_half(static_cast<uint16_t>(byte << 8));
      e2m3[byte] = decode_small(byte & 0x3F, 2, 3, 1);
      e3m2[byte] = decode_small(byte & 0x3F, 3, 2, 3);
      e2m1[byte] = decode_small((byte >> 2) & 0xF, 2, 1, 1);
      signed8[byte] = static_cast<float>(static_cast<int8_t>(byte));
      unsigned8[byte] = static_cast<float>(byte);
      ue4m3[byte] = e4m3[byte & 0x7F];
      ue8m0[byte] = byte == 0xFF ? std::nanf("") : std::ldexp(1.0f, static_cast<int>(byte) - 127);
      for (int half = 0; half < 2; ++half) {
        const uint32_t nibble = (byte >> (4 * half)) & 0xF;
        e2m1_pairs[byte][half] = decode_small(nibble, 2, 1, 1);
        unsigned4_pairs[byte][half] = static_cast<float>(nibble);
        signed4_pairs[byte][half] = static_cast<float>(static_cast<int>(nibble ^ 8) - 8);
      }
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

void decode_bytes(const float* table, const uint8_t* bytes, uint32_t count, float* values) {
  for (uint32_t i = 0; i < count; ++i) values[i] = table[bytes[i]];
}

void decode_pairs(const float (*table)[2], const uint8_t* bytes, uint32_t count, float* values) {
  for (uint32_t i = 0; i < count / 2; ++i) std::memcpy(values + 2 * i, table[bytes[i]], 8);
}

void decode_padded(const float* table, uint32_t bits, const uint8_t* bytes, uint32_t count,
                   float* values) {
  uint8_t containers[16];
  for (uint32_t i = 0; i < count; i += 16) {
    unpack_sixteen(bits, bytes + i, containers);
    if (bits == 4) {
      for (uint8_t& container : containers) container = static_cast<uint8_t>(container << 2);
    }
    decode_bytes(table, containers, 16, values + i);
  }
}

typedef uint16_t HalfWord __attribute__((may_alias, aligned(1)));

// Moves the fields to fp32's places; the product with 2^112 puts the exponent right, subnormals
// included, and infinities and NaNs keep the largest exponent.
inline float widen_half(uint32_t bits) {
  const uint32_t pattern = bit_cast<uint32_t>(bit_cast<float>((bits & 0x7FFF) << 13) * 0x1p112f);
  const uint32_t exponent = (bits & 0x7C00) == 0x7C00 ? 0x7F800000u : 0u;
  return bit_cast<float>(pattern | exponent | (bits & 0x8000) << 16);
}

void decode_halves(const uint8_t* bytes, uint32_t count, float* values) {
  const auto* halves = reinterpret_cast<const HalfWord*>(bytes);
  for (uint32_t i = 0; i < count; ++i) values[i] = widen_half(halves[i]);
}

void decode_words(uint32_t shift, uint32_t mask, uint32_t width, const uint8_t* bytes,
                  uint32_t count, float* values) {
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, bytes + width * i, width);
    word = (word << shift) & mask;
    std::memcpy(values + i, &word, 4);
  }
}

}  // namespace

float decode_half(uint16_t bits) { return widen_half(bits); }

uint16_t encode_half(float value) {
  const uint32_t pattern = bit_cast<uint32_t>(value);
  const uint32_t sign = (pattern >> 16) & 0x8000;
  const uint32_t magnitude = pattern & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7FFF;
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x38800000) {
    // Adding 0.5 leaves the subnormal, rounded to nearest even, in the low bits.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1) - 0x38000000;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

uint32_t element_bits(ElementFormat format) {
  switch (format) {
    case ElementFormat::kTf32: return 32;
    case ElementFormat::kF16:
    case ElementFormat::kBf16: return 16;
    case ElementFormat::kE2m1Packed:
    case ElementFormat::kS4:
    case ElementFormat::kU4: return 4;
    case ElementFormat::kB1: return 1;
    default: return 8;
  }
}

void decode_elements(ElementFormat format, const uint8_t* bytes, uint32_t count, float* values) {
  const Tables& t = tables();
  switch (format) {
    case ElementFormat::kF16: return decode_halves(bytes, count, values);
    case ElementFormat::kBf16: return decode_words(16, 0xFFFFFFFFu, 2, bytes, count, values);
    case ElementFormat::kTf32: return decode_words(0, 0xFFFFE000u, 4, bytes, count, values);
    case ElementFormat::kE4m3: return decode_bytes(t.e4m3, bytes, count, values);
    case ElementFormat::kE5m2: return decode_bytes(t.e5m2, bytes, count, values);
    case ElementFormat::kE2m3: return decode_bytes(t.e2m3, bytes, count, values);
    case ElementFormat::kE3m2: return decode_bytes(t.e3m2, bytes, count, values);
    case ElementFormat::kE2m1: return decode_bytes(t.e2m1, bytes, count, values);
    case ElementFormat::kE2m3Padded: return decode_padded(t.e2m3, 6, bytes, count, values);
    case ElementFormat::kE3m2Padded: return decode_padded(t.e3m2, 6, bytes, count, values);
    case ElementFormat::kE2m1Padded: return decode_padded(t.e2m1, 4, bytes, count, values);
    case ElementFormat::kE2m1Packed: return decode_pairs(t.e2m1_pairs, bytes, count, values);
    case ElementFormat::kS8: return decode_bytes(t.signed8, bytes, count, values);
    case ElementFormat::kU8: return decode_bytes(t.unsigned8, bytes, count, values);
    case ElementFormat::kS4: return decode_pairs(t.signed4_pairs, bytes, count, values);
    case ElementFormat::kU4: return decode_pairs(t.unsigned4_pairs, bytes, count, values);
    case ElementFormat::kB1:
      for (uint32_t i = 0; i < count; ++i) {
        values[i] = static_cast<float>((bytes[i / 8] >> (i % 8)) & 1);
      }
      return;
  }
}

const float* scale_table(ScaleFormat format) {
  return format == ScaleFormat::kUe8m0 ? tables().ue8m0 : tables().ue4m3;
}

void unpack_sixteen(uint32_t bits, const uint8_t* source, uint8_t* containers) {
  const uint32_t mask = (1u << bits) - 1;
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t first = i * bits;
    uint32_t pair = source[first / 8];
    if (first % 8 + bits > 8) pair |= static_cast<uint32_t>(source[first / 8 + 1]) << 8;
    containers[i] = static_cast<uint8_t>((pair >> (first % 8)) & mask);
  }
}

}  // namespace halfbyte::gpu
