// wgmma.mma_async, .fence, .commit_group, .wait_group: products of the four warps of a warpgroup.
//
// PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate"; CUTLASS
// cute/atom/mma_traits_sm90_gmma.hpp. A product starts when all four warps have issued it, in order, and
// is computed when its turn in the warpgroup's pipe is over: shared memory and accumulators are read and
// accumulators written then. A in registers is taken when issued. A program that reads the accumulators
// without wgmma.wait_group finds what they held before.
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "machine/access.h"
#include "machine/matrix_multiply.h"
#include "machine/shared_descriptor.h"
#include "machine/simulation.h"
#include "machine/thread_pool.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kWarps = 4;
constexpr uint32_t kRows = 64;
constexpr uint32_t kWarpRows = 16;
constexpr uint32_t kLeftRegisters = 4;

enum class Result : int64_t { kF16 = 0, kF32 = 1, kS32 = 2 };

// The attributes, in this order; ptx/forms/wgmma.py fills them.
struct Shape {
  uint32_t columns;
  uint32_t depth;
  ElementFormat left;
  ElementFormat right;
  Result result;
  bool saturates;
  bool left_in_registers;
  uint32_t immediates;  // operands after scale-d: two scales, then transpositions
};

Shape read_shape(const Instruction& in) {
  const int64_t* a = in.attributes;
  return {static_cast<uint32_t>(a[0]),      static_cast<uint32_t>(a[1]), static_cast<ElementFormat>(a[2]),
          static_cast<ElementFormat>(a[3]), static_cast<Result>(a[4]),   a[5] != 0,
          a[6] != 0,                        static_cast<uint32_t>(a[7])};
}

uint32_t count_result_registers(const Shape& shape) { return shape.columns / (shape.result == Result::kF16 ? 4 : 2); }

// One wgmma.mma_async as the warps issue it.
struct Product {
  Shape shape;
  const Instruction* in;
  uint64_t descriptors[2];
  bool accumulates;
  bool negates = false;  // the product of both scales is -1
  bool transposes_left = false;
  bool transposes_right = false;
  uint32_t arrived = 0;  // warps
  uint32_t left_registers[kWarps][kLeftRegisters][kLanes];
};

// What the four warps share.
struct Warpgroup {
  Warp* warps[kWarps] = {};
  std::deque<std::shared_ptr<Product>> products;  // issued by some warp, not by all
  uint64_t first_product = 0;                     // number of products.front()
  uint64_t issued[kWarps] = {};                   // products issued by each warp
  uint64_t completed = 0;
  std::vector<uint64_t> groups[kWarps];  // products issued when each group was committed
  AsyncPipe pipe;
  WaitQueue queue;
};

Warpgroup& find_warpgroup(Warp& warp, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) {
    raise_fault(warp, in, first_lane(mask), "partial-warp",
                format_text("lanes 0x%08x execute a warpgroup instruction that needs all 32", mask));
  }
  if (!warp.wgmma_groups) {
    const uint32_t first = warp.index / kWarps * kWarps;
    if (first + kWarps > warp.cta->warps.size()) {
      raise_fault(warp, in, 0, "partial-warpgroup",
                  format_text("warp %u belongs to a warpgroup of %zu warps, 4 wanted", warp.index,
                              warp.cta->warps.size() - first));
    }
    auto group = std::make_shared<Warpgroup>();
    for (uint32_t i = 0; i < kWarps; ++i) {
      group->warps[i] = warp.cta->warps[first + i].get();
      group->warps[i]->wgmma_groups = group;
    }
  }
  return *static_cast<Warpgroup*>(warp.wgmma_groups.get());
}

// The operands that all four warps must agree on.
std::shared_ptr<Product> read_product(Warp& warp, const Instruction& in) {
  auto product = std::make_shared<Product>();
  product->shape = read_shape(in);
  product->in = &in;
  const Shape& shape = product->shape;
  const int32_t* next = in.operands + count_result_registers(shape);
  if (shape.left_in_registers) {
    next += kLeftRegisters;
  } else {
    product->descriptors[0] = warp.uniform64(in, *next++, kFullMask, "a-desc");
  }
  product->descriptors[1] = warp.uniform64(in, *next++, kFullMask, "b-desc");
  const uint32_t accumulates = warp.predicate(*next++);
  if (accumulates != 0 && accumulates != kFullMask) {
    raise_fault(warp, in, 0, "not-uniform", "scale-d differs between the lanes of the warp");
  }
  product->accumulates = accumulates != 0;
  if (shape.immediates >= 2) product->negates = next[0] * next[1] < 0;
  if (shape.immediates == 4) product->transposes_left = next[2] != 0;
  if (shape.immediates >= 3) product->transposes_right = next[shape.immediates - 1] != 0;
  return product;
}

