// Integer arithmetic: add, sub, mul, mad, sad, div, rem, abs, neg, min, max, packed forms, dp4a, dp2a.
#include <algorithm>
#include <limits>

#include "exec/elementwise.h"

namespace halfbyte::gpu {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
using Wide = std::conditional_t<
    std::is_signed_v<T>,
    std::conditional_t<sizeof(T) == 2, int32_t, std::conditional_t<sizeof(T) == 4, int64_t, __int128>>,
    std::conditional_t<sizeof(T) == 2, uint32_t,
                       std::conditional_t<sizeof(T) == 4, uint64_t, unsigned __int128>>>;

// Wrapping arithmetic goes through an unsigned type of at least 32 bits: no overflow is undefined.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < 4), uint32_t, Unsigned<T>>;

template <class T>
T add(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
}
template <class T>
T sub(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
}
template <class T>
T mul_lo(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
}
template <class T>
T mul_hi(T a, T b) {
  return static_cast<T>((static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b)) >> (8 * sizeof(T)));
}
template <class T>
Wide<T> mul_wide(T a, T b) {
  return static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b);
}
template <class T>
T mad_lo(T a, T b, T c) {
  return add<T>(mul_lo<T>(a, b), c);
}
template <class T>
T mad_hi(T a, T b, T c) {
  return add<T>(mul_hi<T>(a, b), c);
}
template <class T>
Wide<T> mad_wide(T a, T b, Wide<T> c) {
  return add<Wide<T>>(mul_wide<T>(a, b), c);
}
template <class T>
T clamp_wide(int64_t value) {
  return static_cast<T>(std::clamp<int64_t>(value, std::numeric_limits<T>::min(),
                                            std::numeric_limits<T>::max()));
}
template <class T>
T add_sat(T a, T b) {
  return clamp_wide<T>(static_cast<int64_t>(a) + b);
}
template <class T>
T sub_sat(T a, T b) {
  return clamp_wide<T>(static_cast<int64_t>(a) - b);
}
int32_t mad_hi_sat(int32_t a, int32_t b, int32_t c) {
  return clamp_wide<int32_t>(static_cast<int64_t>(mul_hi<int32_t>(a, b)) + c);
}

// PTX ISA, "mul24": the 24 low bits of each operand, sign-extended when signed; a 48-bit product.
template <class T>
int64_t product24(T a, T b) {
  if constexpr (std::is_signed_v<T>) {
    const int32_t left = static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8;
    const int32_t right = static_cast<int32_t>(static_cast<uint32_t>(b) << 8) >> 8;
    return static_cast<int64_t>(left) * right;
  } else {
    return static_cast<int64_t>(static_cast<uint64_t>(a & 0xFFFFFFu) * (b & 0xFFFFFFu));
  }
}
template <class T>
T mul24_lo(T a, T b) {
  return static_cast<T>(product24<T>(a, b));
}
template <class T>
T mul24_hi(T a, T b) {
  return static_cast<T>(product24<T>(a, b) >> 16);
}
template <class T>
T mad24_lo(T a, T b, T c) {
  return add<T>(mul24_lo<T>(a, b), c);
}
template <class T>
T mad24_hi(T a, T b, T c) {
  return add<T>(mul24_hi<T>(a, b), c);
}
int32_t mad24_hi_sat(int32_t a, int32_t b, int32_t c) {
  return clamp_wide<int32_t>((product24<int32_t>(a, b) >> 16) + c);
}

template <class T>
T sad(T a, T b, T c) {
  return add<T>(c, a < b ? sub<T>(b, a) : sub<T>(a, b));
}

// Division by zero is unspecified in PTX; quotient and remainder are all ones, as on an H200. The
// most negative value divided by -1 wraps to itself, remainder 0.
template <class T>
T div(T a, T b) {
  const bool wraps = std::is_signed_v<T> && b == static_cast<T>(-1);
  const T divisor = b == 0 || wraps ? static_cast<T>(1) : b;
  const T quotient = static_cast<T>(a / divisor);
  if (b == 0) return static_cast<T>(-1);
  return wraps ? sub<T>(0, a) : quotient;
}
template <class T>
T rem(T a, T b) {
  const bool wraps = std::is_signed_v<T> && b == static_cast<T>(-1);
  const T divisor = b == 0 || wraps ? static_cast<T>(1) : b;
  const T remainder = static_cast<T>(a % divisor);
  return b == 0 ? static_cast<T>(~static_cast<T>(0)) : remainder;
}

template <class T>
T neg(T a) {
  return sub<T>(0, a);
}
template <class T>
T abs(T a) {
  return a < 0 ? neg<T>(a) : a;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T min_relu(T a, T b) {
  return max<T>(min<T>(a, b), 0);
}
template <class T>
T max_relu(T a, T b) {
  return max<T>(max<T>(a, b), 0);
}

template <class A, class B>
uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int byte = 0; byte < 32; byte += 8) {
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> byte)) *
                               static_cast<int32_t>(static_cast<B>(b >> byte)));
  }
  return c;
}
// A: 16-bit halves of a; B: two bytes of b, from bit `first`.
template <class A, class B, int first>
uint32_t dp2a(uint32_t a, uint32_t b, uint32_t c) {
  for (int part = 0; part < 2; ++part) {
    c += static_cast<uint32_t>(static_cast<int32_t>(static_cast<A>(a >> (16 * part)))) *
         static_cast<uint32_t>(static_cast<int32_t>(static_cast<B>(b >> (first + 8 * part))));
  }
  return c;
}

