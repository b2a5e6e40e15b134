// Control flow: bra, brx.idx, ret, exit, trap, and the stand-in for forms that are not known.
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

Outcome bra(Warp& warp, const Instruction& in, uint32_t mask) {
  warp.branch(mask, in.operands[0]);
  return Outcome::kJumped;
}

// Operands: index register, then the targets of its table. The lanes of one target leave together;
// lanes with an index outside the table are undefined by the PTX ISA and fault here.
Outcome brx_idx(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* index = warp.read32(in.operands[0]);
  const uint32_t num_targets = in.num_operands - 1u;
  const uint32_t outside = lanes_where(mask, [&](int lane) { return index[lane] >= num_targets; });
  if (outside) {
    const int lane = first_lane(outside);
    raise_fault(warp, in, lane, "branch-index",
                format_text("brx.idx with index %u into a table of %u targets", index[lane], num_targets));
  }
  const uint32_t chosen = index[first_lane(mask)];
  const uint32_t together = lanes_where(mask, [&](int lane) { return index[lane] == chosen; });
  if (together == warp.fragment().mask) {
    warp.branch(together, in.operands[1 + chosen]);
    return Outcome::kJumped;
  }
  // The others stay at this instruction and choose next.
  const int32_t here = warp.fragment().pc;
  warp.branch(together, in.operands[1 + chosen]);
  if (mask & ~together) warp.fragment().pc = here;
  return Outcome::kJumped;
}

Outcome exit_thread(Warp& warp, const Instruction&, uint32_t mask) {
  warp.exit_lanes(mask);
  return Outcome::kJumped;
}

Outcome trap(Warp& warp, const Instruction& in, uint32_t mask) {
  raise_fault(warp, in, first_lane(mask), "trap", "the kernel stopped itself with a trap");
}

Outcome unsupported(Warp& warp, const Instruction& in, uint32_t mask) {
  raise_fault(warp, in, first_lane(mask), "unsupported-instruction",
              "the virtual GPU does not know this instruction form");
}

HALFBYTE_HANDLER("bra", bra);
HALFBYTE_HANDLER("brx.idx", brx_idx);
HALFBYTE_HANDLER("exit", exit_thread);
HALFBYTE_HANDLER("trap", trap);
HALFBYTE_HANDLER("unsupported", unsupported);

}  // namespace
}  // namespace halfbyte::gpu
