// tcgen05.ld, .st and .wait: a warp moves a block of tensor memory to or from its registers.
//
// PTX ISA, "Matrix fragments for shape ..."; CUTLASS cute/atom/copy_traits_sm100.hpp (SM100_TMEM_LOAD).
// Loads and stores are performed at once. That others may not rely on it is kept in the tensor memory's
// list of transfers until the warp waits: asynchronous work that meets one of them is reported.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "exec/tcgen05_pipe.h"

namespace halfbyte::gpu {
namespace {

// As ptx/forms/tcgen05_transfer.py numbers them.
enum class Shape : int64_t { k32x32b = 0, k16x64b = 1, k16x128b = 2, k16x256b = 3, k16x32bx2 = 4 };
enum class Reduction : int64_t { kNone = 0, kMin = 1, kMax = 2 };
enum class ReducedType : int64_t { kU32 = 0, kS32 = 1, kF32 = 2 };

struct Transfer {
  Shape shape;
  uint32_t registers;
  bool is_packed;  // two 16-bit columns per register
  TensorPlace base;
  uint32_t split;  // columns from the first to the second access of .16x32bx2
};

// Row and column of a register's cell, from the base address.
struct Cell {
  uint32_t row;
  uint32_t column;
};

inline Cell locate_cell(const Transfer& transfer, uint32_t index, uint32_t lane) {
  switch (transfer.shape) {
    case Shape::k32x32b: return {lane, index};
    case Shape::k16x64b: return {lane / 4 + 8 * (lane % 2), 2 * index + lane / 2 % 2};
    case Shape::k16x128b: return {lane / 4 + 8 * (index % 2), 4 * (index / 2) + lane % 4};
    case Shape::k16x256b:
      return {lane / 4 + 8 * (index / 2 % 2), 8 * (index / 4) + 2 * (lane % 4) + index % 2};
    default: return {lane % 16, index};  // lanes from 16 on add the split
  }
}

// Columns, in packed units, that the registers of the transfer span.
uint32_t count_columns(const Transfer& transfer) {
  switch (transfer.shape) {
    case Shape::k16x64b: return 2 * transfer.registers;
    case Shape::k16x128b: return 2 * transfer.registers;
    case Shape::k16x256b: return 2 * transfer.registers;
    default: return transfer.registers;
  }
}

// A warp reaches the 32 lanes of its own partition alone, whatever the upper bits of the lane say:
// kernels are known whose warps all give lane 0. The PTX ISA leaves that undefined.
void check_warp_lanes(Warp& warp, const Instruction& in, Transfer& transfer) {
  const uint32_t own = 32 * (warp.index % 4);
  const bool is_half_height = transfer.shape != Shape::k32x32b;
  const bool is_legal = transfer.base.lane == own || (is_half_height && transfer.base.lane == own + 16);
  if (is_legal) return;
  warp.simulation->findings.add(
      "tensor-memory-lanes",
      format_text("warp %u (number %u of its warpgroup) addresses lane %u; it reaches lanes %u to %u, from "
                  "lane %u%s on",
                  warp.index, warp.index % 4, transfer.base.lane, own, own + 31, own,
                  is_half_height ? " or the middle of them" : ""),
      warp.place(in));
  transfer.base.lane = own + (is_half_height ? transfer.base.lane & 16 : 0);
}

void note_work_in_flight(Warp& warp, const Instruction& in, const Transfer& transfer, bool is_store,
                         uint32_t first, uint32_t last) {
  const uint8_t own_half = transfer.base.lane & 16 ? 2 : 1;
  const uint8_t halves = transfer.shape == Shape::k32x32b ? 3 : own_half;
  const FlightRange* range = warp.cta->in_flight.find_conflict(true, is_store, first, last, 0, halves);
  if (range == nullptr) return;
  const bool is_write = range->resource == Resource::kTensorWrite;
  warp.simulation->findings.add(
      "tensor-memory-race",
      format_text("%s columns [%u, %u) of tensor memory while work of warp %d, issued at cycle %.0f, still %s "
                  "[%u, %u)",
                  is_store ? "stores to" : "loads from", first, last, range->warp, range->issued_at,
                  is_write ? "writes" : "reads", range->first, range->last),
      warp.place(in));
}

// Repetitions of one instruction on the same columns count once.
void list_transfer(TensorMemory& memory, const TensorTransfer& transfer) {
  for (const TensorTransfer& known : memory.transfers) {
    const bool is_same_place = known.first == transfer.first && known.last == transfer.last;
    if (is_same_place && known.warp == transfer.warp && known.instruction == transfer.instruction) return;
  }
  memory.transfers.push_back(transfer);
}

// The address is that of lane 0. Kernels are known that give every lane its own row in it, so that
// those five bits may differ.
void check_same_address(Warp& warp, const Instruction& in, int32_t slot) {
  constexpr uint32_t kOwnRow = 31u << 16;
  const uint32_t* addresses = warp.read32(slot);
  const uint32_t strangers =
      lanes_where(kFullMask, [&](int lane) { return ((addresses[lane] ^ addresses[0]) & ~kOwnRow) != 0; });
  if (strangers == 0) return;
  raise_fault(warp, in, first_lane(strangers), "not-uniform",
              format_text("taddr is 0x%08x in lane 0 and 0x%08x here; a warp has one", addresses[0],
                          addresses[first_lane(strangers)]));
}

// Reads the operands, checks that the warp may touch the cells, and lists the transfer until a wait.
// Attributes: shape, registers, packed.
Transfer begin_transfer(Warp& warp, const Instruction& in, uint32_t mask, const int32_t* address,
                        int32_t split, bool is_store) {
  if (mask != kFullMask) {
    raise_fault(warp, in, first_lane(mask), "partial-warp",
                format_text("lanes 0x%08x execute a tensor memory access that needs all 32", mask));
  }
  check_same_address(warp, in, address[0]);
  find_cta_group(warp, in, 0, std::max(1u, warp.cta->tmem().cta_group));
  Transfer transfer = {static_cast<Shape>(in.attributes[0]), static_cast<uint32_t>(in.attributes[1]),
                       in.attributes[2] != 0, read_tensor_address(warp, in, 0, address, "taddr"),
                       split == kAbsent ? 0u : static_cast<uint32_t>(split)};
  check_warp_lanes(warp, in, transfer);
  const uint32_t columns = count_columns(transfer) * (transfer.is_packed ? 2 : 1);
  const char* what = is_store ? "tcgen05.st" : "tcgen05.ld";
  for (uint32_t part = 0; part < (transfer.shape == Shape::k16x32bx2 ? 2u : 1u); ++part) {
    const uint32_t first = transfer.base.column + part * transfer.split;
    check_columns(warp, in, -1, *warp.cta, first, columns, what);
    note_work_in_flight(warp, in, transfer, is_store, first, first + columns);
    // Loads are not listed: the hardware knows which registers a load still fills, and compilers
    // leave tcgen05.wait::ld out where an instruction that reads them orders what follows.
    if (is_store) list_transfer(warp.cta->tmem(), {warp.index, is_store, first, first + columns, in.index});
  }
  return transfer;
}

inline uint32_t* find_cell(TensorMemory& memory, const Transfer& transfer, uint32_t index, uint32_t lane) {
  const Cell cell = locate_cell(transfer, index, lane);
  const uint32_t column = cell.column * (transfer.is_packed ? 2 : 1) +
                          (transfer.shape == Shape::k16x32bx2 && lane >= 16 ? transfer.split : 0);
  return memory.row(transfer.base.lane + cell.row) + transfer.base.column + column;
}

void load_registers(Warp& warp, const Transfer& transfer, const int32_t* slots) {
  TensorMemory& memory = warp.cta->tmem();
  if (transfer.shape == Shape::k32x32b && !transfer.is_packed) {
    const uint32_t* first = memory.row(transfer.base.lane) + transfer.base.column;
    for (uint32_t i = 0; i < transfer.registers; ++i) {
      uint32_t* target = warp.write32(slots[i]);
      for (uint32_t lane = 0; lane < kLanes; ++lane) target[lane] = first[lane * TensorMemory::kColumns + i];
    }
    return;
  }
  for (uint32_t i = 0; i < transfer.registers; ++i) {
    uint32_t* target = warp.write32(slots[i]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t* cell = find_cell(memory, transfer, i, lane);
      target[lane] = transfer.is_packed ? (cell[0] & 0xFFFF) | cell[1] << 16 : cell[0];
    }
  }
}

Outcome tcgen05_ld(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto registers = static_cast<uint32_t>(in.attributes[1]);
  const int32_t* address = in.operands + registers;
  const int32_t split = in.num_operands > registers + 2 ? address[2] : kAbsent;
  const Transfer transfer = begin_transfer(warp, in, mask, address, split, false);
  load_registers(warp, transfer, in.operands);
  return Outcome::kNext;
}

uint32_t reduce_words(ReducedType type, bool is_max, bool keeps_nan, uint32_t left, uint32_t right) {
  if (type == ReducedType::kU32) return is_max ? std::max(left, right) : std::min(left, right);
  if (type == ReducedType::kS32) {
    const auto a = static_cast<int32_t>(left), b = static_cast<int32_t>(right);
    return static_cast<uint32_t>(is_max ? std::max(a, b) : std::min(a, b));
  }
  const float a = bit_cast<float>(left), b = bit_cast<float>(right);
  if (std::isnan(a) || std::isnan(b)) {
    if (keeps_nan || (std::isnan(a) && std::isnan(b))) return 0x7FFFFFFFu;
    return std::isnan(a) ? right : left;
  }
  return is_max == (a < b) ? right : left;
}

// Attributes as tcgen05.ld, then reduction, type, .abs, .NaN. Every lane reduces its own registers.
Outcome tcgen05_ld_red(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto registers = static_cast<uint32_t>(in.attributes[1]);
  const int32_t* address = in.operands + registers + 1;
  const int32_t split = in.num_operands > registers + 3 ? address[2] : kAbsent;
  const Transfer transfer = begin_transfer(warp, in, mask, address, split, false);
  const bool is_max = static_cast<Reduction>(in.attributes[3]) == Reduction::kMax;
  const auto type = static_cast<ReducedType>(in.attributes[4]);
  const uint32_t sign_mask = in.attributes[5] ? 0x7FFFFFFFu : 0xFFFFFFFFu;
  TensorMemory& memory = warp.cta->tmem();
  uint32_t reduced[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    reduced[lane] = *find_cell(memory, transfer, 0, lane) & sign_mask;
    for (uint32_t i = 1; i < registers; ++i) {
      const uint32_t next = *find_cell(memory, transfer, i, lane) & sign_mask;
      reduced[lane] = reduce_words(type, is_max, in.attributes[6] != 0, reduced[lane], next);
    }
  }
  load_registers(warp, transfer, in.operands);
  std::memcpy(warp.write32(in.operands[registers]), reduced, sizeof reduced);
  return Outcome::kNext;
}

Outcome tcgen05_st(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto registers = static_cast<uint32_t>(in.attributes[1]);
  const bool is_split = static_cast<Shape>(in.attributes[0]) == Shape::k16x32bx2;
  const Transfer transfer = begin_transfer(warp, in, mask, in.operands, is_split ? in.operands[2] : kAbsent, true);
  const int32_t* slots = in.operands + (is_split ? 3 : 2);
  TensorMemory& memory = warp.cta->tmem();
  for (uint32_t i = 0; i < registers; ++i) {
    const uint32_t* source = warp.read32(slots[i]);
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      uint32_t* cell = find_cell(memory, transfer, i, lane);
      cell[0] = transfer.is_packed ? source[lane] & 0xFFFF : source[lane];
      if (transfer.is_packed) cell[1] = source[lane] >> 16;
    }
  }
  warp.simulation->note_progress();
  return Outcome::kNext;
}

// Attribute: 1 for stores.
Outcome tcgen05_wait(Warp& warp, const Instruction& in, uint32_t) {
  auto& transfers = warp.cta->tmem().transfers;
  const bool is_store = in.attributes[0] != 0;
  transfers.erase(std::remove_if(transfers.begin(), transfers.end(),
                                 [&](const TensorTransfer& transfer) {
                                   return transfer.warp == warp.index && transfer.is_store == is_store;
                                 }),
                  transfers.end());
  return Outcome::kNext;
}

HALFBYTE_HANDLER("tcgen05.ld", tcgen05_ld);
HALFBYTE_HANDLER("tcgen05.ld.red", tcgen05_ld_red);
HALFBYTE_HANDLER("tcgen05.st", tcgen05_st);
HALFBYTE_HANDLER("tcgen05.wait", tcgen05_wait);

}  // namespace
}  // namespace halfbyte::gpu