// The product that this warp's next wgmma is: made by the first warp to come, compared by the others.
Product& join_product(Warp& warp, const Instruction& in, Warpgroup& group, uint32_t own) {
  const uint64_t position = group.issued[own]++ - group.first_product;
  std::shared_ptr<Product> product = read_product(warp, in);
  if (position == group.products.size()) group.products.push_back(product);
  Product& joined = *group.products[position];
  const bool has_left = joined.shape.left_in_registers || joined.descriptors[0] == product->descriptors[0];
  if (joined.in != &in || !has_left || joined.descriptors[1] != product->descriptors[1] ||
      joined.accumulates != product->accumulates) {
    raise_fault(warp, in, 0, "warpgroup-disagrees",
                format_text("the warps of a warpgroup execute different wgmma.mma_async (instruction %d here, %d in "
                            "another warp), or with different descriptors or scale-d",
                            in.index, joined.in->index));
  }
  if (joined.shape.left_in_registers) {
    const int32_t* slots = in.operands + count_result_registers(joined.shape);
    for (uint32_t i = 0; i < kLeftRegisters; ++i) {
      std::memcpy(joined.left_registers[own][i], warp.read32(slots[i]), sizeof joined.left_registers[own][i]);
    }
  }
  joined.arrived |= 1u << own;
  return joined;
}

OperandExtent find_extent(const Shape& shape, ElementFormat format, uint32_t rows, bool is_mn_major) {
  const uint32_t bits = element_bits(format);
  return {rows, shape.depth * bits / 8, std::max(1u, bits / 8), is_mn_major};
}

// Element rows [row][depth] of an operand in shared memory.
void decode_shared(const uint8_t* shared, uint64_t bits, ElementFormat format, const OperandExtent& extent,
                   uint32_t depth, std::vector<float>& values) {
  SharedDescriptor descriptor;
  decode_descriptor_sm90(bits, descriptor);
  std::vector<uint8_t> bytes(static_cast<size_t>(extent.rows) * extent.depth_bytes);
  gather_operand(shared, descriptor, extent, 0, extent.rows, bytes.data());
  values.resize(static_cast<size_t>(extent.rows) * depth);
  if (!extent.is_mn_major) return decode_elements(format, bytes.data(), extent.rows * depth, values.data());
  std::vector<float> row(extent.rows);
  for (uint32_t k = 0; k < depth; ++k) {
    decode_elements(format, bytes.data() + k * extent.rows * extent.element_bytes, extent.rows, row.data());
    for (uint32_t r = 0; r < extent.rows; ++r) values[r * depth + k] = row[r];
  }
}

// Fragments of A as for mma.sync: register r of quad q holds 16 bytes along K of row q + 8 * (r % 2).
void decode_left_registers(const Product& product, std::vector<float>& values) {
  const uint32_t depth = product.shape.depth;
  const uint32_t run = 128 / element_bits(product.shape.left);
  values.resize(static_cast<size_t>(kRows) * depth);
  for (uint32_t w = 0; w < kWarps; ++w) {
    for (uint32_t r = 0; r < kLeftRegisters; ++r) {
      const auto* bytes = reinterpret_cast<const uint8_t*>(product.left_registers[w][r]);
      for (uint32_t quad = 0; quad < 8; ++quad) {
        const uint32_t row = kWarpRows * w + quad + 8 * (r % 2);
        decode_elements(product.shape.left, bytes + 16 * quad, run, values.data() + row * depth + r / 2 * run);
      }
    }
  }
}

// Even columns of each group of eight first: what one accumulator register of a quad holds is then
// adjacent in the product.
inline uint32_t permute_column(uint32_t column) {
  return column / 8 * 8 + column % 8 / 2 + column % 2 * 4;
}

