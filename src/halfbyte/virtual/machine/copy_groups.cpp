// Commit groups of asynchronous copies.
#include "machine/copy_groups.h"

#include <algorithm>

#include "machine/simulation.h"

namespace halfbyte::gpu {

bool CopyGroup::is_complete(bool reads_only) const {
  return std::all_of(operations.begin(), operations.end(), [&](const auto& operation) {
    return operation->is_done || (reads_only && operation->is_read);
  });
}

void CopyGroups::add(std::shared_ptr<CopyOperation> operation) {
  operation->open_lanes = operation->lanes;
  open_.push_back(std::move(operation));
}

void CopyGroups::commit(uint32_t lanes) {
  CopyGroup group;
  group.lanes = lanes;
  for (auto& operation : open_) {
    if (!(operation->open_lanes & lanes)) continue;
    group.operations.push_back(operation);
    operation->open_lanes &= ~lanes;
  }
  open_.erase(std::remove_if(open_.begin(), open_.end(),
                             [](const auto& operation) { return operation->open_lanes == 0; }),
              open_.end());
  // Only the oldest groups may be dropped: the newest count even when they are complete.
  while (!committed_.empty() && committed_.front().is_complete(false)) committed_.pop_front();
  committed_.push_back(std::move(group));
}

bool CopyGroups::is_pending(uint32_t lanes, uint64_t allowed, bool reads_only) const {
  uint64_t newer[kLanes] = {};
  for (auto group = committed_.rbegin(); group != committed_.rend(); ++group) {
    uint32_t older = 0;
    for_lanes(group->lanes & lanes, [&](int lane) {
      if (newer[lane]++ >= allowed) older |= 1u << lane;
    });
    if (older && !group->is_complete(reads_only)) return true;
  }
  return false;
}

std::vector<std::shared_ptr<CopyOperation>> CopyGroups::list_pending(uint32_t lanes) const {
  std::vector<std::shared_ptr<CopyOperation>> pending;
  auto add_pending = [&](const std::shared_ptr<CopyOperation>& operation) {
    if ((operation->lanes & lanes) && !operation->is_done &&
        std::find(pending.begin(), pending.end(), operation) == pending.end()) {
      pending.push_back(operation);
    }
  };
  for (const CopyGroup& group : committed_) {
    for (const auto& operation : group.operations) add_pending(operation);
  }
  for (const auto& operation : open_) add_pending(operation);
  return pending;
}

std::shared_ptr<CopyState> copy_state(Warp& warp) {
  if (!warp.copy_groups) warp.copy_groups = std::make_shared<CopyState>();
  return std::static_pointer_cast<CopyState>(warp.copy_groups);
}

void finish_reads(Simulation& simulation, CopyGroups& groups, CopyOperation& operation) {
  operation.is_read = true;
  simulation.wake(groups.queue);
}

void finish_copy(Simulation& simulation, CopyGroups& groups, CopyOperation& operation) {
  operation.is_read = operation.is_done = true;
  std::vector<std::function<void()>> actions;
  actions.swap(operation.on_done);
  for (auto& action : actions) action();
  simulation.note_progress();
  simulation.wake(groups.queue);
}

bool wait_for_groups(Warp& warp, CopyGroups& groups, uint32_t lanes, uint64_t allowed,
                     bool reads_only) {
  if (!groups.is_pending(lanes, allowed, reads_only)) return false;
  Wait wait;
  wait.kind = WaitKind::kAsyncGroup;
  wait.detail = allowed;
  warp.wait_on(groups.queue, wait);
  return true;
}

}  // namespace halfbyte::gpu
