// setp, set, selp, slct and logic on predicates.

#include "exec/elementwise.h"
#include "exec/float_values.h"

namespace halfbyte::gpu {
namespace {

enum class Compare {
  kEq, kNe, kLt, kLe, kGt, kGe,              // ordered: false when an operand is NaN
  kEqu, kNeu, kLtu, kLeu, kGtu, kGeu,        // unordered: true when an operand is NaN
  kNum, kNan
};
constexpr const char* kOrderedNames[] = {"eq", "ne", "lt", "le", "gt", "ge"};
constexpr const char* kFloatNames[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                       "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

template <Compare op, class T>
inline bool holds(T a, T b) {
  switch (op) {
    case Compare::kEq: return a == b;
    case Compare::kNe: return std::is_floating_point_v<T> ? a < b || a > b : a != b;
    case Compare::kLt: return a < b;
    case Compare::kLe: return a <= b;
    case Compare::kGt: return a > b;
    case Compare::kGe: return a >= b;
    case Compare::kEqu: return !(a < b || a > b);
    case Compare::kNeu: return !(a == b);
    case Compare::kLtu: return !(a >= b);
    case Compare::kLeu: return !(a > b);
    case Compare::kGtu: return !(a <= b);
    case Compare::kGeu: return !(a < b);
    case Compare::kNum: return a == a && b == b;
    case Compare::kNan: return a != a || b != b;
  }
  return false;
}

// How the lanes of a register become values to compare. `Raw` is what lies in the register.
template <class T>
struct Plain {
  static constexpr bool kDecodes = false;
  using Raw = T;
  static T value(T raw) { return raw; }
};
struct FlushedF32 {
  static constexpr bool kDecodes = false;
  using Raw = float;
  static float value(float raw) { return flush(raw); }
};
template <class Format, bool flushes, int shift>
struct Half {
  static constexpr bool kDecodes = true;
  using Raw = uint32_t;
  static float value(uint32_t raw) {
    const uint32_t code = raw >> shift & 0xFFFF;
    return Format::decode(flushes ? flush16<Format>(code) : code);
  }
};

// The lanes where the comparison of two sources, at operands `first` and `first + 1`, holds.
template <Compare op, class Reader>
uint32_t compare(const Warp& warp, const Instruction& in, int first, uint32_t mask) {
  using Raw = typename Reader::Raw;
  const Storage<Raw>* a = source<Raw>(warp, in.operands[first]);
  const Storage<Raw>* b = source<Raw>(warp, in.operands[first + 1]);
  auto test = [&](int lane) __attribute__((always_inline)) {
    return holds<op>(Reader::value(from_lane<Raw>(a[lane])), Reader::value(from_lane<Raw>(b[lane])));
  };
  if ((mask & (mask - 1)) == 0) return test(first_lane(mask)) ? mask : 0;
  if constexpr (Reader::kDecodes) {  // two loops, each of which vectorizes
    float x[kLanes], y[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      x[lane] = Reader::value(a[lane]);
      y[lane] = Reader::value(b[lane]);
    }
    return lanes_where(mask, [&](int lane) { return holds<op>(x[lane], y[lane]); });
  }
  return lanes_where(mask, test);
}

// Attribute 0 is the Boolean operator of the predicate c: 0 none, 1 and, 2 or, 3 xor.
inline uint32_t combine(const Warp& warp, const Instruction& in, uint32_t value, int operand) {
  switch (in.attributes[0]) {
    case 1: return value & warp.predicate(in.operands[operand]);
    case 2: return value | warp.predicate(in.operands[operand]);
    case 3: return value ^ warp.predicate(in.operands[operand]);
    default: return value;
  }
}

// Operands p|q, a, b{, c}: p takes the comparison, q its complement, each combined with c.
template <Compare op, class Reader>
Outcome setp(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t truth = compare<op, Reader>(warp, in, 2, mask);
  const uint32_t p = combine(warp, in, truth, 4), q = combine(warp, in, ~truth, 4);
  warp.set_predicate(in.operands[0], p, mask);
  warp.set_predicate(in.operands[1], q, mask);
  return Outcome::kNext;
}

// Packed pairs: p takes the comparison of the low halves, q of the high halves.
template <Compare op, class Low, class High>
Outcome setp_pair(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t low = compare<op, Low>(warp, in, 2, mask);
  const uint32_t high = compare<op, High>(warp, in, 2, mask);
  const uint32_t p = combine(warp, in, low, 4), q = combine(warp, in, high, 4);
  warp.set_predicate(in.operands[0], p, mask);
  warp.set_predicate(in.operands[1], q, mask);
  return Outcome::kNext;
}

// Attribute 1 is what a true lane is set to.
template <Compare op, class Reader>
Outcome set(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t truth = combine(warp, in, compare<op, Reader>(warp, in, 1, mask), 3);
  const uint32_t value = static_cast<uint32_t>(in.attributes[1]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = truth >> lane & 1 ? value : 0; });
  return Outcome::kNext;
}
template <Compare op, class Low, class High>
Outcome set_pair(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t low = combine(warp, in, compare<op, Low>(warp, in, 1, mask), 3);
  const uint32_t high = combine(warp, in, compare<op, High>(warp, in, 1, mask), 3);
  const uint32_t value = static_cast<uint32_t>(in.attributes[1]) & 0xFFFF;
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) {
    to[lane] = (low >> lane & 1 ? value : 0) | (high >> lane & 1 ? value << 16 : 0);
  });
  return Outcome::kNext;
}