// D = product (+ D). Register i of lane 4q + t: row q + 8 * (i / 2 % 2), column 8 * (i / 4) + 2t + i % 2.
void add_words(Warp& warp, const Product& product, const float* sums) {
  const Shape& shape = product.shape;
  for (uint32_t i = 0; i < shape.columns / 2; ++i) {
    uint32_t* d = warp.write32(product.in->operands[i]);
    const float* source = sums + i / 2 % 2 * 8 * shape.columns + i / 4 * 8 + i % 2 * 4;
    for (uint32_t quad = 0; quad < 8; ++quad, source += shape.columns) {
      for (uint32_t t = 0; t < 4; ++t) {
        uint32_t& target = d[4 * quad + t];
        if (shape.result == Result::kF32) {
          target = bit_cast<uint32_t>(product.accumulates ? source[t] + bit_cast<float>(target) : source[t]);
        } else {
          int64_t sum = static_cast<int64_t>(source[t]);
          if (product.accumulates) sum += static_cast<int32_t>(target);
          target = static_cast<uint32_t>(shape.saturates ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
        }
      }
    }
  }
}

// Register i holds the pair of columns 8 * (i / 2) + 2t of row q + 8 * (i % 2).
void add_halves(Warp& warp, const Product& product, const float* sums) {
  const Shape& shape = product.shape;
  for (uint32_t i = 0; i < shape.columns / 4; ++i) {
    uint32_t* d = warp.write32(product.in->operands[i]);
    const float* source = sums + i % 2 * 8 * shape.columns + i / 2 * 8;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const float* pair = source + lane / 4 * shape.columns + lane % 4;
      float low = pair[0], high = pair[4];
      if (product.accumulates) {
        low += decode_half(static_cast<uint16_t>(d[lane]));
        high += decode_half(static_cast<uint16_t>(d[lane] >> 16));
      }
      d[lane] = encode_half(low) | static_cast<uint32_t>(encode_half(high)) << 16;
    }
  }
}

// Buffers of the product being computed; they keep their storage for the next.
struct Scratch {
  std::vector<float> left, right, permuted, sums;
  PanelMatrix panels;
};

void multiply(const Warpgroup& group, const Product& product) {
  static thread_local Scratch kept;
  Scratch& scratch = kept;  // the tasks below run on other threads, and must all mean this one
  const Shape& shape = product.shape;
  Cta& cta = *group.warps[0]->cta;
  if (shape.left_in_registers) {
    decode_left_registers(product, scratch.left);
  } else {
    const OperandExtent extent = find_extent(shape, shape.left, kRows, product.transposes_left);
    decode_shared(cta.shared, product.descriptors[0], shape.left, extent, shape.depth, scratch.left);
  }
  if (product.negates) {
    for (float& value : scratch.left) value = -value;
  }
  const OperandExtent extent = find_extent(shape, shape.right, shape.columns, product.transposes_right);
  decode_shared(cta.shared, product.descriptors[1], shape.right, extent, shape.depth, scratch.right);
  scratch.panels.resize(shape.columns, shape.depth);
  scratch.permuted.resize(scratch.right.size());
  for (uint32_t n = 0; n < shape.columns; ++n) {
    std::memcpy(scratch.permuted.data() + static_cast<size_t>(permute_column(n)) * shape.depth,
                scratch.right.data() + static_cast<size_t>(n) * shape.depth, shape.depth * sizeof(float));
  }
  scratch.panels.set_columns(0, shape.columns, scratch.permuted.data());
  scratch.sums.resize(static_cast<size_t>(kRows) * shape.columns);
  const uint64_t work = static_cast<uint64_t>(kRows) * shape.columns * shape.depth;
  const uint32_t threads = choose_threads(work, cta.simulation->config.num_threads);
  run_parallel(threads, kWarps, [&](uint32_t w) {
    float* sums = scratch.sums.data() + static_cast<size_t>(w) * kWarpRows * shape.columns;
    float* out[kWarpRows];
    for (uint32_t r = 0; r < kWarpRows; ++r) out[r] = sums + static_cast<size_t>(r) * shape.columns;
    multiply_matrices({scratch.left.data() + static_cast<size_t>(w) * kWarpRows * shape.depth, kWarpRows,
                       &scratch.panels, 0, shape.columns, out, Accumulate::kSet, 1.0f});
    if (shape.result == Result::kF16) {
      add_halves(*group.warps[w], product, sums);
    } else {
      add_words(*group.warps[w], product, sums);
    }
  });
}

