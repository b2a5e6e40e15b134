// ld, ldu and st of every state space, st.async, red.async and st.bulk.
//
// Attributes: state space, 1 when the address register has 64 bits.
#include "exec/lane_memory.h"
#include "machine/barriers.h"
#include "machine/reduction.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

constexpr double kRemoteStoreLatency = 200;  // cycles, distributed shared memory

Space space_of(const Instruction& in) { return static_cast<Space>(in.attributes[0]); }
LaneAccess make_access(const Instruction& in, uint32_t mask, uint32_t bytes, bool is_write,
                       int address_operand) {
  return {mask, bytes, is_write, in.operands[address_operand], in.operands[address_operand + 1],
          in.attributes[1] != 0};
}

template <int Unit, int Count>
Outcome load(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int kBytes = Unit * Count;
  LanePointers pointers;
  locate_lanes(warp, in, space_of(in), make_access(in, mask, kBytes, false, Count), pointers);
  if (mask == kFullMask && is_contiguous<kBytes>(pointers)) {
    write_components<Unit, Count>(warp, in.operands, mask, pointers.at[0]);
    return Outcome::kNext;
  }
  LaneBytes<kBytes> bytes;
  gather_lanes(pointers, bytes);
  write_components<Unit, Count>(warp, in.operands, mask, bytes.data);
  return Outcome::kNext;
}

template <int Unit, int Count>
Outcome store(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int kBytes = Unit * Count;
  const Space space = space_of(in);
  LanePointers pointers;
  locate_lanes(warp, in, space, make_access(in, mask, kBytes, true, 0), pointers);
  if (space != Space::kLocal && space != Space::kParam) warp.simulation->note_progress();
  if (mask == kFullMask && is_contiguous<kBytes>(pointers)) {
    read_components<Unit, Count>(warp, in.operands + 2, pointers.at[0]);
    return Outcome::kNext;
  }
  LaneBytes<kBytes> bytes;
  read_components<Unit, Count>(warp, in.operands + 2, bytes.data);
  scatter_lanes(mask, pointers, bytes);
  return Outcome::kNext;
}

// A 128-bit register holds lo[32], then hi[32].
Outcome load_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  LanePointers pointers;
  locate_lanes(warp, in, space_of(in), make_access(in, mask, 16, false, 1), pointers);
  LaneBytes<16> bytes;
  gather_lanes(pointers, bytes);
  const int32_t halves[2] = {in.operands[0], in.operands[0] + 2};
  write_components<8, 2>(warp, halves, mask, bytes.data);
  return Outcome::kNext;
}

Outcome store_b128(Warp& warp, const Instruction& in, uint32_t mask) {
  LanePointers pointers;
  locate_lanes(warp, in, space_of(in), make_access(in, mask, 16, true, 0), pointers);
  const uint64_t* value = warp.read64(in.operands[2]);
  for_lanes(mask, [&](int lane) {
    std::memcpy(pointers.at[lane], value + lane, 8);
    std::memcpy(pointers.at[lane] + 8, value + kLanes + lane, 8);
  });
  if (space_of(in) != Space::kLocal) warp.simulation->note_progress();
  return Outcome::kNext;
}

// --- Asynchronous stores to shared memory of the cluster, counted by an mbarrier ---------------

struct RemoteUpdate {
  uint8_t* target;
  uint8_t bytes[16];
};

struct RemoteOperation {
  Cta* cta;  // of data and mbarrier
  uint32_t offset;
  uint32_t barrier_offset;
  uint32_t bytes;
  uint64_t token;
  Place place;
};

RemoteOperation begin_remote(Warp& warp, const Instruction& in, int lane, uint32_t address,
                             uint32_t barrier, uint32_t bytes) {
  warp.access_shared(in, lane, address, bytes, true);
  require_mbarrier(warp, in, lane, barrier);
  Cta& cta = warp.shared_cta(in, lane, address);
  if (&cta != &warp.shared_cta(in, lane, barrier)) {
    raise_fault(warp, in, lane, "wrong-cta",
                format_text("data at 0x%08x and mbarrier at 0x%08x lie in different CTAs; both must lie "
                            "in the same one", address, barrier));
  }
  RemoteOperation operation{&cta, address & kSharedOffsetMask, barrier & kSharedOffsetMask, bytes,
                            warp.simulation->next_token++, warp.place(in, lane)};
  cta.in_flight.begin({Resource::kSharedWrite, operation.offset, operation.offset + bytes,
                       operation.token, in.index, static_cast<int32_t>(warp.index), warp.time});
  ++cta.async_operations;
  return operation;
}

void finish_remote(Simulation& simulation, const RemoteOperation& operation) {
  Cta& cta = *operation.cta;
  cta.in_flight.end(operation.token);
  --cta.async_operations;
  simulation.note_progress();
  complete_bytes(require_mbarrier(cta, operation.barrier_offset, operation.place), operation.bytes,
                 operation.place);
}

