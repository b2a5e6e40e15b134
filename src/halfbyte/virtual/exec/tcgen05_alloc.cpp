// tcgen05.alloc, .dealloc, .relinquish_alloc_permit.
//
// PTX ISA, "Tensor memory allocation and management". Columns are given out first fit. With
// .cta_group::2 a warp of each CTA of the pair takes part and both get the same columns.
#include <algorithm>
#include <cstring>

#include "exec/tcgen05_pipe.h"
#include "machine/access.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kUnit = 32;  // columns
constexpr uint32_t kPoison = 0x7FC0DEADu;

uint32_t read_column_count(Warp& warp, const Instruction& in, int32_t slot, uint32_t mask) {
  const uint32_t columns = warp.uniform32(in, slot, mask, "nCols");
  const bool is_power = (columns & (columns - 1)) == 0;
  if (columns < kUnit || columns > TensorMemory::kColumns || !is_power) {
    raise_fault(warp, in, first_lane(mask), "tensor-memory-column-count",
                format_text("nCols is %u, a power of two in [32, 512] wanted", columns));
  }
  return columns;
}

bool is_free(const TensorMemory& memory, uint32_t first, uint32_t count) {
  for (uint32_t column = first; column < first + count; ++column) {
    if (memory.owner[column] >= 0) return false;
  }
  return true;
}

// The first column of a run free in every CTA of the group; false when there is none.
bool find_columns(const CtaGroup& group, uint32_t count, uint32_t& first) {
  for (first = 0; first + count <= TensorMemory::kColumns; first += kUnit) {
    bool is_free_in_all = true;
    for (uint32_t i = 0; i < group.count; ++i) is_free_in_all &= is_free(group.ctas[i]->tmem(), first, count);
    if (is_free_in_all) return true;
  }
  return false;
}

void take_columns(TensorMemory& memory, uint32_t first, uint32_t count) {
  for (uint32_t column = first; column < first + count; ++column) {
    memory.owner[column] = static_cast<int32_t>(first);
  }
  for (uint32_t lane = 0; lane < TensorMemory::kLanes; ++lane) {
    std::fill_n(memory.row(lane) + first, count, kPoison);
  }
  memory.last_allocated = count;
}

void check_permit(Warp& warp, const Instruction& in, int lane, uint32_t columns) {
  TensorMemory& memory = warp.cta->tmem();
  if (memory.permit_relinquished) {
    raise_fault(warp, in, lane, "alloc-after-relinquish",
                "tcgen05.alloc after a thread of this CTA executed tcgen05.relinquish_alloc_permit");
  }
  if (columns > memory.last_allocated) {
    warp.simulation->findings.add("tensor-memory-growing-allocation",
                                  format_text("allocates %u columns after an allocation of %u: sizes must not grow",
                                              columns, memory.last_allocated),
                                  warp.place(in, lane));
  }
}

// Attributes: cta_group, 1 for a generic address of the result.
void write_address(Warp& warp, const Instruction& in, uint32_t mask, uint32_t column) {
  const int lane = first_lane(mask);
  uint8_t* target;
  if (in.attributes[1]) {
    const uint64_t address = warp.read64(in.operands[0])[lane] + static_cast<uint64_t>(static_cast<int64_t>(in.operands[1]));
    target = warp.access(in, lane, address, 4, true);
  } else {
    const uint32_t address = warp.read32(in.operands[0])[lane] + static_cast<uint32_t>(in.operands[1]);
    target = warp.access_shared(in, lane, address, 4, true);
  }
  std::memcpy(target, &column, 4);
}

Outcome wait_for_columns(Warp& warp, WaitQueue& queue, uint32_t columns) {
  Wait wait;
  wait.kind = WaitKind::kTensorAlloc;
  wait.address = columns;
  warp.wait_on(queue, wait);
  return Outcome::kRetry;
}

Outcome allocate_alone(Warp& warp, const Instruction& in, uint32_t mask, const CtaGroup& group, uint32_t columns) {
  uint32_t first;
  if (!find_columns(group, columns, first)) return wait_for_columns(warp, warp.cta->tmem().queue, columns);
  take_columns(warp.cta->tmem(), first, columns);
  warp.simulation->note_progress();
  write_address(warp, in, mask, first);
  return Outcome::kNext;
}

