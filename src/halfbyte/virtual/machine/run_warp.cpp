// How one warp runs: fragments of lanes that diverge, merge, converge and wait.
#include <algorithm>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {
constexpr uint32_t kMaxBackEdges = Fragment::kMaxBackEdges;
constexpr double kQuantum = 20;  // cycles a warp may run ahead of the next event

bool waits_for_convergence(const Fragment& fragment) {
  return fragment.state == FragmentState::kWaiting && fragment.wait.kind == WaitKind::kConvergence;
}
}  // namespace

Place Warp::place(const Instruction& in, int lane) const {
  Place place;
  place.instruction = in.index;
  std::copy(cta->id, cta->id + 3, place.cta);
  place.cta_rank = cta->rank;
  place.warp = static_cast<int32_t>(index);
  place.lane = lane;
  return place;
}

uint32_t Warp::uniform32(const Instruction& in, int32_t slot, uint32_t mask, const char* name) const {
  const uint32_t* values = read32(slot);
  const uint32_t first = values[first_lane(mask)];
  if (lanes_where(mask, [&](int lane) { return values[lane] != first; })) {
    raise_fault(*this, in, first_lane(mask), "not-uniform",
                format_text("%s must be the same in every lane of the warp", name));
  }
  return first;
}

uint64_t Warp::uniform64(const Instruction& in, int32_t slot, uint32_t mask, const char* name) const {
  const uint64_t* values = read64(slot);
  const uint64_t first = values[first_lane(mask)];
  if (lanes_where(mask, [&](int lane) { return values[lane] != first; })) {
    raise_fault(*this, in, first_lane(mask), "not-uniform",
                format_text("%s must be the same in every lane of the warp", name));
  }
  return first;
}

void Warp::branch(uint32_t taken, int32_t target) {
  Fragment& running = fragment();
  if (target <= running.pc) ++running.back_edges;
  if (taken == running.mask) {
    running.pc = target;
    if (num_fragments > 1 && running.back_edges > kMaxBackEdges) stop = -1;
    return;
  }
  Fragment other = running;
  other.mask = taken;
  other.pc = target;
  running.mask &= ~taken;
  ++running.pc;
  fragments[num_fragments++] = other;
  stop = -1;
}

void Warp::split_off(uint32_t lanes, int32_t position) {
  if (lanes == 0) return;
  Fragment other = fragment();
  other.mask = lanes;
  other.pc = position;
  fragment().mask &= ~lanes;
  fragments[num_fragments++] = other;
  stop = -1;
}

void Warp::exit_lanes(uint32_t mask) {
  live &= ~mask;
  Fragment& running = fragment();
  running.mask &= ~mask;
  ++running.pc;
  if (running.mask == 0) remove_fragment(current);
  // Fewer lanes are left to wait for.
  for (int i = 0; i < num_fragments; ++i) {
    if (waits_for_convergence(fragments[i])) fragments[i].state = FragmentState::kReady;
  }
  stop = -1;
  if (live) release_exited_warp(*this);  // a whole warp's exit: Simulation::retire_warp
}

void Warp::remove_fragment(int position) {
  fragments[position] = fragments[--num_fragments];
}

void Warp::wait_on(WaitQueue& queue, const Wait& wait) {
  Fragment& running = fragment();
  running.wait = wait;
  running.wait.queue = &queue;
  if (std::find(queue.warps.begin(), queue.warps.end(), this) == queue.warps.end()) {
    queue.warps.push_back(this);
  }
}

bool Warp::is_converged(const Instruction& in) const {
  const uint32_t arrived = fragments[current].mask;
  if (in.convergence == Convergence::kAligned) return arrived == live;
  const uint32_t* needed = read32(in.membermask);
  for (uint32_t rest = arrived; rest; rest &= rest - 1) {
    if (needed[first_lane(rest)] & live & ~arrived) return false;
  }
  return true;
}

