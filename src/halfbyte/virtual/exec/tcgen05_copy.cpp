// tcgen05.cp (shared to tensor memory) and tcgen05.shift.
//
// PTX ISA, "tcgen05.cp", "Optional decompression"; CUTLASS cute/atom/copy_traits_sm100.hpp
// (SM100_UTCCP). The source is a K-major matrix of a shared memory descriptor, rows of 16 or 32 bytes.
#include <cstring>

#include "exec/tcgen05_pipe.h"
#include "exec/tcgen05_product.h"
#include "machine/number_tables.h"
#include "machine/shared_descriptor.h"

namespace halfbyte::gpu {
namespace {

// As ptx/forms/tcgen05_copy.py numbers them.
enum class CopyShape : int64_t {
  k128x256b = 0,
  k4x256b = 1,        // row i to lane 32 * i
  k128x128b = 2,
  k64x128b02_13 = 3,  // rows 0-31 to the lanes of warps 0 and 2, rows 32-63 to those of 1 and 3
  k64x128b01_23 = 4,  // rows 0-31 to the lanes of warps 0 and 1, rows 32-63 to those of 2 and 3
  k32x128b = 5,       // to the lanes of all four warps
};

constexpr double kBytesPerCycle = 128;  // uncalibrated

OperandExtent find_extent(CopyShape shape) {
  OperandExtent extent;
  extent.depth_bytes = shape == CopyShape::k128x256b || shape == CopyShape::k4x256b ? 32 : 16;
  switch (shape) {
    case CopyShape::k4x256b: extent.rows = 4; break;
    case CopyShape::k32x128b: extent.rows = 32; break;
    case CopyShape::k64x128b02_13:
    case CopyShape::k64x128b01_23: extent.rows = 64; break;
    default: extent.rows = 128;
  }
  return extent;
}

// The source row whose bytes lane `lane` gets.
uint32_t find_source_row(CopyShape shape, uint32_t lane) {
  switch (shape) {
    case CopyShape::k64x128b02_13: return lane % 64;
    case CopyShape::k64x128b01_23: return lane % 32 + 32 * (lane / 64);
    case CopyShape::k32x128b: return lane % 32;
    default: return lane;
  }
}

// Sub-byte elements to the byte containers that tensor memory holds: e2m1 in bits 2 to 5.
void decompress(uint32_t bits, uint8_t* chunk) {
  uint8_t containers[16];
  unpack_sixteen(bits, chunk, containers);
  for (uint32_t i = 0; i < 16; ++i) chunk[i] = static_cast<uint8_t>(containers[i] << (bits == 4 ? 2 : 0));
}

void copy_matrix(Cta& cta, const SharedDescriptor& descriptor, CopyShape shape, uint32_t bits, TensorPlace place) {
  const OperandExtent extent = find_extent(shape);
  uint8_t bytes[128 * 32];
  gather_operand(cta.shared, descriptor, extent, 0, extent.rows, bytes);
  if (bits != 8) {
    for (uint32_t i = 0; i < extent.rows * extent.depth_bytes; i += 16) decompress(bits, bytes + i);
  }
  TensorMemory& memory = cta.tmem();
  if (shape == CopyShape::k4x256b) {
    for (uint32_t row = 0; row < 4; ++row) {
      std::memcpy(memory.row(32 * row + place.lane % 32) + place.column, bytes + 32 * row, 32);
    }
    return;
  }
  for (uint32_t lane = 0; lane < TensorMemory::kLanes; ++lane) {
    const uint32_t row = find_source_row(shape, lane);
    std::memcpy(memory.row(lane) + place.column, bytes + row * extent.depth_bytes, extent.depth_bytes);
  }
}

// Attributes: cta_group, shape, bits of an element in shared memory.
void copy_for_lane(Warp& warp, const Instruction& in, int lane) {
  const CtaGroup group = find_cta_group(warp, in, lane, static_cast<uint32_t>(in.attributes[0]));
  const auto shape = static_cast<CopyShape>(in.attributes[1]);
  const auto bits = static_cast<uint32_t>(in.attributes[2]);
  const TensorPlace place = read_tensor_address(warp, in, lane, in.operands, "taddr");
  if (place.lane != 0 && shape != CopyShape::k4x256b) {
    raise_fault(warp, in, lane, "tensor-memory-address",
                format_text("taddr names lane %u; this shape of tcgen05.cp begins at lane 0", place.lane));
  }
  SharedDescriptor descriptor;
  const std::string problem = decode_descriptor_sm100(warp.read64(in.operands[2])[lane], descriptor);
  if (!problem.empty()) raise_fault(warp, in, lane, "shared-descriptor", "s-desc: " + problem);
  const OperandExtent extent = find_extent(shape);
  const ByteRange range = find_operand_range(descriptor, extent);
  TensorWork work(warp, in, lane, group);
  for (uint32_t i = 0; i < group.count; ++i) {
    work.read_shared(*group.ctas[i], range.first, range.last, "tcgen05.cp");
    work.write_columns(*group.ctas[i], place.column, extent.depth_bytes / 4, "tcgen05.cp");
  }
  const double cycles = extent.rows * extent.depth_bytes / kBytesPerCycle;
  work.enqueue(cycles, [group, descriptor, shape, bits, place] {
    for (uint32_t i = 0; i < group.count; ++i) copy_matrix(*group.ctas[i], descriptor, shape, bits, place);
  });
}

Outcome tcgen05_cp(Warp& warp, const Instruction& in, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) copy_for_lane(warp, in, first_lane(rest));
  return Outcome::kNext;
}

void shift_for_lane(Warp& warp, const Instruction& in, int lane) {
  constexpr uint32_t kColumns = 8;
  const CtaGroup group = find_cta_group(warp, in, lane, static_cast<uint32_t>(in.attributes[0]));
  const TensorPlace place = read_tensor_address(warp, in, lane, in.operands, "taddr");
  if (place.lane % 32) {
    raise_fault(warp, in, lane, "tensor-memory-address",
                format_text("taddr names lane %u; tcgen05.shift wants a multiple of 32", place.lane));
  }
  TensorWork work(warp, in, lane, group);
  for (uint32_t i = 0; i < group.count; ++i) {
    work.write_columns(*group.ctas[i], place.column, kColumns, "tcgen05.shift");
  }
  work.enqueue(31 * 32 / kBytesPerCycle, [group, place] {
    for (uint32_t i = 0; i < group.count; ++i) {
      shift_rows_down(group.ctas[i]->tmem(), place.lane, place, kColumns);
    }
  });
}

Outcome tcgen05_shift(Warp& warp, const Instruction& in, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) shift_for_lane(warp, in, first_lane(rest));
  return Outcome::kNext;
}

HALFBYTE_HANDLER("tcgen05.cp", tcgen05_cp);
HALFBYTE_HANDLER("tcgen05.shift", tcgen05_shift);

}  // namespace
}  // namespace halfbyte::gpu
