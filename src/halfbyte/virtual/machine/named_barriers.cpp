// bar.sync and its kin, and what exits do to the barriers that other threads wait at.
#include <algorithm>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

// Counts are in whole warps' worth of threads, as the hardware keeps them: lanes that do not exist
// or have exited arrive with the first lanes of their warp that do.
uint32_t count_threads(const Warp& warp, uint32_t mask, bool is_aligned, bool is_first_of_warp) {
  if (is_aligned) return kLanes;
  const int absent = is_first_of_warp ? kLanes - count_lanes(warp.live) : 0;
  return static_cast<uint32_t>(count_lanes(mask) + absent);
}

bool has_every_live_thread(const Cta& cta, const NamedBarrier& barrier) {
  return std::all_of(cta.warps.begin(), cta.warps.end(), [&](const auto& warp) {
    return (warp->live & ~barrier.arrived_lanes[warp->index]) == 0;
  });
}

const char* name_reduction(BarrierReduction reduction) {
  static const char* const kNames[] = {"sync/arrive", "red.popc", "red.and", "red.or"};
  return kNames[static_cast<int>(reduction) + 1];
}

std::string list_arrived_warps(const NamedBarrier& barrier) {
  std::string text;
  for (size_t i = 0; i < barrier.arrived_lanes.size(); ++i) {
    if (barrier.arrived_lanes[i]) text += (text.empty() ? "" : ", ") + std::to_string(i);
  }
  return text;
}

void check_arrival(Warp& warp, const Instruction& in, uint32_t mask, const NamedArrival& arrival) {
  const int lane = first_lane(mask);
  if (arrival.number > 15) {
    raise_fault(warp, in, lane, "barrier-number",
                format_text("barrier %u; a CTA has barriers 0 to 15", arrival.number));
  }
  if (arrival.count % kLanes != 0) {
    raise_fault(warp, in, lane, "barrier-count",
                format_text("barrier %u with a count of %u threads; a count is a multiple of 32",
                            arrival.number, arrival.count));
  }
  if (arrival.is_aligned && mask != warp.live) {
    raise_fault(warp, in, lane, "aligned-divergent",
                format_text("lanes 0x%08x of the warp's 0x%08x run an .aligned barrier", mask, warp.live));
  }
}

void start_generation(Cta& cta, NamedBarrier& barrier, const NamedArrival& arrival, uint32_t expected) {
  barrier.expected = expected;
  barrier.has_count = arrival.count != 0;
  barrier.reduction = arrival.reduction;
  barrier.true_count = barrier.thread_count = 0;
  barrier.arrived_lanes.assign(cta.warps.size(), 0);
}

void check_agreement(Warp& warp, const Instruction& in, const NamedBarrier& barrier,
                     const NamedArrival& arrival, uint32_t expected) {
  if (barrier.expected != expected) {
    raise_fault(warp, in, -1, "barrier-count-mismatch",
                format_text("barrier %u: warp %u uses count %u, warps %s use %u", arrival.number, warp.index,
                            expected, list_arrived_warps(barrier).c_str(), barrier.expected));
  }
  if (barrier.reduction != arrival.reduction) {
    raise_fault(warp, in, -1, "barrier-kind-mismatch",
                format_text("barrier %u: warp %u runs %s, warps %s run %s", arrival.number, warp.index,
                            name_reduction(arrival.reduction), list_arrived_warps(barrier).c_str(),
                            name_reduction(barrier.reduction)));
  }
}

void write_result(Warp& warp, const Instruction& in, uint32_t mask, const NamedBarrier& barrier) {
  if (barrier.reduction == BarrierReduction::kNone || in.num_attributes < 2) return;
  if (barrier.reduction == BarrierReduction::kPopc) {
    uint32_t* target = warp.write32(in.operands[0]);
    for_lanes(mask, [&](int lane) { target[lane] = barrier.true_count; });
    return;
  }
  const bool is_true = barrier.reduction == BarrierReduction::kAnd ? barrier.true_count == barrier.thread_count
                                                                  : barrier.true_count > 0;
  warp.set_predicate(in.operands[0], is_true ? kFullMask : 0, mask);
}

void write_results(NamedBarrier& barrier) {
  for (Warp* warp : barrier.queue.warps) {
    for (int i = 0; i < warp->num_fragments; ++i) {
      const Fragment& fragment = warp->fragments[i];
      if (fragment.state != FragmentState::kWaiting || fragment.wait.queue != &barrier.queue) continue;
      const Instruction& in = warp->program->instructions[static_cast<size_t>(fragment.pc)];
      write_result(*warp, in, fragment.mask & warp->predicate(in.guard), barrier);
    }
  }
}

bool complete_named_if_due(Cta& cta, NamedBarrier& barrier) {
  const bool is_due = barrier.arrived >= barrier.expected ||
                      (!barrier.has_count && has_every_live_thread(cta, barrier));
  if (!is_due) return false;
  write_results(barrier);
  barrier.arrived = barrier.expected = 0;
  ++barrier.generation;
  cta.simulation->wake(barrier.queue);
  return true;
}

void release_warp_barriers(Warp& warp) {
  for (auto& [members, barrier] : warp.warp_barriers) {
    if (barrier.arrived == 0 || (members & warp.live & ~barrier.arrived) != 0) continue;
    barrier.arrived = 0;
    warp.simulation->wake(barrier.queue);
  }
}

}  // namespace

bool arrive_named(Warp& warp, const Instruction& in, uint32_t mask, const NamedArrival& arrival) {
  check_arrival(warp, in, mask, arrival);
  Cta& cta = *warp.cta;
  NamedBarrier& barrier = cta.named[arrival.number];
  const uint32_t expected = arrival.count ? arrival.count : static_cast<uint32_t>(cta.warps.size()) * kLanes;
  if (barrier.arrived == 0) {
    start_generation(cta, barrier, arrival, expected);
  } else {
    check_agreement(warp, in, barrier, arrival, expected);
  }
  const uint32_t already = barrier.arrived_lanes[warp.index];
  barrier.arrived += count_threads(warp, mask, arrival.is_aligned, already == 0);
  barrier.arrived_lanes[warp.index] |= mask;
  barrier.has_count = barrier.has_count && arrival.count != 0;
  barrier.true_count += static_cast<uint32_t>(count_lanes(arrival.true_lanes & mask));
  barrier.thread_count += static_cast<uint32_t>(count_lanes(mask));
  warp.simulation->note_progress();
  if (barrier.arrived > barrier.expected) {
    raise_fault(warp, in, first_lane(mask), "over-arrival",
                format_text("barrier %u: %u threads arrived where %u are expected (warps %s)", arrival.number,
                            barrier.arrived, barrier.expected, list_arrived_warps(barrier).c_str()));
  }
  if (barrier.arrived < barrier.expected && barrier.has_count) return false;
  const NamedBarrier seen = barrier;  // the arriving warp's own result
  if (!complete_named_if_due(cta, barrier)) return false;
  write_result(warp, in, mask, seen);
  return true;
}

// CUDA programming guide, "Independent Thread Scheduling": barriers without a count wait for the
// threads of the block that have not exited. PTX ISA, "barrier.cluster": likewise for the cluster.
void release_exited_warp(Warp& warp) {
  release_warp_barriers(warp);
  Cta& cta = *warp.cta;
  for (NamedBarrier& barrier : cta.named) {
    if (barrier.arrived > 0 && !barrier.has_count) complete_named_if_due(cta, barrier);
  }
  if (cta.cluster->barrier.arrived > 0) complete_cluster_barrier(*cta.cluster);
}

}  // namespace halfbyte::gpu
