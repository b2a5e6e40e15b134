// State changes of mbarriers, and what exits do to every kind of barrier.
#include "machine/barriers.h"

#include <algorithm>
#include <cstdlib>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

void complete_phase_if_due(Mbarrier& barrier) {
  Simulation& simulation = *barrier.cta->simulation;
  simulation.note_progress();
  if (barrier.pending != 0 || barrier.pending_bytes != 0) return;
  ++barrier.phase;
  barrier.expected = barrier.pending = barrier.next_expected;
  simulation.wake(barrier.queue);
}

void check_count(const Mbarrier& barrier, int64_t count, const Place& place) {
  if (count >= 1 && count <= kMaxMbarrierCount) return;
  throw Fault("mbarrier-count-range",
              format_text("%s: a count of %lld; a count lies between 1 and %lld",
                          describe_mbarrier(barrier).c_str(), static_cast<long long>(count),
                          static_cast<long long>(kMaxMbarrierCount)),
              place);
}

void change_pending_bytes(Mbarrier& barrier, int64_t change, const Place& place) {
  const int64_t bytes = barrier.pending_bytes + change;
  if (std::llabs(bytes) > kMaxMbarrierBytes) {
    throw Fault("mbarrier-bytes-range",
                format_text("%s: %+lld transaction bytes leave the range of -%lld to %lld",
                            describe_mbarrier(barrier).c_str(), static_cast<long long>(change),
                            static_cast<long long>(kMaxMbarrierBytes),
                            static_cast<long long>(kMaxMbarrierBytes)),
                place);
  }
  barrier.pending_bytes = bytes;
  complete_phase_if_due(barrier);
}

void take_arrivals(Mbarrier& barrier, int64_t count, const Place& place) {
  check_count(barrier, count, place);
  if (count > barrier.pending) {
    throw Fault("over-arrival",
                format_text("%s: %lld more arrival%s than the phase expects", describe_mbarrier(barrier).c_str(),
                            static_cast<long long>(count - barrier.pending),
                            count - barrier.pending == 1 ? "" : "s"),
                place);
  }
  barrier.pending -= count;
}

}  // namespace

std::string describe_mbarrier(const Mbarrier& barrier) {
  const Cta& cta = *barrier.cta;
  return format_text(
      "mbarrier at shared+0x%x of cta (%u,%u,%u) rank %u: %llu phase%s completed, pending arrivals "
      "%lld/%lld, missing bytes %lld",
      barrier.offset, cta.id[0], cta.id[1], cta.id[2], cta.rank,
      static_cast<unsigned long long>(barrier.phase), barrier.phase == 1 ? "" : "s",
      static_cast<long long>(barrier.pending), static_cast<long long>(barrier.expected),
      static_cast<long long>(barrier.pending_bytes));
}

void arrive(Mbarrier& barrier, int64_t count, const Place& place) {
  take_arrivals(barrier, count, place);
  complete_phase_if_due(barrier);
}

void arrive_drop(Mbarrier& barrier, int64_t count, const Place& place) {
  take_arrivals(barrier, count, place);
  if (count > barrier.next_expected) {
    throw Fault("over-arrival",
                format_text("%s: arrive_drop of %lld takes the expected count of later phases below zero",
                            describe_mbarrier(barrier).c_str(), static_cast<long long>(count)),
                place);
  }
  barrier.next_expected -= count;
  complete_phase_if_due(barrier);
}

void add_pending_arrivals(Mbarrier& barrier, int64_t count, const Place& place) {
  check_count(barrier, barrier.pending + count, place);
  barrier.pending += count;
}

void add_pending_bytes(Mbarrier& barrier, int64_t bytes, const Place& place) {
  change_pending_bytes(barrier, bytes, place);
}

void complete_bytes(Mbarrier& barrier, int64_t bytes, const Place& place) {
  change_pending_bytes(barrier, -bytes, place);
}

Mbarrier& require_mbarrier(Cta& cta, uint32_t offset, const Place& place) {
  Mbarrier* found = cta.find_mbarrier(offset);
  if (found != nullptr && found->is_valid) return *found;
  const char* state = found == nullptr ? "was never initialised" : "was invalidated (mbarrier.inval)";
  throw Fault(found == nullptr ? "mbarrier-not-initialised" : "mbarrier-invalidated",
              format_text("the mbarrier at shared+0x%x of cta (%u,%u,%u) rank %u %s", offset, cta.id[0],
                          cta.id[1], cta.id[2], cta.rank, state),
              place);
}

Mbarrier& require_mbarrier(Warp& warp, const Instruction& in, int lane, uint32_t address) {
  if (address & 7) {
    raise_fault(warp, in, lane, "misaligned",
                format_text("the mbarrier address 0x%x is not a multiple of 8", address));
  }
  return require_mbarrier(warp.shared_cta(in, lane, address), address & kSharedOffsetMask, warp.place(in, lane));
}

uint32_t missing_at_cluster_barrier(const Warp& warp) {
  const uint32_t odd = warp.cta->cluster->barrier.generation & 1 ? kFullMask : 0;
  const uint32_t arrived = warp.cluster_arrived & ~(warp.cluster_parity ^ odd);
  return warp.live & ~arrived;
}

bool complete_cluster_barrier(Cluster& cluster) {
  for (const auto& cta : cluster.ctas) {
    for (const auto& warp : cta->warps) {
      if (missing_at_cluster_barrier(*warp)) return false;
    }
  }
  Simulation& simulation = *cluster.ctas.front()->simulation;
  cluster.barrier.arrived = 0;
  ++cluster.barrier.generation;
  simulation.wake(cluster.barrier.queue);
  simulation.note_progress();
  return true;
}

Mbarrier* Cta::find_mbarrier_in(uint32_t first, uint32_t last) {
  for (uint32_t offset : mbarrier_offsets) {
    if (offset + 8 <= first || offset >= last) continue;
    Mbarrier* barrier = find_mbarrier(offset);
    if (barrier != nullptr && barrier->is_valid) return barrier;
  }
  return nullptr;
}

}  // namespace halfbyte::gpu
