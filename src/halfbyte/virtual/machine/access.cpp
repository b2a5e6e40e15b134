// Checked memory access: global memory by registered buffer, the other spaces by their windows.
#include "machine/access.h"

#include <algorithm>

#include "machine/simulation.h"

namespace halfbyte::gpu {

namespace {


unsigned long long wide(uint64_t value) { return static_cast<unsigned long long>(value); }

const char* verb(bool is_write) { return is_write ? "writes" : "reads"; }

uint32_t rank_of(uint32_t address) { return address >> kSharedRankShift; }
uint32_t offset_of(uint32_t address) { return address & kSharedOffsetMask; }

[[noreturn]] void fault_outside(const Warp& warp, const Instruction& in, int lane, uint64_t address,
                                uint64_t bytes, const char* what) {
  raise_fault(warp, in, lane, "out-of-bounds",
              format_text("%s %llu bytes at 0x%llx, outside every buffer: %s", what, wide(bytes),
                          wide(address), warp.simulation->memory.describe_nearest(address).c_str()));
}

uint8_t* access_param(Warp& warp, const Instruction& in, int lane, uint64_t offset, uint32_t bytes,
                      bool is_write) {
  const LaunchConfig& config = warp.simulation->config;
  if (is_write) {
    raise_fault(warp, in, lane, "read-only",
                format_text("lane %d writes %u bytes at offset %llu of the kernel's parameters, "
                            "which are read-only", lane, bytes, wide(offset)));
  }
  if (offset + bytes > config.parameter_bytes) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("lane %d reads %u bytes at offset %llu of the kernel's parameters, which "
                            "have %u bytes", lane, bytes, wide(offset), config.parameter_bytes));
  }
  return const_cast<uint8_t*>(config.parameters) + offset;
}

uint8_t* access_local(Warp& warp, const Instruction& in, int lane, uint64_t offset, uint32_t bytes,
                      bool is_write) {
  const uint32_t size = warp.program->local_bytes;
  if (offset + bytes > size) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("lane %d %s %u bytes at offset %llu of its local memory, which has %u "
                            "bytes", lane, verb(is_write), bytes, wide(offset), size));
  }
  return warp.local + static_cast<size_t>(lane) * size + offset;
}

}  // namespace

void check_alignment(const Warp& warp, const Instruction& in, int lane, uint64_t address,
                     uint32_t alignment, const char* what) {
  if ((address & (alignment - 1)) == 0) return;
  raise_fault(warp, in, lane, "misaligned",
              format_text("%s at 0x%llx is not aligned to %u bytes", what, wide(address), alignment));
}

const Allocation& check_global_range(Warp& warp, const Instruction& in, int lane, uint64_t address,
                                     uint64_t bytes, bool is_write, const char* what) {
  const Allocation* found = warp.simulation->memory.find(address);
  if (!found) fault_outside(warp, in, lane, address, bytes, what);
  if (found->is_freed) {
    raise_fault(warp, in, lane, "use-after-free",
                format_text("%s %llu bytes at 0x%llx of %s, which was freed", what, wide(bytes),
                            wide(address), found->name.c_str()));
  }
  if (found->is_stale && is_write && found->is_read_only) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("%s %llu bytes at 0x%llx, in %s", what, wide(bytes), wide(address),
                            found->name.c_str()));
  }
  if (found->is_stale) {
    warp.simulation->findings.add(
        "stale-memory", format_text("%s %llu bytes at 0x%llx, in %s", what, wide(bytes), wide(address),
                                    found->name.c_str()), warp.place(in, lane));
  }
  if (bytes > found->end - address) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("%s %llu bytes at 0x%llx, %llu bytes more than %s holds from there (%llu "
                            "bytes at 0x%llx)", what, wide(bytes), wide(address),
                            wide(bytes - (found->end - address)), found->name.c_str(),
                            wide(found->end - found->begin), wide(found->begin)));
  }
  if (is_write && found->is_read_only) {
    raise_fault(warp, in, lane, "read-only",
                format_text("%s %llu bytes at 0x%llx of %s, which is read-only", what, wide(bytes),
                            wide(address), found->name.c_str()));
  }
  return *found;
}

