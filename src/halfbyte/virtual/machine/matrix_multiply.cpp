// Lets a*b+c become one instruction; see the header for why the result is the same without.
#pragma GCC optimize("fp-contract=fast")

#include "machine/matrix_multiply.h"

#include <algorithm>
#include <cstring>

namespace halfbyte::gpu {
namespace {

typedef float Vector __attribute__((vector_size(kVectorWidth * sizeof(float))));
typedef float LooseFloat __attribute__((may_alias));

#if defined(__AVX512F__)
constexpr uint32_t kRowBlock = 8;
#elif defined(__AVX2__)
constexpr uint32_t kRowBlock = 6;
#else
constexpr uint32_t kRowBlock = 4;
#endif

inline Vector splat(float value) { return value - Vector{}; }

// Accumulators are words of tensor memory or registers, at any multiple of four bytes.
inline Vector load(const float* source) {
  Vector value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

inline void store(float* target, Vector value) { std::memcpy(target, &value, sizeof value); }

typedef int32_t Indices __attribute__((vector_size(kVectorWidth * sizeof(int32_t))));

// Lanes of the rows `kDistance` apart that change places in one step of a transposition: the upper of
// the two rows when kIsUpper.
template <uint32_t kDistance, bool kIsUpper>
inline Indices make_exchange() {
  Indices indices = {};
  for (uint32_t lane = 0; lane < kVectorWidth; ++lane) {
    const bool is_moved = static_cast<bool>(lane & kDistance) != kIsUpper;
    const uint32_t from = kIsUpper ? lane + kDistance : lane - kDistance;
    const uint32_t other = kIsUpper ? 0 : kVectorWidth;  // the row that lanes move from
    const uint32_t own = kIsUpper ? kVectorWidth : 0;
    indices[lane] = static_cast<int32_t>(is_moved ? other + from : own + lane);
  }
  return indices;
}

template <uint32_t kDistance>
inline void exchange(Vector (&rows)[kVectorWidth]) {
  if constexpr (kDistance > 0) {
#pragma GCC unroll 16
    for (uint32_t r = 0; r < kVectorWidth; ++r) {
      if (r & kDistance) continue;
      const Vector low = rows[r], high = rows[r + kDistance];
      rows[r] = __builtin_shuffle(low, high, make_exchange<kDistance, false>());
      rows[r + kDistance] = __builtin_shuffle(low, high, make_exchange<kDistance, true>());
    }
    exchange<kDistance / 2>(rows);
  }
}

// Writes the transpose of kVectorWidth x kVectorWidth values.
inline void transpose_square(const float* source, size_t source_stride, float* target, size_t target_stride) {
  Vector rows[kVectorWidth];
#pragma GCC unroll 16
  for (uint32_t r = 0; r < kVectorWidth; ++r) rows[r] = load(source + r * source_stride);
  exchange<kVectorWidth / 2>(rows);
#pragma GCC unroll 16
  for (uint32_t r = 0; r < kVectorWidth; ++r) store(target + r * target_stride, rows[r]);
}

struct Tile {
  const float* left;
  uint32_t depth;
  const float* panel;
  float* const* out;
  uint32_t offset;   // first column of the tile in the rows of `out`
  uint32_t skipped;  // leading columns of the panel that are not wanted
  uint32_t columns;
  Accumulate accumulate;
  float scale;
};

inline void store_whole(const Tile& tile, Vector sum, float* out) {
  switch (tile.accumulate) {
    case Accumulate::kSet: return store(out, sum);
    case Accumulate::kAdd: return store(out, sum + load(out));
    case Accumulate::kScale: return store(out, sum + load(out) * splat(tile.scale));
  }
}

void store_partial(const Tile& tile, const float* sums, float* out) {
  auto* target = reinterpret_cast<LooseFloat*>(out + tile.offset);
  for (uint32_t c = 0; c < tile.columns; ++c) {
    const float sum = sums[tile.skipped + c];
    if (tile.accumulate == Accumulate::kSet) {
      target[c] = sum;
    } else {
      target[c] = sum + target[c] * (tile.accumulate == Accumulate::kAdd ? 1.0f : tile.scale);
    }
  }
}

template <uint32_t kRows>
void multiply_tile(const Tile& tile) {
  Vector sums[kRows][2] = {};
  const float* right = tile.panel;
  for (uint32_t k = 0; k < tile.depth; ++k, right += kPanelColumns) {
    const Vector right0 = load(right);
    const Vector right1 = load(right + kVectorWidth);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kRows; ++r) {
      const Vector left = splat(tile.left[static_cast<size_t>(r) * tile.depth + k]);
      sums[r][0] += left * right0;
      sums[r][1] += left * right1;
    }
  }
  const bool is_whole = tile.columns == kPanelColumns;
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kRows; ++r) {
    if (is_whole) {
      store_whole(tile, sums[r][0], tile.out[r] + tile.offset);
      store_whole(tile, sums[r][1], tile.out[r] + tile.offset + kVectorWidth);
    } else {
      float flat[kPanelColumns];
      std::memcpy(flat, sums[r], sizeof flat);
      store_partial(tile, flat, tile.out[r]);
    }
  }
}

template <uint32_t kRows>
void multiply_last_rows(const Tile& tile, uint32_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows>(tile);
    multiply_last_rows<kRows - 1>(tile, rows);
  }
}

}  // namespace

