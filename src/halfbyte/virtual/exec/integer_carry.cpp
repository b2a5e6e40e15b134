// Extended-precision integer arithmetic: add.cc, addc, sub.cc, subc, mad.cc, madc.
//
// The condition code register CC.CF of a warp is predicate 2. For subtraction it holds the borrow.
#include "exec/elementwise.h"

namespace halfbyte::gpu {
namespace {

constexpr int32_t kCarryPredicate = 2;

struct Sum {
  uint64_t value;
  bool carry;
};

// A sum of `bits`-wide operands with its carry out.
template <class T>
Sum add_with_carry(T a, T b, bool carry_in) {
  const unsigned __int128 sum = static_cast<unsigned __int128>(a) + b + carry_in;
  return {static_cast<uint64_t>(static_cast<T>(sum)), static_cast<bool>(sum >> (8 * sizeof(T)) & 1)};
}

template <class T>
Sum sub_with_borrow(T a, T b, bool borrow_in) {
  const unsigned __int128 difference = static_cast<unsigned __int128>(a) - b - borrow_in;
  return {static_cast<uint64_t>(static_cast<T>(difference)),
          static_cast<bool>(difference >> (8 * sizeof(T)) & 1)};
}

// Attributes: reads CC.CF, writes CC.CF.
template <class T, class Operation>
void map_carry(Warp& warp, const Instruction& in, uint32_t mask, Operation operation) {
  const bool reads = in.attributes[0] != 0;
  const uint32_t carry_in = reads ? warp.predicate(kCarryPredicate) : 0;
  Storage<T>* to = destination<T>(warp, in.operands[0]);
  uint32_t carry_out = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const Sum sum = operation(lane, carry_in >> lane & 1);
    to[lane] = static_cast<Storage<T>>(sum.value);
    carry_out |= static_cast<uint32_t>(sum.carry) << lane;
  }
  if (in.attributes[1]) warp.set_predicate(kCarryPredicate, carry_out, mask);
}

template <class T>
Outcome addc(Warp& warp, const Instruction& in, uint32_t mask) {
  const Storage<T>* a = source<T>(warp, in.operands[1]);
  const Storage<T>* b = source<T>(warp, in.operands[2]);
  map_carry<T>(warp, in, mask, [=](int lane, bool carry) {
    return add_with_carry<T>(a[lane], b[lane], carry);
  });
  return Outcome::kNext;
}

template <class T>
Outcome subc(Warp& warp, const Instruction& in, uint32_t mask) {
  const Storage<T>* a = source<T>(warp, in.operands[1]);
  const Storage<T>* b = source<T>(warp, in.operands[2]);
  map_carry<T>(warp, in, mask, [=](int lane, bool borrow) {
    return sub_with_borrow<T>(a[lane], b[lane], borrow);
  });
  return Outcome::kNext;
}

// T may be signed: the high half of the product depends on it.
template <class T, bool is_high>
Outcome madc(Warp& warp, const Instruction& in, uint32_t mask) {
  using U = std::make_unsigned_t<T>;
  const Storage<T>* a = source<T>(warp, in.operands[1]);
  const Storage<T>* b = source<T>(warp, in.operands[2]);
  const Storage<T>* c = source<T>(warp, in.operands[3]);
  map_carry<T>(warp, in, mask, [=](int lane, bool carry) {
    using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
    const Wide product = static_cast<Wide>(static_cast<T>(a[lane])) * static_cast<T>(b[lane]);
    const U part = static_cast<U>(is_high ? product >> (8 * sizeof(T)) : product);
    return add_with_carry<U>(part, static_cast<U>(c[lane]), carry);
  });
  return Outcome::kNext;
}

const HandlerTable carries({
    {"addc.b32", addc<uint32_t>},
    {"addc.b64", addc<uint64_t>},
    {"subc.b32", subc<uint32_t>},
    {"subc.b64", subc<uint64_t>},
    {"madc.lo.b32", madc<uint32_t, false>},
    {"madc.lo.b64", madc<uint64_t, false>},
    {"madc.hi.u32", madc<uint32_t, true>},
    {"madc.hi.s32", madc<int32_t, true>},
    {"madc.hi.u64", madc<uint64_t, true>},
    {"madc.hi.s64", madc<int64_t, true>},
});

}  // namespace
}  // namespace halfbyte::gpu
