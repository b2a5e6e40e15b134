// What lowering adds around an instruction: addresses of shared variables, width changes.
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

// Destination; attribute 0: offset in the CTA's shared memory. The rank is part of the address.
Outcome shared_address_b32(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t address = warp.cta->rank << kSharedRankShift | static_cast<uint32_t>(in.attributes[0]);
  uint32_t* out = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) { out[lane] = address; });
  return Outcome::kNext;
}

Outcome shared_address_b64(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t address = warp.cta->rank << kSharedRankShift | static_cast<uint32_t>(in.attributes[0]);
  uint64_t* out = warp.write64(in.operands[0]);
  for_lanes(mask, [&](int lane) { out[lane] = address; });
  return Outcome::kNext;
}

Outcome narrow_b64(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* from = warp.read64(in.operands[1]);
  uint32_t* out = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) { out[lane] = static_cast<uint32_t>(from[lane]); });
  return Outcome::kNext;
}

// Attribute 0: bits of the source that count; attribute 1: whether they are signed.
Outcome widen_b32(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* from = warp.read32(in.operands[1]);
  uint64_t* out = warp.write64(in.operands[0]);
  const int shift = 64 - static_cast<int>(in.attributes[0]);
  if (in.attributes[1]) {
    for_lanes(mask, [&](int lane) {
      const auto high = static_cast<int64_t>(static_cast<uint64_t>(from[lane]) << shift);
      out[lane] = static_cast<uint64_t>(high >> shift);
    });
  } else {
    for_lanes(mask, [&](int lane) { out[lane] = static_cast<uint64_t>(from[lane]) << shift >> shift; });
  }
  return Outcome::kNext;
}

// Attribute 0: bits of the source, which are signed; attribute 1: bits of the destination register.
Outcome extend_b32(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* from = warp.read32(in.operands[1]);
  uint32_t* out = warp.write32(in.operands[0]);
  const int shift = 32 - static_cast<int>(in.attributes[0]);
  const uint32_t kept = in.attributes[1] == 32 ? 0xFFFFFFFFu : (1u << in.attributes[1]) - 1;
  for_lanes(mask, [&](int lane) {
    const auto high = static_cast<int32_t>(from[lane] << shift);
    out[lane] = static_cast<uint32_t>(high >> shift) & kept;
  });
  return Outcome::kNext;
}

HALFBYTE_HANDLER("extend.b32", extend_b32);
HALFBYTE_HANDLER("shared_address.b32", shared_address_b32);
HALFBYTE_HANDLER("shared_address.b64", shared_address_b64);
HALFBYTE_HANDLER("narrow.b64", narrow_b64);
HALFBYTE_HANDLER("widen.b32", widen_b32);

}  // namespace
}  // namespace halfbyte::gpu
