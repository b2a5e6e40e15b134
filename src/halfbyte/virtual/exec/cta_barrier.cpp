// bar, barrier.cta and bar.warp.sync.
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

// Attribute 0 of every form here: 1 when .aligned.
NamedArrival read_arrival(Warp& warp, const Instruction& in, uint32_t mask, int position) {
  NamedArrival arrival;
  arrival.is_aligned = in.attributes[0] != 0;
  arrival.number = warp.uniform32(in, in.operands[position], mask, "the barrier number");
  if (in.num_operands > position + 1 && in.operands[position + 1] != kAbsent) {
    arrival.count = warp.uniform32(in, in.operands[position + 1], mask, "the barrier's thread count");
    if (arrival.count == 0) {
      raise_fault(warp, in, first_lane(mask), "barrier-count", "a barrier with a count of 0 threads");
    }
  }
  return arrival;
}

Outcome wait_named(Warp& warp, const NamedArrival& arrival, uint32_t mask) {
  warp.split_off(warp.fragment().mask & ~mask, warp.fragment().pc + 1);
  NamedBarrier& barrier = warp.cta->named[arrival.number];
  Wait wait;
  wait.kind = WaitKind::kNamedBarrier;
  wait.address = arrival.number;
  wait.detail = barrier.generation;
  warp.wait_on(barrier.queue, wait);
  return Outcome::kAdvance;
}

Outcome bar_sync(Warp& warp, const Instruction& in, uint32_t mask) {
  const NamedArrival arrival = read_arrival(warp, in, mask, 0);
  return arrive_named(warp, in, mask, arrival) ? Outcome::kNext : wait_named(warp, arrival, mask);
}

Outcome bar_arrive(Warp& warp, const Instruction& in, uint32_t mask) {
  arrive_named(warp, in, mask, read_arrival(warp, in, mask, 0));
  return Outcome::kNext;
}

// Attributes: aligned, reduction. Operands: result, barrier, count, predicate; without a count the
// predicate is the third.
Outcome bar_red(Warp& warp, const Instruction& in, uint32_t mask) {
  const int32_t predicate = in.operands[in.num_operands - 1];
  Instruction counted = in;
  counted.num_operands = static_cast<uint16_t>(in.num_operands - 1);
  NamedArrival arrival = read_arrival(warp, counted, mask, 1);
  arrival.reduction = static_cast<BarrierReduction>(in.attributes[1]);
  arrival.true_lanes = warp.predicate(predicate);
  return arrive_named(warp, in, mask, arrival) ? Outcome::kNext : wait_named(warp, arrival, mask);
}

Outcome arrive_warp(Warp& warp, const Instruction& in, uint32_t mask, uint32_t members) {
  if (mask & ~members) {
    raise_fault(warp, in, first_lane(mask & ~members), "not-a-member",
                format_text("lanes 0x%08x run bar.warp.sync with membermask 0x%08x, which leaves some out",
                            mask, members));
  }
  WarpBarrier& barrier = warp.warp_barriers[members];
  barrier.arrived |= mask;
  if ((members & warp.live & ~barrier.arrived) == 0) {
    barrier.arrived = 0;
    warp.simulation->wake(barrier.queue);
    return Outcome::kNext;
  }
  Wait wait;
  wait.kind = WaitKind::kWarpBarrier;
  wait.address = members;
  wait.detail = barrier.arrived;
  warp.wait_on(barrier.queue, wait);
  return Outcome::kAdvance;
}

// Lanes may name different groups: the first group goes on, the others come here again.
Outcome bar_warp_sync(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* members = warp.read32(in.operands[0]);
  const uint32_t first = members[first_lane(mask)];
  const uint32_t group = lanes_where(mask, [&](int lane) { return members[lane] == first; });
  if ((first & warp.live & ~group) == 0 && group == mask && (mask & ~first) == 0) return Outcome::kNext;
  warp.split_off(warp.fragment().mask & ~group, warp.fragment().pc);
  return arrive_warp(warp, in, group, first);
}

HALFBYTE_HANDLER("bar.sync", bar_sync);
HALFBYTE_HANDLER("bar.arrive", bar_arrive);
HALFBYTE_HANDLER("bar.red", bar_red);
HALFBYTE_HANDLER("bar.warp.sync", bar_warp_sync);

}  // namespace
}  // namespace halfbyte::gpu