// Operands d, a, b, predicate. Widths below 64 bits share one handler: T is the stored width.
template <class T>
Outcome selp(Warp& warp, const Instruction& in, uint32_t mask) {
  Storage<T>* to = destination<T>(warp, in.operands[0]);
  const Storage<T>* a = source<T>(warp, in.operands[1]);
  const Storage<T>* b = source<T>(warp, in.operands[2]);
  const uint32_t choice = warp.predicate(in.operands[3]);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const Storage<T> chosen_a = a[lane], chosen_b = b[lane];
    to[lane] = static_cast<T>(choice >> lane & 1 ? chosen_a : chosen_b);
  });
  return Outcome::kNext;
}

template <class T>
T slct_s32(T a, T b, int32_t c) {
  return c >= 0 ? a : b;
}
template <class T, bool flushes>
T slct_f32(T a, T b, float c) {
  return flush_if<flushes>(c) >= 0.0f ? a : b;
}
// .ftz flushes the selector alone; data passes as it is (H200).
float slct_flushed(float a, float b, float c) { return flush(c) >= 0.0f ? a : b; }

// Attribute 0: and, or, xor, not, mov.
Outcome predicate_logic(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t a = warp.predicate(in.operands[1]);
  const uint32_t b = in.num_operands > 2 ? warp.predicate(in.operands[2]) : 0;
  uint32_t value = a;
  switch (in.attributes[0]) {
    case 0: value = a & b; break;
    case 1: value = a | b; break;
    case 2: value = a ^ b; break;
    case 3: value = ~a; break;
    default: break;
  }
  warp.set_predicate(in.operands[0], value, mask);
  return Outcome::kNext;
}

template <class Reader, Compare op>
void register_compare(const std::string& name, const std::string& type) {
  register_handler("setp." + name + "." + type, setp<op, Reader>);
  register_handler("set." + name + "." + type, set<op, Reader>);
}
template <class Reader, size_t... op>
void register_compares(const std::string& type, const char* const* names, std::index_sequence<op...>) {
  (register_compare<Reader, static_cast<Compare>(op)>(names[op], type), ...);
}
template <class Reader>
void register_integer(const std::string& type) {
  register_compares<Reader>(type, kOrderedNames, std::make_index_sequence<6>{});
}
template <class Reader>
void register_float(const std::string& type) {
  register_compares<Reader>(type, kFloatNames, std::make_index_sequence<14>{});
}

template <class Format, bool flushes, size_t... op>
void register_packed(const std::string& type, std::index_sequence<op...>) {
  using Low = Half<Format, flushes, 0>;
  using High = Half<Format, flushes, 16>;
  (register_handler(std::string("setp.") + kFloatNames[op] + "." + type,
                    setp_pair<static_cast<Compare>(op), Low, High>),
   ...);
  (register_handler(std::string("set.") + kFloatNames[op] + "." + type,
                    set_pair<static_cast<Compare>(op), Low, High>),
   ...);
}

const bool registered = [] {
  register_integer<Plain<uint16_t>>("u16");
  register_integer<Plain<int16_t>>("s16");
  register_integer<Plain<uint32_t>>("u32");
  register_integer<Plain<int32_t>>("s32");
  register_integer<Plain<uint64_t>>("u64");
  register_integer<Plain<int64_t>>("s64");
  register_float<Plain<float>>("f32");
  register_float<FlushedF32>("ftz.f32");
  register_float<Plain<double>>("f64");
  register_float<Half<F16, false, 0>>("f16");
  register_float<Half<F16, true, 0>>("ftz.f16");
  register_float<Half<BF16, false, 0>>("bf16");
  register_packed<F16, false>("f16x2", std::make_index_sequence<14>{});
  register_packed<F16, true>("ftz.f16x2", std::make_index_sequence<14>{});
  register_packed<BF16, false>("bf16x2", std::make_index_sequence<14>{});
  return true;
}();

const HandlerTable selects({
    {"selp.b16", selp<uint16_t>},
    {"selp.b32", selp<uint32_t>},
    {"selp.b64", selp<uint64_t>},
    {"slct.b16.s32", map_lanes<slct_s32<uint16_t>>},
    {"slct.b32.s32", map_lanes<slct_s32<uint32_t>>},
    {"slct.b64.s32", map_lanes<slct_s32<uint64_t>>},
    {"slct.b16.f32", map_lanes<slct_f32<uint16_t, false>>},
    {"slct.b32.f32", map_lanes<slct_f32<uint32_t, false>>},
    {"slct.b64.f32", map_lanes<slct_f32<uint64_t, false>>},
    {"slct.ftz.b16.f32", map_lanes<slct_f32<uint16_t, true>>},
    {"slct.ftz.b32.f32", map_lanes<slct_f32<uint32_t, true>>},
    {"slct.ftz.b64.f32", map_lanes<slct_f32<uint64_t, true>>},
    {"slct.ftz.f32.f32", map_lanes<slct_flushed>},
    {"predicate.logic", predicate_logic},
});

}  // namespace
}  // namespace halfbyte::gpu
