// Whether threads that run without progress will ever do anything else.
//
// While nothing observable changes, what a warp does next follows from its own state alone. A warp
// that comes back to a state that it was in before will go round for ever; a loop that counts, or
// that looks at the clock, does not come back, however long it takes.
#include "machine/livelock.h"

#include <algorithm>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

constexpr size_t kBytesPerSlice = 64 * 1024;  // state larger than this is not looked at every time

inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// Four chains side by side: one would wait for a multiplication per word.
uint64_t hash_words(uint64_t hash, const uint32_t* words, size_t count) {
  uint64_t chains[4] = {hash, hash + 1, hash + 2, hash + 3};
  for (size_t i = 0; i + 8 <= count; i += 8) {
    for (size_t chain = 0; chain < 4; ++chain) {
      uint64_t value;
      std::memcpy(&value, words + i + 2 * chain, sizeof(value));
      chains[chain] = mix(chains[chain], value);
    }
  }
  return mix(mix(chains[0], chains[1]), mix(chains[2], chains[3]));
}

uint64_t hash_state(const Warp& warp, size_t bytes) {
  uint64_t hash = mix(warp.live, static_cast<uint64_t>(warp.num_fragments));
  for (int i = 0; i < warp.num_fragments; ++i) {
    const Fragment& fragment = warp.fragments[i];
    hash = mix(hash, static_cast<uint64_t>(fragment.pc) << 32 | fragment.mask);
    hash = mix(hash, static_cast<uint64_t>(fragment.state) << 2 | fragment.timed_out << 1 | fragment.has_arrived);
    hash = mix(hash, fragment.refused_wait);
    // Among several, the count decides who runs next, as far as it is looked at.
    hash = mix(hash, warp.num_fragments > 1 ? std::min(fragment.back_edges, Fragment::kMaxBackEdges + 1) : 0u);
  }
  if (warp.num_fragments > 1) hash = mix(hash, static_cast<uint64_t>(warp.current) << 32 | warp.pinned_lanes);
  // Registers, predicates and local memory are one buffer, of whole 128-byte slots.
  return hash_words(hash, warp.registers, bytes / sizeof(uint32_t));
}

}  // namespace

bool LivelockWatch::look_at(const Warp& warp, uint64_t progress, size_t state_bytes) {
  if (progress != progress_) {
    progress_ = progress;
    repeated_ = 0;
    seen_.clear();
  }
  SeenState& seen = seen_[&warp];
  if (seen.has_repeated || seen.pause-- > 0) return false;
  seen.pause = state_bytes / kBytesPerSlice;
  const uint64_t state = hash_state(warp, state_bytes);
  if (seen.steps > 0 && state == seen.state) {
    seen.has_repeated = true;
    ++repeated_;
    return true;
  }
  if (seen.steps == seen.limit) {  // Brent: the state to come back to moves on at powers of two
    seen.state = state;
    seen.steps = 0;
    seen.limit = std::max<uint64_t>(1, 2 * seen.limit);
  }
  ++seen.steps;
  return false;
}

}  // namespace halfbyte::gpu
