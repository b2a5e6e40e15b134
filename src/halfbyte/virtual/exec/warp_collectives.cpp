// Instructions in which the lanes of a warp work together: shfl, vote, match, redux, activemask.
//
// The lanes of the mask have arrived together. Lanes may name different membermasks: those that
// name the same one form a group and see only each other.
#include <type_traits>

#include "exec/elementwise.h"
#include "exec/float_values.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

// Calls body(group) for every set of lanes that name the same membermask. `operand` < 0 with
// kAbsent: an instruction without membermask, whose lanes are one group. A lane that its own
// membermask leaves out is undefined by PTX and faults.
template <class Body>
void for_groups(const Warp& warp, const Instruction& in, int32_t operand, uint32_t mask, Body&& body) {
  if (operand == kAbsent) return body(mask);
  const uint32_t* members = warp.read32(operand);
  uint32_t rest = mask;
  while (rest) {
    const uint32_t wanted = members[first_lane(rest)];
    const uint32_t group = lanes_where(rest, [&](int lane) { return members[lane] == wanted; });
    if (group & ~wanted) {
      raise_fault(warp, in, first_lane(group & ~wanted), "not-a-member",
                  format_text("lanes 0x%08x run it with membermask 0x%08x, which leaves some out", group, wanted));
    }
    body(group);
    rest &= ~group;
  }
}

enum class Shuffle { kUp, kDown, kButterfly, kIndex };

// PTX ISA, "shfl.sync": the lane that `lane` reads; `lane` itself outside the segment.
template <Shuffle mode>
inline int32_t find_source_lane(int32_t lane, uint32_t b, uint32_t c, bool& is_inside) {
  const int32_t distance = static_cast<int32_t>(b & 31), clamp = static_cast<int32_t>(c & 31);
  const int32_t segment = static_cast<int32_t>(c >> 8 & 31);
  const int32_t highest = (lane & segment) | (clamp & ~segment);
  const int32_t lowest = lane & segment;
  int32_t from = lowest | (distance & ~segment);
  if (mode == Shuffle::kUp) from = lane - distance;
  if (mode == Shuffle::kDown) from = lane + distance;
  if (mode == Shuffle::kButterfly) from = lane ^ distance;
  is_inside = mode == Shuffle::kUp ? from >= highest : from <= highest;
  return is_inside ? from : lane;
}

// Operands d|p, a, b, c{, membermask}. A source lane that does not take part is undefined by PTX:
// reported, and the value its register holds is read.
template <Shuffle mode>
Outcome shfl(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* b = warp.read32(in.operands[3]);
  const uint32_t* c = warp.read32(in.operands[4]);
  uint32_t values[kLanes];
  std::memcpy(values, warp.read32(in.operands[2]), sizeof(values));
  int32_t from[kLanes];
  uint32_t flags[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    bool is_inside = false;
    from[lane] = find_source_lane<mode>(lane, b[lane], c[lane], is_inside) & 31;
    flags[lane] = is_inside;
  }
  const uint32_t inside = lanes_where(mask, [&](int lane) { return flags[lane] != 0; });
  uint32_t stray = 0;
  const int32_t members = in.num_operands > 5 ? in.operands[5] : kAbsent;
  for_groups(warp, in, members, mask, [&](uint32_t group) {
    stray |= lanes_where(group, [&](int lane) { return !(group >> from[lane] & 1); });
  });
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = values[from[lane]]; });
  warp.set_predicate(in.operands[1], inside, mask);
  if (stray) {
    const int lane = first_lane(stray);
    warp.simulation->findings.add(
        "undefined-shuffle",
        format_text("lane %d reads a lane that does not take part; the result is undefined", lane),
        warp.place(in, lane));
  }
  return Outcome::kNext;
}

enum class Vote { kAll, kAny, kUni, kBallot };

// Operands d or p, a{, membermask}.
template <Vote mode>
Outcome vote(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t votes = warp.predicate(in.operands[1]);
  const int32_t members = in.num_operands > 2 ? in.operands[2] : kAbsent;
  for_groups(warp, in, members, mask, [&](uint32_t group) {
    const uint32_t yes = votes & group;
    if (mode == Vote::kBallot) {
      uint32_t* to = warp.write32(in.operands[0]);
      for_independent_lanes(group, [&](int lane) { to[lane] = yes; });
      return;
    }
    bool truth = yes == group;
    if (mode == Vote::kAny) truth = yes != 0;
    if (mode == Vote::kUni) truth = yes == 0 || yes == group;
    warp.set_predicate(in.operands[0], truth ? kFullMask : 0, group);
  });
  return Outcome::kNext;
}

// Operands d, a, membermask: the lanes of the group with the same value.
template <class T>
Outcome match_any(Warp& warp, const Instruction& in, uint32_t mask) {
  const Storage<T>* a = source<T>(warp, in.operands[1]);
  uint32_t found[kLanes];
  for_groups(warp, in, in.operands[2], mask, [&](uint32_t group) {
    for (uint32_t rest = group; rest;) {
      const Storage<T> value = a[first_lane(rest)];
      const uint32_t same = lanes_where(group, [&](int lane) { return a[lane] == value; });
      for (uint32_t each = same; each; each &= each - 1) found[first_lane(each)] = same;
      rest &= ~same;
    }
  });
  uint32_t* to = warp.write32(in.operands[0]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) to[first_lane(rest)] = found[first_lane(rest)];
  return Outcome::kNext;
}

