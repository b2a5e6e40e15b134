// Logic and shifts: and, or, xor, not, cnot, lop3, shl, shr, shf, prmt.
#include "exec/elementwise.h"

namespace halfbyte::gpu {
namespace {

template <class T>
T bit_and(T a, T b) {
  return a & b;
}
template <class T>
T bit_or(T a, T b) {
  return a | b;
}
template <class T>
T bit_xor(T a, T b) {
  return a ^ b;
}
template <class T>
T bit_not(T a) {
  return static_cast<T>(~a);
}
template <class T>
T cnot(T a) {
  return a == 0;
}

// Shift amounts above the width are clamped to it (PTX ISA, "shl", "shr").
template <class T>
T shl(T a, uint32_t amount) {
  constexpr uint32_t bits = 8 * sizeof(T);
  using Work = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  const Work shifted = static_cast<Work>(a) << (amount & (bits - 1));
  return amount >= bits ? 0 : static_cast<T>(shifted);
}
template <class T>
T shr(T a, uint32_t amount) {
  constexpr uint32_t bits = 8 * sizeof(T);
  if constexpr (std::is_signed_v<T>) {
    return static_cast<T>(a >> (amount >= bits ? bits - 1 : amount));
  } else {
    const T shifted = static_cast<T>(a >> (amount & (bits - 1)));
    return amount >= bits ? 0 : shifted;
  }
}

// The 64-bit value b:a shifted by c; the high word (left) or the low word (right).
template <bool is_left, bool wraps>
uint32_t shf(uint32_t a, uint32_t b, uint32_t c) {
  const uint64_t pair = static_cast<uint64_t>(b) << 32 | a;
  const uint32_t amount = wraps ? c & 31 : (c < 32 ? c : 32);
  return static_cast<uint32_t>(is_left ? (pair << amount) >> 32 : pair >> amount);
}

inline uint32_t byte_of(uint32_t a, uint32_t b, uint32_t index) {
  const uint64_t pair = static_cast<uint64_t>(b) << 32 | a;
  return static_cast<uint32_t>(pair >> (8 * (index & 7))) & 0xFF;
}
// Each nibble of the selector picks a byte of b:a; its top bit replicates that byte's sign.
uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const uint32_t nibble = selector >> (4 * byte);
    const uint32_t value = byte_of(a, b, nibble);
    const uint32_t sign = static_cast<uint32_t>(-static_cast<int32_t>(value >> 7)) & 0xFF;
    result |= (nibble & 8 ? sign : value) << (8 * byte);
  }
  return result;
}
// PTX ISA, "prmt", the table of modes: which byte of b:a goes to each byte for selector n.
enum class PrmtMode { kForward, kBackward, kReplicate8, kEdgeLeft, kEdgeRight, kReplicate16 };
template <PrmtMode mode>
uint32_t prmt_mode(uint32_t a, uint32_t b, uint32_t selector) {
  const uint32_t n = selector & 3;
  uint32_t result = 0;
  for (uint32_t byte = 0; byte < 4; ++byte) {
    uint32_t index = n;
    if (mode == PrmtMode::kForward) index = n + byte;
    if (mode == PrmtMode::kBackward) index = n - byte;
    if (mode == PrmtMode::kEdgeLeft) index = byte > n ? byte : n;
    if (mode == PrmtMode::kEdgeRight) index = byte < n ? byte : n;
    if (mode == PrmtMode::kReplicate16) index = (n & 1) * 2 + (byte & 1);
    result |= byte_of(a, b, index) << (8 * byte);
  }
  return result;
}

// Operand 4 is the truth table: bit (4a + 2b + c) is the result.
void map_lop3(Warp& warp, const Instruction& in, uint32_t mask, uint32_t* to) {
  const uint32_t* a = warp.read32(in.operands[in.num_operands - (in.num_attributes ? 5 : 4)]);
  const uint32_t* b = warp.read32(in.operands[in.num_operands - (in.num_attributes ? 4 : 3)]);
  const uint32_t* c = warp.read32(in.operands[in.num_operands - (in.num_attributes ? 3 : 2)]);
  const int32_t table = in.operands[in.num_operands - (in.num_attributes ? 2 : 1)];
  uint32_t term[8];
  for (int row = 0; row < 8; ++row) term[row] = -static_cast<uint32_t>(table >> row & 1);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const uint32_t x = a[lane], y = b[lane], z = c[lane];
    const uint32_t low = (~y & ((~z & term[0]) | (z & term[1]))) | (y & ((~z & term[2]) | (z & term[3])));
    const uint32_t high = (~y & ((~z & term[4]) | (z & term[5]))) | (y & ((~z & term[6]) | (z & term[7])));
    to[lane] = (~x & low) | (x & high);
  });
}

