// elect.sync, nanosleep, and what the functional machine need not do: fences, prefetches, hints.
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kLineBytes = 128;  // size of discard and applypriority, PTX ISA

// Fences order memory; this machine performs memory operations in program order.
Outcome no_operation(Warp&, const Instruction&, uint32_t) { return Outcome::kNext; }

// Operands: leader's lane, predicate, membermask. The lowest member is elected; PTX leaves open which.
Outcome elect_sync(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t members = warp.uniform32(in, in.operands[2], mask, "the membermask of elect.sync");
  if (mask & ~members) {
    raise_fault(warp, in, first_lane(mask & ~members), "not-a-member",
                format_text("lanes 0x%08x run elect.sync with membermask 0x%08x, which leaves some out", mask,
                            members));
  }
  const int leader = first_lane(mask);
  uint32_t* target = warp.write32(in.operands[0]);
  for_lanes(mask, [&](int lane) { target[lane] = static_cast<uint32_t>(leader); });
  warp.set_predicate(in.operands[1], 1u << leader, mask);
  return Outcome::kNext;
}

Outcome nanosleep(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* nanoseconds = warp.read32(in.operands[0]);
  uint32_t longest = 0;
  for_lanes(mask, [&](int lane) { longest = nanoseconds[lane] > longest ? nanoseconds[lane] : longest; });
  warp.time += longest * 1e-9 * warp.simulation->config.clock_hz;
  return Outcome::kYield;
}

Outcome setmaxnreg(Warp& warp, const Instruction& in, uint32_t mask) {
  const int32_t registers = in.operands[0];
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    raise_fault(warp, in, first_lane(mask), "register-count",
                format_text("setmaxnreg of %d registers; 24 to 256 in steps of 8", registers));
  }
  return Outcome::kNext;
}

// What was in the line is lost: programs must not read it before they write it.
Outcome discard(Warp& warp, const Instruction& in, uint32_t mask) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint64_t address = warp.read64(in.operands[0])[lane] + static_cast<uint64_t>(static_cast<int64_t>(in.operands[1]));
    if (address % kLineBytes != 0) {
      raise_fault(warp, in, lane, "misaligned", "discard takes an address that is a multiple of 128");
    }
    for (uint32_t byte = 0; byte < kLineBytes; byte += 16) {
      std::memset(warp.access(in, lane, address + byte, 16, true), 0xD5, 16);
    }
  }
  return Outcome::kNext;
}

// Attribute 0: the policy. Cache policies are opaque; they change no result.
Outcome createpolicy(Warp& warp, const Instruction& in, uint32_t mask) {
  uint64_t* target = warp.write64(in.operands[0]);
  for_lanes(mask, [&](int lane) { target[lane] = static_cast<uint64_t>(in.attributes[0]); });
  return Outcome::kNext;
}

HALFBYTE_HANDLER("fence", no_operation);
HALFBYTE_HANDLER("fence.proxy", no_operation);
HALFBYTE_HANDLER("hint", no_operation);
HALFBYTE_HANDLER("elect.sync", elect_sync);
HALFBYTE_HANDLER("nanosleep", nanosleep);
HALFBYTE_HANDLER("setmaxnreg", setmaxnreg);
HALFBYTE_HANDLER("discard", discard);
HALFBYTE_HANDLER("createpolicy", createpolicy);

}  // namespace
}  // namespace halfbyte::gpu
