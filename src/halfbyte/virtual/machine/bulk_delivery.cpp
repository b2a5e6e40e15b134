// Bulk copies into and out of shared memory: destinations, mbarriers, commit groups.
#include "machine/bulk_delivery.h"

#include "machine/access.h"

namespace halfbyte::gpu {

namespace {

constexpr double kLoadLatency = 700;      // cycles from issue to the first bytes
constexpr double kReadLatency = 200;      // until shared memory has been read
constexpr double kBytesPerCycle = 64;

uint32_t rank_of(uint32_t address) { return address >> kSharedRankShift; }

std::vector<uint32_t> list_ranks(Warp& warp, const Instruction& in, int lane,
                                 const DeliveryOperands& operands) {
  if (!operands.is_multicast) return {rank_of(operands.destination)};
  const uint32_t size = static_cast<uint32_t>(warp.cta->cluster->ctas.size());
  if (operands.cta_mask == 0 || operands.cta_mask >> size) {
    raise_fault(warp, in, lane, "bad-multicast",
                format_text("the multicast mask 0x%x names %s of a cluster of %u CTAs",
                            operands.cta_mask, operands.cta_mask ? "CTAs outside" : "no CTA", size));
  }
  std::vector<uint32_t> ranks;
  for (uint32_t rest = operands.cta_mask; rest; rest &= rest - 1) {
    ranks.push_back(static_cast<uint32_t>(__builtin_ctz(rest)));
  }
  return ranks;
}

// PTX ISA, "cp.async.bulk.tensor", .cta_group: which CTA's mbarrier a destination signals.
uint32_t barrier_rank(const DeliveryOperands& operands, uint32_t rank) {
  const uint32_t named = rank_of(operands.barrier);
  if (operands.pairs && operands.is_multicast) return (rank & ~1u) | (named & 1u);
  return operands.is_multicast ? rank : named;
}

void check_barrier_rank(Warp& warp, const Instruction& in, int lane, const DeliveryOperands& operands,
                        uint32_t rank) {
  const uint32_t named = rank_of(operands.barrier);
  const bool is_same = named == rank;
  if (operands.is_multicast || is_same || (operands.pairs && (named ^ rank) == 1)) return;
  raise_fault(warp, in, lane, "wrong-cta",
              format_text("the destination 0x%08x lies in CTA rank %u and the mbarrier 0x%08x in CTA "
                          "rank %u; it must lie in %s",
                          operands.destination, rank, operands.barrier, named,
                          operands.pairs ? "the same CTA or the other CTA of its pair"
                                         : "the same CTA (only .cta_group::2 may name the peer's)"));
}

}  // namespace

double bulk_latency(const Simulation&, uint64_t bytes) {
  return kLoadLatency + static_cast<double>(bytes) / kBytesPerCycle;
}

uint32_t own_shared_offset(Warp& warp, const Instruction& in, int lane, uint32_t address,
                           const char* what) {
  if (rank_of(address) != warp.cta->rank) {
    raise_fault(warp, in, lane, "wrong-cta",
                format_text("%s 0x%08x lies in CTA rank %u; it must lie in the executing CTA (rank %u)",
                            what, address, rank_of(address), warp.cta->rank));
  }
  return address & kSharedOffsetMask;
}

Delivery begin_delivery(Warp& warp, const Instruction& in, int lane, const DeliveryOperands& operands) {
  Delivery delivery;
  delivery.offset = operands.destination & kSharedOffsetMask;
  delivery.barrier_offset = operands.barrier & kSharedOffsetMask;
  delivery.counted_bytes = operands.counted_bytes;
  delivery.token = warp.simulation->next_token++;
  delivery.place = warp.place(in, lane);
  if (operands.is_own_cta) own_shared_offset(warp, in, lane, operands.destination, "the destination");
  const uint32_t last = delivery.offset + operands.bytes;
  for (const uint32_t rank : list_ranks(warp, in, lane, operands)) {
    check_barrier_rank(warp, in, lane, operands, rank);
    Cta& cta = warp.shared_cta(in, lane, rank << kSharedRankShift);
    const uint32_t signalled = barrier_rank(operands, rank);
    Cta& barrier_cta = warp.shared_cta(in, lane, signalled << kSharedRankShift);
    check_shared_range(warp, in, lane, cta, delivery.offset, operands.bytes, "the copy writes");
    note_conflict(warp, in, lane, cta, true, delivery.offset, last);
    note_mbarrier_overwrite(warp, in, lane, cta, delivery.offset, last);
    delivery.targets.push_back({&cta, &barrier_cta});
  }
  for (const Delivery::Target& target : delivery.targets) {
    target.cta->in_flight.begin({Resource::kSharedWrite, delivery.offset, last, delivery.token, in.index,
                                 static_cast<int32_t>(warp.index), warp.time});
    ++target.cta->async_operations;
  }
  return delivery;
}

void finish_delivery(const Delivery& delivery) {
  for (const Delivery::Target& target : delivery.targets) {
    target.cta->in_flight.end(delivery.token);
    --target.cta->async_operations;
  }
  for (const Delivery::Target& target : delivery.targets) {
    Mbarrier& barrier =
        require_mbarrier(*target.barrier_cta, delivery.barrier_offset, delivery.place);
    complete_bytes(barrier, delivery.counted_bytes, delivery.place);
  }
}

void begin_bulk_read(Warp& warp, const Instruction& in, uint32_t lanes, uint32_t offset,
                     uint32_t bytes, std::function<void(const uint8_t* shared)> copy) {
  Cta* cta = warp.cta;
  Simulation* simulation = warp.simulation;
  const int lane = first_lane(lanes);
  check_shared_range(warp, in, lane, *cta, offset, bytes, "the copy reads");
  note_conflict(warp, in, lane, *cta, false, offset, offset + bytes);
  const auto state = copy_state(warp);
  auto operation = std::make_shared<CopyOperation>();
  operation->lanes = lanes;
  state->bulk.add(operation);
  const uint64_t token = simulation->next_token++;
  cta->in_flight.begin({Resource::kSharedRead, offset, offset + bytes, token, in.index,
                        static_cast<int32_t>(warp.index), warp.time});
  ++cta->async_operations;
  const double transfer = static_cast<double>(bytes) / kBytesPerCycle;
  const double read_at = warp.time + simulation->latency(kReadLatency + transfer);
  const double rest = simulation->latency(kLoadLatency - kReadLatency);
  simulation->schedule(read_at, [=, copy = std::move(copy)] {
    copy(cta->shared);
    cta->in_flight.end(token);
    --cta->async_operations;
    finish_reads(*simulation, state->bulk, *operation);
    simulation->schedule(simulation->now + rest, [=] {
      finish_copy(*simulation, state->bulk, *operation);
    });
  });
}

}  // namespace halfbyte::gpu
