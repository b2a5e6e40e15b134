// clusterlaunchcontrol: a running cluster takes over one that has not started.
//
// The 16-byte response is opaque to programs; here: first ctaid x, y, z, then 1 when a cluster was
// cancelled (taken) and 0 when none was left.
#include "exec/mbarrier_address.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kResponseBytes = 16;
constexpr double kLatency = 600;  // cycles, uncalibrated

struct Response {
  uint32_t words[4] = {0, 0, 0, 0};
};

struct Request {
  Response response;
  uint32_t data = 0;     // offset of the response
  uint32_t barrier = 0;  // offset of the mbarrier
  uint64_t token = 0;
  Place place;
};

Response take_cluster(Simulation& simulation) {
  Response response;
  uint32_t cluster[3];
  if (!simulation.take_pending_cluster(cluster)) return response;
  for (int axis = 0; axis < 3; ++axis) response.words[axis] = cluster[axis] * simulation.config.cluster[axis];
  response.words[3] = 1;
  return response;
}

void deliver(Cta& cta, const Request& request) {
  cta.in_flight.end(request.token);
  --cta.async_operations;
  std::memcpy(cta.shared + request.data, request.response.words, kResponseBytes);
  complete_bytes(require_mbarrier(cta, request.barrier, request.place), kResponseBytes, request.place);
}

void send(Warp& warp, const Instruction& in, Cta& cta, const Request& request) {
  Simulation& simulation = *warp.simulation;
  if (Mbarrier* hit = cta.mbarrier_in(request.data, request.data + kResponseBytes)) {
    simulation.findings.add("mbarrier-overwritten",
                            "clusterlaunchcontrol.try_cancel writes over the live " + describe_mbarrier(*hit),
                            request.place);
  }
  FlightRange range;
  range.resource = Resource::kSharedWrite;
  range.first = request.data;
  range.last = request.data + kResponseBytes;
  range.token = request.token;
  range.instruction = in.index;
  range.warp = static_cast<int32_t>(warp.index);
  range.issued_at = warp.time;
  cta.in_flight.begin(range);
  ++cta.async_operations;
  simulation.schedule(warp.time + simulation.latency(kLatency), [&cta, request] { deliver(cta, request); });
}

void check_placement(Warp& warp, const Instruction& in, int lane, uint32_t data, uint32_t bytes) {
  const uint32_t offset = data & kSharedOffsetMask;
  if (offset % kResponseBytes != 0) {
    raise_fault(warp, in, lane, "misaligned",
                format_text("the response address 0x%x is not a multiple of 16", data));
  }
  if (offset + bytes > warp.cta->shared_bytes) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("a response at shared+0x%x ends outside the CTA's %u bytes of shared memory", offset,
                            warp.cta->shared_bytes));
  }
}

// Attributes: space, 1 for .multicast::cluster::all. Operands: response address, mbarrier address.
Outcome try_cancel(Warp& warp, const Instruction& in, uint32_t mask) {
  const auto space = static_cast<MbarrierSpace>(in.attributes[0]);
  for (uint32_t rest = mask; rest; rest &= rest - 1) {  // every lane is a request of its own
    const int lane = first_lane(rest);
    Request request;
    const uint32_t data = read_mbarrier_address(warp, in, lane, in.operands, space);
    const uint32_t barrier = read_mbarrier_address(warp, in, lane, in.operands + 2, space);
    check_placement(warp, in, lane, data, kResponseBytes);
    request.response = take_cluster(*warp.simulation);
    request.data = data & kSharedOffsetMask;
    request.barrier = barrier & kSharedOffsetMask;
    request.place = warp.place(in, lane);
    request.token = warp.simulation->next_token++;
    if (in.attributes[1] == 0) {
      send(warp, in, warp.shared_cta(in, lane, data), request);
      continue;
    }
    for (const auto& cta : warp.cta->cluster->ctas) send(warp, in, *cta, request);
  }
  return Outcome::kNext;
}

// A 128-bit register is lo[32], hi[32] of 64 bits.
uint32_t read_word(Warp& warp, int32_t slot, int lane, int word) {
  const uint64_t* halves = warp.read64(slot);
  return static_cast<uint32_t>(halves[lane + (word / 2) * kLanes] >> (word % 2 * 32));
}

Outcome is_canceled(Warp& warp, const Instruction& in, uint32_t mask) {
  const uint32_t taken = lanes_where(mask, [&](int lane) { return read_word(warp, in.operands[1], lane, 3) == 1; });
  warp.set_predicate(in.operands[0], taken, mask);
  return Outcome::kNext;
}

// Attributes: first word, number of words. Operands: results, response.
Outcome get_first_ctaid(Warp& warp, const Instruction& in, uint32_t mask) {
  const int first = static_cast<int>(in.attributes[0]), count = static_cast<int>(in.attributes[1]);
  for (int i = 0; i < count; ++i) {
    uint32_t* target = warp.write32(in.operands[i]);
    // The fourth item of .v4 is ignored by the PTX ISA.
    for_lanes(mask, [&](int lane) { target[lane] = i == 3 ? 0 : read_word(warp, in.operands[count], lane, first + i); });
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("clusterlaunchcontrol.try_cancel", try_cancel);
HALFBYTE_HANDLER("clusterlaunchcontrol.is_canceled", is_canceled);
HALFBYTE_HANDLER("clusterlaunchcontrol.get_first_ctaid", get_first_ctaid);

}  // namespace
}  // namespace halfbyte::gpu
