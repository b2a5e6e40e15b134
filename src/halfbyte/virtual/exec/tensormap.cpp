// tensormap.replace and tensormap.cp_fenceproxy.
#include "exec/same_operands.h"
#include "exec/tensor_map_access.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

// As the forms number them.
enum class Field : int64_t {
  kGlobalAddress, kRank, kBoxDim, kGlobalDim, kGlobalStride, kElementStride, kElementType,
  kInterleave, kSwizzle, kSwizzleAtom, kFill
};

void write_bits(uint8_t* map, uint32_t first, uint32_t count, uint64_t value) {
  for (uint32_t i = 0; i < count; ++i) {
    uint8_t& byte = map[(first + i) / 8];
    const uint32_t bit = (first + i) % 8;
    byte = static_cast<uint8_t>((byte & ~(1u << bit)) | (value >> i & 1) << bit);
  }
}

struct ElementCode {
  uint64_t type;
  uint64_t is_tf32;
};

// PTX ISA, "tensormap.replace", table of new_val: 11 and 12 are tf32 and tf32.ftz.
ElementCode find_element_code(uint64_t value) {
  if (value <= 10) return {value, 0};
  if (value <= 12) return {value - 11 + 7, 1};
  return {value - 13 + 11, 0};
}

struct Replacement {
  Field field;
  uint32_t ordinal;
  uint64_t value;
};

void check_replacement(Warp& warp, const Instruction& in, int lane, const Replacement& change) {
  static constexpr uint64_t kLargest[] = {UINT64_MAX, 4, 256, UINT32_MAX, UINT64_MAX, 8, 15, 2, 4, 3, 1};
  static constexpr uint32_t kOrdinals[] = {1, 1, 5, 5, 4, 5, 1, 1, 1, 1, 1};
  const auto field = static_cast<size_t>(change.field);
  if (change.value > kLargest[field] || change.ordinal >= kOrdinals[field]) {
    raise_fault(warp, in, lane, "bad-tensor-map",
                format_text("new value %llu, ordinal %u; the field takes values up to %llu and ordinals "
                            "below %u", static_cast<unsigned long long>(change.value), change.ordinal,
                            static_cast<unsigned long long>(kLargest[field]), kOrdinals[field]));
  }
  if (change.field == Field::kGlobalStride && change.value % 16) {
    raise_fault(warp, in, lane, "bad-tensor-map",
                format_text("a global stride of %llu bytes; it must be a multiple of 16",
                            static_cast<unsigned long long>(change.value)));
  }
}

void replace_element(uint8_t* map, uint64_t value) {
  const ElementCode code = find_element_code(value);
  write_bits(map, 71, 4, code.type);
  write_bits(map, 80, 1, code.is_tf32);
}

void replace_field(uint8_t* map, const Replacement& change) {
  const uint32_t i = change.ordinal;
  switch (change.field) {
    case Field::kGlobalAddress: return write_bits(map, 0, 64, change.value);
    case Field::kRank: return write_bits(map, 68, 3, change.value);
    case Field::kBoxDim: return write_bits(map, 440 + 8 * i, 8, change.value - 1);
    case Field::kGlobalDim: return write_bits(map, 256 + 32 * i, 32, change.value - 1);
    case Field::kGlobalStride:
      write_bits(map, 96 + 32 * i, 32, change.value >> 4);
      return write_bits(map, 224 + 4 * i, 4, change.value >> 36);
    case Field::kElementStride: return write_bits(map, 416 + 3 * i, 3, change.value - 1);
    case Field::kElementType: return replace_element(map, change.value);
    case Field::kInterleave: return write_bits(map, 75, 2, change.value);
    case Field::kSwizzle:
      write_bits(map, 77, 2, change.value & 3);
      return write_bits(map, 86, 1, change.value >> 2);
    case Field::kSwizzleAtom: return write_bits(map, 83, 2, change.value);
    case Field::kFill: return write_bits(map, 79, 1, change.value);
  }
}

// Attributes: field, space of the address, 1 for a 64-bit value, 1 when an ordinal is there.
Outcome tensormap_replace(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto space = static_cast<Space>(in.attributes[1]);
  const bool has_ordinal = in.attributes[3] != 0;
  const int32_t value_slot = in.operands[has_ordinal ? 3 : 2];
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    uint64_t address = static_cast<uint64_t>(static_cast<int64_t>(in.operands[1]));
    if (space == Space::kShared) {
      address = (warp.read32(in.operands[0])[lane] + static_cast<uint32_t>(in.operands[1])) | kSharedWindow;
    } else {
      address += warp.read64(in.operands[0])[lane];
    }
    const Replacement change{
        static_cast<Field>(in.attributes[0]),
        has_ordinal ? static_cast<uint32_t>(in.operands[2]) : 0,
        in.attributes[2] != 0 ? warp.read64(value_slot)[lane] : warp.read32(value_slot)[lane]};
    check_replacement(warp, in, lane, change);
    replace_field(locate_tensor_map(warp, in, lane, address, true), change);
  }
  warp.simulation->note_progress();
  return Outcome::kNext;
}

// Copies 128 bytes of shared to global memory, once for lanes with equal operands.
Outcome tensormap_copy(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) {
    const uint64_t target =
        warp.read64(in.operands[0])[lane] + static_cast<uint64_t>(static_cast<int64_t>(in.operands[1]));
    const uint64_t source =
        kSharedWindow | (warp.read32(in.operands[2])[lane] + static_cast<uint32_t>(in.operands[3]));
    if (in.operands[4] != static_cast<int32_t>(kTensorMapBytes)) {
      raise_fault(warp, in, lane, "bad-size",
                  format_text("tensormap.cp_fenceproxy of %d bytes; the size is 128", in.operands[4]));
    }
    const uint8_t* from = locate_tensor_map(warp, in, lane, source, false);
    std::memcpy(locate_tensor_map(warp, in, lane, target, true), from, kTensorMapBytes);
  });
  warp.simulation->note_progress();
  return Outcome::kNext;
}

HALFBYTE_HANDLER("tensormap.replace", tensormap_replace);
HALFBYTE_HANDLER("tensormap.cp_fenceproxy", tensormap_copy);

}  // namespace

}  // namespace halfbyte::gpu
