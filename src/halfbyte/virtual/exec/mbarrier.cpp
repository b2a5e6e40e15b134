// mbarrier.init, inval, arrive, arrive_drop, expect_tx, complete_tx, pending_count.
#include <algorithm>

#include "exec/mbarrier_address.h"
#include "exec/mbarrier_state.h"

namespace halfbyte::gpu {
namespace {

MbarrierSpace space_of(const Instruction& in) { return static_cast<MbarrierSpace>(in.attributes[0]); }

// mbarrier.init, inval, test_wait and try_wait accept barriers of the executing CTA only.
uint32_t own_offset(Warp& warp, const Instruction& in, int lane, uint32_t address) {
  const uint32_t rank = address >> kSharedRankShift;
  if (rank != warp.cta->rank) {
    raise_fault(warp, in, lane, "remote-mbarrier",
                format_text("shared address 0x%x lies in the CTA of rank %u; this instruction takes an "
                            "mbarrier of its own CTA (rank %u)",
                            address, rank, warp.cta->rank));
  }
  const uint32_t offset = address & kSharedOffsetMask;
  if (offset & 7) {
    raise_fault(warp, in, lane, "misaligned",
                format_text("the mbarrier address 0x%x is not a multiple of 8", address));
  }
  if (offset + 8 > warp.cta->shared_bytes) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("an mbarrier at shared+0x%x ends outside the CTA's %u bytes of shared memory",
                            offset, warp.cta->shared_bytes));
  }
  return offset;
}

// Whether an init would leave the barrier as it is: every warp of a CTA runs the same init, and
// nobody has used the barrier yet.
bool is_untouched(const Mbarrier& barrier, int64_t count) {
  return barrier.is_valid && barrier.phase == 0 && barrier.pending_bytes == 0 &&
         barrier.expected == count && barrier.pending == count && barrier.next_expected == count;
}

void init_one(Warp& warp, const Instruction& in, int lane, uint32_t offset, uint32_t count) {
  if (count < 1 || count > kMaxMbarrierCount) {
    raise_fault(warp, in, lane, "mbarrier-count-range",
                format_text("mbarrier.init at shared+0x%x with a count of %u; a count lies between 1 and %lld",
                            offset, count, static_cast<long long>(kMaxMbarrierCount)));
  }
  Cta& cta = *warp.cta;
  Simulation& simulation = *warp.simulation;
  auto [position, is_fresh] = cta.mbarriers.try_emplace(offset);
  Mbarrier& barrier = position->second;
  if (is_fresh) {
    cta.mbarrier_offsets.push_back(offset);
    cta.mbarriers_begin = std::min(cta.mbarriers_begin, offset);
    cta.mbarriers_end = std::max(cta.mbarriers_end, offset + 8);
  } else if (is_untouched(barrier, count)) {
    return;
  } else if (barrier.is_valid) {
    simulation.findings.add("mbarrier-reinitialised",
                            "mbarrier.init on a live mbarrier without mbarrier.inval: " +
                                describe_mbarrier(barrier),
                            warp.place(in, lane));
  }
  barrier.offset = offset;
  barrier.cta = &cta;
  barrier.expected = barrier.pending = barrier.next_expected = count;
  barrier.pending_bytes = 0;
  barrier.phase = 0;
  barrier.is_valid = true;
  barrier.serial = simulation.next_token++;
  barrier.initialized_by = in.index;
  simulation.note_progress();
}

// Lanes that give the same barrier the same count initialise it once: warps that run an init with all
// lanes are common and harmless.
Outcome mbarrier_init(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* counts = warp.read32(in.operands[2]);
  uint32_t rest = mask;
  while (rest) {
    const int lane = first_lane(rest);
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands, space_of(in));
    init_one(warp, in, lane, own_offset(warp, in, lane, address), counts[lane]);
    for (uint32_t others = rest; others; others &= others - 1) {
      const int other = first_lane(others);
      if (counts[other] == counts[lane] &&
          read_mbarrier_address(warp, in, other, in.operands, space_of(in)) == address) {
        rest &= ~(1u << other);
      }
    }
  }
  return Outcome::kNext;
}

