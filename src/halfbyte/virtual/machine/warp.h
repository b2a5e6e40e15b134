// A warp: its registers, and the fragments its lanes are divided into.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "machine/barriers.h"
#include "machine/cta.h"
#include "machine/instruction.h"
#include "machine/lanes.h"
#include "machine/memory.h"
#include "machine/report.h"

namespace halfbyte::gpu {

struct Program;
struct Simulation;

enum class WaitKind : uint8_t {
  kNone, kMbarrier, kNamedBarrier, kClusterBarrier, kConvergence, kAsyncGroup, kTensorAlloc, kWarpBarrier, kOther
};

// Why a fragment does not run; enough for a report.
struct Wait {
  WaitKind kind = WaitKind::kNone;
  const WaitQueue* queue = nullptr;
  uint32_t address = 0;    // 32-bit shared address (mbarrier), barrier number, column count
  uint64_t detail = 0;     // parity or phase waited for; needed lanes (convergence)
  bool may_time_out = false;  // a suspended try_wait may legally return false
};

enum class FragmentState : uint8_t { kReady, kWaiting };

// Lanes of one warp that run together. All lanes start in one fragment; a divergent branch splits,
// equal positions merge, and every fragment makes progress (independent thread scheduling).
struct Fragment {
  // A lane group that loops this often while others of its warp are ready lets them run: spin locks
  // between lanes of one warp make progress (PTX ISA, independent thread scheduling since sm_70).
  static constexpr uint32_t kMaxBackEdges = 1024;

  uint32_t mask = 0;
  int32_t pc = 0;
  FragmentState state = FragmentState::kReady;
  bool advance_on_wake = false;
  bool timed_out = false;  // set when a suspended try_wait is told that its time is over
  uint32_t back_edges = 0;
  uint64_t arrived_generation = 0;  // scratch of the barrier the fragment waits on
  bool has_arrived = false;         // ditto: arrived, waiting for the others
  uint64_t refused_wait = 0;        // the wait that an adversarial try_wait has refused once
  Wait wait;
};

struct Warp {
  Simulation* simulation = nullptr;
  Cta* cta = nullptr;
  const Program* program = nullptr;
  uint32_t index = 0;              // in the CTA
  uint32_t live = 0;               // lanes that have not exited
  uint32_t started = 0;            // lanes that exist (block size not a multiple of 32)
  uint32_t* registers = nullptr;   // slots of 32 x uint32_t
  uint32_t* predicates = nullptr;  // one 32-bit mask each
  uint8_t* local = nullptr;        // [lane][local_bytes]
  double time = 0;                 // cycles
  uint64_t instructions = 0;
  bool is_queued = false;
  Fragment fragments[kLanes];
  int num_fragments = 0;
  int current = 0;
  uint32_t pinned_lanes = 0;       // lanes whose fragment runs out of turn (fairness between spins)
  int32_t stop = 0;                // the running fragment is put back when its pc reaches this
  uint32_t tid[3][kLanes];
  // Cached allocation of the last global access of this warp.
  uint64_t cached_begin = 1, cached_end = 0;
  bool cached_is_read_only = false;
  // State that one instruction family keeps per warp, made by it on first use: commit groups of
  // asynchronous copies; pending wgmma groups.
  std::shared_ptr<void> copy_groups;
  std::shared_ptr<void> wgmma_groups;
  // barrier.cluster: lanes that have arrived and not waited, and the parity of their generation.
  uint32_t cluster_arrived = 0, cluster_parity = 0;
  std::map<uint32_t, WarpBarrier> warp_barriers;  // bar.warp.sync, by membermask
  std::unordered_map<uint64_t, SeenPhase> seen_phases;  // by waiting instruction and mbarrier

  ~Warp();

  Fragment& fragment() { return fragments[current]; }

  // Operand access. A slot >= 0 is a register; a negative one is ~index of a program constant.
  inline const uint32_t* read32(int32_t slot) const;
  inline const uint64_t* read64(int32_t slot) const {
    return reinterpret_cast<const uint64_t*>(read32(slot));
  }
  uint32_t* write32(int32_t slot) { return registers + static_cast<size_t>(slot) * kLanes; }
  uint64_t* write64(int32_t slot) { return reinterpret_cast<uint64_t*>(write32(slot)); }
  uint32_t predicate(int32_t operand) const {
    return operand >= 0 ? predicates[operand] : ~predicates[~operand];
  }
  void set_predicate(int32_t operand, uint32_t value, uint32_t mask) {
    uint32_t& target = predicates[operand];
    target = (target & ~mask) | (value & mask);
  }
  // The value of the first lane of the mask; raises a fault when `name` differs between its lanes.
  uint32_t uniform32(const Instruction& in, int32_t slot, uint32_t mask, const char* name) const;
  uint64_t uniform64(const Instruction& in, int32_t slot, uint32_t mask, const char* name) const;

  // Control flow of the current fragment.
  void branch(uint32_t taken, int32_t target);
  void exit_lanes(uint32_t mask);
  // Makes a ready fragment at `position` of some lanes of the current one, which stays where it is:
  // lanes whose guard is false must not sleep with the others.
  void split_off(uint32_t lanes, int32_t position);
  // Chooses the fragment to run and merges those that stand at the same instruction; false when
  // every fragment waits.
  bool choose_fragment();
  bool is_converged(const Instruction& in) const;
  void remove_fragment(int position);
  // Puts the current fragment to sleep; the handler returns kRetry or kAdvance.
  void wait_on(WaitQueue& queue, const Wait& wait);

  // Host pointer of `bytes` at a generic address for one lane, after bounds, alignment, freed and
  // read-only checks (global), window checks (shared of any CTA of the cluster, param, local), and
  // in-flight findings for shared memory. Faults otherwise. See access.cpp.
  uint8_t* access(const Instruction& in, int lane, uint64_t address, uint32_t bytes, bool is_write);
  // The same for a 32-bit shared address (rank << 24 | offset).
  uint8_t* access_shared(const Instruction& in, int lane, uint32_t address, uint32_t bytes, bool is_write);
  // The CTA a 32-bit shared address lies in; faults when the rank is not in the cluster.
  Cta& shared_cta(const Instruction& in, int lane, uint32_t address);

  Place place(const Instruction& in, int lane = -1) const;
};

}  // namespace halfbyte::gpu

#include "machine/program.h"

namespace halfbyte::gpu {
inline const uint32_t* Warp::read32(int32_t slot) const {
  return slot >= 0 ? registers + static_cast<size_t>(slot) * kLanes
                   : program->constants + static_cast<size_t>(program->constant_slots[~slot]) * kLanes;
}
}  // namespace halfbyte::gpu
