// cp.async.bulk.tensor, cp.reduce.async.bulk.tensor and their prefetch: tile, gather4, scatter4 and
// im2col modes, one to five dimensions.
#include "machine/tensor_copy.h"

#include "exec/same_operands.h"
#include "exec/tensor_map_access.h"
#include "machine/bulk_delivery.h"

namespace halfbyte::gpu {

namespace {

constexpr uint32_t kSharedAlignment = 128;
constexpr int64_t kNoReduction = -1;

// Attributes of every form here: mode, coordinates, im2col offsets; then what the direction needs.
struct TensorOperands {
  int map;          // entry of the tensor map's address
  int coordinates;  // entry of the first one
  int offsets;      // entry of the first im2col offset
};

void raise_bad_request(Warp& warp, const Instruction& in, int lane, const TensorMap& map,
                       const std::string& error) {
  raise_fault(warp, in, lane, "bad-tensor-copy",
              format_text("%s: %s", map.describe().c_str(), error.c_str()));
}

TensorRequest read_request(Warp& warp, const Instruction& in, int lane, const TensorOperands& entries) {
  TensorRequest request;
  const int64_t address = in.operands[entries.map + 1];
  request.map =
      read_tensor_map(warp, in, lane, warp.read64(in.operands[entries.map])[lane] + address);
  request.mode = static_cast<TensorMode>(in.attributes[0]);
  for (int i = 0; i < in.attributes[1]; ++i) {
    request.coordinates[i] =
        static_cast<int32_t>(warp.read32(in.operands[entries.coordinates + i])[lane]);
  }
  for (int i = 0; i < in.attributes[2]; ++i) {
    request.offsets[i] = warp.read32(in.operands[entries.offsets + i])[lane] & 0xFFFF;
  }
  const uint32_t rank = request.mode == TensorMode::kRows ? 2 : static_cast<uint32_t>(in.attributes[1]);
  if (request.map.rank != rank) {
    raise_bad_request(warp, in, lane, request.map,
                      format_text("a map of rank %u for an instruction of %u dimensions",
                                  request.map.rank, rank));
  }
  return request;
}

std::string describe_coordinates(const TensorRequest& request, int count) {
  std::string text = "{";
  for (int i = 0; i < count; ++i) {
    text += format_text("%s%d", i ? ", " : "", request.coordinates[i]);
  }
  return text + "}";
}

bool is_registered(const Warp& warp, const AddressSpan& span, bool is_write) {
  if (span.end <= span.begin) return true;
  const Allocation* found = warp.simulation->memory.find(span.begin);
  return found && !found->is_freed && !found->is_stale && span.end <= found->end && !(is_write && found->is_read_only);
}

// Faults unless every row that exists in the tensor lies in a registered buffer.
void check_rows(Warp& warp, const Instruction& in, int lane, const TensorRequest& request,
                bool is_write) {
  if (request.mode == TensorMode::kTile && is_registered(warp, find_tile_span(request), is_write)) return;
  const uint64_t bits = request.map.unit_bits();
  const uint64_t step = request.map.element_strides[0];
  for_each_row(request, [&](const TensorRow& row) {
    if (row.last <= row.first) return;
    const AddressSpan span{row.address + row.first * step * bits / 8,
                           row.address + ((row.last - 1) * step * bits + bits + 7) / 8};
    if (is_registered(warp, span, is_write)) return;
    const std::string what =
        format_text("the box at %s of the %s %s",
                    describe_coordinates(request, static_cast<int>(in.attributes[1])).c_str(),
                    request.map.describe().c_str(), is_write ? "writes" : "reads");
    check_global_range(warp, in, lane, span.begin, span.end - span.begin, is_write, what.c_str());
  });
}

void check_request(Warp& warp, const Instruction& in, int lane, const TensorRequest& request,
                   bool is_store, bool is_reduction) {
  const std::string error = find_request_error(request, is_store, is_reduction);
  if (!error.empty()) raise_bad_request(warp, in, lane, request.map, error);
  check_rows(warp, in, lane, request, is_store);
}

// Further attributes: 1 for .shared::cta, 1 for .multicast::cluster, 1 for .cta_group::2.
// Operands: destination, tensor map and coordinates, mbarrier, im2col offsets, mask, cache policy.
void load_once(Warp& warp, const Instruction& in, int lane) {
  const int barrier = 4 + static_cast<int>(in.attributes[1]);
  const int offsets = barrier + 2;
  const TensorRequest request = read_request(warp, in, lane, {2, 4, offsets});
  check_request(warp, in, lane, request, false, false);
  DeliveryOperands operands;
  operands.destination = warp.read32(in.operands[0])[lane] + static_cast<uint32_t>(in.operands[1]);
  operands.barrier =
      warp.read32(in.operands[barrier])[lane] + static_cast<uint32_t>(in.operands[barrier + 1]);
  operands.bytes = request.shared_bytes();
  operands.counted_bytes = request.counted_bytes();
  operands.is_own_cta = in.attributes[3] != 0;
  operands.is_multicast = in.attributes[4] != 0;
  operands.pairs = in.attributes[5] != 0;
  if (operands.is_multicast) {
    operands.cta_mask = warp.read32(in.operands[offsets + in.attributes[2]])[lane] & 0xFFFF;
  }
  check_alignment(warp, in, lane, operands.destination, kSharedAlignment,
                  "the shared memory destination of the tensor copy");
  const Delivery delivery = begin_delivery(warp, in, lane, operands);
  Simulation* simulation = warp.simulation;
  const double latency = simulation->latency(bulk_latency(*simulation, operands.bytes));
  simulation->schedule(warp.time + latency, [delivery, request] {
    std::vector<uint8_t*> shared;
    for (const Delivery::Target& target : delivery.targets) shared.push_back(target.cta->shared);
    load_tensor(request, shared, delivery.offset);
    finish_delivery(delivery);
  });
}

Outcome tensor_load(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) { load_once(warp, in, lane); });
  return Outcome::kNext;
}