bool Warp::choose_fragment() {
  for (int i = 0; i < num_fragments; ++i) {
    Fragment& kept = fragments[i];
    const bool kept_meets = waits_for_convergence(kept);
    if (kept.state != FragmentState::kReady && !kept_meets) continue;
    for (int j = i + 1; j < num_fragments;) {
      Fragment& other = fragments[j];
      const bool meets = other.state == FragmentState::kReady || waits_for_convergence(other);
      if (!meets || other.pc != kept.pc || other.timed_out != kept.timed_out) {
        ++j;
        continue;
      }
      kept.mask |= other.mask;
      kept.state = FragmentState::kReady;
      kept.back_edges = 0;
      pinned_lanes = 0;
      remove_fragment(j);
    }
  }
  int lowest = -1, next = -1;  // ready fragments with the two lowest positions
  int pinned = -1, spinning = -1;
  for (int i = 0; i < num_fragments; ++i) {
    if (fragments[i].state != FragmentState::kReady) continue;
    if (fragments[i].mask & pinned_lanes) pinned = i;
    if (fragments[i].back_edges > kMaxBackEdges) spinning = i;
    if (lowest < 0 || fragments[i].pc < fragments[lowest].pc) {
      next = lowest;
      lowest = i;
    } else if (next < 0 || fragments[i].pc < fragments[next].pc) {
      next = i;
    }
  }
  if (lowest < 0) return false;
  if (spinning >= 0 && next >= 0) {  // the spinning lanes step back behind everyone who is ready
    fragments[spinning].back_edges = 0;
    const int chosen = spinning == lowest ? next : lowest;
    pinned_lanes = fragments[chosen].mask;
    pinned = chosen;
  }
  if (pinned >= 0 && next >= 0) {
    current = pinned;
    stop = INT32_MAX;
    return true;
  }
  pinned_lanes = 0;
  current = lowest;
  stop = next < 0 ? INT32_MAX : fragments[next].pc;
  for (int i = 0; i < num_fragments; ++i) {  // meet lanes that wait further down
    if (waits_for_convergence(fragments[i]) && fragments[i].pc > fragments[lowest].pc) {
      stop = std::min(stop, fragments[i].pc);
    }
  }
  return true;
}

void Simulation::run_slice(Warp& warp) {
  slice_limit_ = (heap_.empty() ? warp.time : std::max(warp.time, heap_.front().when)) + kQuantum;
  const Instruction* code = program.instructions.data();
  while (warp.choose_fragment()) {
    bool is_running = true;
    while (is_running) {
      Fragment& fragment = warp.fragment();
      if (fragment.pc >= warp.stop) break;
      if (warp.time > slice_limit_) return enqueue(warp);
      const Instruction& in = code[fragment.pc];
      const uint32_t mask = fragment.mask & warp.predicate(in.guard);
      ++instructions;
      ++warp.instructions;
      warp.time += 1;  // an issue slot; the clock orders events and predicts nothing
      if (mask == 0) {
        ++fragment.pc;
        continue;
      }
      if (in.convergence != Convergence::kNone && fragment.mask != warp.live && !warp.is_converged(in)) {
        fragment.state = FragmentState::kWaiting;
        fragment.wait = Wait{};
        fragment.wait.kind = WaitKind::kConvergence;
        fragment.wait.detail =
            in.convergence == Convergence::kAligned ? warp.live : warp.read32(in.membermask)[first_lane(mask)];
        break;
      }
      const Outcome outcome = in.handler(warp, in, mask);
      if (outcome == Outcome::kNext) {
        ++warp.fragment().pc;
      } else if (outcome == Outcome::kJumped) {
        if (warp.live == 0) return retire_warp(warp);
      } else if (outcome == Outcome::kYield) {
        ++warp.fragment().pc;
        return enqueue(warp);
      } else {
        Fragment& waiting = warp.fragment();
        waiting.state = FragmentState::kWaiting;
        waiting.advance_on_wake = outcome == Outcome::kAdvance;
        is_running = false;
      }
    }
  }
}

}  // namespace halfbyte::gpu