const HandlerTable wrapping({
    {"add.b16", map_lanes<add<uint16_t>>},
    {"add.b32", map_lanes<add<uint32_t>>},
    {"add.b64", map_lanes<add<uint64_t>>},
    {"sub.b16", map_lanes<sub<uint16_t>>},
    {"sub.b32", map_lanes<sub<uint32_t>>},
    {"sub.b64", map_lanes<sub<uint64_t>>},
    {"mul.lo.b16", map_lanes<mul_lo<uint16_t>>},
    {"mul.lo.b32", map_lanes<mul_lo<uint32_t>>},
    {"mul.lo.b64", map_lanes<mul_lo<uint64_t>>},
    {"mad.lo.b16", map_lanes<mad_lo<uint16_t>>},
    {"mad.lo.b32", map_lanes<mad_lo<uint32_t>>},
    {"mad.lo.b64", map_lanes<mad_lo<uint64_t>>},
    {"neg.b16", map_lanes<neg<uint16_t>>},
    {"neg.b32", map_lanes<neg<uint32_t>>},
    {"neg.b64", map_lanes<neg<uint64_t>>},
    {"abs.s16", map_lanes<abs<int16_t>>},
    {"abs.s32", map_lanes<abs<int32_t>>},
    {"abs.s64", map_lanes<abs<int64_t>>},
    {"add.sat.s32", map_lanes<add_sat<int32_t>>},
    {"sub.sat.s32", map_lanes<sub_sat<int32_t>>},
    {"add.sat.u32", map_lanes<add_sat<uint32_t>>},
    {"sub.sat.u32", map_lanes<sub_sat<uint32_t>>},
    {"mad.hi.sat.s32", map_lanes<mad_hi_sat>},
    {"mul24.lo.u32", map_lanes<mul24_lo<uint32_t>>},
    {"mul24.lo.s32", map_lanes<mul24_lo<int32_t>>},
    {"mul24.hi.u32", map_lanes<mul24_hi<uint32_t>>},
    {"mul24.hi.s32", map_lanes<mul24_hi<int32_t>>},
    {"mad24.lo.u32", map_lanes<mad24_lo<uint32_t>>},
    {"mad24.lo.s32", map_lanes<mad24_lo<int32_t>>},
    {"mad24.hi.u32", map_lanes<mad24_hi<uint32_t>>},
    {"mad24.hi.s32", map_lanes<mad24_hi<int32_t>>},
    {"mad24.hi.sat.s32", map_lanes<mad24_hi_sat>},
});

// Forms where the sign of the operands matters, for every 16-, 32- and 64-bit type.
template <class T>
void register_signed_forms(const std::string& type) {
  register_handler("mul.hi." + type, map_lanes<mul_hi<T>>);
  register_handler("mad.hi." + type, map_lanes<mad_hi<T>>);
  register_handler("sad." + type, map_lanes<sad<T>>);
  register_handler("div." + type, map_lanes<div<T>>);
  register_handler("rem." + type, map_lanes<rem<T>>);
  register_handler("min." + type, map_lanes<min<T>>);
  register_handler("max." + type, map_lanes<max<T>>);
  if constexpr (sizeof(T) < 8) {
    register_handler("mul.wide." + type, map_lanes<mul_wide<T>>);
    register_handler("mad.wide." + type, map_lanes<mad_wide<T>>);
  }
}

// 16x2 and 8x4 integers packed in 32 bits.
template <class T>
void register_packed_forms(const std::string& type) {
  register_handler("add." + type, map_lanes<map_parts2<add<T>, T>>);
  register_handler("sub." + type, map_lanes<map_parts2<sub<T>, T>>);
  register_handler("add.sat." + type, map_lanes<map_parts2<add_sat<T>, T>>);
  register_handler("sub.sat." + type, map_lanes<map_parts2<sub_sat<T>, T>>);
  register_handler("neg." + type, map_lanes<map_parts1<neg<T>, T>>);
  register_handler("min." + type, map_lanes<map_parts2<min<T>, T>>);
  register_handler("max." + type, map_lanes<map_parts2<max<T>, T>>);
  if constexpr (std::is_signed_v<T>) {
    register_handler("min.relu." + type, map_lanes<map_parts2<min_relu<T>, T>>);
    register_handler("max.relu." + type, map_lanes<map_parts2<max_relu<T>, T>>);
  }
}

template <class A, class B>
void register_dot_products(const std::string& types) {
  using A2 = std::conditional_t<std::is_signed_v<A>, int16_t, uint16_t>;
  register_handler("dp4a." + types, map_lanes<dp4a<A, B>>);
  register_handler("dp2a.lo." + types, map_lanes<dp2a<A2, B, 0>>);
  register_handler("dp2a.hi." + types, map_lanes<dp2a<A2, B, 16>>);
}

const bool registered = [] {
  register_signed_forms<uint16_t>("u16");
  register_signed_forms<int16_t>("s16");
  register_signed_forms<uint32_t>("u32");
  register_signed_forms<int32_t>("s32");
  register_signed_forms<uint64_t>("u64");
  register_signed_forms<int64_t>("s64");
  register_packed_forms<uint16_t>("u16x2");
  register_packed_forms<int16_t>("s16x2");
  register_packed_forms<uint8_t>("u8x4");
  register_packed_forms<int8_t>("s8x4");
  register_dot_products<uint8_t, uint8_t>("u32.u32");
  register_dot_products<uint8_t, int8_t>("u32.s32");
  register_dot_products<int8_t, uint8_t>("s32.u32");
  register_dot_products<int8_t, int8_t>("s32.s32");
  register_handler("min.relu.s32", map_lanes<min_relu<int32_t>>);
  register_handler("max.relu.s32", map_lanes<max_relu<int32_t>>);
  return true;
}();

}  // namespace
}  // namespace halfbyte::gpu
