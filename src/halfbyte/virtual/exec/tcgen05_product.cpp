// Layouts of tensor memory: PTX ISA, "Data path layout organization" (layouts A to G) and "Block
// scaling"; CUTLASS cute/atom/mma_traits_sm100_frag.hpp.
#include "exec/tcgen05_product.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>

#include "machine/matrix_multiply.h"
#include "machine/thread_pool.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kMaxRows = 32;   // of one block
constexpr uint32_t kMaxDepth = 96;
constexpr uint32_t kMaxColumns = 256;
constexpr uint32_t kPartition = 32;  // lanes of one data path partition

// The part of a product that one partition of one CTA's tensor memory computes: it reads its own lanes
// of A (if in tensor memory) and its own copy of the scale factors, and writes its own lanes of D.
struct Block {
  Cta* cta;
  uint32_t lane;          // of its first row
  uint32_t rows;          // 32, or 16 where half of the lanes are used
  uint32_t left_row;      // first row of A, counted in the CTA
  uint32_t first_column;  // of B
  uint32_t columns;
  uint32_t right_set = 0;
};

// Right operands that have been scaled alike.
struct RightSet {
  uint32_t first_column;
  uint32_t columns;
  std::vector<uint32_t> scale_words;  // [lane of the partition][column]; empty when not scaled
  PanelMatrix panels;
};

// Column parts that lie in lanes of their own: 1, 2 (layouts B and E) or 4 (layout G).
uint32_t count_parts(const MmaRequest& request) {
  const MmaVariant& variant = request.variant;
  if (variant.cta_group == 2) return request.shape.rows == 128 ? 2 : 1;
  return variant.is_stationary ? 128 / request.shape.rows : 1;
}

std::vector<Block> list_blocks(const MmaRequest& request) {
  const uint32_t cta_rows = request.shape.rows / request.variant.cta_group;
  const uint32_t parts = count_parts(request);
  const uint32_t columns = request.shape.columns / parts;
  const bool is_half_used = parts == 1 && cta_rows == 64;
  const uint32_t rows = is_half_used ? 16 : 32;
  std::vector<Block> blocks;
  for (uint32_t c = 0; c < request.group.count; ++c) {
    for (uint32_t partition = 0; partition < 4; ++partition) {
      const uint32_t left_row = partition * rows % cta_rows;
      const uint32_t part = partition * rows / cta_rows;
      blocks.push_back({request.group.ctas[c], kPartition * partition + (is_half_used ? request.result.lane : 0),
                        rows, left_row, part * columns, columns});
    }
  }
  return blocks;
}

// Columns of scale factor words for `rows` rows; each word has four factors, K = 96 spans two words.
uint32_t count_scale_columns(const MmaShape& shape, uint32_t rows, uint32_t first_byte) {
  const uint32_t words = (first_byte + shape.scales + 3) / 4;
  const uint32_t per_word = (rows + kPartition - 1) / kPartition;
  return words == 1 ? per_word : (words - 1) * ((rows + 127) / 128 * 4) + per_word;
}

// Factor `index` along K of row `row`, from the words of one partition.
struct ScaleReader {
  const float* table;
  uint32_t first_byte;
  uint32_t word_stride;  // columns between consecutive words of one row

  ScaleReader(const MmaShape& shape, uint32_t rows, uint32_t byte)
      : table(scale_table(shape.scale_format)), first_byte(byte), word_stride((rows + 127) / 128 * 4) {}
  uint32_t column(uint32_t row, uint32_t index) const {
    return row / kPartition + (first_byte + index) / 4 * word_stride;
  }
  float read(uint32_t word, uint32_t index) const { return table[word >> ((first_byte + index) % 4 * 8) & 0xFF]; }
};

uint32_t cta_rows(const MmaRequest& request) { return request.shape.rows / request.variant.cta_group; }

// Bit n is set where .ws takes zero for column n of B (PTX ISA, "Zero-column mask descriptor").
std::array<bool, kMaxColumns> make_zero_columns(const MmaRequest& request) {
  std::array<bool, kMaxColumns> zeros = {};
  const uint64_t bits = request.zero_columns;
  if (!(bits >> 39 & 1)) return zeros;
  const uint32_t zero_run = static_cast<uint32_t>(bits >> 40 & 0xFF) + 1;
  const uint32_t used_run = static_cast<uint32_t>(bits >> 48 & 0xFF) + 1;
  const uint32_t parts = count_parts(request);
  const uint32_t columns = request.shape.columns / parts;
  for (uint32_t part = 0; part < parts; ++part) {
    const bool starts_with_zeros = bits >> (32 + part) & 1;
    const auto skipped = static_cast<uint32_t>(bits >> (8 * part) & 0xFF);
    for (uint32_t n = 0; n < columns; ++n) {
      const uint32_t position = (n + skipped) % (zero_run + used_run);
      zeros[part * columns + n] = starts_with_zeros ? position < zero_run : position >= used_run;
    }
  }
  return zeros;
}

