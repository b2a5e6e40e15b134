// Asynchronous work in flight on one CTA's shared and tensor memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace halfbyte::gpu {

enum class Resource : uint8_t { kSharedRead, kSharedWrite, kTensorRead, kTensorWrite };

// One range that an asynchronous operation reads or writes until it completes. Shared memory counts
// bytes; tensor memory counts columns.
struct FlightRange {
  Resource resource;
  uint32_t first;
  uint32_t last;  // one past the end
  uint64_t token;
  int32_t instruction;
  int32_t warp;
  double issued_at;  // cycles
  // Tensor memory: which 16 lanes of every 32 (bit 0 the lower, bit 1 the upper). Two accumulators of
  // 64 rows share columns that way.
  uint8_t lane_halves = 3;
};

class InFlight {
 public:
  // Token groups the ranges of one operation (any number the caller keeps unique).
  void begin(const FlightRange& range) { ranges_.push_back(range); }
  void end(uint64_t token);
  bool empty() const { return ranges_.empty(); }
  // The first range in flight that conflicts with an access of [first, last): a write conflicts with
  // reads and writes, a read with writes only. nullptr when none; ranges of `except` are ignored.
  const FlightRange* find_conflict(bool is_tensor_memory, bool is_write, uint32_t first, uint32_t last,
                                   uint64_t except = 0, uint8_t lane_halves = 3) const;
  const std::vector<FlightRange>& ranges() const { return ranges_; }

 private:
  std::vector<FlightRange> ranges_;
};

}  // namespace halfbyte::gpu
