// mov in all its shapes: copies, and vectors packed into or taken out of one register.
#include "exec/elementwise.h"

namespace halfbyte::gpu {
namespace {

template <class T>
T copy(T a) {
  return a;
}

Outcome mov_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* from = warp.read64(in.operands[1]);
  uint64_t* to = warp.write64(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) {
    const uint64_t low = from[lane], high = from[kLanes + lane];
    to[lane] = low;
    to[kLanes + lane] = high;
  });
  return Outcome::kNext;
}

// Whole = {part, ...}: the first part lies in the low bits.
template <class Whole, class Part>
Outcome pack(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int count = sizeof(Whole) / sizeof(Part);
  Storage<Whole>* to = destination<Whole>(warp, in.operands[0]);
  const Storage<Part>* from[count];
  for (int i = 0; i < count; ++i) from[i] = source<Part>(warp, in.operands[1 + i]);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    Whole whole = 0;
    for (int i = 0; i < count; ++i) {
      whole |= static_cast<Whole>(static_cast<Whole>(static_cast<Part>(from[i][lane])) << (8 * sizeof(Part) * i));
    }
    to[lane] = whole;
  });
  return Outcome::kNext;
}

template <class Part, class Whole>
Outcome unpack(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int count = sizeof(Whole) / sizeof(Part);
  const Storage<Whole>* from = source<Whole>(warp, in.operands[count]);
  Storage<Part>* to[count];
  for (int i = 0; i < count; ++i) to[i] = destination<Part>(warp, in.operands[i]);
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    const Storage<Whole> whole = from[lane];
    for (int i = 0; i < count; ++i) to[i][lane] = static_cast<Part>(whole >> (8 * sizeof(Part) * i));
  });
  return Outcome::kNext;
}

Outcome pack_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* low = warp.read64(in.operands[1]);
  const uint64_t* high = warp.read64(in.operands[2]);
  uint64_t* to = warp.write64(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) {
    const uint64_t first = low[lane], second = high[lane];
    to[lane] = first;
    to[kLanes + lane] = second;
  });
  return Outcome::kNext;
}

Outcome unpack_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* from = warp.read64(in.operands[2]);
  uint64_t* low = warp.write64(in.operands[0]);
  uint64_t* high = warp.write64(in.operands[1]);
  for_independent_lanes(mask, [&](int lane) {
    const uint64_t first = from[lane], second = from[kLanes + lane];
    low[lane] = first;
    high[lane] = second;
  });
  return Outcome::kNext;
}

const HandlerTable moves({
    {"mov.b16", map_lanes<copy<uint16_t>>},
    {"mov.b32", map_lanes<copy<uint32_t>>},
    {"mov.b64", map_lanes<copy<uint64_t>>},
    {"mov.b128", mov_b128},
    {"pack.b16.b8", pack<uint16_t, uint8_t>},
    {"pack.b32.b8", pack<uint32_t, uint8_t>},
    {"pack.b32.b16", pack<uint32_t, uint16_t>},
    {"pack.b64.b16", pack<uint64_t, uint16_t>},
    {"pack.b64.b32", pack<uint64_t, uint32_t>},
    {"pack.b128.b64", pack_b128},
    {"unpack.b8.b16", unpack<uint8_t, uint16_t>},
    {"unpack.b8.b32", unpack<uint8_t, uint32_t>},
    {"unpack.b16.b32", unpack<uint16_t, uint32_t>},
    {"unpack.b16.b64", unpack<uint16_t, uint64_t>},
    {"unpack.b32.b64", unpack<uint32_t, uint64_t>},
    {"unpack.b64.b128", unpack_b128},
});

}  // namespace
}  // namespace halfbyte::gpu