Outcome lop3(Warp& warp, const Instruction& in, uint32_t mask) {
  map_lop3(warp, in, mask, warp.write32(in.operands[0]));
  return Outcome::kNext;
}

// Operands d|p, a, b, c, table, q; attribute: 0 and, 1 or. p = (d != 0) BoolOp q.
Outcome lop3_bool(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t q = warp.predicate(in.operands[6]);
  uint32_t* to = warp.write32(in.operands[0]);
  map_lop3(warp, in, mask, to);
  const uint32_t any = lanes_where(mask, [&](int lane) { return to[lane] != 0; });
  warp.set_predicate(in.operands[1], in.attributes[0] ? any | q : any & q, mask);
  return Outcome::kNext;
}

const HandlerTable logic({
    {"and.b16", map_lanes<bit_and<uint16_t>>},
    {"and.b32", map_lanes<bit_and<uint32_t>>},
    {"and.b64", map_lanes<bit_and<uint64_t>>},
    {"or.b16", map_lanes<bit_or<uint16_t>>},
    {"or.b32", map_lanes<bit_or<uint32_t>>},
    {"or.b64", map_lanes<bit_or<uint64_t>>},
    {"xor.b16", map_lanes<bit_xor<uint16_t>>},
    {"xor.b32", map_lanes<bit_xor<uint32_t>>},
    {"xor.b64", map_lanes<bit_xor<uint64_t>>},
    {"not.b16", map_lanes<bit_not<uint16_t>>},
    {"not.b32", map_lanes<bit_not<uint32_t>>},
    {"not.b64", map_lanes<bit_not<uint64_t>>},
    {"cnot.b16", map_lanes<cnot<uint16_t>>},
    {"cnot.b32", map_lanes<cnot<uint32_t>>},
    {"cnot.b64", map_lanes<cnot<uint64_t>>},
    {"lop3.b32", lop3},
    {"lop3.bool.b32", lop3_bool},
});

const HandlerTable shifts({
    {"shl.b16", map_lanes<shl<uint16_t>>},
    {"shl.b32", map_lanes<shl<uint32_t>>},
    {"shl.b64", map_lanes<shl<uint64_t>>},
    {"shr.u16", map_lanes<shr<uint16_t>>},
    {"shr.u32", map_lanes<shr<uint32_t>>},
    {"shr.u64", map_lanes<shr<uint64_t>>},
    {"shr.s16", map_lanes<shr<int16_t>>},
    {"shr.s32", map_lanes<shr<int32_t>>},
    {"shr.s64", map_lanes<shr<int64_t>>},
    {"shf.l.clamp.b32", map_lanes<shf<true, false>>},
    {"shf.l.wrap.b32", map_lanes<shf<true, true>>},
    {"shf.r.clamp.b32", map_lanes<shf<false, false>>},
    {"shf.r.wrap.b32", map_lanes<shf<false, true>>},
    {"prmt.b32", map_lanes<prmt>},
    {"prmt.b32.f4e", map_lanes<prmt_mode<PrmtMode::kForward>>},
    {"prmt.b32.b4e", map_lanes<prmt_mode<PrmtMode::kBackward>>},
    {"prmt.b32.rc8", map_lanes<prmt_mode<PrmtMode::kReplicate8>>},
    {"prmt.b32.ecl", map_lanes<prmt_mode<PrmtMode::kEdgeLeft>>},
    {"prmt.b32.ecr", map_lanes<prmt_mode<PrmtMode::kEdgeRight>>},
    {"prmt.b32.rc16", map_lanes<prmt_mode<PrmtMode::kReplicate16>>},
});

}  // namespace
}  // namespace halfbyte::gpu
