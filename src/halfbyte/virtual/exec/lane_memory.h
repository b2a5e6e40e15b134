// Moving the lanes' values between registers and memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "machine/access.h"

namespace halfbyte::gpu {

// Unsigned integer of a size in bytes.
template <int Bytes> struct UnsignedOf;
template <> struct UnsignedOf<1> { using type = uint8_t; };
template <> struct UnsignedOf<2> { using type = uint16_t; };
template <> struct UnsignedOf<4> { using type = uint32_t; };
template <> struct UnsignedOf<8> { using type = uint64_t; };
template <int Bytes> using Unsigned = typename UnsignedOf<Bytes>::type;

// Whether lane i's bytes follow lane i-1's, for all 32 lanes.
template <int Bytes>
inline bool is_contiguous(const LanePointers& pointers) {
  const uint64_t* at = reinterpret_cast<const uint64_t*>(pointers.at);
  uint64_t difference = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    difference |= (at[lane] - at[0]) ^ static_cast<uint64_t>(lane * Bytes);
  }
  return difference == 0;
}

// Every lane's bytes, one lane after the other.
template <int Bytes>
struct alignas(64) LaneBytes {
  uint8_t data[kLanes * Bytes];
};

template <int Bytes>
inline void gather_lanes(const LanePointers& pointers, LaneBytes<Bytes>& bytes) {
  for (int lane = 0; lane < kLanes; ++lane) {
    std::memcpy(bytes.data + lane * Bytes, pointers.at[lane], Bytes);
  }
}

template <int Bytes>
inline void scatter_lanes(uint32_t mask, const LanePointers& pointers, const LaneBytes<Bytes>& bytes) {
  for_lanes(mask, [&](int lane) {
    std::memcpy(pointers.at[lane], bytes.data + lane * Bytes, Bytes);
  });
}

// Writes component `position` of `count` of all lanes into a register; narrow ones zero-extended.
template <class Register, class Value>
inline void write_component(uint32_t mask, Register* __restrict__ target,
                            const Value* __restrict__ source, int position, int count) {
  for_lanes(mask, [&](int lane) { target[lane] = source[lane * count + position]; });
}

template <int Unit, int Count>
inline void write_components(Warp& warp, const int32_t* slots, uint32_t mask, const uint8_t* bytes) {
  const auto* source = reinterpret_cast<const Unsigned<Unit>*>(bytes);
  for (int i = 0; i < Count; ++i) {
    if constexpr (Unit == 8) {
      write_component(mask, warp.write64(slots[i]), source, i, Count);
    } else {
      write_component(mask, warp.write32(slots[i]), source, i, Count);
    }
  }
}

// Reads the components of every lane from the registers into `bytes`.
template <int Unit, int Count>
inline void read_components(const Warp& warp, const int32_t* slots, uint8_t* bytes) {
  using Value = Unsigned<Unit>;
  Value* __restrict__ target = reinterpret_cast<Value*>(bytes);
  for (int i = 0; i < Count; ++i) {
    if constexpr (Unit == 8) {
      const uint64_t* __restrict__ source = warp.read64(slots[i]);
      for (int lane = 0; lane < kLanes; ++lane) target[lane * Count + i] = source[lane];
    } else {
      const uint32_t* __restrict__ source = warp.read32(slots[i]);
      for (int lane = 0; lane < kLanes; ++lane) {
        target[lane * Count + i] = static_cast<Value>(source[lane]);
      }
    }
  }
}

}  // namespace halfbyte::gpu
