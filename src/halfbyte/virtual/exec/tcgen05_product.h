// The arithmetic of one tcgen05.mma, done when the pipe reaches it.
#pragma once

#include <cstdint>

#include "exec/tcgen05_descriptor.h"
#include "exec/tcgen05_pipe.h"
#include "machine/shared_descriptor.h"

namespace halfbyte::gpu {

struct MmaRequest {
  MmaVariant variant;
  MmaShape shape;
  CtaGroup group;
  TensorPlace result;
  TensorPlace left_place;  // A in tensor memory
  SharedDescriptor left;   // A in shared memory
  SharedDescriptor right;
  TensorPlace left_scales;
  TensorPlace right_scales;
  bool accumulates = false;
  uint32_t scale_shift = 0;        // D is scaled by 2^-this before the product is added
  uint32_t disabled_lanes[8] = {};  // bit i of word w: lane 32w + i of the group is not written
  uint64_t zero_columns = 0;       // zero-column mask descriptor of .ws
};

OperandExtent find_left_extent(const MmaRequest& request);
OperandExtent find_right_extent(const MmaRequest& request);
// Columns of tensor memory that hold the accumulator, A, and the scale factors of A and B.
uint32_t count_result_columns(const MmaRequest& request);
uint32_t count_left_columns(const MmaRequest& request);
uint32_t count_left_scale_columns(const MmaRequest& request);
uint32_t count_right_scale_columns(const MmaRequest& request);

void multiply(const MmaRequest& request);

// Rows of one partition of 32 lanes: each takes the next one's columns, the last keeps its own. The
// direction is that of an NVIDIA example, which was observed on a B200 (CuTe DSL examples,
// experimental/primitives/tcgen05/1cta_mma_a_from_tmem.py).
void shift_rows_down(TensorMemory& memory, uint32_t first_lane, TensorPlace place, uint32_t columns);

}  // namespace halfbyte::gpu
