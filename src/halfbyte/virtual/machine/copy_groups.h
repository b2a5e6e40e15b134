// Asynchronous copies of a warp's threads, and the groups they wait for (PTX ISA, "cp.async",
// "cp.async.bulk": commit_group, wait_group).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "machine/barriers.h"

namespace halfbyte::gpu {

struct Warp;
struct Instruction;
struct Simulation;

// One copy, or several that complete together.
struct CopyOperation {
  uint32_t lanes = 0;       // threads that issued it
  uint32_t open_lanes = 0;  // those of them that have not committed it
  bool is_read = false;     // the source may be overwritten
  bool is_done = false;
  std::vector<std::function<void()>> on_done;
};

struct CopyGroup {
  uint32_t lanes = 0;
  std::vector<std::shared_ptr<CopyOperation>> operations;
  bool is_complete(bool reads_only) const;
};

// The groups of one kind (bulk or not) of all threads of a warp.
class CopyGroups {
 public:
  WaitQueue queue;

  void add(std::shared_ptr<CopyOperation> operation);
  // A new group of each lane holds its operations not committed yet.
  void commit(uint32_t lanes);
  // Whether a group older than the `allowed` newest ones of some lane is incomplete.
  bool is_pending(uint32_t lanes, uint64_t allowed, bool reads_only) const;
  // Operations of the lanes that are not done, committed or not.
  std::vector<std::shared_ptr<CopyOperation>> list_pending(uint32_t lanes) const;

 private:
  std::vector<std::shared_ptr<CopyOperation>> open_;
  std::deque<CopyGroup> committed_;  // oldest first
};

struct SingleCopies;  // exec/async_copy.cpp

// Both kinds, made on first use; completions keep them alive after the warp has gone.
struct CopyState {
  CopyGroups single;
  CopyGroups bulk;
  std::shared_ptr<SingleCopies> batch;  // cp.async operations that later ones may still join
};

std::shared_ptr<CopyState> copy_state(Warp& warp);

// Marks the operation's reads, or all of it, as done and wakes who waits for the groups.
void finish_reads(Simulation& simulation, CopyGroups& groups, CopyOperation& operation);
void finish_copy(Simulation& simulation, CopyGroups& groups, CopyOperation& operation);

// Puts the fragment to sleep and returns true while a group older than the newest `allowed` pends.
bool wait_for_groups(Warp& warp, CopyGroups& groups, uint32_t lanes, uint64_t allowed,
                     bool reads_only);

}  // namespace halfbyte::gpu
