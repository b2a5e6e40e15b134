// mma.sync: one warp multiplies fragments in its registers.
//
// Fragment layouts: PTX ISA, "Matrix fragments for mma.*"; CUTLASS cute/atom/mma_traits_sm{70,80,89,90,
// 120}.hpp. But for the oldest shape (m8n8k4 of f16) they follow one rule: register r of the four lanes
// of quad q holds 16 adjacent bytes along K, from row q + 8 * (r % 2) of A, or column q of B; C and D
// have two adjacent columns per lane, rows q and q + 8.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "machine/matrix_multiply.h"
#include "machine/number_tables.h"
#include "machine/warp.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kMaxDepth = 256;
constexpr uint32_t kColumns = 8;

enum class Result : int64_t { kF16 = 0, kF32 = 1, kS32 = 2, kF64 = 3 };
enum class BitOperation : int64_t { kNone = 0, kXor = 1, kAnd = 2 };

// The attributes, in this order; ptx/forms/mma_sync.py fills them.
struct Shape {
  uint32_t rows;
  uint32_t depth;
  ElementFormat left;
  ElementFormat right;
  Result result;
  bool saturates;
  BitOperation bits;
  uint32_t scales;  // factors per row along K; 0: not block scaled
  ScaleFormat scale_format;
};

Shape read_shape(const Instruction& in) {
  const int64_t* a = in.attributes;
  return {static_cast<uint32_t>(a[0]),     static_cast<uint32_t>(a[1]),
          static_cast<ElementFormat>(a[2]), static_cast<ElementFormat>(a[3]),
          static_cast<Result>(a[4]),        a[5] != 0,
          static_cast<BitOperation>(a[6]),  static_cast<uint32_t>(a[7]),
          static_cast<ScaleFormat>(a[8])};
}

// Where the registers of each operand begin in the operand list.
struct Operands {
  const int32_t* d;
  const int32_t* a;
  const int32_t* b;
  const int32_t* c;
  const int32_t* scales;  // data A, byte and thread selectors, data B, selectors
};

Operands locate_operands(const Instruction& in, uint32_t d, uint32_t a, uint32_t b) {
  const int32_t* o = in.operands;
  return {o, o + d, o + d + a, o + d + a + b, o + 2 * d + a + b};
}

void check_whole_warp(Warp& warp, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) {
    raise_fault(warp, in, first_lane(mask), "partial-warp",
                format_text("lanes 0x%08x execute a matrix instruction that needs all 32", mask));
  }
}

const uint8_t* read_bytes(Warp& warp, int32_t slot) {
  return reinterpret_cast<const uint8_t*>(warp.read32(slot));
}

// Values of A by row, and of B by k with eight columns each.
struct Decoded {
  alignas(64) float left[16 * kMaxDepth];
  alignas(64) float right[kColumns * kMaxDepth];
};

// One register of all lanes at a time: `run` elements of each quad.
void decode_left(Warp& warp, const Shape& shape, const int32_t* slots, Decoded& out) {
  const uint32_t run = 128 / element_bits(shape.left);
  const uint32_t row_groups = shape.rows / 8;
  const uint32_t registers = shape.depth / run * row_groups;
  alignas(64) float values[8 * 128];
  for (uint32_t r = 0; r < registers; ++r) {
    decode_elements(shape.left, read_bytes(warp, slots[r]), 8 * run, values);
    float* target = out.left + 8 * (r % row_groups) * shape.depth + r / row_groups * run;
    for (uint32_t quad = 0; quad < 8; ++quad) {
      for (uint32_t i = 0; i < run; i += 4) {
        std::memcpy(target + quad * shape.depth + i, values + quad * run + i, 4 * sizeof(float));
      }
    }
  }
}

void decode_right(Warp& warp, const Shape& shape, const int32_t* slots, Decoded& out) {
  const uint32_t run = 128 / element_bits(shape.right);
  alignas(64) float values[8 * 128];
  for (uint32_t r = 0; r < shape.depth / run; ++r) {
    decode_elements(shape.right, read_bytes(warp, slots[r]), 8 * run, values);
    float* target = out.right + r * run * kColumns;
    for (uint32_t i = 0; i < run; ++i) {
      for (uint32_t quad = 0; quad < 8; ++quad) target[i * kColumns + quad] = values[quad * run + i];
    }
  }
}

// Byte `byte` of the scale data that lane 4 * quad + thread holds.
uint32_t scale_byte(const uint8_t* data, uint32_t quad, uint32_t thread, uint32_t byte) {
  return data[4 * (4 * quad + thread) + byte];
}

void check_selectors(Warp& warp, const Instruction& in, const Shape& shape, uint32_t byte,
                     uint32_t thread, uint32_t threads, const char* matrix) {
  const uint32_t last = 4 - shape.scales;
  const bool is_aligned = shape.scales != 2 || byte % 2 == 0;
  if (byte <= last && is_aligned && thread < threads) return;
  raise_fault(warp, in, 0, "scale-selector",
              format_text("byte-id %u and thread-id %u of matrix %s are not legal with %u scale factors per row",
                          byte, thread, matrix, shape.scales));
}

