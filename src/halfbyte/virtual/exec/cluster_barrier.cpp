// barrier.cluster.arrive and wait.
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

void check_aligned(Warp& warp, const Instruction& in, uint32_t mask) {
  if (in.attributes[0] == 0 || mask == warp.live) return;
  raise_fault(warp, in, first_lane(mask), "aligned-divergent",
              format_text("lanes 0x%08x of the warp's 0x%08x run an .aligned cluster barrier", mask, warp.live));
}

Outcome barrier_cluster_arrive(Warp& warp, const Instruction& in, uint32_t mask) {
  check_aligned(warp, in, mask);
  if (const uint32_t twice = warp.cluster_arrived & mask) {
    raise_fault(warp, in, first_lane(twice), "cluster-barrier-order",
                "barrier.cluster.arrive follows an arrive of the same thread without a wait between them");
  }
  ClusterBarrier& barrier = warp.cta->cluster->barrier;
  const uint32_t parity = barrier.generation & 1 ? kFullMask : 0;
  warp.cluster_arrived |= mask;
  warp.cluster_parity = (warp.cluster_parity & ~mask) | (parity & mask);
  barrier.arrived += static_cast<uint32_t>(count_lanes(mask));
  warp.simulation->note_progress();
  if (missing_at_cluster_barrier(warp) == 0) complete_cluster_barrier(*warp.cta->cluster);
  return Outcome::kNext;
}

// A thread's arrival is of the current generation or of the one before: parity tells them apart.
Outcome barrier_cluster_wait(Warp& warp, const Instruction& in, uint32_t mask) {
  check_aligned(warp, in, mask);
  if (const uint32_t early = mask & ~warp.cluster_arrived) {
    raise_fault(warp, in, first_lane(early), "cluster-barrier-order",
                "barrier.cluster.wait of a thread that has not run barrier.cluster.arrive");
  }
  ClusterBarrier& barrier = warp.cta->cluster->barrier;
  const uint32_t parity = barrier.generation & 1 ? kFullMask : 0;
  const uint32_t pending = mask & ~(warp.cluster_parity ^ parity);
  if (pending == 0) {
    warp.cluster_arrived &= ~mask;
    return Outcome::kNext;
  }
  warp.split_off(warp.fragment().mask & ~mask, warp.fragment().pc + 1);
  Wait wait;
  wait.kind = WaitKind::kClusterBarrier;
  wait.detail = barrier.generation;
  warp.wait_on(barrier.queue, wait);
  return Outcome::kRetry;
}

HALFBYTE_HANDLER("barrier.cluster.arrive", barrier_cluster_arrive);
HALFBYTE_HANDLER("barrier.cluster.wait", barrier_cluster_wait);

}  // namespace
}  // namespace halfbyte::gpu