void check_shared_range(const Warp& warp, const Instruction& in, int lane, const Cta& cta,
                        uint32_t offset, uint32_t bytes, const char* what) {
  const uint32_t reserved = warp.simulation->config.reserved_shared_bytes;
  if (offset < reserved) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("%s %u bytes at shared offset 0x%x of CTA rank %u, in the first %u bytes, "
                            "which are reserved", what, bytes, offset, cta.rank,
                            reserved));
  }
  if (static_cast<uint64_t>(offset) + bytes > cta.shared_bytes) {
    raise_fault(warp, in, lane, "out-of-bounds",
                format_text("%s %u bytes at shared offset 0x%x of CTA rank %u, whose shared memory "
                            "ends at 0x%x", what, bytes, offset, cta.rank, cta.shared_bytes));
  }
}

void note_conflict(Warp& warp, const Instruction& in, int lane, Cta& cta, bool is_write,
                   uint32_t first, uint32_t last) {
  if (cta.in_flight.empty()) return;
  const FlightRange* other = cta.in_flight.find_conflict(false, is_write, first, last);
  if (!other) return;
  const bool other_writes = other->resource == Resource::kSharedWrite;
  warp.simulation->findings.add(
      is_write ? "write-in-flight" : "read-in-flight",
      format_text("%s shared memory [0x%x, 0x%x) of CTA rank %u while the asynchronous operation that "
                  "warp %d issued at cycle %.0f (instruction %d) still %s [0x%x, 0x%x)",
                  verb(is_write), first, last, cta.rank, other->warp, other->issued_at,
                  other->instruction, verb(other_writes), other->first, other->last),
      warp.place(in, lane));
}

void note_mbarrier_overwrite(Warp& warp, const Instruction& in, int lane, Cta& cta, uint32_t first,
                             uint32_t last) {
  const Mbarrier* barrier = cta.mbarrier_in(first, last);
  if (!barrier) return;
  warp.simulation->findings.add("mbarrier-overwritten",
                                format_text("writes shared memory [0x%x, 0x%x), which holds a live %s",
                                            first, last, describe_mbarrier(*barrier).c_str()),
                                warp.place(in, lane));
}

Cta& Warp::shared_cta(const Instruction& in, int lane, uint32_t address) {
  const uint32_t rank = rank_of(address);
  if (rank == cta->rank) return *cta;
  auto& ctas = cta->cluster->ctas;
  if (rank >= ctas.size()) {
    raise_fault(*this, in, lane, "out-of-bounds",
                format_text("shared address 0x%08x names CTA rank %u of a cluster of %zu", address,
                            rank, ctas.size()));
  }
  Cta& remote = *ctas[rank];
  if (remote.live_warps == 0) {
    simulation->findings.add("shared-of-exited-cta",
                             format_text("accesses shared memory of CTA rank %u of the cluster, whose "
                                         "threads have all exited", rank),
                             place(in, lane));
  }
  return remote;
}

uint8_t* Warp::access_shared(const Instruction& in, int lane, uint32_t address, uint32_t bytes,
                             bool is_write) {
  Cta& target = shared_cta(in, lane, address);
  const uint32_t offset = offset_of(address);
  const char* what = is_write ? "the store writes" : "the load reads";
  check_shared_range(*this, in, lane, target, offset, bytes, what);
  if ((bytes & (bytes - 1)) == 0) check_alignment(*this, in, lane, offset, bytes, "the shared access");
  note_conflict(*this, in, lane, target, is_write, offset, offset + bytes);
  if (is_write) note_mbarrier_overwrite(*this, in, lane, target, offset, offset + bytes);
  return target.shared + offset;
}

uint8_t* Warp::access(const Instruction& in, int lane, uint64_t address, uint32_t bytes,
                      bool is_write) {
  const uint64_t window = address & kWindowMask;
  const bool is_window = (window & (window - 1)) == 0 && (address & ~kWindowMask) >> 56 == 0;
  if (window && is_window) {
    const uint64_t offset = address & ~kWindowMask;
    if (window == kSharedWindow && offset >> 32 == 0) {
      return access_shared(in, lane, static_cast<uint32_t>(offset), bytes, is_write);
    }
    check_alignment(*this, in, lane, offset, bytes, "the access");
    if (window == kParamWindow) return access_param(*this, in, lane, offset, bytes, is_write);
    if (window == kLocalWindow) return access_local(*this, in, lane, offset, bytes, is_write);
  }
  const char* what = is_write ? "the store writes" : "the load reads";
  const Allocation& found = check_global_range(*this, in, lane, address, bytes, is_write, what);
  if ((bytes & (bytes - 1)) == 0) check_alignment(*this, in, lane, address, bytes, "the access");
  if (found.is_stale) return reinterpret_cast<uint8_t*>(address);  // each access is a finding
  cached_begin = found.begin;
  cached_end = found.end;
  cached_is_read_only = found.is_read_only;
  return reinterpret_cast<uint8_t*>(address);
}

