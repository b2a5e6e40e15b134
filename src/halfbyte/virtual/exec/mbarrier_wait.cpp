// mbarrier.test_wait and try_wait, by state and by parity.
//
// try_wait is "potentially blocking" (PTX ISA): it may suspend the thread, and it may return false at
// any time. Here it suspends, so that spinning costs nothing and a hang is seen at once; a launch may
// ask that the first try of each wait fails at once, which uncovers programs that ignore the result.
#include "exec/mbarrier_address.h"
#include "exec/mbarrier_state.h"

namespace halfbyte::gpu {
namespace {

// What the lanes of one execution found.
struct Tried {
  uint32_t done = 0;          // lanes whose phase is complete
  Mbarrier* barrier = nullptr;
  uint64_t value = 0;         // parity or state of the first lane
  uint32_t address = 0;
  bool is_uniform = true;     // every lane names this barrier and value
};

bool is_try(const Instruction& in) { return in.attributes[1] != 0; }
bool is_parity(const Instruction& in) { return in.attributes[2] != 0; }

uint64_t read_wanted(Warp& warp, const Instruction& in, int lane) {
  if (!is_parity(in)) return warp.read64(in.operands[3])[lane];
  const uint32_t parity = warp.read32(in.operands[3])[lane];
  if (parity > 1) {
    warp.simulation->findings.add("mbarrier-parity-range",
                                  format_text("phase parity %u; PTX defines 0 and 1 alone", parity),
                                  warp.place(in, lane));
  }
  return parity & 1;
}

bool is_complete(Warp& warp, const Instruction& in, int lane, const Mbarrier& barrier, uint64_t wanted) {
  if (is_parity(in)) return (barrier.phase & 1) != wanted;
  if (offset_of_state(wanted) != (barrier.offset & 0x7FFFF)) {
    raise_fault(warp, in, lane, "mbarrier-state-of-another",
                format_text("the state was taken from an mbarrier at shared+0x%x; ", offset_of_state(wanted)) +
                    describe_mbarrier(barrier));
  }
  const uint64_t since = phases_since(wanted, barrier);
  if (since > 1) {
    warp.simulation->findings.add("mbarrier-stale-state",
                                  format_text("the state is %llu phases old, PTX allows 1: ",
                                              static_cast<unsigned long long>(since)) +
                                      describe_mbarrier(barrier),
                                  warp.place(in, lane));
  }
  return since > 0;
}

Mbarrier& own_mbarrier(Warp& warp, const Instruction& in, int lane, uint32_t address) {
  if (address >> kSharedRankShift != warp.cta->rank) {
    raise_fault(warp, in, lane, "remote-mbarrier",
                format_text("waits on an mbarrier of the CTA of rank %u; only its own CTA (rank %u) can wait",
                            address >> kSharedRankShift, warp.cta->rank));
  }
  return require_mbarrier(warp, in, lane, address);
}

Tried try_lanes(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto space = static_cast<MbarrierSpace>(in.attributes[0]);
  Tried tried;
  uint32_t address = 0;
  uint64_t wanted = 0;
  bool complete = false;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint32_t lane_address = read_mbarrier_address(warp, in, lane, in.operands + 1, space);
    const uint64_t lane_wanted = read_wanted(warp, in, lane);
    if (tried.barrier == nullptr || lane_address != address || lane_wanted != wanted) {
      address = lane_address;
      wanted = lane_wanted;
      Mbarrier& barrier = own_mbarrier(warp, in, lane, address);
      complete = is_complete(warp, in, lane, barrier, wanted);
      if (tried.barrier == nullptr) {
        tried.barrier = &barrier;
        tried.address = address;
        tried.value = wanted;
      } else {
        tried.is_uniform = tried.is_uniform && address == tried.address && wanted == tried.value;
      }
    }
    if (complete) tried.done |= 1u << lane;
  }
  return tried;
}

// The suspended lanes slept through the phase that they waited for: the next one is over as well.
bool slept_through(Warp& warp, const Instruction& in, const Tried& tried) {
  const Fragment& fragment = warp.fragment();
  if (!fragment.has_arrived || fragment.wait.kind != WaitKind::kMbarrier || !tried.is_uniform) return false;
  if (fragment.wait.address != tried.address || fragment.wait.detail != tried.value) return false;
  if (tried.barrier->phase == fragment.arrived_generation) return false;
  warp.simulation->findings.add("mbarrier-missed-phase",
                                "a later phase completed before the waiting thread saw the one it waited for: " +
                                    describe_mbarrier(*tried.barrier),
                                warp.place(in));
  return true;
}

// True once per wait in adversarial launches. A wait is one instruction on one phase of one barrier.
bool refuses_first_try(Warp& warp, const Instruction& in, const Tried& tried) {
  if (!warp.simulation->config.adversarial_try_wait) return false;
  uint64_t wait = tried.barrier->phase * 0x9E3779B97F4A7C15ull + tried.address;
  wait = wait * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(in.index) + 1;
  if (warp.fragment().refused_wait == wait) return false;
  warp.fragment().refused_wait = wait;
  return true;
}

// A ring that restarts its parity too early passes its waits on completions that it already used.
void note_seen_phase(Warp& warp, const Instruction& in, const Tried& tried, uint32_t mask) {
  SeenPhase& seen = warp.seen_phases[static_cast<uint64_t>(in.index) << 32 | tried.address];
  const int64_t phase = static_cast<int64_t>(tried.barrier->phase) - 1;
  if (seen.lanes == 0 || seen.serial != tried.barrier->serial || seen.phase != phase) {
    seen = SeenPhase{tried.barrier->serial, phase, mask};
    return;
  }
  if (seen.lanes & mask) {
    warp.simulation->findings.add(
        "mbarrier-phase-reused",
        format_text("this wait with parity %u passes a second time on the same completion (%s): ",
                    static_cast<unsigned>(tried.value),
                    phase < 0 ? "that of the phase before the first"
                              : format_text("phase %lld", static_cast<long long>(phase)).c_str()) +
            describe_mbarrier(*tried.barrier),
        warp.place(in, first_lane(mask)));
  }
  seen.lanes |= mask;
}

Outcome suspend(Warp& warp, const Tried& tried, uint32_t mask) {
  warp.split_off(warp.fragment().mask & ~mask, warp.fragment().pc + 1);
  Fragment& fragment = warp.fragment();
  fragment.has_arrived = true;
  fragment.arrived_generation = tried.barrier->phase;
  Wait wait;
  wait.kind = WaitKind::kMbarrier;
  wait.address = tried.address;
  wait.detail = tried.value;
  wait.may_time_out = true;
  warp.wait_on(tried.barrier->queue, wait);
  return Outcome::kRetry;
}

// Attributes: space, is try_wait, is parity. Operands: predicate, address, parity or state, hint.
Outcome mbarrier_wait(Warp& warp, const Instruction& in, uint32_t mask) {
  Tried tried = try_lanes(warp, in, mask);
  Fragment& fragment = warp.fragment();
  if (is_try(in) && tried.done == 0 && slept_through(warp, in, tried)) tried.done = mask;
  const bool timed_out = fragment.timed_out;
  fragment.timed_out = false;
  Outcome outcome = Outcome::kNext;
  if (tried.done != mask && !timed_out) {
    // Lanes that wait for different things cannot share one queue: they poll instead.
    if (!is_try(in) || tried.done != 0 || !tried.is_uniform) {
      outcome = Outcome::kYield;
    } else if (!refuses_first_try(warp, in, tried)) {
      return suspend(warp, tried, mask);
    }
  }
  if (tried.done == mask && tried.is_uniform && is_parity(in)) note_seen_phase(warp, in, tried, mask);
  fragment.has_arrived = false;
  warp.set_predicate(in.operands[0], tried.done, mask);
  return outcome;
}

HALFBYTE_HANDLER("mbarrier.wait", mbarrier_wait);

}  // namespace
}  // namespace halfbyte::gpu