Outcome mbarrier_inval(Warp& warp, const Instruction& in, uint32_t mask) {
  Mbarrier* last = nullptr;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands, space_of(in));
    const uint32_t offset = own_offset(warp, in, lane, address);
    if (last != nullptr && last->offset == offset) continue;
    Mbarrier& barrier = require_mbarrier(*warp.cta, offset, warp.place(in, lane));
    if (!barrier.queue.warps.empty()) {
      raise_fault(warp, in, lane, "mbarrier-invalidated-while-waited",
                  "threads still wait on the invalidated " + describe_mbarrier(barrier));
    }
    barrier.is_valid = false;
    last = &barrier;
  }
  warp.simulation->note_progress();
  return Outcome::kNext;
}

constexpr int64_t kExpectTx = 1, kDrop = 2, kNoComplete = 4;

void check_incomplete(Warp& warp, const Instruction& in, int lane, const Mbarrier& barrier, uint32_t count) {
  if (barrier.pending > count || barrier.pending_bytes != 0) return;
  raise_fault(warp, in, lane, "no-complete-completes",
              "an arrival with .noComplete completes the phase: " + describe_mbarrier(barrier));
}

// The lanes of one warp arrive together: an arrival of theirs behind the one that completed the phase
// is one too many, not the first of the next phase.
void check_phase(Warp& warp, const Instruction& in, int lane, const Mbarrier& barrier, uint64_t phase,
                 uint32_t mask) {
  if (barrier.phase == phase) return;
  raise_fault(warp, in, lane, "over-arrival",
              format_text("%d lanes of the warp arrive together, more than the phase waits for: %s",
                          count_lanes(mask), describe_mbarrier(barrier).c_str()));
}

// Attributes: space, flags. Operands: state, address, count (or transaction bytes). Every lane is an
// arrival of its own, in lane order.
Outcome mbarrier_arrive(Warp& warp, const Instruction& in, uint32_t mask) {
  const int64_t flags = in.attributes[1];
  const int32_t amount_slot = in.operands[3];
  const uint32_t* amounts = amount_slot == kAbsent ? nullptr : warp.read32(amount_slot);
  uint64_t* states = warp.write64(in.operands[0]);
  Mbarrier* barrier = nullptr;
  uint32_t last_address = 0;
  uint64_t phase = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands + 1, space_of(in));
    if (barrier == nullptr || address != last_address) {
      barrier = &require_mbarrier(warp, in, lane, address);
      phase = barrier->phase;
    }
    check_phase(warp, in, lane, *barrier, phase, mask);
    last_address = address;
    const uint32_t amount = amounts == nullptr ? 1 : amounts[lane];
    const uint32_t count = flags & kExpectTx ? 1 : amount;
    const uint64_t state = encode_mbarrier_state(*barrier);
    const Place place = warp.place(in, lane);
    if (flags & kNoComplete) check_incomplete(warp, in, lane, *barrier, count);
    if (flags & kExpectTx) add_pending_bytes(*barrier, amount, place);
    if (flags & kDrop) {
      arrive_drop(*barrier, count, place);
    } else {
      arrive(*barrier, count, place);
    }
    states[lane] = state;
  }
  return Outcome::kNext;
}

// Attributes: space, sign (1 expect_tx, -1 complete_tx). Operands: address, bytes.
Outcome mbarrier_tx(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t* bytes = warp.read32(in.operands[2]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands, space_of(in));
    Mbarrier& barrier = require_mbarrier(warp, in, lane, address);
    if (in.attributes[1] > 0) {
      add_pending_bytes(barrier, bytes[lane], warp.place(in, lane));
    } else {
      complete_bytes(barrier, bytes[lane], warp.place(in, lane));
    }
  }
  return Outcome::kNext;
}

Outcome mbarrier_pending_count(Warp& warp, const Instruction& in, uint32_t mask) {
  uint32_t* counts = warp.write32(in.operands[0]);
  const uint64_t* states = warp.read64(in.operands[1]);
  for_lanes(mask, [&](int lane) { counts[lane] = pending_of_state(states[lane]); });
  return Outcome::kNext;
}

HALFBYTE_HANDLER("mbarrier.init", mbarrier_init);
HALFBYTE_HANDLER("mbarrier.inval", mbarrier_inval);
HALFBYTE_HANDLER("mbarrier.arrive", mbarrier_arrive);
HALFBYTE_HANDLER("mbarrier.tx", mbarrier_tx);
HALFBYTE_HANDLER("mbarrier.pending_count", mbarrier_pending_count);

}  // namespace
}  // namespace halfbyte::gpu