class Product {
 public:
  void run(const MmaRequest& request);

 private:
  void choose_right_sets();
  uint32_t find_right_set(const Block& block);
  void fill_columns(uint32_t cta_index, uint32_t first, uint32_t count);
  void store_columns(uint32_t first, uint32_t count, float* values);
  void scale_columns(const RightSet& set, uint32_t first, uint32_t count, const float* values, float* scaled) const;
  void run_block(const Block& block);
  void decode_left(const Block& block, float* values) const;
  void scale_left(const Block& block, float* values) const;
  void add_to_accumulators(const Block& block, const float (*sums)[kMaxColumns]) const;
  bool is_disabled(const Block& block, uint32_t lane) const;

  const MmaRequest* request_ = nullptr;
  std::vector<Block> blocks_;
  std::vector<std::unique_ptr<RightSet>> sets_;
  uint32_t used_sets_ = 0;  // the rest keep their storage for the next product
  std::vector<uint32_t> words_;  // scale factors of the block being looked at
  std::array<bool, kMaxColumns> zero_columns_ = {};
};

uint32_t Product::find_right_set(const Block& block) {
  const MmaShape& shape = request_->shape;
  std::vector<uint32_t>& words = words_;
  words.clear();
  uint32_t first = 0, columns = shape.columns;
  if (shape.scales) {
    first = block.first_column;
    columns = block.columns;
    const uint32_t count = count_right_scale_columns(*request_);
    words.resize(kPartition * count);
    for (uint32_t lane = 0; lane < kPartition; ++lane) {
      const uint32_t* row = block.cta->tmem().row(block.lane / kPartition * kPartition + lane);
      std::memcpy(words.data() + lane * count, row + request_->right_scales.column, count * sizeof(uint32_t));
    }
  }
  for (uint32_t i = 0; i < used_sets_; ++i) {
    if (sets_[i]->first_column == first && sets_[i]->scale_words == words) return i;
  }
  if (used_sets_ == sets_.size()) sets_.push_back(std::make_unique<RightSet>());
  RightSet& set = *sets_[used_sets_];
  set.first_column = first;
  set.columns = columns;
  set.scale_words = words;
  set.panels.resize(columns, shape.depth);
  return used_sets_++;
}

void Product::choose_right_sets() {
  used_sets_ = 0;
  for (Block& block : blocks_) block.right_set = find_right_set(block);
}

// Puts decoded columns of B, scaled, into every set that has them.
void Product::store_columns(uint32_t first, uint32_t count, float* values) {
  const MmaShape& shape = request_->shape;
  if (shape.negates_right) {
    for (uint32_t i = 0; i < count * shape.depth; ++i) values[i] = -values[i];
  }
  float scaled[kPartition * kMaxDepth];
  for (uint32_t i = 0; i < used_sets_; ++i) {
    RightSet& set = *sets_[i];
    const uint32_t begin = std::max(first, set.first_column);
    const uint32_t end = std::min(first + count, set.first_column + set.columns);
    if (begin >= end) continue;
    const float* source = values + (begin - first) * shape.depth;
    if (shape.scales) {
      scale_columns(set, begin - set.first_column, end - begin, source, scaled);
      source = scaled;
    }
    set.panels.set_columns(begin - set.first_column, end - begin, source);
  }
}

void Product::scale_columns(const RightSet& set, uint32_t first, uint32_t count, const float* values,
                            float* scaled) const {
  const MmaShape& shape = request_->shape;
  const ScaleReader reader(shape, set.columns, shape.right_scale_byte);
  const size_t stride = set.scale_words.size() / kPartition;
  const uint32_t block = shape.depth / shape.scales;
  for (uint32_t column = first; column < first + count; ++column) {
    const uint32_t* words = set.scale_words.data() + column % kPartition * stride;
    for (uint32_t s = 0; s < shape.scales; ++s) {
      const float scale = reader.read(words[reader.column(column, s)], s);
      for (uint32_t k = 0; k < block; ++k) *scaled++ = *values++ * scale;
    }
  }
}

