// The 128-byte tensor map (PTX ISA, "Tensor-map"): opaque there, its bits found by encoding.
//
// With interleave, dimension 0 counts columns of a slice of 16 or 32 bytes, and the last dimension but
// one the slices of channels, of which a copy takes one whatever the box says (seen on an H200).
//
// Bits, all of the first 64 bytes (little endian). Observed in tensor maps that CuTe DSL encodes,
// except those marked "assumed":
//   0..63      global address
//   64         im2col mode; 65 set; 68..70 rank - 1; 71..74 element type; 75..76 interleave 0/16/32 B;
//   77..78     swizzle 0/32/64/128 B; 79 fill with NaN (seen on an H200); 80 tf32; 81..82 L2 promotion;
//   83..84     swizzle atom 16 B, 32 B, 32 B with 8-B flip, 64 B (the last two assumed);
//   85         tensor of 128 KiB or more; 86 swizzle 96 B (assumed)
//   96 + 32 i  stride of dimension i + 1, in units of 16 bytes, low 32 bits (i = 0..3)
//   224 + 4 i  the same, high 4 bits
//   256 + 32 i extent of dimension i, minus 1 (i = 0..4)
//   416 + 3 i  element stride of dimension i, minus 1
//   440        box extent of dimension 0 (im2col: channels per pixel), minus 1, 8 bits
//   448 + 8 i  tile: box extent of dimension i + 1, minus 1
//   448, 464   im2col: lower and upper corner, 16 / 8 / 5 bits per dimension from W on (rank 3 / 4 / 5)
//   480        im2col: pixels per column, minus 1, 10 bits (observed: 6 and 7 set bits)
#pragma once

#include <cstdint>
#include <string>

namespace halfbyte::gpu {

constexpr int kMaxRank = 5;
constexpr uint32_t kTensorMapBytes = 128;
constexpr uint32_t kTensorMapAlignment = 64;

// Codes of the element type field.
enum class TensorElement : uint32_t {
  kU8, kU16, kU32, kS32, kU64, kS64, kF16, kF32, kF32Ftz, kF64, kBf16, kU4, kU4Padded, kU6Padded, kCount
};

enum class SwizzleAtom : uint32_t { k16, k32, k32Flip8, k64 };

struct TensorMap {
  uint64_t address = 0;
  uint32_t rank = 0;
  TensorElement element = TensorElement::kU8;
  bool is_im2col = false;
  bool is_tf32 = false;
  bool fills_nan = false;
  uint32_t interleave_bytes = 0;
  uint32_t swizzle_bytes = 0;
  SwizzleAtom atom = SwizzleAtom::k16;
  uint64_t dims[kMaxRank] = {1, 1, 1, 1, 1};
  uint64_t strides[kMaxRank] = {};  // bytes; of dimensions 1 and up
  uint32_t box[kMaxRank] = {1, 1, 1, 1, 1};
  uint32_t element_strides[kMaxRank] = {1, 1, 1, 1, 1};
  int32_t lower[3] = {};  // im2col corners: W, H, D
  int32_t upper[3] = {};
  uint32_t pixels = 0;  // im2col, per column

  uint32_t element_bits() const;
  // What dimension 0 counts: elements, or with interleave whole slices of channels.
  uint32_t unit_bits() const { return is_interleaved_tile() ? interleave_bytes * 8 : element_bits(); }
  bool is_interleaved_tile() const { return interleave_bytes != 0 && !is_im2col; }
  // Types whose 16 elements fill 16 bytes of shared memory, padding included.
  bool is_padded() const {
    return element == TensorElement::kU4Padded || element == TensorElement::kU6Padded;
  }
  // Elements of one row of the box, and the bytes they take in shared and in global memory.
  uint32_t row_elements() const;
  uint32_t shared_row_bytes() const;
  uint32_t packed_row_bytes() const;
  // From one row to the next in shared memory: rows shorter than the swizzle's span lie a span apart.
  uint32_t shared_row_pitch() const;
  std::string describe() const;
};

// Reads the first 64 bytes of a tensor map.
TensorMap decode_tensor_map(const uint8_t* bytes);
// What makes the map illegal, with the rule; empty when nothing does.
std::string find_tensor_map_error(const TensorMap& map);

// How the 16-byte chunks of shared memory are permuted: bits of the address flip with higher bits.
struct Swizzle {
  uint32_t mask = 0;    // of the bits from 7 on
  uint32_t shift = 4;   // bit that the lowest of them flips
  bool flips_8 = false;
  uint32_t apply(uint32_t offset) const { return offset ^ ((offset >> 7 & mask) << shift); }
  bool is_flipped(uint32_t offset) const { return flips_8 && (offset >> 7 & 1); }
};
Swizzle swizzle_of(const TensorMap& map);

}  // namespace halfbyte::gpu