// Scale data of A comes from the lane pair 2 * thread-id of each quad (rows q and q + 8), that of B from
// lane thread-id (PTX ISA, "Block scaling for mma.sync").
void apply_scales(Warp& warp, const Instruction& in, const Shape& shape, const int32_t* slots,
                  Decoded& values) {
  const float* table = scale_table(shape.scale_format);
  const uint32_t block = shape.depth / shape.scales;
  const uint8_t* left = read_bytes(warp, slots[0]);
  const uint32_t left_byte = warp.uniform32(in, slots[1], kFullMask, "byte-id-a");
  const uint32_t left_thread = warp.uniform32(in, slots[2], kFullMask, "thread-id-a");
  const uint8_t* right = read_bytes(warp, slots[3]);
  const uint32_t right_byte = warp.uniform32(in, slots[4], kFullMask, "byte-id-b");
  const uint32_t right_thread = warp.uniform32(in, slots[5], kFullMask, "thread-id-b");
  check_selectors(warp, in, shape, left_byte, left_thread, 2, "A");
  check_selectors(warp, in, shape, right_byte, right_thread, 4, "B");
  for (uint32_t s = 0; s < shape.scales; ++s) {
    for (uint32_t row = 0; row < shape.rows; ++row) {
      const float scale = table[scale_byte(left, row % 8, 2 * left_thread + row / 8, left_byte + s)];
      float* target = values.left + row * shape.depth + s * block;
      for (uint32_t k = 0; k < block; ++k) target[k] *= scale;
    }
    float scales[kColumns];
    for (uint32_t n = 0; n < kColumns; ++n) scales[n] = table[scale_byte(right, n, right_thread, right_byte + s)];
    float* target = values.right + s * block * kColumns;
    for (uint32_t i = 0; i < block * kColumns; ++i) target[i] *= scales[i % kColumns];
  }
}

// Turns sums of products of bits into sums of exclusive ors: |a| + |b| - 2ab.
void count_differing_bits(const Shape& shape, const Decoded& values, float (*product)[kColumns]) {
  for (uint32_t row = 0; row < shape.rows; ++row) {
    for (uint32_t n = 0; n < kColumns; ++n) {
      float ones = 0;
      for (uint32_t k = 0; k < shape.depth; ++k) {
        ones += values.left[row * shape.depth + k] + values.right[k * kColumns + n];
      }
      product[row][n] = ones - 2 * product[row][n];
    }
  }
}

uint32_t add_integer(uint32_t old, float product, bool saturates) {
  const int64_t sum = static_cast<int64_t>(static_cast<int32_t>(old)) + static_cast<int64_t>(product);
  return static_cast<uint32_t>(saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
}

// Accumulators in the making: D may be any of the registers of C, in any order.
using Results = uint32_t[4][kLanes];

// D = product + C. Register i of lane 4q + j is row q + 8 * (i / 2), column 2j + i % 2.
void add_words(Warp& warp, const Shape& shape, const Operands& operands,
               const float (*product)[kColumns], Results& results) {
  for (uint32_t i = 0; i < shape.rows / 4; ++i) {
    const uint32_t* c = warp.read32(operands.c[i]);
    uint32_t* d = results[i];
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float sum = product[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
      d[lane] = shape.result == Result::kS32 ? add_integer(c[lane], sum, shape.saturates)
                                             : bit_cast<uint32_t>(sum + bit_cast<float>(c[lane]));
    }
  }
}

void add_halves(Warp& warp, const Shape& shape, const Operands& operands,
                const float (*product)[kColumns], Results& results) {
  for (uint32_t i = 0; i < shape.rows / 8; ++i) {
    const uint32_t* c = warp.read32(operands.c[i]);
    uint32_t* d = results[i];
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float* pair = product[lane / 4 + 8 * i] + 2 * (lane % 4);
      const uint32_t low = encode_half(pair[0] + decode_half(static_cast<uint16_t>(c[lane])));
      const uint32_t high = encode_half(pair[1] + decode_half(static_cast<uint16_t>(c[lane] >> 16)));
      d[lane] = low | high << 16;
    }
  }
}

Outcome mma_sync(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  const uint32_t d = shape.rows / (shape.result == Result::kF16 ? 8 : 4);
  const uint32_t a = shape.rows * shape.depth * element_bits(shape.left) / 1024;
  const uint32_t b = kColumns * shape.depth * element_bits(shape.right) / 1024;
  const Operands operands = locate_operands(in, d, a, b);
  Decoded values;
  decode_left(warp, shape, operands.a, values);
  decode_right(warp, shape, operands.b, values);
  if (shape.scales) apply_scales(warp, in, shape, operands.scales, values);
  alignas(64) float product[16][kColumns];
  multiply_eight_columns(values.left, values.right, shape.rows, shape.depth, product);
  if (shape.bits == BitOperation::kXor) count_differing_bits(shape, values, product);
  Results results;
  if (shape.result == Result::kF16) {
    add_halves(warp, shape, operands, product, results);
  } else {
    add_words(warp, shape, operands, product, results);
  }
  for (uint32_t i = 0; i < d; ++i) std::memcpy(warp.write32(operands.d[i]), results[i], sizeof results[i]);
  return Outcome::kNext;
}

