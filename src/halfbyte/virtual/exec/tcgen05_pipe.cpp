#include "exec/tcgen05_pipe.h"

#include <algorithm>

#include "exec/mbarrier_address.h"
#include "machine/access.h"

namespace halfbyte::gpu {
namespace {

// tcgen05.commit: attributes are cta_group, mbarrier space, multicast.
Outcome tcgen05_commit(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto space = static_cast<MbarrierSpace>(in.attributes[1]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const CtaGroup group = find_cta_group(warp, in, lane, static_cast<uint32_t>(in.attributes[0]));
    const uint32_t address = read_mbarrier_address(warp, in, lane, in.operands, space);
    std::vector<Cta*> targets;
    if (in.attributes[2]) {
      const uint32_t ctas = warp.read32(in.operands[2])[lane] & 0xFFFF;
      for (uint32_t rank = 0; rank < 16; ++rank) {
        if (ctas >> rank & 1) targets.push_back(&warp.shared_cta(in, lane, rank << kSharedRankShift));
      }
    } else {
      targets.push_back(&warp.shared_cta(in, lane, address));
    }
    const Place place = warp.place(in, lane);
    TensorWork(warp, in, lane, group).enqueue(0, [targets, address, place] {
      for (Cta* cta : targets) arrive(require_mbarrier(*cta, address & kSharedOffsetMask, place), 1, place);
    });
  }
  return Outcome::kNext;
}

Outcome tcgen05_fence(Warp&, const Instruction&, uint32_t) { return Outcome::kNext; }

HALFBYTE_HANDLER("tcgen05.commit", tcgen05_commit);
HALFBYTE_HANDLER("tcgen05.fence", tcgen05_fence);

}  // namespace

CtaGroup find_cta_group(Warp& warp, const Instruction& in, int lane, uint32_t cta_group) {
  Cta& cta = *warp.cta;
  if (cta.simulation->config.tensor_memory_columns == 0) {
    raise_fault(warp, in, lane, "no-tensor-memory", "this GPU has no tensor memory");
  }
  TensorMemory& memory = cta.tmem();
  if (memory.cta_group == 0) memory.cta_group = cta_group;
  if (memory.cta_group != cta_group) {
    cta.simulation->findings.add("mixed-cta-group",
                                 format_text(".cta_group::%u after an instruction of .cta_group::%u: all of a "
                                             "kernel must agree",
                                             cta_group, memory.cta_group),
                                 warp.place(in, lane));
  }
  CtaGroup group;
  group.count = cta_group;
  group.ctas[0] = &cta;
  if (cta_group == 1) return group;
  const auto& ctas = cta.cluster->ctas;
  const uint32_t even = cta.rank & ~1u;
  if (even + 1 >= ctas.size()) {
    raise_fault(warp, in, lane, "no-peer-cta",
                format_text(".cta_group::2 needs a CTA pair; the cluster has %zu CTAs and this is rank %u",
                            ctas.size(), cta.rank));
  }
  for (uint32_t i = 0; i < 2; ++i) group.ctas[i] = ctas[even + i].get();
  return group;
}

TensorPlace read_tensor_address(Warp& warp, const Instruction& in, int lane, const int32_t* operand,
                                const char* name) {
  const uint32_t address = warp.read32(operand[0])[lane] + static_cast<uint32_t>(operand[1]);
  const uint32_t columns = warp.simulation->config.tensor_memory_columns;
  const uint32_t row = (address >> 16) & 0x3FFF;
  if (row >= TensorMemory::kLanes || (address & 0xFFFF) >= columns) {
    raise_fault(warp, in, lane, "tensor-memory-address",
                format_text("%s is 0x%08x: lane %u, column %u; there are %u lanes and %u columns", name,
                            address, row, address & 0xFFFF, TensorMemory::kLanes, columns));
  }
  return {row, address & 0xFFFF};
}

void check_columns(Warp& warp, const Instruction& in, int lane, Cta& cta, uint32_t first, uint32_t count,
                   const char* what) {
  TensorMemory& memory = cta.tmem();
  for (uint32_t column = first; column < first + count; ++column) {
    if (column < TensorMemory::kColumns && memory.owner[column] >= 0) continue;
    if (column < TensorMemory::kColumns && memory.owner[column] == TensorMemory::kReleased) {
      warp.simulation->findings.add(
          "tensor-memory-released",
          format_text("%s takes tensor memory columns [%u, %u) of the CTA of rank %u, which are deallocated "
                      "already: another CTA could have them by now",
                      what, first, first + count, cta.rank),
          warp.place(in, lane));
      return;
    }
    raise_fault(warp, in, lane, "tensor-memory-unallocated",
                format_text("%s takes tensor memory columns [%u, %u) of the CTA of rank %u; column %u is not "
                            "allocated",
                            what, first, first + count, cta.rank, column));
  }
}

TensorWork::TensorWork(Warp& warp, const Instruction& in, int lane, const CtaGroup& group)
    : warp_(warp), in_(in), lane_(lane), group_(group), token_(warp.simulation->next_token++) {}

void TensorWork::add_range(Cta& cta, Resource resource, uint32_t first, uint32_t last) {
  cta.in_flight.begin({resource, first, last, token_, in_.index, static_cast<int32_t>(warp_.index), warp_.time});
}

void TensorWork::read_shared(Cta& cta, uint32_t first, uint32_t last, const char* what) {
  check_shared_range(warp_, in_, lane_, cta, first, last - first, what);
  note_conflict(warp_, in_, lane_, cta, false, first, last);
  add_range(cta, Resource::kSharedRead, first, last);
}

void TensorWork::note_transfers(Cta& cta, bool is_write, uint32_t first, uint32_t last) {
  for (const TensorTransfer& transfer : cta.tmem().transfers) {
    if (transfer.first >= last || transfer.last <= first || !(is_write || transfer.is_store)) continue;
    warp_.simulation->findings.add(
        "tensor-memory-unwaited-store",
        format_text("asynchronous work %s tensor memory columns [%u, %u) that warp %u %s without "
                    "tcgen05.wait::%s",
                    is_write ? "writes" : "reads", first, last, transfer.warp,
                    transfer.is_store ? "stores to" : "loads from", transfer.is_store ? "st" : "ld"),
        warp_.place(in_, lane_));
  }
}

void TensorWork::read_columns(Cta& cta, uint32_t first, uint32_t count, const char* what) {
  check_columns(warp_, in_, lane_, cta, first, count, what);
  note_transfers(cta, false, first, first + count);
  add_range(cta, Resource::kTensorRead, first, first + count);
}

void TensorWork::write_columns(Cta& cta, uint32_t first, uint32_t count, const char* what, uint8_t lane_halves) {
  check_columns(warp_, in_, lane_, cta, first, count, what);
  note_transfers(cta, true, first, first + count);
  cta.in_flight.begin({Resource::kTensorWrite, first, first + count, token_, in_.index,
                       static_cast<int32_t>(warp_.index), warp_.time, lane_halves});
}

void TensorWork::enqueue(double cycles, std::function<void()> action) {
  Cta& leader = group_.leader();
  AsyncPipe& pipe = leader.tensor_pipe;
  pipe.free_at = std::max(pipe.free_at, warp_.time) + cycles;
  for (uint32_t i = 0; i < group_.count; ++i) ++group_.ctas[i]->tensor_pipe.pending;
  warp_.simulation->schedule(pipe.free_at, [group = group_, token = token_, action = std::move(action)] {
    action();
    for (uint32_t i = 0; i < group.count; ++i) {
      group.ctas[i]->in_flight.end(token);
      --group.ctas[i]->tensor_pipe.pending;
    }
  });
}

}  // namespace halfbyte::gpu
