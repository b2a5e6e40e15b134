// cp.async: copies of 4, 8 or 16 bytes per thread that land at a later time.
//
// Copies that a warp issues one after the other land together, some time after the last of them; a
// commit or an arrival closes such a batch.
#include <algorithm>

#include "exec/lane_memory.h"
#include "exec/mbarrier_address.h"
#include "machine/copy_groups.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

struct SingleCopies : CopyOperation {
  struct Copy {
    uint8_t* target;
    const uint8_t* source;
    uint32_t bytes;   // written
    uint32_t copied;  // of them; the rest is zero
  };
  std::vector<Copy> copies;
  double ready_at = 0;
  uint64_t token = 0;
};

namespace {

constexpr double kCopyLatency = 500;  // cycles

enum class SourceSize : int64_t { kWhole, kRegister, kIgnored };

// Bytes that each lane reads; the others are written as zeros.
void read_source_sizes(Warp& warp, const Instruction& in, uint32_t mask, uint32_t bytes,
                       uint32_t* sizes) {
  const auto kind = static_cast<SourceSize>(in.attributes[0]);
  const int32_t operand = in.num_operands > 5 ? in.operands[5] : kAbsent;
  if (kind == SourceSize::kIgnored) {
    const uint32_t ignored = warp.predicate(operand);
    for (int lane = 0; lane < kLanes; ++lane) sizes[lane] = ignored >> lane & 1 ? 0 : bytes;
    return;
  }
  if (kind == SourceSize::kWhole || operand == kAbsent) {
    std::fill(sizes, sizes + kLanes, bytes);
    return;
  }
  const uint32_t* wanted = warp.read32(operand);
  for_lanes(mask, [&](int lane) {
    if (wanted[lane] > bytes) {
      raise_fault(warp, in, lane, "bad-size",
                  format_text("cp.async with a source size of %u bytes and a copy size of %u",
                              wanted[lane], bytes));
    }
    sizes[lane] = wanted[lane];
  });
}

// Host pointers of the sources. What a lane does not read is not checked: kernels pass stray
// addresses with a source size of zero.
void locate_sources(Warp& warp, const Instruction& in, uint32_t mask, uint32_t bytes,
                    const uint32_t* sizes, LanePointers& sources) {
  const uint32_t whole = lanes_where(mask, [&](int lane) { return sizes[lane] == bytes; });
  const uint32_t partial = lanes_where(mask, [&](int lane) { return sizes[lane] - 1 < bytes - 1; });
  if (whole) {
    const LaneAccess access{whole, bytes, false, in.operands[2], in.operands[3], true};
    locate_lanes(warp, in, Space::kGlobal, access, sources);
  }
  const uint64_t* base = warp.read64(in.operands[2]);
  for_lanes(partial, [&](int lane) {
    const uint64_t address = base[lane] + static_cast<int64_t>(in.operands[3]);
    check_alignment(warp, in, lane, address, bytes, "the source of cp.async");
    check_global_range(warp, in, lane, address, sizes[lane], false, "cp.async reads");
    sources.at[lane] = reinterpret_cast<uint8_t*>(address);
  });
}

void land(Simulation& simulation, const std::shared_ptr<CopyState>& state, Cta& cta,
          const std::shared_ptr<SingleCopies>& batch) {
  if (batch->ready_at > simulation.now) {
    simulation.schedule(batch->ready_at, [&simulation, state, &cta, batch] {
      land(simulation, state, cta, batch);
    });
    return;
  }
  for (const SingleCopies::Copy& copy : batch->copies) {
    if (copy.copied) std::memcpy(copy.target, copy.source, copy.copied);
    if (copy.copied < copy.bytes) std::memset(copy.target + copy.copied, 0, copy.bytes - copy.copied);
  }
  batch->copies.clear();
  cta.in_flight.end(batch->token);
  --cta.async_operations;
  if (state->batch == batch) state->batch = nullptr;
  finish_copy(simulation, state->single, *batch);
}

std::shared_ptr<SingleCopies> open_batch(Warp& warp, uint32_t mask) {
  const auto state = copy_state(warp);
  Simulation* simulation = warp.simulation;
  const double ready_at = warp.time + simulation->latency(kCopyLatency);
  auto batch = state->batch;
  if (batch && batch->lanes != mask) batch = nullptr;
  if (!batch) {
    batch = std::make_shared<SingleCopies>();
    batch->lanes = mask;
    batch->token = simulation->next_token++;
    state->batch = batch;
    state->single.add(batch);
    Cta* cta = warp.cta;
    ++cta->async_operations;
    simulation->schedule(ready_at, [simulation, state, cta, batch] {
      land(*simulation, state, *cta, batch);
    });
  }
  batch->ready_at = std::max(batch->ready_at, ready_at);
  return batch;
}

// Registers the destinations of one instruction, neighbours joined.
void begin_writes(Warp& warp, const Instruction& in, uint32_t mask, uint32_t bytes,
                  const LanePointers& targets, uint64_t token) {
  uint32_t offsets[kLanes];
  int count = 0;
  for_lanes(mask, [&](int lane) {
    offsets[count++] = static_cast<uint32_t>(targets.at[lane] - warp.cta->shared);
  });
  if (!std::is_sorted(offsets, offsets + count)) std::sort(offsets, offsets + count);
  for (int i = 0; i < count;) {
    const uint32_t first = offsets[i];
    uint32_t last = first;
    while (i < count && offsets[i] <= last) last = offsets[i++] + bytes;
    warp.cta->in_flight.begin({Resource::kSharedWrite, first, last, token, in.index,
                               static_cast<int32_t>(warp.index), warp.time});
  }
}

// Operands: shared address, global address, size, source size or ignore-src, cache policy.
Outcome copy_async(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto bytes = static_cast<uint32_t>(in.operands[4]);
  if (bytes != 4 && bytes != 8 && bytes != 16) {
    raise_fault(warp, in, first_lane(mask), "bad-size",
                format_text("cp.async of %u bytes; the size is 4, 8 or 16", bytes));
  }
  uint32_t sizes[kLanes] = {};
  read_source_sizes(warp, in, mask, bytes, sizes);
  LanePointers sources, targets;
  locate_sources(warp, in, mask, bytes, sizes, sources);
  const LaneAccess access{mask, bytes, true, in.operands[0], in.operands[1], false};
  locate_lanes(warp, in, Space::kShared, access, targets);
  const auto batch = open_batch(warp, mask);
  begin_writes(warp, in, mask, bytes, targets, batch->token);
  for_lanes(mask, [&](int lane) {
    batch->copies.push_back({targets.at[lane], sources.at[lane], bytes, sizes[lane]});
  });
  return Outcome::kNext;
}

Outcome commit_group(Warp& warp, const Instruction&, uint32_t mask) {
  const auto state = copy_state(warp);
  state->single.commit(mask);
  state->batch = nullptr;
  return Outcome::kNext;
}

Outcome wait_group(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto state = copy_state(warp);
  const bool waits = wait_for_groups(warp, state->single, mask,
                                     static_cast<uint32_t>(in.operands[0]), false);
  return waits ? Outcome::kRetry : Outcome::kNext;
}

// Waits for every copy of the threads, committed or not.
Outcome wait_all(Warp& warp, const Instruction&, uint32_t mask) {
  const auto state = copy_state(warp);
  state->single.commit(mask);
  state->batch = nullptr;
  return wait_for_groups(warp, state->single, mask, 0, false) ? Outcome::kRetry : Outcome::kNext;
}

void arrive_when_done(const std::vector<std::shared_ptr<CopyOperation>>& pending, Cta& cta,
                      uint32_t offset, int64_t count, const Place& place) {
  auto arrive_now = [&cta, offset, count, place] {
    arrive(require_mbarrier(cta, offset, place), count, place);
  };
  if (pending.empty()) return arrive_now();
  auto remaining = std::make_shared<size_t>(pending.size());
  for (const auto& operation : pending) {
    operation->on_done.push_back([remaining, arrive_now] {
      if (--*remaining == 0) arrive_now();
    });
  }
}

// Attributes: space of the address, 1 for .noinc.
Outcome arrive_after_copies(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto state = copy_state(warp);
  state->batch = nullptr;
  const auto space = static_cast<MbarrierSpace>(in.attributes[0]);
  uint32_t rest = mask;
  while (rest) {
    const int lane = first_lane(rest);
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands, space);
    uint32_t same = 0;
    for_lanes(rest, [&](int other) {
      if (read_mbarrier_address(warp, in, other, in.operands, space) == address) same |= 1u << other;
    });
    rest &= ~same;
    Mbarrier& barrier = require_mbarrier(warp, in, lane, address);
    const int64_t count = count_lanes(same);
    if (in.attributes[1] == 0) add_pending_arrivals(barrier, count, warp.place(in, lane));
    arrive_when_done(state->single.list_pending(same), *barrier.cta, barrier.offset, count,
                     warp.place(in, lane));
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("cp.async", copy_async);
HALFBYTE_HANDLER("cp.async.commit_group", commit_group);
HALFBYTE_HANDLER("cp.async.wait_group", wait_group);
HALFBYTE_HANDLER("cp.async.wait_all", wait_all);
HALFBYTE_HANDLER("cp.async.mbarrier.arrive", arrive_after_copies);

}  // namespace

}  // namespace halfbyte::gpu
