// atom and red of every operation and type; the lanes of a warp take their turns in order.
//
// Attributes: state space, 1 when the address register has 64 bits, vector length, 1 when the old
// value is wanted (atom), reduction.
#include "exec/lane_memory.h"
#include "machine/reduction.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

constexpr int kLongestVector = 8;

struct AtomicOperands {
  Space space;
  bool is_wide;
  int count;
  bool has_result;
  int address() const { return has_result ? count : 0; }
  int value() const { return address() + 2; }
};

AtomicOperands parse_attributes(const Instruction& in) {
  return {static_cast<Space>(in.attributes[0]), in.attributes[1] != 0,
          static_cast<int>(in.attributes[2]), in.attributes[3] != 0};
}

// f16x2 and bf16x2: two elements in one register, reduced each by itself.
template <class Half>
struct Pair {
  Half low, high;
};

template <class Value> struct IsPair : std::false_type {};
template <class Half> struct IsPair<Pair<Half>> : std::true_type {};

template <Reduction Operation, class Value>
Value combine_value(Value old, Value value) {
  if constexpr (IsPair<Value>::value) {
    return {combine<Operation>(old.low, value.low), combine<Operation>(old.high, value.high)};
  } else {
    return combine<Operation>(old, value);
  }
}

bool is_in_shared(const Warp& warp, const uint8_t* pointer) {
  for (const auto& cta : warp.cta->cluster->ctas) {
    if (pointer >= cta->shared && pointer < cta->shared + cta->shared_bytes) return true;
  }
  return false;
}

// Register of component `i` of the value or result, as an array over lanes.
template <int Bytes>
auto* component(Warp& warp, int32_t slot) {
  if constexpr (Bytes == 8) {
    return warp.write64(slot);
  } else {
    return warp.write32(slot);
  }
}

template <int Bytes>
const auto* component(const Warp& warp, int32_t slot) {
  if constexpr (Bytes == 8) {
    return warp.read64(slot);
  } else {
    return warp.read32(slot);
  }
}

template <class Value>
void locate_atomic(Warp& warp, const Instruction& in, uint32_t mask, const AtomicOperands& operands,
                   LanePointers& pointers) {
  const LaneAccess access{mask, static_cast<uint32_t>(sizeof(Value)) * operands.count, true,
                          in.operands[operands.address()], in.operands[operands.address() + 1],
                          operands.is_wide};
  locate_lanes(warp, in, operands.space, access, pointers);
}

// Replaces one component of one lane; true when memory changed.
template <class Value, class Replace>
bool replace_component(uint8_t* target, Value& old, Replace&& replace) {
  std::memcpy(&old, target, sizeof(Value));
  const Value next = replace(old);
  const bool has_changed = std::memcmp(&old, &next, sizeof(Value)) != 0;
  std::memcpy(target, &next, sizeof(Value));
  return has_changed;
}

template <Reduction Operation, class Value>
Outcome reduce(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int kBytes = sizeof(Value);
  const AtomicOperands operands = parse_attributes(in);
  LanePointers pointers;
  locate_atomic<Value>(warp, in, mask, operands, pointers);
  // PTX ISA, "atom": on global memory .add.f32 flushes subnormal inputs and results to zero.
  [[maybe_unused]] bool flushes = false;
  if constexpr (Operation == Reduction::kAdd && std::is_same_v<Value, float>) {
    flushes = !is_in_shared(warp, pointers.at[first_lane(mask)]);
  }
  bool has_changed = false;
  Unsigned<kBytes> results[kLongestVector][kLanes];
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    for (int i = 0; i < operands.count; ++i) {
      const auto bits = static_cast<Unsigned<kBytes>>(
          component<kBytes>(static_cast<const Warp&>(warp), in.operands[operands.value() + i])[lane]);
      const Value value = bit_cast<Value>(bits);
      Value old;
      has_changed |= replace_component(pointers.at[lane] + i * kBytes, old, [&](Value now) {
        if constexpr (std::is_same_v<Value, float>) {
          if (flushes) return combine<Operation>(FlushedFloat{now}, FlushedFloat{value}).value;
        }
        return combine_value<Operation>(now, value);
      });
      results[i][lane] = bit_cast<Unsigned<kBytes>>(old);
    }
  }
  if (has_changed) warp.simulation->note_progress();
  for (int i = 0; operands.has_result && i < operands.count; ++i) {
    auto* target = component<kBytes>(warp, in.operands[i]);
    for_lanes(mask, [&](int lane) { target[lane] = results[i][lane]; });
  }
  return Outcome::kNext;
}