// Multiply-adds per cycle and SM (uncalibrated): m64n256k16 of f16 in 128 cycles.
double find_rate(ElementFormat format) { return 2048.0 * 16 / element_bits(format); }

void check_operand(Warp& warp, const Instruction& in, uint64_t bits, const OperandExtent& extent, uint64_t token,
                   const char* what) {
  SharedDescriptor descriptor;
  decode_descriptor_sm90(bits, descriptor);
  const ByteRange range = find_operand_range(descriptor, extent);
  Cta& cta = *warp.cta;
  check_shared_range(warp, in, 0, cta, range.first, range.last - range.first, what);
  note_conflict(warp, in, 0, cta, false, range.first, range.last);
  cta.in_flight.begin({Resource::kSharedRead, range.first, range.last, token, in.index,
                       static_cast<int32_t>(warp.index), warp.time});
}

// All four warps have come: the product takes its place in the pipe.
void start_product(Warp& warp, const Instruction& in, const std::shared_ptr<void>& shared) {
  auto& group = *static_cast<Warpgroup*>(shared.get());
  std::shared_ptr<Product> product = group.products.front();
  group.products.pop_front();
  ++group.first_product;
  Simulation& simulation = *warp.simulation;
  const uint64_t token = simulation.next_token++;
  const Shape& shape = product->shape;
  if (!shape.left_in_registers) {
    const OperandExtent extent = find_extent(shape, shape.left, kRows, product->transposes_left);
    check_operand(warp, in, product->descriptors[0], extent, token, "A of wgmma");
  }
  const OperandExtent extent = find_extent(shape, shape.right, shape.columns, product->transposes_right);
  check_operand(warp, in, product->descriptors[1], extent, token, "B of wgmma");
  const double multiply_adds = static_cast<double>(kRows) * shape.columns * shape.depth;
  group.pipe.free_at = std::max(group.pipe.free_at, warp.time) + multiply_adds / find_rate(shape.left);
  ++warp.cta->async_operations;
  simulation.schedule(group.pipe.free_at, [shared, product, cta = warp.cta, token] {
    auto& owner = *static_cast<Warpgroup*>(shared.get());
    multiply(owner, *product);
    ++owner.completed;
    cta->in_flight.end(token);
    --cta->async_operations;
    cta->simulation->wake(owner.queue);
  });
}

Outcome wgmma_mma_async(Warp& warp, const Instruction& in, uint32_t mask) {
  Warpgroup& group = find_warpgroup(warp, in, mask);
  const Product& product = join_product(warp, in, group, warp.index % kWarps);
  if (product.arrived == (1u << kWarps) - 1) start_product(warp, in, warp.wgmma_groups);
  return Outcome::kNext;
}

Outcome wgmma_fence(Warp& warp, const Instruction& in, uint32_t mask) {
  find_warpgroup(warp, in, mask);
  return Outcome::kNext;
}

Outcome wgmma_commit_group(Warp& warp, const Instruction& in, uint32_t mask) {
  Warpgroup& group = find_warpgroup(warp, in, mask);
  const uint32_t own = warp.index % kWarps;
  group.groups[own].push_back(group.issued[own]);
  return Outcome::kNext;
}

// wait_group N: at most the N youngest groups are incomplete.
Outcome wgmma_wait_group(Warp& warp, const Instruction& in, uint32_t mask) {
  Warpgroup& group = find_warpgroup(warp, in, mask);
  std::vector<uint64_t>& groups = group.groups[warp.index % kWarps];
  const auto pending = static_cast<size_t>(in.operands[0]);
  if (groups.size() > pending && group.completed < groups[groups.size() - pending - 1]) {
    Wait wait;
    wait.kind = WaitKind::kAsyncGroup;
    wait.detail = groups.size() - pending;
    warp.wait_on(group.queue, wait);
    return Outcome::kRetry;
  }
  const auto is_done = [&](uint64_t end) { return end <= group.completed; };
  groups.erase(groups.begin(), std::find_if_not(groups.begin(), groups.end(), is_done));
  return Outcome::kNext;
}

HALFBYTE_HANDLER("wgmma.mma_async", wgmma_mma_async);
HALFBYTE_HANDLER("wgmma.fence", wgmma_fence);
HALFBYTE_HANDLER("wgmma.commit_group", wgmma_commit_group);
HALFBYTE_HANDLER("wgmma.wait_group", wgmma_wait_group);

}  // namespace
}  // namespace halfbyte::gpu
