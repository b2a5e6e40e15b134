// Decoding of the number formats that matrix operands come in.
#pragma once

#include <cstdint>

namespace halfbyte::gpu {

// How the elements of a matrix operand lie in bytes.
enum class ElementFormat : uint8_t {
  kF16,
  kBf16,
  kTf32,  // 32 bits, of which the low 13 are ignored
  kE4m3,
  kE5m2,
  kE2m3,        // one element per byte, low six bits
  kE3m2,        // one element per byte, low six bits
  kE2m1,        // one element per byte, bits 2 to 5
  kE2m3Padded,  // 16 elements packed in 12 bytes, then 4 bytes of padding (b6x16_p32)
  kE3m2Padded,
  kE2m1Padded,  // 16 elements packed in 8 bytes, then 8 bytes of padding (b4x16_p64)
  kE2m1Packed,  // two elements per byte, the low nibble first
  kS8,
  kU8,
  kS4,  // two elements per byte, the low nibble first
  kU4,
  kB1,  // 32 elements per word, bit 0 first
};

enum class ScaleFormat : uint8_t { kUe4m3 = 0, kUe8m0 = 1 };

// Bits that one element takes, padding included.
uint32_t element_bits(ElementFormat format);

// Values of `count` elements that start at `bytes`; padded formats want multiples of 16. Integers
// come out exact too: all of them are below 2^24.
void decode_elements(ElementFormat format, const uint8_t* bytes, uint32_t count, float* values);

// 256 values by byte.
const float* scale_table(ScaleFormat format);

// The value of 16 source elements of `bits` (4 or 6) each, one per byte, in the low bits.
void unpack_sixteen(uint32_t bits, const uint8_t* source, uint8_t* containers);

float decode_half(uint16_t bits);
uint16_t encode_half(float value);  // nearest even

}  // namespace halfbyte::gpu
