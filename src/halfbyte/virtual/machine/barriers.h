// mbarriers, named CTA barriers, the cluster barrier and warp barriers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine/report.h"

namespace halfbyte::gpu {

struct Warp;
struct Cta;
struct Cluster;
struct Instruction;

// Warps with a fragment that waits on this object; the object's address is the wait's key.
struct WaitQueue {
  std::vector<Warp*> warps;
};

// PTX ISA, "mbarrier": a phase completes when no arrival and no transaction byte is pending.
struct Mbarrier {
  uint32_t offset = 0;  // in the CTA's shared memory
  Cta* cta = nullptr;
  int64_t expected = 0;  // arrivals of the current phase
  int64_t pending = 0;
  int64_t next_expected = 0;  // arrivals of the phases to come; arrive_drop lowers it
  int64_t pending_bytes = 0;  // may be negative: bytes that arrived before they were expected
  uint64_t phase = 0;         // completed phases; the parity of the current one is phase & 1
  bool is_valid = false;      // between init and inval
  int32_t initialized_by = -1;  // instruction
  uint64_t serial = 0;          // of the init: a later mbarrier at this offset has another
  WaitQueue queue;
};

// Limits of one mbarrier (PTX ISA, "mbarrier: contents of the mbarrier object").
constexpr int64_t kMaxMbarrierCount = (1 << 20) - 1;
constexpr int64_t kMaxMbarrierBytes = (1 << 20) - 1;

// The operations on an mbarrier, for instructions and for asynchronous completions alike. Each may
// complete the phase: waiters are woken and progress is noted. Faults name `place`.
void arrive(Mbarrier& barrier, int64_t count, const Place& place = Place{});
void arrive_drop(Mbarrier& barrier, int64_t count, const Place& place = Place{});
// One more arrival is awaited in this phase (cp.async.mbarrier.arrive without .noinc).
void add_pending_arrivals(Mbarrier& barrier, int64_t count, const Place& place = Place{});
void add_pending_bytes(Mbarrier& barrier, int64_t bytes, const Place& place = Place{});  // expect_tx
void complete_bytes(Mbarrier& barrier, int64_t bytes, const Place& place = Place{});     // complete_tx

// The live mbarrier at an offset; faults when none was initialised there or it was invalidated.
Mbarrier& require_mbarrier(Cta& cta, uint32_t offset, const Place& place);
// The same for a 32-bit shared address (rank << 24 | offset) of one lane.
Mbarrier& require_mbarrier(Warp& warp, const Instruction& in, int lane, uint32_t address);
// "mbarrier at shared+0x408 of cta (0,0,0) rank 0: 3 phases completed, ..." for messages.
std::string describe_mbarrier(const Mbarrier& barrier);

enum class BarrierReduction : int8_t { kNone = -1, kPopc = 0, kAnd = 1, kOr = 2 };

// bar.sync and its kin: barriers 0 to 15 of a CTA.
struct NamedBarrier {
  uint32_t arrived = 0;    // threads
  uint32_t expected = 0;   // threads; 0 while nobody has arrived
  bool has_count = false;  // false: every thread of the CTA that has not exited
  BarrierReduction reduction = BarrierReduction::kNone;
  uint32_t true_count = 0;  // threads whose predicate is true, where a reduction runs
  uint32_t thread_count = 0;
  uint64_t generation = 0;
  std::vector<uint32_t> arrived_lanes;  // mask per warp
  WaitQueue queue;
};

// barrier.cluster: which threads have arrived is kept in each warp.
struct ClusterBarrier {
  uint32_t arrived = 0;  // threads, exited ones included
  uint64_t generation = 0;
  WaitQueue queue;
};

// The phase that a waiting instruction of a warp saw completed last. One that passes twice on the
// same phase relies on data of the round before: the mark of a phase that was not carried over.
struct SeenPhase {
  uint64_t serial = 0;
  int64_t phase = 0;  // -1: the phase before the first, which a fresh mbarrier counts as complete
  uint32_t lanes = 0;
};

// bar.warp.sync of one membermask: lanes may meet from different instructions.
struct WarpBarrier {
  uint32_t arrived = 0;
  WaitQueue queue;
};

// One arrival at a named barrier.
struct NamedArrival {
  uint32_t number = 0;
  uint32_t count = 0;  // threads; 0: every thread of the CTA
  bool is_aligned = true;
  BarrierReduction reduction = BarrierReduction::kNone;
  uint32_t true_lanes = 0;
};

// Returns true when this arrival completes the barrier: waiters were woken with their results.
bool arrive_named(Warp& warp, const Instruction& in, uint32_t mask, const NamedArrival& arrival);
// Lanes of the warp that have not arrived at the cluster barrier's current generation.
uint32_t missing_at_cluster_barrier(const Warp& warp);
// Completes the cluster barrier when no live thread is missing.
bool complete_cluster_barrier(Cluster& cluster);

}  // namespace halfbyte::gpu
