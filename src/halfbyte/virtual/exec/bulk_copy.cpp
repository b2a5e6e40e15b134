// cp.async.bulk and cp.reduce.async.bulk without a tensor map; commit and wait of bulk groups.
#include "exec/same_operands.h"
#include "machine/access.h"
#include "machine/bulk_delivery.h"
#include "machine/reduction.h"

namespace halfbyte::gpu {

namespace {

constexpr uint32_t kBulkAlignment = 16;
constexpr int64_t kNoReduction = -1;

void check_size(Warp& warp, const Instruction& in, int lane, uint32_t bytes) {
  if (bytes % kBulkAlignment == 0) return;
  raise_fault(warp, in, lane, "bad-size",
              format_text("a bulk copy of %u bytes; the size must be a multiple of %u", bytes,
                          kBulkAlignment));
}

uint32_t shared_address(const Warp& warp, const int32_t* operand, int lane) {
  return warp.read32(operand[0])[lane] + static_cast<uint32_t>(operand[1]);
}

uint64_t global_address(const Warp& warp, const int32_t* operand, int lane) {
  return warp.read64(operand[0])[lane] + static_cast<uint64_t>(static_cast<int64_t>(operand[1]));
}

// Attributes: 1 for .shared::cta, 1 for .multicast::cluster.
// Operands: destination, source, size, mbarrier, mask, cache policy.
void load_once(Warp& warp, const Instruction& in, int lane) {
  DeliveryOperands operands;
  operands.destination = shared_address(warp, in.operands, lane);
  operands.bytes = operands.counted_bytes = warp.read32(in.operands[4])[lane];
  operands.barrier = shared_address(warp, in.operands + 5, lane);
  operands.is_own_cta = in.attributes[0] != 0;
  operands.is_multicast = in.attributes[1] != 0;
  if (operands.is_multicast) operands.cta_mask = warp.read32(in.operands[7])[lane] & 0xFFFF;
  const uint64_t source = global_address(warp, in.operands + 2, lane);
  check_size(warp, in, lane, operands.bytes);
  check_alignment(warp, in, lane, operands.destination, kBulkAlignment, "the destination of the copy");
  check_alignment(warp, in, lane, source, kBulkAlignment, "the source of the copy");
  if (operands.bytes == 0) return;
  check_global_range(warp, in, lane, source, operands.bytes, false, "the copy reads");
  const Delivery delivery = begin_delivery(warp, in, lane, operands);
  Simulation* simulation = warp.simulation;
  const double latency = simulation->latency(bulk_latency(*simulation, operands.bytes));
  simulation->schedule(warp.time + latency, [delivery, source, bytes = operands.bytes] {
    for (const Delivery::Target& target : delivery.targets) {
      std::memcpy(target.cta->shared + delivery.offset, reinterpret_cast<const void*>(source), bytes);
    }
    finish_delivery(delivery);
  });
}

Outcome bulk_load(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) { load_once(warp, in, lane); });
  return Outcome::kNext;
}

// From shared memory of this CTA to that of another one. Attributes: reduction or -1, element.
// Operands: destination, source, size, mbarrier.
void send_once(Warp& warp, const Instruction& in, int lane) {
  DeliveryOperands operands;
  operands.destination = shared_address(warp, in.operands, lane);
  operands.bytes = operands.counted_bytes = warp.read32(in.operands[4])[lane];
  operands.barrier = shared_address(warp, in.operands + 5, lane);
  const uint32_t address = shared_address(warp, in.operands + 2, lane);
  const uint32_t source = own_shared_offset(warp, in, lane, address, "the source");
  check_size(warp, in, lane, operands.bytes);
  check_alignment(warp, in, lane, operands.destination, kBulkAlignment, "the destination of the copy");
  check_alignment(warp, in, lane, source, kBulkAlignment, "the source of the copy");
  if (operands.bytes == 0) return;
  Cta* from = warp.cta;
  check_shared_range(warp, in, lane, *from, source, operands.bytes, "the copy reads");
  note_conflict(warp, in, lane, *from, false, source, source + operands.bytes);
  ReduceElements reduce = nullptr;
  uint64_t count = 0;
  if (in.attributes[0] != kNoReduction) {
    const auto element = static_cast<Element>(in.attributes[1]);
    reduce = find_reduction(static_cast<Reduction>(in.attributes[0]), element);
    count = operands.bytes / element_bytes(element);
  }
  const Delivery delivery = begin_delivery(warp, in, lane, operands);
  Simulation* simulation = warp.simulation;
  from->in_flight.begin({Resource::kSharedRead, source, source + operands.bytes, delivery.token,
                         in.index, static_cast<int32_t>(warp.index), warp.time});
  ++from->async_operations;
  const double latency = simulation->latency(bulk_latency(*simulation, operands.bytes));
  simulation->schedule(warp.time + latency, [=, bytes = operands.bytes] {
    uint8_t* target = delivery.targets[0].cta->shared + delivery.offset;
    if (reduce) {
      reduce(target, from->shared + source, count);
    } else {
      std::memmove(target, from->shared + source, bytes);
    }
    from->in_flight.end(delivery.token);
    --from->async_operations;
    finish_delivery(delivery);
  });
}

