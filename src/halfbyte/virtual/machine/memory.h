// Registered global memory, and the windows of the generic address space.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace halfbyte::gpu {

// Generic addresses: global memory is host memory at its own address; the other spaces have windows.
constexpr uint64_t kSharedWindow = 1ull << 56;  // | cta rank << 24 | offset
constexpr uint64_t kParamWindow = 1ull << 57;   // | offset into the kernel's parameter block
constexpr uint64_t kLocalWindow = 1ull << 58;   // | offset into the thread's local memory
constexpr uint64_t kWindowMask = kSharedWindow | kParamWindow | kLocalWindow;
constexpr uint32_t kSharedRankShift = 24;
constexpr uint32_t kSharedOffsetMask = (1u << kSharedRankShift) - 1;

struct Allocation {
  uint64_t begin;
  uint64_t end;
  std::string name;
  bool is_freed;
  bool is_read_only;
  // Host memory that exists and that no program should touch: what rounding leaves behind a buffer,
  // or a buffer that was freed a moment ago. An access is a finding, not a fault: on hardware it
  // reads whatever is there.
  bool is_stale = false;
};

// The buffers a kernel may touch. Freed buffers stay listed until their range is registered again,
// so that a use after free is told from a plain stray access.
class GlobalMemory {
 public:
  void register_buffer(uint64_t begin, uint64_t bytes, const std::string& name, bool read_only,
                       bool stale = false);
  void mark_freed(uint64_t begin);
  // The allocation that holds `address`, freed ones included; nullptr when none does.
  const Allocation* find(uint64_t address) const;
  // "4096 bytes past the end of 'C'" or the like, for a message.
  std::string describe_nearest(uint64_t address) const;
  // Changes whenever a buffer is added or freed: caches of Allocation pointers are then stale.
  uint64_t generation() const { return generation_; }

 private:
  std::map<uint64_t, Allocation> buffers_;  // by begin; ranges do not overlap
  uint64_t generation_ = 0;
};

}  // namespace halfbyte::gpu
