// Reading the tensor map that an instruction names.
#pragma once

#include "machine/access.h"
#include "machine/tensor_map.h"

namespace halfbyte::gpu {

// Host pointer of the 128 bytes at a generic address (param, const or global memory); faults when
// they lie elsewhere or are not aligned to 64 bytes.
inline uint8_t* locate_tensor_map(Warp& warp, const Instruction& in, int lane, uint64_t address,
                                  bool is_write) {
  check_alignment(warp, in, lane, address & ~kWindowMask, kTensorMapAlignment, "the tensor map");
  warp.access(in, lane, address + kTensorMapBytes / 2, kTensorMapBytes / 2, is_write);
  return warp.access(in, lane, address, kTensorMapBytes / 2, is_write);
}

inline TensorMap read_tensor_map(Warp& warp, const Instruction& in, int lane, uint64_t address) {
  const TensorMap map = decode_tensor_map(locate_tensor_map(warp, in, lane, address, false));
  const std::string error = find_tensor_map_error(map);
  if (!error.empty()) {
    raise_fault(warp, in, lane, "bad-tensor-map",
                format_text("the tensor map at 0x%llx is not legal: %s",
                            static_cast<unsigned long long>(address), error.c_str()));
  }
  return map;
}

}  // namespace halfbyte::gpu
