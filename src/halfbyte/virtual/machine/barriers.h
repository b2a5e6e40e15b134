// mbarriers, named CTA barriers and the cluster barrier.
#pragma once

#include <cstdint>
#include <vector>

namespace halfbyte::gpu {

struct Warp;
struct Cta;

// Warps with a fragment that waits on this object; the object's address is the wait's key.
struct WaitQueue {
  std::vector<Warp*> warps;
};

// PTX ISA, "mbarrier": a phase completes when no arrival and no transaction byte is pending.
struct Mbarrier {
  uint32_t offset = 0;  // in the CTA's shared memory
  Cta* cta = nullptr;
  int64_t expected = 0;  // arrivals of each phase
  int64_t pending = 0;
  int64_t next_expected = 0;  // after arrive_drop
  int64_t pending_bytes = 0;
  uint64_t phase = 0;  // completed phases; the parity of the current one is phase & 1
  int32_t initialized_by = -1;
  WaitQueue queue;
};

struct NamedBarrier {
  uint32_t arrived = 0;   // threads
  uint32_t expected = 0;  // threads; 0 while nobody has arrived
  uint32_t reduced_and = 0xFFFFFFFFu;
  uint32_t reduced_or = 0;
  uint32_t reduced_count = 0;
  uint64_t generation = 0;
  uint32_t result[3] = {0, 0, 0};  // popc, and, or of the last generation
  std::vector<uint32_t> arrived_warps;
  WaitQueue queue;
};

struct ClusterBarrier {
  uint32_t arrived = 0;  // threads
  uint64_t generation = 0;
  WaitQueue queue;
};

}  // namespace halfbyte::gpu
