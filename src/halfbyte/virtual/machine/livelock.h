// Recognises threads that go round in circles.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace halfbyte::gpu {

struct Warp;

// Looks at the states of running warps while a launch makes no progress.
class LivelockWatch {
 public:
  // True when the warp has, for the first time since the last progress, come back to a state that
  // it was in since then.
  bool look_at(const Warp& warp, uint64_t progress, size_t state_bytes);
  // Warps that have come back.
  size_t repeated() const { return repeated_; }

 private:
  struct SeenState {
    uint64_t state = 0;
    uint64_t steps = 0;  // looks since `state` was taken
    uint64_t limit = 0;  // looks after which another is taken
    size_t pause = 0;    // slices until the next look
    bool has_repeated = false;
  };

  uint64_t progress_ = UINT64_MAX;
  size_t repeated_ = 0;
  std::unordered_map<const Warp*, SeenState> seen_;
};

}  // namespace halfbyte::gpu
