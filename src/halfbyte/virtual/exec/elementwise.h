// Turns a function of one lane's values into a handler that runs it on the lanes of a mask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine/warp.h"

// Registers either coincide or are disjoint, so a lane never reads what another lane has written.
#if defined(__GNUC__) && !defined(__clang__)
#define HALFBYTE_INDEPENDENT_LANES _Pragma("GCC ivdep")
#elif defined(__clang__)
#define HALFBYTE_INDEPENDENT_LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define HALFBYTE_INDEPENDENT_LANES
#endif

namespace halfbyte::gpu {

// How a value of type T lies in a register: 64-bit types in a 64-bit lane, all others in a 32-bit
// lane, zero-extended.
template <class T>
using Storage = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T from_lane(Storage<T> raw) {
  if constexpr (std::is_floating_point_v<T>) {
    return bit_cast<T>(raw);
  } else {
    return static_cast<T>(raw);
  }
}

template <class T>
inline Storage<T> to_lane(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return bit_cast<Storage<T>>(value);
  } else {
    return static_cast<Storage<T>>(static_cast<std::make_unsigned_t<T>>(value));
  }
}

template <class T>
inline const Storage<T>* source(const Warp& warp, int32_t operand) {
  if constexpr (sizeof(T) == 8) {
    return warp.read64(operand);
  } else {
    return warp.read32(operand);
  }
}

template <class T>
inline Storage<T>* destination(Warp& warp, int32_t operand) {
  if constexpr (sizeof(T) == 8) {
    return warp.write64(operand);
  } else {
    return warp.write32(operand);
  }
}

// Calls body(lane) for the lanes of the mask; the full mask is a loop without dependences.
template <class Body>
inline __attribute__((always_inline)) void for_independent_lanes(uint32_t mask, Body&& body) {
  if (mask == kFullMask) {
    HALFBYTE_INDEPENDENT_LANES
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (uint32_t rest = mask; rest; rest &= rest - 1) body(__builtin_ctz(rest));
  }
}

template <auto function, class Result, class... Arguments, size_t... index>
inline __attribute__((always_inline)) void map_operands(Result (*)(Arguments...),
                                                        std::index_sequence<index...>, Warp& warp,
                                                        const Instruction& in, uint32_t mask) {
  Storage<Result>* to = destination<Result>(warp, in.operands[0]);
  const std::tuple<const Storage<Arguments>*...> from{
      source<Arguments>(warp, in.operands[1 + index])...};
  for_independent_lanes(mask, [&](int lane) __attribute__((always_inline)) {
    to[lane] = to_lane<Result>(function(from_lane<Arguments>(std::get<index>(from)[lane])...));
  });
}

template <class Result, class... Arguments>
constexpr size_t count_arguments(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// Handler of `function(source...) -> destination` for operands in textual order. Everything it calls
// is inlined: a call in the loop would keep it from being vectorized.
template <auto function>
__attribute__((flatten)) Outcome map_lanes(Warp& warp, const Instruction& in, uint32_t mask) {
  map_operands<function>(function, std::make_index_sequence<count_arguments(function)>{}, warp, in,
                         mask);
  return Outcome::kNext;
}

// The same for a packed pair of 32-bit values in each 64-bit lane: a register of 64 floats.
template <auto function, class Result, class... Arguments, size_t... index>
inline __attribute__((always_inline)) void map_pair_operands(Result (*)(Arguments...),
                                                             std::index_sequence<index...>,
                                                             Warp& warp, const Instruction& in,
                                                             uint32_t mask) {
  uint32_t* to = warp.write32(in.operands[0]);
  const std::tuple<decltype(source<Arguments>(warp, 0))...> from{
      warp.read32(in.operands[1 + index])...};
  auto body = [&](int half) __attribute__((always_inline)) {
    to[half] = to_lane<Result>(function(from_lane<Arguments>(std::get<index>(from)[half])...));
  };
  if (mask == kFullMask) {
    HALFBYTE_INDEPENDENT_LANES
    for (int half = 0; half < 2 * kLanes; ++half) body(half);
  } else {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      body(2 * __builtin_ctz(rest));
      body(2 * __builtin_ctz(rest) + 1);
    }
  }
}

template <auto function>
__attribute__((flatten)) Outcome map_pairs(Warp& warp, const Instruction& in, uint32_t mask) {
  map_pair_operands<function>(function, std::make_index_sequence<count_arguments(function)>{},
                              warp, in, mask);
  return Outcome::kNext;
}

// Applies a function of 16-bit (or 8-bit) values to the parts of packed 32-bit values.
template <auto function, class Part, class... Packed>
inline uint32_t map_parts_of(Packed... packed) {
  constexpr int bits = 8 * sizeof(Part);
  using Unsigned = std::make_unsigned_t<Part>;
  uint32_t result = 0;
  for (int position = 0; position < 32; position += bits) {
    const Part part = static_cast<Part>(function(static_cast<Part>(packed >> position)...));
    result |= static_cast<uint32_t>(static_cast<Unsigned>(part)) << position;
  }
  return result;
}

template <auto function, class Part>
uint32_t map_parts1(uint32_t a) {
  return map_parts_of<function, Part>(a);
}
template <auto function, class Part>
uint32_t map_parts2(uint32_t a, uint32_t b) {
  return map_parts_of<function, Part>(a, b);
}

// A function of 16-bit codes (in the low half of 32 bits) for a scalar register, whose upper half is
// ignored, and for both halves of a packed one.
template <auto function, class Signature>
struct Halves;
template <auto function, class... Codes>
struct Halves<function, uint32_t (*)(Codes...)> {
  static uint32_t low(Codes... codes) { return function((codes & 0xFFFF)...); }
  static uint32_t both(Codes... codes) {
    return function((codes & 0xFFFF)...) | function((codes >> 16)...) << 16;
  }
};

// Registers a handler whose name is put together at start-up.
__attribute__((noinline)) inline void register_handler(const std::string& name, Handler handler) {
  HandlerRegistration(name.c_str(), handler);
}

// Registers `function` for a 16-bit type and, with "x2", for its packed pair.
template <auto function>
void register_halves(const std::string& stem, const std::string& type) {
  using Parts = Halves<function, decltype(function)>;
  register_handler(stem + type, map_lanes<&Parts::low>);
  register_handler(stem + type + "x2", map_lanes<&Parts::both>);
}

// One row of a table of handlers; a family registers its table with one static object.
struct NamedHandler {
  const char* name;
  Handler handler;
};

struct HandlerTable {
  template <size_t count>
  explicit HandlerTable(const NamedHandler (&rows)[count]) {
    for (const NamedHandler& row : rows) HandlerRegistration(row.name, row.handler);
  }
};

}  // namespace halfbyte::gpu