// The CTAs meet in the even one's record; whoever comes last allocates for both.
Outcome allocate_in_pair(Warp& warp, const Instruction& in, uint32_t mask, const CtaGroup& group,
                         uint32_t columns) {
  TensorMemory& record = group.leader().tmem();
  Fragment& fragment = warp.fragment();
  const uint32_t own = warp.cta->rank & 1;
  if (fragment.has_arrived && record.pair_generation != fragment.arrived_generation) {
    fragment.has_arrived = false;
    write_address(warp, in, mask, record.pair_result);
    return Outcome::kNext;
  }
  if (!fragment.has_arrived) {
    if (record.pair_columns[own]) return wait_for_columns(warp, record.queue, columns);
    record.pair_columns[own] = columns;
    fragment.has_arrived = true;
    fragment.arrived_generation = record.pair_generation;
  }
  const uint32_t other = record.pair_columns[own ^ 1];
  if (other && other != columns) {
    raise_fault(warp, in, first_lane(mask), "tensor-memory-pair-mismatch",
                format_text("allocates %u columns; the peer CTA allocates %u at the same time", columns, other));
  }
  uint32_t first;
  if (!other || !find_columns(group, columns, first)) return wait_for_columns(warp, record.queue, columns);
  for (uint32_t i = 0; i < 2; ++i) {
    take_columns(group.ctas[i]->tmem(), first, columns);
    record.pair_columns[i] = 0;
  }
  record.pair_result = first;
  ++record.pair_generation;
  fragment.has_arrived = false;
  warp.simulation->note_progress();
  warp.simulation->wake(record.queue);
  write_address(warp, in, mask, first);
  return Outcome::kNext;
}

Outcome tcgen05_alloc(Warp& warp, const Instruction& in, uint32_t mask) {
  const int lane = first_lane(mask);
  const CtaGroup group = find_cta_group(warp, in, lane, static_cast<uint32_t>(in.attributes[0]));
  const uint32_t columns = read_column_count(warp, in, in.operands[2], mask);
  if (!warp.fragment().has_arrived) check_permit(warp, in, lane, columns);
  return group.count == 2 ? allocate_in_pair(warp, in, mask, group, columns)
                          : allocate_alone(warp, in, mask, group, columns);
}

Outcome tcgen05_dealloc(Warp& warp, const Instruction& in, uint32_t mask) {
  const int lane = first_lane(mask);
  const CtaGroup group = find_cta_group(warp, in, lane, static_cast<uint32_t>(in.attributes[0]));
  const uint32_t address = warp.uniform32(in, in.operands[0], mask, "taddr");
  const uint32_t columns = read_column_count(warp, in, in.operands[1], mask);
  const uint32_t first = address & 0xFFFF;
  TensorMemory& memory = warp.cta->tmem();
  uint32_t owned = 0;
  while (first + owned < TensorMemory::kColumns && memory.owner[first + owned] == static_cast<int32_t>(first)) ++owned;
  if (address >> 16 || owned == 0) {
    raise_fault(warp, in, lane, "tensor-memory-dealloc",
                format_text("no live allocation begins at tensor memory address 0x%08x (freed twice?)", address));
  }
  if (owned != columns) {
    raise_fault(warp, in, lane, "tensor-memory-dealloc",
                format_text("frees %u columns; the allocation at column %u has %u", columns, first, owned));
  }
  if (const FlightRange* range = warp.cta->in_flight.find_conflict(true, true, first, first + columns)) {
    warp.simulation->findings.add("tensor-memory-released",
                                  format_text("frees columns [%u, %u) that work issued at cycle %.0f by warp %d still uses",
                                              first, first + columns, range->issued_at, range->warp),
                                  warp.place(in, lane));
  }
  for (uint32_t column = first; column < first + columns; ++column) memory.owner[column] = TensorMemory::kReleased;
  warp.simulation->note_progress();
  warp.simulation->wake(memory.queue);
  if (group.count == 2) warp.simulation->wake(group.leader().tmem().queue);
  return Outcome::kNext;
}

Outcome tcgen05_relinquish(Warp& warp, const Instruction& in, uint32_t mask) {
  find_cta_group(warp, in, first_lane(mask), static_cast<uint32_t>(in.attributes[0]));
  warp.cta->tmem().permit_relinquished = true;
  return Outcome::kNext;
}

HALFBYTE_HANDLER("tcgen05.alloc", tcgen05_alloc);
HALFBYTE_HANDLER("tcgen05.dealloc", tcgen05_dealloc);
HALFBYTE_HANDLER("tcgen05.relinquish_alloc_permit", tcgen05_relinquish);

}  // namespace
}  // namespace halfbyte::gpu