void PanelMatrix::resize(uint32_t columns, uint32_t depth) {
  columns_ = columns;
  depth_ = depth;
  values_.resize(static_cast<size_t>(panels()) * kPanelColumns * depth);
  if (columns % kPanelColumns) {
    const size_t last = static_cast<size_t>(depth) * kPanelColumns;
    std::memset(values_.data() + values_.size() - last, 0, last * sizeof(float));
  }
}

void PanelMatrix::set_column(uint32_t column, const float* source) {
  float* target = values_.data() + static_cast<size_t>(column / kPanelColumns) * depth_ * kPanelColumns +
                  column % kPanelColumns;
  for (uint32_t k = 0; k < depth_; ++k) target[static_cast<size_t>(k) * kPanelColumns] = source[k];
}

void PanelMatrix::set_columns(uint32_t first, uint32_t count, const float* source) {
  uint32_t column = first;
  const uint32_t end = first + count;
  const bool is_whole = depth_ % kVectorWidth == 0;
  while (column < end) {
    const float* from = source + static_cast<size_t>(column - first) * depth_;
    if (!is_whole || column % kVectorWidth || column + kVectorWidth > end) {
      set_column(column++, from);
      continue;
    }
    float* target = values_.data() + static_cast<size_t>(column / kPanelColumns) * depth_ * kPanelColumns +
                    column % kPanelColumns;
    for (uint32_t k = 0; k < depth_; k += kVectorWidth) {
      transpose_square(from + k, depth_, target + static_cast<size_t>(k) * kPanelColumns, kPanelColumns);
    }
    column += kVectorWidth;
  }
}

void multiply_matrices(const MatrixProduct& product) {
  const uint32_t depth = product.right->depth();
  const uint32_t end = product.first_column + product.column_count;
  for (uint32_t column = product.first_column; column < end;) {
    const uint32_t skipped = column % kPanelColumns;
    const uint32_t count = std::min(kPanelColumns - skipped, end - column);
    Tile tile = {product.left, depth,   product.right->panel(column / kPanelColumns),
                 product.out,  column - product.first_column,
                 skipped,      count,   product.accumulate,
                 product.scale};
    uint32_t row = 0;
    for (; row + kRowBlock <= product.rows; row += kRowBlock) {
      multiply_tile<kRowBlock>(tile);
      tile.left += static_cast<size_t>(kRowBlock) * depth;
      tile.out += kRowBlock;
    }
    multiply_last_rows<kRowBlock - 1>(tile, product.rows - row);
    column += count;
  }
}

void multiply_eight_columns(const float* left, const float* right, uint32_t rows, uint32_t depth,
                            float (*out)[8]) {
  typedef float Row __attribute__((vector_size(32)));
  for (uint32_t first = 0; first < rows; first += 8) {
    Row sums[8] = {};
    for (uint32_t k = 0; k < depth; ++k) {
      Row values;
      std::memcpy(&values, right + 8 * static_cast<size_t>(k), sizeof values);
#pragma GCC unroll 8
      for (uint32_t r = 0; r < 8; ++r) sums[r] += values * (left[(first + r) * depth + k] - Row{});
    }
    std::memcpy(out + first, sums, sizeof sums);
  }
}

uint32_t choose_threads(uint64_t multiply_adds, uint32_t num_threads) {
  constexpr uint64_t kWorthSharing = 500'000;
  return multiply_adds < kWorthSharing ? 1 : num_threads;
}

}  // namespace halfbyte::gpu