// st.async [a], b, [mbar]: PTX ISA, "st.async"; every lane's bytes count on the mbarrier.
template <int Unit, int Count>
Outcome store_async(Warp& warp, const Instruction& in, uint32_t mask) {
  constexpr int kBytes = Unit * Count;
  LaneBytes<kBytes> bytes;
  read_components<Unit, Count>(warp, in.operands + 2, bytes.data);
  const uint32_t* base = warp.read32(in.operands[0]);
  const uint32_t* barrier = warp.read32(in.operands[2 + Count]);
  Simulation* simulation = warp.simulation;
  for_lanes(mask, [&](int lane) {
    const RemoteOperation operation =
        begin_remote(warp, in, lane, base[lane] + in.operands[1], barrier[lane] + in.operands[3 + Count],
                     kBytes);
    RemoteUpdate update;
    update.target = operation.cta->shared + operation.offset;
    std::memcpy(update.bytes, bytes.data + lane * kBytes, kBytes);
    simulation->schedule(warp.time + simulation->latency(kRemoteStoreLatency),
                         [simulation, operation, update] {
                           std::memcpy(update.target, update.bytes, operation.bytes);
                           finish_remote(*simulation, operation);
                         });
  });
  return Outcome::kNext;
}

// red.async [a], b, [mbar]. Attribute 0 is the reduction, attribute 1 the type.
Outcome reduce_async(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto element = static_cast<Element>(in.attributes[1]);
  const ReduceElements reduce = find_reduction(static_cast<Reduction>(in.attributes[0]), element);
  const uint32_t bytes = element_bytes(element);
  const uint32_t* base = warp.read32(in.operands[0]);
  const uint32_t* barrier = warp.read32(in.operands[3]);
  Simulation* simulation = warp.simulation;
  for_lanes(mask, [&](int lane) {
    const RemoteOperation operation = begin_remote(
        warp, in, lane, base[lane] + in.operands[1], barrier[lane] + in.operands[4], bytes);
    const uint64_t value =
        bytes == 8 ? warp.read64(in.operands[2])[lane] : warp.read32(in.operands[2])[lane];
    simulation->schedule(warp.time + simulation->latency(kRemoteStoreLatency),
                         [simulation, operation, value, reduce] {
                           reduce(operation.cta->shared + operation.offset,
                                  reinterpret_cast<const uint8_t*>(&value), 1);
                           finish_remote(*simulation, operation);
                         });
  });
  return Outcome::kNext;
}

// st.bulk [a], size, 0: zeros shared memory; the size is a multiple of 8.
Outcome store_bulk(Warp& warp, const Instruction& in, uint32_t mask) {
  const bool is_wide = in.attributes[1] != 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint64_t address64 =
        (is_wide ? warp.read64(in.operands[0])[lane]
                 : kSharedWindow | warp.read32(in.operands[0])[lane]) +
        static_cast<uint64_t>(static_cast<int64_t>(in.operands[1]));
    if ((address64 & kWindowMask) != kSharedWindow) {
      raise_fault(warp, in, lane, "not-shared-memory",
                  format_text("the generic address 0x%llx of st.bulk is not in shared memory",
                              static_cast<unsigned long long>(address64)));
    }
    const auto address = static_cast<uint32_t>(address64);
    const uint64_t bytes = warp.read64(in.operands[2])[lane];
    if (bytes % 8 || bytes > kSharedOffsetMask) {
      raise_fault(warp, in, lane, "bad-size",
                  format_text("st.bulk of %llu bytes; the size must be a multiple of 8 below 16 MiB",
                              static_cast<unsigned long long>(bytes)));
    }
    if (bytes == 0) continue;
    check_alignment(warp, in, lane, address, 8, "the destination of st.bulk");
    Cta& cta = warp.shared_cta(in, lane, address);
    const uint32_t offset = address & kSharedOffsetMask;
    const uint32_t size = static_cast<uint32_t>(bytes);
    check_shared_range(warp, in, lane, cta, offset, size, "st.bulk writes");
    note_conflict(warp, in, lane, cta, true, offset, offset + size);
    std::memset(cta.shared + offset, 0, size);
  }
  warp.simulation->note_progress();
  return Outcome::kNext;
}

#define REGISTER_UNIT(unit, count)                                     \
  HALFBYTE_HANDLER("ld." #unit "x" #count, (load<unit, count>));       \
  HALFBYTE_HANDLER("st." #unit "x" #count, (store<unit, count>))

REGISTER_UNIT(1, 1);
REGISTER_UNIT(1, 2);
REGISTER_UNIT(1, 4);
REGISTER_UNIT(1, 8);
REGISTER_UNIT(2, 1);
REGISTER_UNIT(2, 2);
REGISTER_UNIT(2, 4);
REGISTER_UNIT(2, 8);
REGISTER_UNIT(4, 1);
REGISTER_UNIT(4, 2);
REGISTER_UNIT(4, 4);
REGISTER_UNIT(4, 8);
REGISTER_UNIT(8, 1);
REGISTER_UNIT(8, 2);
REGISTER_UNIT(8, 4);
HALFBYTE_HANDLER("ld.16x1", load_b128);
HALFBYTE_HANDLER("st.16x1", store_b128);
HALFBYTE_HANDLER("st.bulk", store_bulk);
HALFBYTE_HANDLER("st.async.4x1", (store_async<4, 1>));
HALFBYTE_HANDLER("st.async.4x2", (store_async<4, 2>));
HALFBYTE_HANDLER("st.async.4x4", (store_async<4, 4>));
HALFBYTE_HANDLER("st.async.8x1", (store_async<8, 1>));
HALFBYTE_HANDLER("st.async.8x2", (store_async<8, 2>));
HALFBYTE_HANDLER("red.async", reduce_async);

}  // namespace

}  // namespace halfbyte::gpu
