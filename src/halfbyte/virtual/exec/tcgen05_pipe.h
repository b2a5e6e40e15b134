// What the tcgen05 instructions share: CTA groups, tensor memory addresses, the asynchronous pipe.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "machine/simulation.h"

namespace halfbyte::gpu {

// The CTAs whose tensor memory an instruction touches: its own, or both of the pair, even rank first.
struct CtaGroup {
  Cta* ctas[2] = {nullptr, nullptr};
  uint32_t count = 1;
  Cta& leader() const { return *ctas[0]; }
};

// Faults on GPUs without tensor memory, and where a pair is asked for and the cluster has none; notes
// instructions of different .cta_group in one kernel.
CtaGroup find_cta_group(Warp& warp, const Instruction& in, int lane, uint32_t cta_group);

struct TensorPlace {
  uint32_t lane;
  uint32_t column;
};

inline TensorPlace split_tensor_address(uint32_t address) {
  return {(address >> 16) & 0x7F, address & 0x1FF};
}

// A lane's tensor memory address: `operand` is a slot and an offset. Faults beyond 128 lanes or the
// GPU's columns. Bits 30 and 31 (the scale factor's byte) are left to the caller.
TensorPlace read_tensor_address(Warp& warp, const Instruction& in, int lane, const int32_t* operand,
                                const char* name);

// Faults unless columns [first, first + count) of the CTA lie in live allocations.
void check_columns(Warp& warp, const Instruction& in, int lane, Cta& cta, uint32_t first, uint32_t count,
                   const char* what);

// One asynchronous operation on its way: ranges are registered as it is made, and end with it.
class TensorWork {
 public:
  TensorWork(Warp& warp, const Instruction& in, int lane, const CtaGroup& group);
  // Shared memory [first, last) of the CTA is read: must exist, and meets no write in flight.
  void read_shared(Cta& cta, uint32_t first, uint32_t last, const char* what);
  // Columns are read or written: must be allocated, and meet no ld or st that was not waited for.
  void read_columns(Cta& cta, uint32_t first, uint32_t count, const char* what);
  void write_columns(Cta& cta, uint32_t first, uint32_t count, const char* what, uint8_t lane_halves = 3);
  // Runs `action` when everything issued before on this pipe and `cycles` of its own have passed.
  void enqueue(double cycles, std::function<void()> action);

 private:
  void add_range(Cta& cta, Resource resource, uint32_t first, uint32_t last);
  void note_transfers(Cta& cta, bool is_write, uint32_t first, uint32_t last);

  Warp& warp_;
  const Instruction& in_;
  int lane_;
  CtaGroup group_;
  uint64_t token_;
};

}  // namespace halfbyte::gpu
