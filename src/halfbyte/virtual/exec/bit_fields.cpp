// Bits of integers: popc, clz, bfind, fns, brev, bfe, bfi, bmsk, szext.
#include "exec/elementwise.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kNotFound = 0xFFFFFFFFu;

template <class T>
uint32_t popc(T a) {
  return static_cast<uint32_t>(__builtin_popcountll(a));
}
template <class T>
uint32_t clz(T a) {
  if constexpr (sizeof(T) == 8) {
    return a ? static_cast<uint32_t>(__builtin_clzll(a)) : 64;
  } else {
    return a ? static_cast<uint32_t>(__builtin_clz(a)) : 32;
  }
}
// The most significant bit that differs from the sign (signed) or is set (unsigned).
template <class T, bool as_shift>
uint32_t bfind(T a) {
  using U = std::make_unsigned_t<T>;
  const U bits = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~a : a);
  if (bits == 0) return kNotFound;
  const uint32_t zeros = clz<U>(bits);
  return as_shift ? zeros : 8 * sizeof(T) - 1 - zeros;
}
// The n-th set bit of the mask, counted from `start` upwards (offset > 0) or downwards (< 0).
uint32_t fns(uint32_t mask, uint32_t start, int32_t offset) {
  if (offset == 0) return start < 32 && (mask >> start & 1) ? start : kNotFound;
  int64_t left = offset > 0 ? offset : -static_cast<int64_t>(offset);
  const int step = offset > 0 ? 1 : -1;
  for (int64_t bit = start; bit >= 0 && bit < 32; bit += step) {
    if ((mask >> bit & 1) && --left == 0) return static_cast<uint32_t>(bit);
  }
  return kNotFound;
}
template <class T>
T brev(T a) {
  T result = 0;
  for (unsigned bit = 0; bit < 8 * sizeof(T); ++bit) result |= (a >> bit & 1) << (8 * sizeof(T) - 1 - bit);
  return result;
}

// The `count` low bits set; count may reach the width.
template <class U>
U low_bits(uint32_t count) {
  constexpr uint32_t width = 8 * sizeof(U);
  return count >= width ? static_cast<U>(-1) : static_cast<U>((static_cast<U>(1) << (count % width)) - 1);
}

// Positions and counts of 32-bit forms are taken modulo 256, those of 64-bit forms whole (H200).
template <class U>
uint32_t bit_count(uint32_t count) {
  return sizeof(U) == 8 ? (count < 256 ? count : 256) : count & 0xFF;
}

// b: first bit, c: number of bits. What lies past the top is the sign.
template <class T>
std::make_unsigned_t<T> bfe(std::make_unsigned_t<T> a, uint32_t b, uint32_t c) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t width = 8 * sizeof(T);
  const uint32_t first = bit_count<U>(b), length = bit_count<U>(c);
  const uint32_t available = first < width ? width - first : 0;
  const uint32_t taken = length < available ? length : available;
  const U field = static_cast<U>((first < width ? a >> (first % width) : 0) & low_bits<U>(taken));
  if (!std::is_signed_v<T> || length == 0) return field;
  const uint32_t last = first + length - 1;
  const bool sign = a >> (last < width ? last : width - 1) & 1;
  return sign ? static_cast<U>(field | ~low_bits<U>(taken)) : field;
}
// The `count` low bits of a, put into b from bit `position`.
template <class U>
U bfi(U a, U b, uint32_t position, uint32_t count) {
  constexpr uint32_t width = 8 * sizeof(U);
  const uint32_t first = bit_count<U>(position), length = bit_count<U>(count);
  if (first >= width) return b;
  const U field = static_cast<U>(low_bits<U>(length) << (first % width));
  return static_cast<U>((b & ~field) | ((a << (first % width)) & field));
}
template <bool wraps>
uint32_t bmsk(uint32_t first, uint32_t count) {
  if (wraps) return low_bits<uint32_t>(count & 31) << (first & 31);
  return first >= 32 ? 0 : low_bits<uint32_t>(count) << (first & 31);
}
// Extends the value in the `count` low bits of a.
template <class T, bool wraps>
uint32_t szext(uint32_t a, uint32_t count) {
  const uint32_t bits = wraps ? count & 31 : (count < 32 ? count : 32);
  const uint32_t field = a & low_bits<uint32_t>(bits);
  const bool sign = std::is_signed_v<T> && bits != 0 && (a >> ((bits - 1) & 31) & 1);
  return sign ? field | ~low_bits<uint32_t>(bits) : field;
}

const HandlerTable bits({
    {"popc.b32", map_lanes<popc<uint32_t>>},
    {"popc.b64", map_lanes<popc<uint64_t>>},
    {"clz.b32", map_lanes<clz<uint32_t>>},
    {"clz.b64", map_lanes<clz<uint64_t>>},
    {"bfind.u32", map_lanes<bfind<uint32_t, false>>},
    {"bfind.s32", map_lanes<bfind<int32_t, false>>},
    {"bfind.u64", map_lanes<bfind<uint64_t, false>>},
    {"bfind.s64", map_lanes<bfind<int64_t, false>>},
    {"bfind.shiftamt.u32", map_lanes<bfind<uint32_t, true>>},
    {"bfind.shiftamt.s32", map_lanes<bfind<int32_t, true>>},
    {"bfind.shiftamt.u64", map_lanes<bfind<uint64_t, true>>},
    {"bfind.shiftamt.s64", map_lanes<bfind<int64_t, true>>},
    {"fns.b32", map_lanes<fns>},
    {"brev.b32", map_lanes<brev<uint32_t>>},
    {"brev.b64", map_lanes<brev<uint64_t>>},
    {"bfe.u32", map_lanes<bfe<uint32_t>>},
    {"bfe.s32", map_lanes<bfe<int32_t>>},
    {"bfe.u64", map_lanes<bfe<uint64_t>>},
    {"bfe.s64", map_lanes<bfe<int64_t>>},
    {"bfi.b32", map_lanes<bfi<uint32_t>>},
    {"bfi.b64", map_lanes<bfi<uint64_t>>},
    {"bmsk.clamp.b32", map_lanes<bmsk<false>>},
    {"bmsk.wrap.b32", map_lanes<bmsk<true>>},
    {"szext.clamp.u32", map_lanes<szext<uint32_t, false>>},
    {"szext.clamp.s32", map_lanes<szext<int32_t, false>>},
    {"szext.wrap.u32", map_lanes<szext<uint32_t, true>>},
    {"szext.wrap.s32", map_lanes<szext<int32_t, true>>},
});

}  // namespace
}  // namespace halfbyte::gpu
