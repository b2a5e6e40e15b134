// mov.sreg: the special registers. Attribute 0 counts SPECIAL_REGISTERS of ptx/special_registers.py;
// the enumeration here keeps its order.
#include "exec/elementwise.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {
namespace {

enum Special : int64_t {
  kTid = 0, kNtid = 4, kCtaid = 8, kNctaid = 12,  // x y z w each
  kClusterid = 16, kNclusterid = 20, kClusterCtaid = 24, kClusterNctaid = 28,
  kLaneid = 32, kWarpid, kNwarpid, kSmid, kNsmid, kClusterCtarank, kClusterNctarank,
  kClock, kClockHi, kLanemaskEq, kLanemaskLe, kLanemaskLt, kLanemaskGe, kLanemaskGt,
  kGlobaltimerLo, kGlobaltimerHi, kTotalSmemSize, kAggrSmemSize, kDynamicSmemSize,
  kReservedSmemBegin, kReservedSmemEnd, kReservedSmemCap,
  kGridid, kClock64, kGlobaltimer, kCurrentGraphExec, kIsExplicitCluster,
  kPm, kPm64 = kPm + 8, kEnvreg = kPm64 + 8, kReservedSmemOffset = kEnvreg + 32,
};

uint32_t find_sm(const Warp& warp) {
  const LaunchConfig& config = warp.simulation->config;
  const uint32_t* id = warp.cta->id;
  const uint64_t position = id[0] + static_cast<uint64_t>(config.grid[0]) * (id[1] + static_cast<uint64_t>(config.grid[1]) * id[2]);
  return static_cast<uint32_t>(position % (config.num_sms ? config.num_sms : 1));
}

uint32_t read_vector(const Warp& warp, int64_t which, uint32_t axis) {
  const LaunchConfig& config = warp.simulation->config;
  if (axis == 3) return 0;  // .w is always zero
  const uint32_t size = config.cluster[axis] ? config.cluster[axis] : 1;
  switch (which) {
    case kNtid: return config.block[axis];
    case kCtaid: return warp.cta->id[axis];
    case kNctaid: return config.grid[axis];
    case kClusterid: return warp.cta->cluster->id[axis];
    case kNclusterid: return config.grid[axis] / size;
    case kClusterCtaid: return warp.cta->id[axis] % size;
    default: return size;
  }
}

uint64_t read_uniform(const Warp& warp, int64_t which) {
  const LaunchConfig& config = warp.simulation->config;
  const uint64_t clock = static_cast<uint64_t>(warp.time);
  const uint64_t nanoseconds = static_cast<uint64_t>(warp.time / config.clock_hz * 1e9);
  const uint32_t shared = warp.program->static_shared_end + config.dynamic_shared_bytes;
  switch (which) {
    case kWarpid: return warp.index;
    case kNwarpid: return config.max_warps_per_sm;
    case kSmid: return find_sm(warp);
    case kNsmid: return config.num_sms;
    case kClusterCtarank: return warp.cta->rank;
    case kClusterNctarank: return warp.cta->cluster->ctas.size();
    case kClock: return static_cast<uint32_t>(clock);
    case kClockHi: return clock >> 32;
    case kClock64: return clock;
    case kGlobaltimerLo: return static_cast<uint32_t>(nanoseconds);
    case kGlobaltimerHi: return nanoseconds >> 32;
    case kGlobaltimer: return nanoseconds;
    case kTotalSmemSize: return shared - config.reserved_shared_bytes;
    case kAggrSmemSize: return shared;
    case kDynamicSmemSize: return config.dynamic_shared_bytes;
    case kReservedSmemEnd:
    case kReservedSmemCap: return config.reserved_shared_bytes;
    case kGridid: return 1;
    default: return 0;  // performance monitors, environment, reserved offsets: nothing there
  }
}

uint32_t read_lane(const Warp& warp, int64_t which, int lane) {
  const uint32_t own = 1u << lane;
  switch (which) {
    case kTid: case kTid + 1: case kTid + 2: return warp.tid[which - kTid][lane];
    case kLaneid: return static_cast<uint32_t>(lane);
    case kLanemaskEq: return own;
    case kLanemaskLe: return own | (own - 1);
    case kLanemaskLt: return own - 1;
    case kLanemaskGe: return ~(own - 1);
    default: return ~(own | (own - 1));
  }
}

bool is_per_lane(int64_t which) {
  return which < kTid + 3 || which == kLaneid || (which >= kLanemaskEq && which <= kLanemaskGt);
}
bool is_wide(int64_t which) {
  return (which >= kGridid && which <= kCurrentGraphExec) || (which >= kPm64 && which < kEnvreg);
}

Outcome mov_sreg(Warp& warp, const Instruction& in, uint32_t mask) {
  const int64_t which = in.attributes[0];
  if (which == kIsExplicitCluster) {
    const uint32_t* cluster = warp.simulation->config.cluster;
    const bool is_cluster = static_cast<uint64_t>(cluster[0]) * cluster[1] * cluster[2] > 1;
    warp.set_predicate(in.operands[0], is_cluster ? kFullMask : 0, mask);
  } else if (is_per_lane(which)) {
    uint32_t* to = warp.write32(in.operands[0]);
    for_lanes(mask, [&](int lane) { to[lane] = read_lane(warp, which, lane); });
  } else if (is_wide(which)) {
    const uint64_t value = read_uniform(warp, which);
    uint64_t* to = warp.write64(in.operands[0]);
    for_lanes(mask, [&](int lane) { to[lane] = value; });
  } else {
    const bool is_vector = which < kLaneid;
    const uint32_t value = is_vector ? read_vector(warp, which & ~3, static_cast<uint32_t>(which & 3))
                                     : static_cast<uint32_t>(read_uniform(warp, which));
    uint32_t* to = warp.write32(in.operands[0]);
    for_lanes(mask, [&](int lane) { to[lane] = value; });
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("mov.sreg", mov_sreg);

}  // namespace
}  // namespace halfbyte::gpu