// Columns [first, first + count) of those that CTA `cta_index` of the group holds.
void Product::fill_columns(uint32_t cta_index, uint32_t first, uint32_t count) {
  const MmaShape& shape = request_->shape;
  const OperandExtent extent = find_right_extent(*request_);
  const uint32_t shift = static_cast<uint32_t>(request_->zero_columns >> 56 & 0x3F);
  const uint32_t column = cta_index * (shape.columns / request_->variant.cta_group) + first;
  uint8_t bytes[kPartition * 128];
  gather_operand(request_->group.ctas[cta_index]->shared, request_->right, extent, first + shift, count, bytes);
  float values[kPartition * kMaxDepth];
  if (extent.is_mn_major) {
    float row[kPartition];
    for (uint32_t k = 0; k < shape.depth; ++k) {
      decode_elements(shape.right, bytes + k * count * extent.element_bytes, count, row);
      for (uint32_t n = 0; n < count; ++n) values[n * shape.depth + k] = row[n];
    }
  } else {
    decode_elements(shape.right, bytes, count * shape.depth, values);
  }
  for (uint32_t n = 0; n < count; ++n) {
    if (zero_columns_[column + n]) std::fill_n(values + n * shape.depth, shape.depth, 0.0f);
  }
  store_columns(column, count, values);
}

void Product::decode_left(const Block& block, float* values) const {
  const MmaShape& shape = request_->shape;
  const OperandExtent extent = find_left_extent(*request_);
  uint8_t bytes[kMaxRows * 128];
  if (request_->variant.left_in_tensor_memory) {
    for (uint32_t r = 0; r < block.rows; ++r) {
      const uint32_t* row = block.cta->tmem().row(block.lane + r) + request_->left_place.column;
      std::memcpy(bytes + r * extent.depth_bytes, row, extent.depth_bytes);
    }
    decode_elements(shape.left, bytes, block.rows * shape.depth, values);
    return;
  }
  gather_operand(block.cta->shared, request_->left, extent, block.left_row, block.rows, bytes);
  if (!extent.is_mn_major) return decode_elements(shape.left, bytes, block.rows * shape.depth, values);
  float row[kMaxRows];
  for (uint32_t k = 0; k < shape.depth; ++k) {
    decode_elements(shape.left, bytes + k * block.rows * extent.element_bytes, block.rows, row);
    for (uint32_t r = 0; r < block.rows; ++r) values[r * shape.depth + k] = row[r];
  }
}

void Product::scale_left(const Block& block, float* values) const {
  const MmaShape& shape = request_->shape;
  if (shape.negates_left) {
    for (uint32_t i = 0; i < block.rows * shape.depth; ++i) values[i] = -values[i];
  }
  if (!shape.scales) return;
  const ScaleReader reader(shape, cta_rows(*request_), shape.left_scale_byte);
  const uint32_t depth = shape.depth / shape.scales;
  const uint32_t partition = block.lane / kPartition * kPartition;
  for (uint32_t r = 0; r < block.rows; ++r) {
    const uint32_t row = block.left_row + r;
    const uint32_t* words = block.cta->tmem().row(partition + row % kPartition) + request_->left_scales.column;
    for (uint32_t s = 0; s < shape.scales; ++s) {
      const float scale = reader.read(words[reader.column(row, s)], s);
      float* target = values + r * shape.depth + s * depth;
      for (uint32_t k = 0; k < depth; ++k) target[k] *= scale;
    }
  }
}

bool Product::is_disabled(const Block& block, uint32_t lane) const {
  const uint32_t first = request_->group.count == 2 && block.cta == request_->group.ctas[1] ? 4 : 0;
  return request_->disabled_lanes[first + lane / 32] >> (lane % 32) & 1;
}

