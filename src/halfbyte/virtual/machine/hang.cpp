// What a launch that cannot go on tells: who waits for what. And what a CTA leaves unfinished.
#include <algorithm>
#include <sstream>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {

// Rounds of expired try_waits without progress after which a launch counts as hung: a program may
// try a few times, doing other things in between, before it gives way to others.
constexpr int kMaxIdleRounds = 16;
constexpr size_t kMaxListed = 4096;  // fragments in one report

void write_place(std::ostringstream& out, const Warp& warp, const Fragment& fragment) {
  const Cta& cta = *warp.cta;
  out << format_text("\"instruction\":%d,\"cta\":[%u,%u,%u],\"rank\":%u,\"warp\":%u,\"lanes\":%u", fragment.pc,
                     cta.id[0], cta.id[1], cta.id[2], cta.rank, warp.index, fragment.mask);
}

void write_mbarrier(std::ostringstream& out, const Warp& warp, const Wait& wait) {
  const uint32_t rank = wait.address >> kSharedRankShift;
  const uint32_t offset = wait.address & kSharedOffsetMask;
  Mbarrier* barrier = nullptr;
  if (rank < warp.cta->cluster->ctas.size()) barrier = warp.cta->cluster->ctas[rank]->find_mbarrier(offset);
  out << format_text(",\"barrier_rank\":%u,\"offset\":%u", rank, offset);
  if (barrier == nullptr) return;
  out << format_text(
      ",\"parity\":%u,\"phases\":%llu,\"pending\":%lld,\"expected\":%lld,\"pending_bytes\":%lld,\"valid\":%s",
      static_cast<unsigned>(barrier->phase & 1), static_cast<unsigned long long>(barrier->phase),
      static_cast<long long>(barrier->pending), static_cast<long long>(barrier->expected),
      static_cast<long long>(barrier->pending_bytes), barrier->is_valid ? "true" : "false");
}

void write_named_barrier(std::ostringstream& out, const Warp& warp, const Wait& wait) {
  const NamedBarrier& barrier = warp.cta->named[wait.address & 15];
  out << format_text(",\"number\":%u,\"arrived\":%u,\"expected\":%u,\"arrived_warps\":[", wait.address,
                     barrier.arrived, barrier.expected);
  const char* separator = "";
  for (size_t i = 0; i < barrier.arrived_lanes.size(); ++i) {
    if (barrier.arrived_lanes[i] == 0) continue;
    out << separator << i;
    separator = ",";
  }
  out << "]";
}

void write_cluster_barrier(std::ostringstream& out, const Warp& warp) {
  out << ",\"missing\":[";
  const char* separator = "";
  for (const auto& cta : warp.cta->cluster->ctas) {
    for (const auto& other : cta->warps) {
      const uint32_t lanes = missing_at_cluster_barrier(*other);
      if (lanes == 0) continue;
      out << separator << format_text("{\"rank\":%u,\"warp\":%u,\"lanes\":%u}", cta->rank, other->index, lanes);
      separator = ",";
    }
  }
  out << "]";
}

void write_tensor_columns(std::ostringstream& out, const Warp& warp, const Wait& wait) {
  out << ",\"columns\":" << wait.address << ",\"owned\":[";
  const char* separator = "";
  if (warp.cta->tensor_memory) {
    const std::vector<int32_t>& owner = warp.cta->tensor_memory->owner;
    for (size_t column = 0; column < owner.size();) {
      size_t end = column + 1;
      while (end < owner.size() && owner[end] == owner[column]) ++end;
      if (owner[column] >= 0) {
        out << separator << "[" << column << "," << end << "]";
        separator = ",";
      }
      column = end;
    }
  }
  out << "]";
}

void write_wait(std::ostringstream& out, const Warp& warp, const Fragment& fragment) {
  static const char* const kNames[] = {"none",        "mbarrier",     "named-barrier", "cluster-barrier",
                                       "convergence", "async-group",  "tensor-alloc",  "warp-barrier",
                                       "other"};
  const Wait& wait = fragment.wait;
  out << ",\"wait\":\"" << kNames[static_cast<int>(wait.kind)] << "\"";
  switch (wait.kind) {
    case WaitKind::kMbarrier: return write_mbarrier(out, warp, wait);
    case WaitKind::kNamedBarrier: return write_named_barrier(out, warp, wait);
    case WaitKind::kClusterBarrier: return write_cluster_barrier(out, warp);
    case WaitKind::kTensorAlloc: return write_tensor_columns(out, warp, wait);
    case WaitKind::kConvergence:
      out << ",\"needed\":" << static_cast<uint32_t>(wait.detail);
      return;
    case WaitKind::kWarpBarrier: {
      const auto found = warp.warp_barriers.find(wait.address);
      out << ",\"needed\":" << (wait.address & warp.live)
          << ",\"arrived\":" << (found == warp.warp_barriers.end() ? 0u : found->second.arrived);
      return;
    }
    default: out << ",\"detail\":" << wait.detail;
  }
}

template <class Visit>
void for_fragments(const std::vector<std::unique_ptr<Cluster>>& clusters, Visit&& visit) {
  for (const auto& cluster : clusters) {
    for (const auto& cta : cluster->ctas) {
      for (const auto& warp : cta->warps) {
        for (int i = 0; i < warp->num_fragments; ++i) visit(*warp, warp->fragments[i]);
      }
    }
  }
}

