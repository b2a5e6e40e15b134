#include "machine/in_flight.h"

#include <algorithm>

namespace halfbyte::gpu {

void InFlight::end(uint64_t token) {
  ranges_.erase(std::remove_if(ranges_.begin(), ranges_.end(),
                               [token](const FlightRange& range) { return range.token == token; }),
                ranges_.end());
}

const FlightRange* InFlight::find_conflict(bool is_tensor_memory, bool is_write, uint32_t first, uint32_t last,
                                           uint64_t except, uint8_t lane_halves) const {
  const Resource reads = is_tensor_memory ? Resource::kTensorRead : Resource::kSharedRead;
  const Resource writes = is_tensor_memory ? Resource::kTensorWrite : Resource::kSharedWrite;
  for (const FlightRange& range : ranges_) {
    if (range.first >= last || range.last <= first || (except != 0 && range.token == except)) continue;
    if (is_tensor_memory && (range.lane_halves & lane_halves) == 0) continue;
    if (range.resource == writes || (is_write && range.resource == reads)) return &range;
  }
  return nullptr;
}

}  // namespace halfbyte::gpu
