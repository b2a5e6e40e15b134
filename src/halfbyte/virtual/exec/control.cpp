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

// Operands: message, file, line, function, character size (the device runtime's `__assertfail`).
Outcome assertfail(Warp& warp, const Instruction& in, uint32_t mask) {
  const int lane = first_lane(mask);
  auto read_text = [&](int operand) {
    std::string text;
    uint64_t address = warp.read64(in.operands[operand])[lane];
    for (; text.size() < 1000; ++address) {
      const char next = static_cast<char>(*warp.access(in, lane, address, 1, false));
      if (next == 0) break;
      text += next;
    }
    return text;
  };
  const uint32_t line = warp.read32(in.operands[2])[lane];
  raise_fault(warp, in, lane, "assertion",
              format_text("assertion `%s` failed in %s (%s:%u)", read_text(0).c_str(),
                          read_text(3).c_str(), read_text(1).c_str(), line));
}

Outcome unsupported(Warp& warp, const Instruction& in, uint32_t mask) {
  raise_fault(warp, in, first_lane(mask), "unsupported-instruction",
              "the virtual GPU does not know this instruction form");
}

HALFBYTE_HANDLER("bra", bra);
HALFBYTE_HANDLER("brx.idx", brx_idx);
HALFBYTE_HANDLER("exit", exit_thread);
HALFBYTE_HANDLER("trap", trap);
HALFBYTE_HANDLER("assertfail", assertfail);
HALFBYTE_HANDLER("unsupported", unsupported);

}  // namespace
}  // namespace halfbyte::gpu
