// Matrix descriptors of operands in shared memory, as wgmma (sm_90) and tcgen05 (sm_100) take them.
//
// PTX ISA, "Shared memory descriptor", "Canonical layouts"; CUTLASS cute/arch/mma_sm90_desc.hpp and
// mma_sm100_desc.hpp. A matrix is a grid of 16-byte chunks. The swizzle permutes the chunks of every
// line of 32, 64 or 128 bytes by bits 7 to 9 of their own address.
#pragma once

#include <cstdint>
#include <string>

namespace halfbyte::gpu {

struct SharedDescriptor {
  uint32_t start = 0;        // bytes
  uint32_t leading = 0;      // bytes; an address when leading_is_address
  uint32_t stride = 0;       // bytes
  uint32_t swizzle = 0;      // bits of the address that are permuted: 0 to 3
  uint32_t span = 16;        // bytes of one swizzle line
  uint32_t base_offset = 0;  // where the swizzle pattern starts, in lines of 128 bytes
  bool has_wide_atoms = false;      // 128-byte swizzle of 32-byte atoms
  bool leading_is_address = false;  // the second part of 48-byte rows lies elsewhere (sm_103)
};

// Each returns an empty text, or what is wrong with the descriptor.
std::string decode_descriptor_sm90(uint64_t bits, SharedDescriptor& descriptor);
std::string decode_descriptor_sm100(uint64_t bits, SharedDescriptor& descriptor);

// A matrix operand of `rows` (M or N) times `depth_bytes` of K.
struct OperandExtent {
  uint32_t rows = 0;
  uint32_t depth_bytes = 0;    // K major: bytes of one row
  uint32_t element_bytes = 1;  // MN major only
  bool is_mn_major = false;
};

struct ByteRange {
  uint32_t first;
  uint32_t last;  // one past the end
};

// Shared memory that the operand may touch, whole swizzle lines.
ByteRange find_operand_range(const SharedDescriptor& descriptor, const OperandExtent& extent);

// Copies rows [first_row, first_row + row_count) out of `shared`: K major as [row][depth_bytes], MN major
// as [k][row_count elements]. For MN major, both must be multiples of 16 bytes worth of elements.
void gather_operand(const uint8_t* shared, const SharedDescriptor& descriptor,
                    const OperandExtent& extent, uint32_t first_row, uint32_t row_count,
                    uint8_t* bytes);

}  // namespace halfbyte::gpu