Outcome bulk_send(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) { send_once(warp, in, lane); });
  return Outcome::kNext;
}

// To global memory. Attributes: reduction or -1, element, operand of the byte mask or -1.
// Operands: destination, source, size, cache policy, byte mask.
void store_once(Warp& warp, const Instruction& in, int lane, uint32_t lanes) {
  const uint64_t target = global_address(warp, in.operands, lane);
  const uint32_t address = shared_address(warp, in.operands + 2, lane);
  const uint32_t source = own_shared_offset(warp, in, lane, address, "the source");
  const uint32_t bytes = warp.read32(in.operands[4])[lane];
  check_size(warp, in, lane, bytes);
  check_alignment(warp, in, lane, target, kBulkAlignment, "the destination of the copy");
  check_alignment(warp, in, lane, source, kBulkAlignment, "the source of the copy");
  if (bytes == 0) return;
  check_global_range(warp, in, lane, target, bytes, true, "the copy writes");
  auto* destination = reinterpret_cast<uint8_t*>(target);
  if (in.attributes[0] != kNoReduction) {
    const auto element = static_cast<Element>(in.attributes[1]);
    const auto reduce = find_reduction(static_cast<Reduction>(in.attributes[0]), element);
    const uint64_t count = bytes / element_bytes(element);
    begin_bulk_read(warp, in, lanes, source, bytes, [=](const uint8_t* shared) {
      reduce(destination, shared + source, count);
    });
    return;
  }
  const bool is_masked = in.attributes[2] >= 0;
  const uint32_t kept = is_masked ? warp.read32(in.operands[in.attributes[2]])[lane] : 0xFFFF;
  begin_bulk_read(warp, in, lanes, source, bytes, [=](const uint8_t* shared) {
    if (!is_masked) {
      std::memcpy(destination, shared + source, bytes);
      return;
    }
    // Bit i of the mask: byte i of every 16 is copied.
    for (uint32_t i = 0; i < bytes; ++i) {
      if (kept >> (i & 15) & 1) destination[i] = shared[source + i];
    }
  });
}

Outcome bulk_store(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t lanes) {
    store_once(warp, in, lane, lanes);
  });
  return Outcome::kNext;
}

// Only the range is checked: nothing here caches. Operands: source, size, cache policy.
Outcome bulk_prefetch(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) {
    const uint64_t source = global_address(warp, in.operands, lane);
    const uint32_t bytes = warp.read32(in.operands[2])[lane];
    check_size(warp, in, lane, bytes);
    check_alignment(warp, in, lane, source, kBulkAlignment, "the source of the prefetch");
  });
  return Outcome::kNext;
}

Outcome bulk_commit_group(Warp& warp, const Instruction&, uint32_t mask) {
  copy_state(warp)->bulk.commit(mask);
  return Outcome::kNext;
}

// Attribute: 1 for .read.
Outcome bulk_wait_group(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto state = copy_state(warp);
  const bool waits = wait_for_groups(warp, state->bulk, mask, static_cast<uint32_t>(in.operands[0]),
                                     in.attributes[0] != 0);
  return waits ? Outcome::kRetry : Outcome::kNext;
}

HALFBYTE_HANDLER("cp.async.bulk.load", bulk_load);
HALFBYTE_HANDLER("cp.async.bulk.send", bulk_send);
HALFBYTE_HANDLER("cp.async.bulk.store", bulk_store);
HALFBYTE_HANDLER("cp.async.bulk.prefetch", bulk_prefetch);
HALFBYTE_HANDLER("cp.async.bulk.commit_group", bulk_commit_group);
HALFBYTE_HANDLER("cp.async.bulk.wait_group", bulk_wait_group);

}  // namespace

}  // namespace halfbyte::gpu