const char* name_resource(Resource resource) {
  static const char* const kNames[] = {"shared-read", "shared-write", "tensor-read", "tensor-write"};
  return kNames[static_cast<int>(resource)];
}

void write_in_flight(std::ostringstream& out, const std::vector<std::unique_ptr<Cluster>>& clusters) {
  const char* separator = "";
  size_t listed = 0;
  for (const auto& cluster : clusters) {
    for (const auto& cta : cluster->ctas) {
      for (const FlightRange& range : cta->in_flight.ranges()) {
        if (++listed > kMaxListed) return;
        out << separator
            << format_text("{\"cta\":[%u,%u,%u],\"rank\":%u,\"warp\":%d,\"instruction\":%d,\"resource\":\"%s\","
                           "\"first\":%u,\"last\":%u,\"issued_at\":%.0f}",
                           cta->id[0], cta->id[1], cta->id[2], cta->rank, range.warp, range.instruction,
                           name_resource(range.resource), range.first, range.last, range.issued_at);
        separator = ",";
      }
    }
  }
}

Place place_in(const Cta& cta, int32_t instruction, int32_t warp) {
  Place place;
  place.instruction = instruction;
  std::copy(cta.id, cta.id + 3, place.cta);
  place.cta_rank = cta.rank;
  place.warp = warp;
  return place;
}

void report_range_at_exit(Cta& cta, const FlightRange& range) {
  const bool is_tensor = range.resource == Resource::kTensorRead || range.resource == Resource::kTensorWrite;
  const char* kind = is_tensor                                ? "exit-with-tensor-work-in-flight"
                     : range.resource == Resource::kSharedRead ? "exit-with-store-in-flight"
                                                              : "exit-with-load-in-flight";
  const char* advice = is_tensor ? "its completion was never waited for"
                       : range.resource == Resource::kSharedRead
                           ? "wait with cp.async.bulk.wait_group.read before the CTA exits"
                           : "nothing waited for the data that it writes";
  cta.simulation->findings.add(
      kind,
      format_text("the CTA exits while asynchronous work issued at cycle %.0f still %s %s [0x%x, 0x%x): %s",
                  range.issued_at,
                  range.resource == Resource::kSharedRead || range.resource == Resource::kTensorRead ? "reads"
                                                                                                     : "writes",
                  is_tensor ? "tensor memory columns" : "shared memory", range.first, range.last, advice),
      place_in(cta, range.instruction, range.warp));
}

}  // namespace

bool Simulation::expire_waits() {
  idle_rounds_ = progress == progress_at_expiry_ ? idle_rounds_ + 1 : 0;
  progress_at_expiry_ = progress;
  if (idle_rounds_ > kMaxIdleRounds) return false;
  bool is_any = false;
  for_fragments(clusters, [&](Warp& warp, Fragment& fragment) {
    if (fragment.state != FragmentState::kWaiting || !fragment.wait.may_time_out) return;
    fragment.state = FragmentState::kReady;
    fragment.timed_out = true;
    fragment.wait.queue = nullptr;
    warp.stop = -1;
    warp.time = std::max(warp.time, now);
    enqueue(warp);
    is_any = true;
  });
  return is_any;
}

// {"kind", "cycles", "waits": [...], "running": [...], "in_flight": [...], "omitted"}; the fields of
// a wait depend on what is waited for. report.py is the reader.
void Simulation::report_hang(const char* kind) {
  std::ostringstream waits, running;
  const char* waits_separator = "";
  const char* running_separator = "";
  size_t listed = 0, omitted = 0;
  for_fragments(clusters, [&](const Warp& warp, const Fragment& fragment) {
    if (++listed > kMaxListed) {
      ++omitted;
      return;
    }
    if (fragment.state == FragmentState::kWaiting) {
      waits << waits_separator << "{";
      write_place(waits, warp, fragment);
      write_wait(waits, warp, fragment);
      waits << "}";
      waits_separator = ",";
    } else {
      running << running_separator << "{";
      write_place(running, warp, fragment);
      running << "}";
      running_separator = ",";
    }
  });
  std::ostringstream out;
  out << "{\"kind\":" << quote_json(kind) << ",\"cycles\":" << format_text("%.0f", now)
      << ",\"omitted\":" << omitted << ",\"waits\":[" << waits.str() << "],\"running\":[" << running.str()
      << "],\"in_flight\":[";
  write_in_flight(out, clusters);
  out << "]}";
  deadlock = out.str();
}

void check_cta_exit(Cta& cta) {
  for (const FlightRange& range : cta.in_flight.ranges()) report_range_at_exit(cta, range);
  for (uint32_t offset : cta.mbarrier_offsets) {
    const Mbarrier& barrier = *cta.find_mbarrier(offset);
    if (!barrier.is_valid || barrier.pending_bytes == 0) continue;
    cta.simulation->findings.add("exit-with-pending-bytes",
                                 "the CTA exits while transaction bytes are outstanding: " +
                                     describe_mbarrier(barrier),
                                 place_in(cta, barrier.initialized_by, -1));
  }
  if (!cta.tensor_memory) return;
  uint32_t owned = 0;
  for (int32_t owner : cta.tensor_memory->owner) owned += owner >= 0;
  if (owned == 0) return;
  cta.simulation->findings.add("tensor-memory-not-freed",
                               format_text("the CTA exits with %u columns of tensor memory allocated", owned),
                               place_in(cta, -1, -1));
}

}  // namespace halfbyte::gpu
