// Addresses between state spaces: cvta, isspacep, mapa, getctarank.
#include "exec/elementwise.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

// Attribute 0: the window of the space (0 for global and const, which are generic as they are).
Outcome cvta(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t window = static_cast<uint64_t>(in.attributes[0]);
  const uint64_t* from = warp.read64(in.operands[1]);
  uint64_t* to = warp.write64(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = from[lane] | window; });
  return Outcome::kNext;
}
Outcome cvta_to(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t kept = ~static_cast<uint64_t>(in.attributes[0]);
  const uint64_t* from = warp.read64(in.operands[1]);
  uint64_t* to = warp.write64(in.operands[0]);
  for_independent_lanes(mask, [&](int lane) { to[lane] = from[lane] & kept; });
  return Outcome::kNext;
}

// Attribute 0: the window a generic address of the space lies in; attribute 1: 1 where only the
// own CTA's shared memory counts.
Outcome isspacep(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t window = static_cast<uint64_t>(in.attributes[0]);
  const bool is_own = in.attributes[1] != 0;
  const uint64_t* address = warp.read64(in.operands[1]);
  const uint64_t rank = warp.cta->rank;
  const uint32_t inside = lanes_where(mask, [&](int lane) {
    const bool is_in_window = (address[lane] & kWindowMask) == window;
    return is_in_window && (!is_own || ((address[lane] >> kSharedRankShift) & 0xFF) == rank);
  });
  warp.set_predicate(in.operands[0], inside, mask);
  return Outcome::kNext;
}

// Constants lie among the registered buffers of global memory, marked read-only.
Outcome isspacep_const(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint64_t* address = warp.read64(in.operands[1]);
  const uint32_t inside = lanes_where(mask, [&](int lane) {
    if ((address[lane] & kWindowMask) != 0) return false;
    const Allocation* found = warp.simulation->memory.find(address[lane]);
    return found != nullptr && found->is_read_only;
  });
  warp.set_predicate(in.operands[0], inside, mask);
  return Outcome::kNext;
}

// The same offset in the shared memory of another CTA of the cluster.
inline uint32_t map_shared(uint32_t address, uint32_t rank) {
  return (address & kSharedOffsetMask) | rank << kSharedRankShift;
}
uint32_t mapa_b32(uint32_t address, uint32_t rank) { return map_shared(address, rank); }
uint64_t mapa_b64(uint64_t address, uint32_t rank) {
  return map_shared(static_cast<uint32_t>(address), rank);
}
uint64_t mapa_generic(uint64_t address, uint32_t rank) {
  return kSharedWindow | map_shared(static_cast<uint32_t>(address), rank);
}

uint32_t getctarank_b32(uint32_t address) { return address >> kSharedRankShift; }
uint32_t getctarank_b64(uint64_t address) {
  return static_cast<uint32_t>(address) >> kSharedRankShift;
}

const HandlerTable addresses({
    {"cvta", cvta},
    {"cvta.to", cvta_to},
    {"isspacep", isspacep},
    {"isspacep.const", isspacep_const},
    {"mapa.b32", map_lanes<mapa_b32>},
    {"mapa.b64", map_lanes<mapa_b64>},
    {"mapa.generic", map_lanes<mapa_generic>},
    {"getctarank.b32", map_lanes<getctarank_b32>},
    {"getctarank.b64", map_lanes<getctarank_b64>},
});

}  // namespace
}  // namespace halfbyte::gpu