// Further attribute: reduction or -1. Operands: tensor map and coordinates, source, cache policy.
void store_once(Warp& warp, const Instruction& in, int lane, uint32_t lanes) {
  const int source = 2 + static_cast<int>(in.attributes[1]);
  const TensorRequest request = read_request(warp, in, lane, {0, 2, 0});
  const bool reduces = in.attributes[3] != kNoReduction;
  check_request(warp, in, lane, request, true, reduces);
  ReduceElements reduce = nullptr;
  if (reduces) {
    reduce = find_tensor_reduction(request.map, static_cast<Reduction>(in.attributes[3]));
    if (!reduce) {
      raise_bad_request(warp, in, lane, request.map, "its element type has no such reduction");
    }
  }
  const uint32_t address =
      warp.read32(in.operands[source])[lane] + static_cast<uint32_t>(in.operands[source + 1]);
  const uint32_t offset =
      own_shared_offset(warp, in, lane, address, "the shared memory source of the tensor copy");
  check_alignment(warp, in, lane, offset, kSharedAlignment,
                  "the shared memory source of the tensor copy");
  begin_bulk_read(warp, in, lanes, offset, request.shared_bytes(), [=](const uint8_t* shared) {
    store_tensor(request, shared, offset, reduce);
  });
}

Outcome tensor_store(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t lanes) {
    store_once(warp, in, lane, lanes);
  });
  return Outcome::kNext;
}

// Nothing here caches: only the map is checked. Operands: tensor map and coordinates, offsets.
Outcome tensor_prefetch(Warp& warp, const Instruction& in, uint32_t mask) {
  for_different_lanes(warp, in, mask, [&](int lane, uint32_t) {
    const TensorRequest request =
        read_request(warp, in, lane, {0, 2, 2 + static_cast<int>(in.attributes[1])});
    const std::string error = find_request_error(request, false, false);
    if (!error.empty()) raise_bad_request(warp, in, lane, request.map, error);
  });
  return Outcome::kNext;
}

HALFBYTE_HANDLER("cp.async.bulk.tensor.load", tensor_load);
HALFBYTE_HANDLER("cp.async.bulk.tensor.store", tensor_store);
HALFBYTE_HANDLER("cp.async.bulk.tensor.prefetch", tensor_prefetch);

}  // namespace

}  // namespace halfbyte::gpu