// Elements of 64 bits: register r holds k = 4 * (r / (rows / 8)) + lane % 4. Every step is a fused
// multiply-add, as the fp64 units do it.
Outcome mma_sync_f64(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  const uint32_t row_groups = shape.rows / 8;
  const Operands operands = locate_operands(in, shape.rows / 4, shape.depth / 4 * row_groups, shape.depth / 4);
  auto read = [&](int32_t slot, uint32_t lane) { return bit_cast<double>(warp.read64(slot)[lane]); };
  double results[4][kLanes];
  for (uint32_t i = 0; i < shape.rows / 4; ++i) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t column = 2 * (lane % 4) + i % 2;
      double sum = read(operands.c[i], lane);
      for (uint32_t k = 0; k < shape.depth; ++k) {
        const double left = read(operands.a[k / 4 * row_groups + i / 2], lane / 4 * 4 + k % 4);
        const double right = read(operands.b[k / 4], column * 4 + k % 4);
        sum = std::fma(left, right, sum);
      }
      results[i][lane] = sum;
    }
  }
  for (uint32_t i = 0; i < shape.rows / 4; ++i) {
    std::memcpy(warp.write64(operands.d[i]), results[i], sizeof results[i]);
  }
  return Outcome::kNext;
}

// m8n8k4 of f16: four products, one per quad pair (lanes 4q .. 4q + 3 and 16 + 4q ..).
struct QuadPair {
  uint32_t quad;
  uint32_t lane(uint32_t thread) const { return 4 * quad + thread % 4 + 16 * (thread / 4); }
};

uint16_t read_half(Warp& warp, const int32_t* slots, uint32_t lane, uint32_t index) {
  return static_cast<uint16_t>(warp.read32(slots[index / 2])[lane] >> (16 * (index % 2)));
}

// Element (row, k) of a row-major A, and (column, k) of a column-major B: thread `row` holds its four k.
// The other order: thread k + 4 * (row / 4) holds four rows.
float read_old_element(Warp& warp, const int32_t* slots, QuadPair pair, bool is_k_major, uint32_t row,
                       uint32_t k) {
  const uint32_t thread = is_k_major ? row : k + 4 * (row / 4);
  return decode_half(read_half(warp, slots, pair.lane(thread), is_k_major ? k : row % 4));
}

// Thread and index within it of accumulator (row, column).
void locate_old_accumulator(bool is_half, uint32_t row, uint32_t column, uint32_t& thread, uint32_t& index) {
  if (is_half) {
    thread = row;
    index = column;
    return;
  }
  thread = row % 2 + 2 * (column / 2 % 2) + 4 * (row / 4);
  index = column % 2 + 2 * (row / 2 % 2) + 4 * (column / 4);
}

// Attributes: result type, A row major, B column major.
Outcome mma_sync_m8n8k4(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const bool is_half = static_cast<Result>(in.attributes[0]) == Result::kF16;
  const Operands operands = locate_operands(in, is_half ? 4 : 8, 2, 2);
  uint32_t results[8][kLanes] = {};
  for (uint32_t quad = 0; quad < 4; ++quad) {
    const QuadPair pair = {quad};
    for (uint32_t row = 0; row < 8; ++row) {
      for (uint32_t column = 0; column < kColumns; ++column) {
        float sum = 0;
        for (uint32_t k = 0; k < 4; ++k) {
          sum += read_old_element(warp, operands.a, pair, in.attributes[1], row, k) *
                 read_old_element(warp, operands.b, pair, in.attributes[2], column, k);
        }
        uint32_t thread, index;
        locate_old_accumulator(is_half, row, column, thread, index);
        const uint32_t lane = pair.lane(thread);
        if (is_half) {
          const uint32_t half = encode_half(sum + decode_half(read_half(warp, operands.c, lane, index)));
          results[index / 2][lane] |= half << (16 * (index % 2));
        } else {
          results[index][lane] = bit_cast<uint32_t>(sum + bit_cast<float>(warp.read32(operands.c[index])[lane]));
        }
      }
    }
  }
  for (uint32_t i = 0; i < (is_half ? 4 : 8); ++i) {
    std::memcpy(warp.write32(operands.d[i]), results[i], sizeof results[i]);
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("mma.sync", mma_sync);
HALFBYTE_HANDLER("mma.sync.f64", mma_sync_f64);
HALFBYTE_HANDLER("mma.sync.m8n8k4", mma_sync_m8n8k4);

}  // namespace
}  // namespace halfbyte::gpu
