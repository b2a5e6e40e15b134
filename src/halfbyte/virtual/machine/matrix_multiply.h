// Products of small matrices in fp32: the arithmetic of every tensor core instruction.
//
// Products of two decoded elements are exact in fp32 (at most 11 bits of significand each), so fused
// and separate multiply-add agree. Every element of a product is summed over k in ascending order,
// beginning at zero, and then added to the accumulator: the result does not depend on the number of
// threads, on the blocking or on the vector width. Hardware leaves the order of summation open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "machine/number_tables.h"

namespace halfbyte::gpu {

#if defined(__AVX512F__)
constexpr uint32_t kVectorWidth = 16;
#elif defined(__AVX2__)
constexpr uint32_t kVectorWidth = 8;
#else
constexpr uint32_t kVectorWidth = 4;
#endif
constexpr uint32_t kPanelColumns = 2 * kVectorWidth;

// The right operand of a product, stored in panels of kPanelColumns columns: [panel][k][column]. Its
// rows are given along k, as tensor cores take B. Missing columns of the last panel are zero.
class PanelMatrix {
 public:
  void resize(uint32_t columns, uint32_t depth);
  uint32_t columns() const { return columns_; }
  uint32_t depth() const { return depth_; }
  uint32_t panels() const { return (columns_ + kPanelColumns - 1) / kPanelColumns; }
  const float* panel(uint32_t index) const {
    return values_.data() + static_cast<size_t>(index) * depth_ * kPanelColumns;
  }
  // Column `column` gets the depth() values at `source`.
  void set_column(uint32_t column, const float* source);
  // Columns [first, first + count) from `source`, column by column.
  void set_columns(uint32_t first, uint32_t count, const float* source);

 private:
  uint32_t columns_ = 0;
  uint32_t depth_ = 0;
  std::vector<float> values_;
};

enum class Accumulate : uint8_t {
  kSet,    // D = A*B
  kAdd,    // D = A*B + D
  kScale,  // D = A*B + D*scale
};

// rows x depth values at `left`, row by row, times columns [first, first + count) of `right`; row r goes
// to out[r][0 .. count). `first` must be a multiple of kPanelColumns unless count ends the matrix in the
// same panel.
struct MatrixProduct {
  const float* left;
  uint32_t rows;
  const PanelMatrix* right;
  uint32_t first_column;
  uint32_t column_count;
  float* const* out;
  Accumulate accumulate;
  float scale;
};

void multiply_matrices(const MatrixProduct& product);

// out[r][0 .. 8) = the sums over k < depth of left[r][k] * right[k][0 .. 8), for 8 or 16 rows: the
// product of one warp's mma.
void multiply_eight_columns(const float* left, const float* right, uint32_t rows, uint32_t depth,
                            float (*out)[8]);

// Rows and threads for which sharing out pays: below, the caller multiplies alone.
uint32_t choose_threads(uint64_t multiply_adds, uint32_t num_threads);

}  // namespace halfbyte::gpu
