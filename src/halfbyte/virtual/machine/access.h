// Addresses of a warp-wide access: host pointers of all lanes, checked together where that is enough.
#pragma once

#include <cstdint>

#include "machine/lanes.h"
#include "machine/warp.h"

namespace halfbyte::gpu {

// State spaces as the forms number them.
enum class Space : int64_t {
  kGeneric = 0, kGlobal = 1, kShared = 2, kLocal = 3, kParam = 4, kConst = 5
};

// One access of every lane of a mask.
struct LaneAccess {
  uint32_t mask;
  uint32_t bytes;      // of one lane, all vector components together; also the alignment wanted
  bool is_write;
  int32_t slot;        // address operand: base slot (>= 0: register)
  int32_t offset;      // address operand: byte offset
  bool is_wide;        // the base register has 64 bits
};

// Host pointers of the lanes. Lanes outside the mask point where the first lane of it does, so that
// a gather over all 32 is safe.
struct alignas(64) LanePointers {
  uint8_t* at[kLanes];
};

// Fills the pointers for an access to `space`; faults like Warp::access.
void locate_lanes(Warp& warp, const Instruction& in, Space space, const LaneAccess& access,
                  LanePointers& pointers);

// Adds a finding when [first, last) of the CTA's shared memory meets asynchronous work in flight.
void note_conflict(Warp& warp, const Instruction& in, int lane, Cta& cta, bool is_write,
                   uint32_t first, uint32_t last);

// Adds a finding when a write of [first, last) meets a live mbarrier.
void note_mbarrier_overwrite(Warp& warp, const Instruction& in, int lane, Cta& cta, uint32_t first,
                             uint32_t last);

// Faults unless [address, address + bytes) lies in one live buffer (writable for a write). `what`
// starts the message: "the tensor map's box".
const Allocation& check_global_range(Warp& warp, const Instruction& in, int lane, uint64_t address,
                                     uint64_t bytes, bool is_write, const char* what);

// Faults unless [offset, offset + bytes) lies in the CTA's shared memory.
void check_shared_range(const Warp& warp, const Instruction& in, int lane, const Cta& cta,
                        uint32_t offset, uint32_t bytes, const char* what);

// Faults unless the address is a multiple of `alignment` (a power of two).
void check_alignment(const Warp& warp, const Instruction& in, int lane, uint64_t address,
                     uint32_t alignment, const char* what);

}  // namespace halfbyte::gpu