// Operands d|p, a, membermask: the group and true when all its values are equal, else 0 and false.
template <class T>
Outcome match_all(Warp& warp, const Instruction& in, uint32_t mask) {
  const Storage<T>* a = source<T>(warp, in.operands[2]);
  uint32_t agree = 0;
  for_groups(warp, in, in.operands[3], mask, [&](uint32_t group) {
    const Storage<T> value = a[first_lane(group)];
    if (lanes_where(group, [&](int lane) { return a[lane] == value; }) == group) agree |= group;
  });
  uint32_t result[kLanes] = {};
  for_groups(warp, in, in.operands[3], agree, [&](uint32_t group) {
    for (uint32_t rest = group; rest; rest &= rest - 1) result[first_lane(rest)] = group;
  });
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = result[lane]; });
  warp.set_predicate(in.operands[1], agree, mask);
  return Outcome::kNext;
}

template <class T, T (*combine)(T, T)>
Outcome redux(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* a = warp.read32(in.operands[1]);
  uint32_t* to = warp.write32(in.operands[0]);
  for_groups(warp, in, in.operands[2], mask, [&](uint32_t group) {
    T total = from_lane<T>(a[first_lane(group)]);
    for (uint32_t rest = group & (group - 1); rest; rest &= rest - 1) {
      total = combine(total, from_lane<T>(a[first_lane(rest)]));
    }
    const uint32_t value = to_lane<T>(total);
    for_independent_lanes(group, [&](int lane) { to[lane] = value; });
  });
  return Outcome::kNext;
}
template <class T>
T sum(T a, T b) {
  return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
template <class T>
T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T greatest(T a, T b) {
  return a < b ? b : a;
}
uint32_t bits_and(uint32_t a, uint32_t b) { return a & b; }
uint32_t bits_or(uint32_t a, uint32_t b) { return a | b; }
uint32_t bits_xor(uint32_t a, uint32_t b) { return a ^ b; }

// Attributes: maximum, .abs, .NaN. -0 is less than +0; a NaN loses against a number unless .NaN.
Outcome redux_f32(Warp& warp, const Instruction& in, uint32_t mask) {
  const bool is_max = in.attributes[0], takes_abs = in.attributes[1], keeps_nan = in.attributes[2];
  const uint32_t* a = warp.read32(in.operands[1]);
  uint32_t* to = warp.write32(in.operands[0]);
  // Bits ordered as the values: negative numbers reversed below the others.
  auto order = [](uint32_t bits) { return bits >> 31 ? ~bits : bits | 0x80000000u; };
  for_groups(warp, in, in.operands[2], mask, [&](uint32_t group) {
    bool has_nan = false, has_number = false;
    uint32_t best = 0;
    for (uint32_t rest = group; rest; rest &= rest - 1) {
      const uint32_t bits = a[first_lane(rest)] & (takes_abs ? 0x7FFFFFFFu : kFullMask);
      if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        has_nan = true;
      } else if (!has_number || (is_max ? order(bits) > order(best) : order(bits) < order(best))) {
        best = bits;
        has_number = true;
      }
    }
    const uint32_t value = !has_number || (has_nan && keeps_nan) ? kCanonicalNan32 : best;
    for_independent_lanes(group, [&](int lane) { to[lane] = value; });
  });
  return Outcome::kNext;
}

Outcome activemask(Warp& warp, const Instruction& in, uint32_t mask) {
  uint32_t* to = warp.write32(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = mask; });
  return Outcome::kNext;
}

const HandlerTable collectives({
    {"shfl.up", shfl<Shuffle::kUp>},
    {"shfl.down", shfl<Shuffle::kDown>},
    {"shfl.bfly", shfl<Shuffle::kButterfly>},
    {"shfl.idx", shfl<Shuffle::kIndex>},
    {"vote.all", vote<Vote::kAll>},
    {"vote.any", vote<Vote::kAny>},
    {"vote.uni", vote<Vote::kUni>},
    {"vote.ballot", vote<Vote::kBallot>},
    {"match.any.b32", match_any<uint32_t>},
    {"match.any.b64", match_any<uint64_t>},
    {"match.all.b32", match_all<uint32_t>},
    {"match.all.b64", match_all<uint64_t>},
    {"redux.add", redux<uint32_t, sum<uint32_t>>},
    {"redux.min.u32", redux<uint32_t, least<uint32_t>>},
    {"redux.max.u32", redux<uint32_t, greatest<uint32_t>>},
    {"redux.min.s32", redux<int32_t, least<int32_t>>},
    {"redux.max.s32", redux<int32_t, greatest<int32_t>>},
    {"redux.and", redux<uint32_t, bits_and>},
    {"redux.or", redux<uint32_t, bits_or>},
    {"redux.xor", redux<uint32_t, bits_xor>},
    {"redux.f32", redux_f32},
    {"activemask", activemask},
});

}  // namespace
}  // namespace halfbyte::gpu