// Accumulators of f16 and s32.
void Product::add_to_accumulators(const Block& block, const float (*sums)[kMaxColumns]) const {
  const MmaShape& shape = request_->shape;
  for (uint32_t r = 0; r < block.rows; ++r) {
    if (is_disabled(block, block.lane + r)) continue;
    uint32_t* row = block.cta->tmem().row(block.lane + r) + request_->result.column;
    for (uint32_t n = 0; n < block.columns; ++n) {
      if (shape.accumulator == Accumulator::kF16) {
        float sum = sums[r][n];
        if (request_->accumulates) sum += std::ldexp(decode_half(static_cast<uint16_t>(row[n])), -static_cast<int>(request_->scale_shift));
        row[n] = encode_half(sum);
      } else {
        int64_t sum = static_cast<int64_t>(sums[r][n]);
        if (request_->accumulates) sum += static_cast<int32_t>(row[n]);
        row[n] = static_cast<uint32_t>(shape.saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
      }
    }
  }
}

void Product::run_block(const Block& block) {
  const MmaShape& shape = request_->shape;
  alignas(64) float left[kMaxRows * kMaxDepth];
  decode_left(block, left);
  scale_left(block, left);
  const RightSet& set = *sets_[block.right_set];
  const bool is_direct = shape.accumulator == Accumulator::kF32;
  alignas(64) float sums[kMaxRows][kMaxColumns];
  float* out[kMaxRows];
  for (uint32_t r = 0; r < block.rows; ++r) {
    uint32_t* cells = block.cta->tmem().row(block.lane + r) + request_->result.column;
    out[r] = is_direct && !is_disabled(block, block.lane + r) ? reinterpret_cast<float*>(cells) : sums[r];
  }
  const Accumulate mode = !is_direct || !request_->accumulates ? Accumulate::kSet
                          : request_->scale_shift              ? Accumulate::kScale
                                                               : Accumulate::kAdd;
  multiply_matrices({left, block.rows, &set.panels, block.first_column - set.first_column, block.columns, out,
                     mode, std::ldexp(1.0f, -static_cast<int>(request_->scale_shift))});
  if (!is_direct) add_to_accumulators(block, sums);
}

void Product::run(const MmaRequest& request) {
  request_ = &request;
  blocks_ = list_blocks(request);
  zero_columns_ = make_zero_columns(request);
  choose_right_sets();
  const MmaShape& shape = request.shape;
  const uint64_t work = static_cast<uint64_t>(shape.rows) * shape.columns * shape.depth;
  const uint32_t threads = choose_threads(work, request.group.leader().simulation->config.num_threads);
  const uint32_t cta_columns = shape.columns / request.variant.cta_group;
  const uint32_t pieces = (cta_columns + kPartition - 1) / kPartition;
  run_parallel(threads, pieces * request.group.count, [&](uint32_t task) {
    const uint32_t first = task % pieces * kPartition;
    fill_columns(task / pieces, first, std::min(kPartition, cta_columns - first));
  });
  run_parallel(threads, static_cast<uint32_t>(blocks_.size()), [&](uint32_t task) { run_block(blocks_[task]); });
}

}  // namespace

OperandExtent find_left_extent(const MmaRequest& request) {
  const uint32_t bits = element_bits(request.shape.left);
  return {cta_rows(request), request.shape.depth * bits / 8, std::max(1u, bits / 8), request.shape.left_is_mn_major};
}

OperandExtent find_right_extent(const MmaRequest& request) {
  const uint32_t bits = element_bits(request.shape.right);
  const uint32_t shift = static_cast<uint32_t>(request.zero_columns >> 56 & 0x3F);
  return {request.shape.columns / request.variant.cta_group + shift, request.shape.depth * bits / 8,
          std::max(1u, bits / 8), request.shape.right_is_mn_major};
}

uint32_t count_result_columns(const MmaRequest& request) { return request.shape.columns / count_parts(request); }

uint32_t count_left_columns(const MmaRequest& request) {
  return request.shape.depth * element_bits(request.shape.left) / 32;
}

uint32_t count_left_scale_columns(const MmaRequest& request) {
  return count_scale_columns(request.shape, cta_rows(request), request.shape.left_scale_byte);
}

uint32_t count_right_scale_columns(const MmaRequest& request) {
  return count_scale_columns(request.shape, count_result_columns(request), request.shape.right_scale_byte);
}

void shift_rows_down(TensorMemory& memory, uint32_t first_lane, TensorPlace place, uint32_t columns) {
  for (uint32_t lane = first_lane; lane + 1 < first_lane + kPartition; ++lane) {
    std::memcpy(memory.row(lane) + place.column, memory.row(lane + 1) + place.column,
                columns * sizeof(uint32_t));
  }
}

void multiply(const MmaRequest& request) {
  static thread_local Product product;
  product.run(request);
  if (!request.variant.shifts_left) return;
  for (uint32_t i = 0; i < request.group.count; ++i) {  // .ashift: A moves when the product is done
    TensorMemory& memory = request.group.ctas[i]->tmem();
    for (uint32_t lane = 0; lane < TensorMemory::kLanes; lane += kPartition) {
      shift_rows_down(memory, lane, request.left_place, count_left_columns(request));
    }
  }
}

}  // namespace halfbyte::gpu
