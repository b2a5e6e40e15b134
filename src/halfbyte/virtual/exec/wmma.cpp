// wmma.load, .mma, .store: the older matrix instructions.
//
// PTX ISA leaves open which elements a lane's registers hold ("Matrix fragments for WMMA"). Here element e
// of a matrix, counted row by row, is slot e / 32 of lane e % 32; where a fragment has more slots than
// the matrix has elements (f16), the elements repeat.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "machine/access.h"
#include "machine/number_tables.h"
#include "machine/warp.h"

namespace halfbyte::gpu {
namespace {

enum class Result : int64_t { kF16 = 0, kF32 = 1, kS32 = 2, kF64 = 3 };
enum class BitOperation : int64_t { kNone = 0, kXor = 1, kAnd = 2 };

// A matrix of elements of some bits in the registers of a fragment.
struct Fragment32 {
  uint32_t rows;
  uint32_t columns;
  uint32_t bits;
  uint32_t registers;  // of 32 bits; 64-bit elements count two

  uint32_t count() const { return rows * columns; }
  uint32_t slots() const { return 32 * registers / bits; }
};

// Address of lane's slot within a register's lanes, as a bit position.
inline uint8_t* find_slot_bytes(Warp& warp, const int32_t* slots, const Fragment32& shape, uint32_t lane,
                                uint32_t slot, uint32_t& first_bit) {
  if (shape.bits == 64) return reinterpret_cast<uint8_t*>(warp.write64(slots[slot]) + lane);
  const uint32_t per_register = 32 / shape.bits;
  first_bit = slot % per_register * shape.bits;
  auto* word = reinterpret_cast<uint8_t*>(warp.write32(slots[slot / per_register]) + lane);
  const uint32_t byte = first_bit / 8;
  first_bit %= 8;
  return word + byte;
}

// Copies one element of `bits`; those of fewer than 8 lie `from_bit` and `to_bit` into their bytes.
inline void copy_element(uint32_t bits, const uint8_t* from, uint32_t from_bit, uint8_t* to, uint32_t to_bit) {
  if (bits >= 8) {
    std::memcpy(to, from, bits / 8);
    return;
  }
  const uint32_t mask = (1u << bits) - 1;
  const uint32_t value = static_cast<uint32_t>(*from) >> from_bit & mask;
  *to = static_cast<uint8_t>((*to & ~(mask << to_bit)) | value << to_bit);
}

void check_whole_warp(Warp& warp, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) {
    raise_fault(warp, in, first_lane(mask), "partial-warp",
                format_text("lanes 0x%08x execute a matrix instruction that needs all 32", mask));
  }
}

// wmma.load and .store. Attributes: space, rows, columns, bits, registers, 1 where memory is row major.
struct Memory {
  Space space;
  Fragment32 shape;
  bool is_row_major;
};

Memory read_memory(const Instruction& in) {
  const int64_t* a = in.attributes;
  return {static_cast<Space>(a[0]),
          {static_cast<uint32_t>(a[1]), static_cast<uint32_t>(a[2]), static_cast<uint32_t>(a[3]),
           static_cast<uint32_t>(a[4])},
          a[5] != 0};
}

uint8_t* locate_element(Warp& warp, const Instruction& in, const Memory& memory, const int32_t* address,
                        uint64_t stride, uint32_t element, bool is_write, uint32_t& first_bit) {
  const uint32_t row = element / memory.shape.columns, column = element % memory.shape.columns;
  const uint64_t index = memory.is_row_major ? row * stride + column : column * stride + row;
  const uint64_t bit = index * memory.shape.bits;
  first_bit = static_cast<uint32_t>(bit % 8);
  const uint32_t bytes = std::max(1u, memory.shape.bits / 8);
  const uint64_t offset = bit / 8 + static_cast<uint64_t>(static_cast<int64_t>(address[1]));
  if (memory.space == Space::kShared) {
    const uint32_t base = warp.uniform32(in, address[0], kFullMask, "p");
    return warp.access_shared(in, 0, base + static_cast<uint32_t>(offset), bytes, is_write);
  }
  return warp.access(in, 0, warp.uniform64(in, address[0], kFullMask, "p") + offset, bytes, is_write);
}

uint64_t read_stride(Warp& warp, const Instruction& in, const Memory& memory, int32_t slot) {
  if (slot == kAbsent) return memory.is_row_major ? memory.shape.columns : memory.shape.rows;
  return warp.uniform32(in, slot, kFullMask, "stride");
}

uint32_t count_operands(const Fragment32& shape) { return shape.bits == 64 ? shape.registers / 2 : shape.registers; }

Outcome wmma_load(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Memory memory = read_memory(in);
  const int32_t* address = in.operands + count_operands(memory.shape);
  const uint64_t stride = read_stride(warp, in, memory, address[2]);
  for (uint32_t e = 0; e < memory.shape.slots() * kLanes; ++e) {
    uint32_t from_bit = 0, to_bit = 0;
    const uint8_t* from =
        locate_element(warp, in, memory, address, stride, e % memory.shape.count(), false, from_bit);
    uint8_t* to = find_slot_bytes(warp, in.operands, memory.shape, e % kLanes, e / kLanes, to_bit);
    copy_element(memory.shape.bits, from, from_bit, to, to_bit);
  }
  return Outcome::kNext;
}

Outcome wmma_store(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Memory memory = read_memory(in);
  const int32_t* slots = in.operands + 2;
  const uint64_t stride = read_stride(warp, in, memory, slots[count_operands(memory.shape)]);
  for (uint32_t e = 0; e < memory.shape.count(); ++e) {
    uint32_t from_bit = 0, to_bit = 0;
    const uint8_t* from = find_slot_bytes(warp, slots, memory.shape, e % kLanes, e / kLanes, from_bit);
    uint8_t* to = locate_element(warp, in, memory, in.operands, stride, e, true, to_bit);
    copy_element(memory.shape.bits, from, from_bit, to, to_bit);
  }
  return Outcome::kNext;
}

// wmma.mma. Attributes: M, N, K, formats of A and B, types of D and C, saturation, bit operation,
// registers of A, B, D and C.
struct Product {
  Fragment32 a, b, d, c;
  ElementFormat left, right;
  Result result, addend;
  bool saturates;
  BitOperation operation;
};

uint32_t result_bits(Result result) { return result == Result::kF16 ? 16 : result == Result::kF64 ? 64 : 32; }

Product read_product(const Instruction& in) {
  const int64_t* v = in.attributes;
  const auto word = [&](int i) { return static_cast<uint32_t>(v[i]); };
  Product p;
  p.left = static_cast<ElementFormat>(v[3]);
  p.right = static_cast<ElementFormat>(v[4]);
  p.result = static_cast<Result>(v[5]);
  p.addend = static_cast<Result>(v[6]);
  p.saturates = v[7] != 0;
  p.operation = static_cast<BitOperation>(v[8]);
  const bool is_double = p.result == Result::kF64;
  p.a = {word(0), word(2), is_double ? 64 : element_bits(p.left), word(9)};
  p.b = {word(2), word(1), is_double ? 64 : element_bits(p.right), word(10)};
  p.d = {word(0), word(1), result_bits(p.result), word(11)};
  p.c = {word(0), word(1), result_bits(p.addend), word(12)};
  return p;
}

// The elements of a fragment, row by row, packed as in memory.
std::vector<uint8_t> read_fragment(Warp& warp, const int32_t* slots, const Fragment32& shape) {
  std::vector<uint8_t> bytes((static_cast<size_t>(shape.count()) * shape.bits + 7) / 8);
  for (uint32_t e = 0; e < shape.count(); ++e) {
    uint32_t from_bit = 0;
    const uint8_t* from = find_slot_bytes(warp, slots, shape, e % kLanes, e / kLanes, from_bit);
    copy_element(shape.bits, from, from_bit, bytes.data() + static_cast<size_t>(e) * shape.bits / 8,
                 e * shape.bits % 8);
  }
  return bytes;
}

std::vector<float> decode_fragment(Warp& warp, const int32_t* slots, const Fragment32& shape, ElementFormat format) {
  const std::vector<uint8_t> bytes = read_fragment(warp, slots, shape);
  std::vector<float> values(shape.count());
  decode_elements(format, bytes.data(), shape.count(), values.data());
  return values;
}

void write_element(Warp& warp, const int32_t* slots, const Fragment32& shape, uint32_t e, const void* value) {
  uint32_t bit = 0;
  uint8_t* to = find_slot_bytes(warp, slots, shape, e % kLanes, e / kLanes, bit);
  std::memcpy(to, value, shape.bits / 8);
}

uint32_t add_word(const Product& p, float sum, const uint8_t* addend) {
  if (p.result == Result::kS32) {
    int32_t old;
    std::memcpy(&old, addend, 4);
    const int64_t total = static_cast<int64_t>(sum) + old;
    return static_cast<uint32_t>(p.saturates ? std::clamp<int64_t>(total, INT32_MIN, INT32_MAX) : total);
  }
  float old;
  if (p.addend == Result::kF16) {
    uint16_t half;
    std::memcpy(&half, addend, 2);
    old = decode_half(half);
  } else {
    std::memcpy(&old, addend, 4);
  }
  return p.result == Result::kF16 ? encode_half(sum + old) : bit_cast<uint32_t>(sum + old);
}

void multiply_floats(Warp& warp, const Product& p, const int32_t* d, const int32_t* a, const int32_t* b,
                     const int32_t* c) {
  const std::vector<float> left = decode_fragment(warp, a, p.a, p.left);
  const std::vector<float> right = decode_fragment(warp, b, p.b, p.right);
  const std::vector<uint8_t> addends = read_fragment(warp, c, p.c);
  for (uint32_t e = 0; e < p.d.count(); ++e) {
    const uint32_t row = e / p.d.columns, column = e % p.d.columns;
    float sum = 0;
    for (uint32_t k = 0; k < p.a.columns; ++k) {
      const float x = left[row * p.a.columns + k], y = right[k * p.b.columns + column];
      sum += p.operation == BitOperation::kXor ? static_cast<float>(x != y) : x * y;
    }
    const uint32_t word = add_word(p, sum, addends.data() + static_cast<size_t>(e) * p.c.bits / 8);
    write_element(warp, d, p.d, e, &word);
  }
}

void multiply_doubles(Warp& warp, const Product& p, const int32_t* d, const int32_t* a, const int32_t* b,
                      const int32_t* c) {
  const std::vector<uint8_t> left = read_fragment(warp, a, p.a), right = read_fragment(warp, b, p.b);
  const std::vector<uint8_t> addends = read_fragment(warp, c, p.c);
  const auto read = [](const std::vector<uint8_t>& bytes, uint32_t index) {
    double value;
    std::memcpy(&value, bytes.data() + 8 * static_cast<size_t>(index), 8);
    return value;
  };
  for (uint32_t e = 0; e < p.d.count(); ++e) {
    const uint32_t row = e / p.d.columns, column = e % p.d.columns;
    double sum = read(addends, e);
    for (uint32_t k = 0; k < p.a.columns; ++k) {
      sum = std::fma(read(left, row * p.a.columns + k), read(right, k * p.b.columns + column), sum);
    }
    write_element(warp, d, p.d, e, &sum);
  }
}

Outcome wmma_mma(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Product p = read_product(in);
  const int32_t* d = in.operands;
  const int32_t* a = d + count_operands(p.d);
  const int32_t* b = a + count_operands(p.a);
  const int32_t* c = b + count_operands(p.b);
  if (p.result == Result::kF64) {
    multiply_doubles(warp, p, d, a, b, c);
  } else {
    multiply_floats(warp, p, d, a, b, c);
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("wmma.load", wmma_load);
HALFBYTE_HANDLER("wmma.store", wmma_store);
HALFBYTE_HANDLER("wmma.mma", wmma_mma);

}  // namespace
}  // namespace halfbyte::gpu
