// Copies between a tensor in global memory and a box in shared memory, row by row.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "machine/reduction.h"
#include "machine/tensor_map.h"

namespace halfbyte::gpu {

// As the forms number them. kRows: tile::gather4 and tile::scatter4.
enum class TensorMode : int64_t { kTile = 0, kRows = 1, kIm2col = 2, kIm2colW = 3, kIm2colW128 = 4 };

struct TensorRequest {
  TensorMap map;
  TensorMode mode = TensorMode::kTile;
  int32_t coordinates[kMaxRank] = {};
  uint32_t offsets[3] = {};  // im2col: W, H, D; im2col::w: halo, offset

  uint32_t num_rows() const;
  uint32_t shared_bytes() const { return num_rows() * map.shared_row_pitch(); }
  // Bytes copied, as an mbarrier counts them: padding in shared memory is not copied.
  uint32_t counted_bytes() const { return num_rows() * map.packed_row_bytes(); }
};

// One row of the box: where its element 0 lies in global memory, and which of its elements exist
// there ([first, last); none when last <= first).
struct TensorRow {
  uint64_t address;
  uint32_t first;
  uint32_t last;
};

// Every row in the order of shared memory.
void for_each_row(const TensorRequest& request, const std::function<void(const TensorRow&)>& visit);

// Global addresses between the first and the last byte that a box in tile mode touches; empty when
// it lies outside the tensor.
struct AddressSpan {
  uint64_t begin;
  uint64_t end;
};
AddressSpan find_tile_span(const TensorRequest& request);

// Why this request cannot be made of this map; empty when it can.
std::string find_request_error(const TensorRequest& request, bool is_store, bool is_reduction);

// Copies the box to `offset` of each shared memory.
void load_tensor(const TensorRequest& request, const std::vector<uint8_t*>& shared, uint32_t offset);
// Copies the box at `offset` to the tensor; with `reduce`, reduces into it.
void store_tensor(const TensorRequest& request, const uint8_t* shared, uint32_t offset,
                  ReduceElements reduce);
// Reduction of the map's element type; nullptr when it has none for the operation.
ReduceElements find_tensor_reduction(const TensorMap& map, Reduction operation);

}  // namespace halfbyte::gpu