// exch, and cas where a second value is given.
template <int Bytes, bool Compares>
Outcome exchange(Warp& warp, const Instruction& in, uint32_t mask) {
  using Value = Unsigned<Bytes>;
  const AtomicOperands operands = parse_attributes(in);
  LanePointers pointers;
  locate_atomic<Value>(warp, in, mask, operands, pointers);
  const Warp& source = warp;
  const auto* first = component<Bytes>(source, in.operands[operands.value()]);
  const auto* second = Compares ? component<Bytes>(source, in.operands[operands.value() + 1]) : first;
  bool has_changed = false;
  Value results[kLanes];
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    has_changed |= replace_component(pointers.at[lane], results[lane], [&](Value now) {
      const bool keeps = Compares && now != static_cast<Value>(first[lane]);
      return keeps ? now : static_cast<Value>(second[lane]);
    });
  }
  if (has_changed) warp.simulation->note_progress();
  if (operands.has_result) {
    auto* target = component<Bytes>(warp, in.operands[0]);
    for_lanes(mask, [&](int lane) { target[lane] = results[lane]; });
  }
  return Outcome::kNext;
}

struct Wide {
  uint64_t low, high;
};

Wide read_wide(const Warp& warp, int32_t slot, int lane) {
  const uint64_t* halves = warp.read64(slot);
  return {halves[lane], halves[kLanes + lane]};
}

template <bool Compares>
Outcome exchange_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  const AtomicOperands operands = parse_attributes(in);
  LanePointers pointers;
  locate_atomic<Wide>(warp, in, mask, operands, pointers);
  bool has_changed = false;
  Wide results[kLanes];
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const Wide first = read_wide(warp, in.operands[operands.value()], lane);
    const Wide second = Compares ? read_wide(warp, in.operands[operands.value() + 1], lane) : first;
    has_changed |= replace_component(pointers.at[lane], results[lane], [&](Wide now) {
      const bool keeps = Compares && (now.low != first.low || now.high != first.high);
      return keeps ? now : second;
    });
  }
  if (has_changed) warp.simulation->note_progress();
  uint64_t* target = warp.write64(in.operands[0]);
  for_lanes(mask, [&](int lane) {
    target[lane] = results[lane].low;
    target[kLanes + lane] = results[lane].high;
  });
  return Outcome::kNext;
}

#define REGISTER_ORDER(type, value)                                    \
  HALFBYTE_HANDLER("atom.add." type, (reduce<Reduction::kAdd, value>)); \
  HALFBYTE_HANDLER("atom.min." type, (reduce<Reduction::kMin, value>)); \
  HALFBYTE_HANDLER("atom.max." type, (reduce<Reduction::kMax, value>))

#define REGISTER_BITS(type, value)                                     \
  HALFBYTE_HANDLER("atom.and." type, (reduce<Reduction::kAnd, value>)); \
  HALFBYTE_HANDLER("atom.or." type, (reduce<Reduction::kOr, value>));   \
  HALFBYTE_HANDLER("atom.xor." type, (reduce<Reduction::kXor, value>))

REGISTER_ORDER("u32", uint32_t);
REGISTER_ORDER("s32", int32_t);
REGISTER_ORDER("u64", uint64_t);
REGISTER_ORDER("s64", int64_t);
REGISTER_ORDER("f16", Float16);
REGISTER_ORDER("bf16", Bfloat16);
REGISTER_ORDER("f16x2", Pair<Float16>);
REGISTER_ORDER("bf16x2", Pair<Bfloat16>);
REGISTER_BITS("b32", uint32_t);
REGISTER_BITS("b64", uint64_t);
HALFBYTE_HANDLER("atom.add.f32", (reduce<Reduction::kAdd, float>));
HALFBYTE_HANDLER("atom.add.f64", (reduce<Reduction::kAdd, double>));
HALFBYTE_HANDLER("atom.inc.u32", (reduce<Reduction::kInc, uint32_t>));
HALFBYTE_HANDLER("atom.dec.u32", (reduce<Reduction::kDec, uint32_t>));
HALFBYTE_HANDLER("atom.exch.b32", (exchange<4, false>));
HALFBYTE_HANDLER("atom.exch.b64", (exchange<8, false>));
HALFBYTE_HANDLER("atom.exch.b128", exchange_b128<false>);
HALFBYTE_HANDLER("atom.cas.b16", (exchange<2, true>));
HALFBYTE_HANDLER("atom.cas.b32", (exchange<4, true>));
HALFBYTE_HANDLER("atom.cas.b64", (exchange<8, true>));
HALFBYTE_HANDLER("atom.cas.b128", exchange_b128<true>);

}  // namespace

}  // namespace halfbyte::gpu
