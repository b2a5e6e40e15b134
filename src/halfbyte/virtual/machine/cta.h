// CTAs and clusters: what their threads share.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "machine/barriers.h"
#include "machine/in_flight.h"
#include "machine/memory.h"

namespace halfbyte::gpu {

struct Warp;
struct Cluster;
struct Simulation;

// A tcgen05.ld or .st that its warp has not waited for.
struct TensorTransfer {
  uint32_t warp;
  bool is_store;
  uint32_t first;  // columns
  uint32_t last;
  int32_t instruction;
};

// 128 lanes x 512 columns of 32 bits. Allocation state is per CTA (PTX ISA, "tcgen05.alloc").
struct TensorMemory {
  static constexpr uint32_t kLanes = 128;
  static constexpr uint32_t kColumns = 512;
  static constexpr int32_t kNeverAllocated = -1;
  static constexpr int32_t kReleased = -2;
  std::vector<uint32_t> cells;  // [lane][column]; poisoned when made
  std::vector<int32_t> owner;   // per column: first column of its allocation, kNeverAllocated, kReleased
  bool permit_relinquished = false;
  WaitQueue queue;  // tcgen05.alloc that waits for columns
  uint32_t cta_group = 0;            // of the first tcgen05 instruction; all must agree
  uint32_t last_allocated = 512;     // columns of the last allocation
  // Allocation by both CTAs of a pair, kept in the even one's: who has come, and the last result.
  uint32_t pair_columns[2] = {0, 0};  // 0: has not come
  uint64_t pair_generation = 0;
  uint32_t pair_result = 0;
  std::vector<TensorTransfer> transfers;
  uint32_t* row(uint32_t lane) { return cells.data() + lane * kColumns; }
};

// In-order queue of asynchronous tensor work (tcgen05 of one CTA or pair, wgmma of one warp group).
struct AsyncPipe {
  double free_at = 0;    // cycles; when the last operation queued completes
  uint64_t pending = 0;  // operations not complete
};

struct Cta {
  Simulation* simulation = nullptr;
  Cluster* cluster = nullptr;
  uint32_t rank = 0;
  uint32_t id[3] = {0, 0, 0};
  uint8_t* shared = nullptr;  // 1024-byte aligned; offset 0 is the reserved first KiB
  uint32_t shared_bytes = 0;  // one past the last valid offset
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t live_warps = 0;
  std::unordered_map<uint32_t, Mbarrier> mbarriers;  // by shared offset
  std::vector<uint32_t> mbarrier_offsets;            // of all that were ever initialised
  uint32_t mbarriers_begin = UINT32_MAX, mbarriers_end = 0;  // bounds of their bytes
  NamedBarrier named[16];
  InFlight in_flight;
  std::unique_ptr<TensorMemory> tensor_memory;  // made on first use
  AsyncPipe tensor_pipe;
  uint64_t async_operations = 0;  // of any kind, not complete

  ~Cta();
  TensorMemory& tmem();
  // The mbarrier at `offset`, or nullptr when none was initialised there.
  Mbarrier* find_mbarrier(uint32_t offset);
  // A live mbarrier with bytes in [first, last), which an ordinary or asynchronous write must not
  // touch; nullptr when there is none. The bounds make the usual case two comparisons.
  Mbarrier* mbarrier_in(uint32_t first, uint32_t last) {
    return last <= mbarriers_begin || first >= mbarriers_end ? nullptr : find_mbarrier_in(first, last);
  }
  Mbarrier* find_mbarrier_in(uint32_t first, uint32_t last);
};

struct Cluster {
  uint32_t id[3] = {0, 0, 0};
  std::vector<std::unique_ptr<Cta>> ctas;
  uint32_t live_ctas = 0;
  ClusterBarrier barrier;
};

}  // namespace halfbyte::gpu
