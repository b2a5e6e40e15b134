// A lowered kernel, ready to run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine/instruction.h"

namespace halfbyte::gpu {

struct Program {
  std::vector<Instruction> instructions;
  std::vector<int32_t> operands;
  std::vector<int64_t> attributes;
  std::vector<uint32_t> constant_storage;  // every constant broadcast to 32 lanes
  std::vector<int32_t> constant_slots;     // constant index -> slot in the storage
  const uint32_t* constants = nullptr;
  uint32_t register_slots = 0;
  uint32_t num_predicates = 0;
  uint32_t static_shared_end = 0;  // offset of dynamic shared memory
  uint32_t local_bytes = 0;        // per thread
};

// One row of the table that Python fills, in this order; see lowering/program.py.
struct InstructionRecord {
  int32_t handler;  // position in the list of handler names that Python passed
  int32_t guard;
  int32_t first_operand;
  int32_t num_operands;
  int32_t first_attribute;
  int32_t num_attributes;
  int32_t convergence;
  int32_t membermask;
};

Handler find_handler(const std::string& name);  // nullptr when unknown
std::vector<std::string> list_handlers();

}  // namespace halfbyte::gpu