namespace {

// What the addresses of all lanes have in common; those outside the mask count as the first lane's.
template <class Address>
struct AddressRange {
  Address lowest;
  Address highest;
  Address bits;  // or of all: tells a misaligned lane
};

// Fills `at` and returns the range.
template <class Address>
inline AddressRange<Address> read_addresses(const Address* __restrict__ source, Address offset,
                                            uint32_t mask, Address* __restrict__ at) {
  for (int lane = 0; lane < kLanes; ++lane) at[lane] = source[lane] + offset;
  if (mask != kFullMask) {
    const Address first = at[first_lane(mask)];
    for (int lane = 0; lane < kLanes; ++lane) at[lane] = (mask >> lane & 1) ? at[lane] : first;
  }
  Address lowest = at[0], highest = at[0], bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    const Address address = at[lane];
    lowest = address < lowest ? address : lowest;
    highest = address > highest ? address : highest;
    bits |= address;
  }
  return {lowest, highest, bits};
}

struct alignas(64) LaneAddresses {
  uint64_t at[kLanes];
  AddressRange<uint64_t> range;
};

LaneAddresses read_wide_addresses(const Warp& warp, const LaneAccess& access) {
  LaneAddresses result;
  if (access.is_wide) {
    result.range = read_addresses<uint64_t>(warp.read64(access.slot),
                                            static_cast<uint64_t>(static_cast<int64_t>(access.offset)),
                                            access.mask, result.at);
    return result;
  }
  alignas(64) uint32_t narrow[kLanes];
  const auto range = read_addresses<uint32_t>(warp.read32(access.slot),
                                              static_cast<uint32_t>(access.offset), access.mask, narrow);
  for (int lane = 0; lane < kLanes; ++lane) result.at[lane] = narrow[lane];
  result.range = {range.lowest, range.highest, range.bits};
  return result;
}

void fill_others(uint32_t mask, LanePointers& pointers) {
  uint8_t* first = pointers.at[first_lane(mask)];
  for_lanes(~mask, [&](int lane) { pointers.at[lane] = first; });
}

void locate_one_by_one(Warp& warp, const Instruction& in, const LaneAccess& access,
                       const LaneAddresses& addresses, uint64_t window, LanePointers& pointers) {
  for (uint32_t rest = access.mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const uint64_t address = window ? (addresses.at[lane] & ~kWindowMask) | window : addresses.at[lane];
    pointers.at[lane] = warp.access(in, lane, address, access.bytes, access.is_write);
  }
  if (access.mask != kFullMask) fill_others(access.mask, pointers);
}

// Whether all lanes of a global access lie in one buffer that is cached, or is from now on.
bool is_in_cached_buffer(Warp& warp, const LaneAccess& access, const AddressRange<uint64_t>& range) {
  if ((range.bits & (access.bytes - 1)) != 0) return false;
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (range.lowest >= warp.cached_begin && range.highest < warp.cached_end &&
        warp.cached_end - range.highest >= access.bytes &&
        !(access.is_write && warp.cached_is_read_only)) {
      return true;
    }
    const Allocation* found = attempt == 0 ? warp.simulation->memory.find(range.lowest) : nullptr;
    if (!found || found->is_freed || found->is_stale) return false;
    warp.cached_begin = found->begin;
    warp.cached_end = found->end;
    warp.cached_is_read_only = found->is_read_only;
  }
  return false;
}

// Whether all lanes lie in the warp's own CTA, aligned, and meet nothing that must be reported.
bool is_plain_shared(const Warp& warp, const LaneAccess& access, const AddressRange<uint32_t>& range) {
  Cta& cta = *warp.cta;
  const uint32_t first = offset_of(range.lowest), last = offset_of(range.highest) + access.bytes;
  if (rank_of(range.lowest) != cta.rank || rank_of(range.highest) != cta.rank ||
      (range.bits & (access.bytes - 1)) != 0 || first < warp.simulation->config.reserved_shared_bytes ||
      last > cta.shared_bytes) {
    return false;
  }
  if (!cta.in_flight.empty() && cta.in_flight.find_conflict(false, access.is_write, first, last)) {
    return false;
  }
  return !(access.is_write && cta.mbarrier_in(first, last));
}

