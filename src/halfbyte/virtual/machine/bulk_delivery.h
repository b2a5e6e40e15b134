// What bulk and tensor copies have in common: bytes that land in the shared memory of one or more
// CTAs and count on their mbarriers, and reads of shared memory that commit groups wait for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "machine/copy_groups.h"
#include "machine/simulation.h"

namespace halfbyte::gpu {

// Where a copy goes, as its operands say.
struct DeliveryOperands {
  uint32_t destination;      // 32-bit shared address
  uint32_t barrier;          // 32-bit shared address
  uint32_t bytes;            // of shared memory
  uint32_t counted_bytes;    // on the mbarrier
  bool is_multicast = false;
  uint32_t cta_mask = 0;     // destinations of a multicast
  bool pairs = false;        // .cta_group::2: the mbarrier may lie in the other CTA of the pair
  bool is_own_cta = false;   // .shared::cta: the destination lies in the executing CTA
};

// An incoming copy of several CTAs in flight.
struct Delivery {
  struct Target {
    Cta* cta;
    Cta* barrier_cta;
  };
  std::vector<Target> targets;
  uint32_t offset = 0;
  uint32_t barrier_offset = 0;
  uint32_t counted_bytes = 0;
  uint64_t token = 0;
  Place place;
};

// Checks the destinations and registers their ranges as being written. Faults for destinations
// outside the cluster or shared memory and for mbarriers in the wrong CTA.
Delivery begin_delivery(Warp& warp, const Instruction& in, int lane, const DeliveryOperands& operands);
// The bytes are there: ends the ranges and completes the transactions.
void finish_delivery(const Delivery& delivery);

// Starts an operation of the bulk groups of `lanes` that reads [offset, offset + bytes) of the warp's
// own CTA: `copy` runs when the read happens, the groups complete later.
void begin_bulk_read(Warp& warp, const Instruction& in, uint32_t lanes, uint32_t offset,
                     uint32_t bytes, std::function<void(const uint8_t* shared)> copy);

// Cycles until the bytes of a copy have landed.
double bulk_latency(const Simulation& simulation, uint64_t bytes);

// The 16-bit shared operands of an instruction: offset of a 32-bit address in its own CTA; faults for
// another CTA's.
uint32_t own_shared_offset(Warp& warp, const Instruction& in, int lane, uint32_t address,
                           const char* what);

}  // namespace halfbyte::gpu