void locate_local(Warp& warp, const Instruction& in, const LaneAccess& access,
                  const LaneAddresses& addresses, LanePointers& pointers) {
  const uint64_t size = warp.program->local_bytes;
  const AddressRange<uint64_t>& range = addresses.range;
  const bool is_plain = (range.bits & (access.bytes - 1)) == 0 &&
                        (range.highest & ~kWindowMask) + access.bytes <= size &&
                        range.lowest >> 56 == range.highest >> 56;
  if (!is_plain) return locate_one_by_one(warp, in, access, addresses, kLocalWindow, pointers);
  for (int lane = 0; lane < kLanes; ++lane) {
    pointers.at[lane] = warp.local + static_cast<uint64_t>(lane) * size +
                        (addresses.at[lane] & ~kWindowMask);
  }
}

// One lane's pointer for all: parameters, and anything else that the lanes read together.
void locate_once(Warp& warp, const Instruction& in, const LaneAccess& access, uint64_t address,
                 LanePointers& pointers) {
  uint8_t* pointer =
      warp.access(in, first_lane(access.mask), address, access.bytes, access.is_write);
  std::fill(pointers.at, pointers.at + kLanes, pointer);
}

void locate_slowly(Warp& warp, const Instruction& in, Space space, const LaneAccess& access,
                   LanePointers& pointers) {
  const LaneAddresses addresses = read_wide_addresses(warp, access);
  const uint64_t lowest = addresses.range.lowest, highest = addresses.range.highest;
  const bool is_local = space == Space::kLocal || (lowest & kWindowMask) == kLocalWindow;
  if (is_local && (space == Space::kLocal || space == Space::kParam || space == Space::kGeneric) &&
      (space == Space::kLocal || (highest & kWindowMask) == kLocalWindow)) {
    return locate_local(warp, in, access, addresses, pointers);
  }
  uint64_t window = 0;
  if (space == Space::kShared) window = kSharedWindow;
  if (space == Space::kParam) window = kParamWindow;
  if (window == 0 && space != Space::kGeneric) {
    const uint32_t strays = lanes_where(
        access.mask, [&](int at) { return (addresses.at[at] & kWindowMask) != 0; });
    if (strays) {
      const int lane = first_lane(strays);
      fault_outside(warp, in, lane, addresses.at[lane], access.bytes,
                    access.is_write ? "the store writes" : "the load reads");
    }
  }
  if (lowest == highest) {
    const uint64_t address = window ? (lowest & ~kWindowMask) | window : lowest;
    return locate_once(warp, in, access, address, pointers);
  }
  locate_one_by_one(warp, in, access, addresses, window, pointers);
}

}  // namespace

void locate_lanes(Warp& warp, const Instruction& in, Space space, const LaneAccess& access,
                  LanePointers& pointers) {
  auto* at = reinterpret_cast<uint64_t*>(pointers.at);
  if (space == Space::kShared && !access.is_wide) {
    alignas(64) uint32_t narrow[kLanes];
    const auto range = read_addresses<uint32_t>(
        warp.read32(access.slot), static_cast<uint32_t>(access.offset), access.mask, narrow);
    if (is_plain_shared(warp, access, range)) {
      const auto start = reinterpret_cast<uint64_t>(warp.cta->shared);
      for (int lane = 0; lane < kLanes; ++lane) at[lane] = start + (narrow[lane] & kSharedOffsetMask);
      return;
    }
  } else if (access.is_wide && (space == Space::kGlobal || space == Space::kGeneric)) {
    const auto range = read_addresses<uint64_t>(
        warp.read64(access.slot), static_cast<uint64_t>(static_cast<int64_t>(access.offset)),
        access.mask, at);
    if (((range.lowest | range.highest) & kWindowMask) == 0) {
      if (is_in_cached_buffer(warp, access, range)) return;
    } else if (range.lowest >> 32 == kSharedWindow >> 32 && range.highest >> 32 == kSharedWindow >> 32) {
      const AddressRange<uint32_t> narrow{static_cast<uint32_t>(range.lowest),
                                          static_cast<uint32_t>(range.highest),
                                          static_cast<uint32_t>(range.bits)};
      if (space == Space::kGeneric && is_plain_shared(warp, access, narrow)) {
        const auto start = reinterpret_cast<uint64_t>(warp.cta->shared);
        for (int lane = 0; lane < kLanes; ++lane) at[lane] = start + (at[lane] & kSharedOffsetMask);
        return;
      }
    }
  }
  locate_slowly(warp, in, space, access, pointers);
}

}  // namespace halfbyte::gpu
