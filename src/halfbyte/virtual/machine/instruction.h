// One lowered instruction and how its handler is found.
#pragma once

#include <cstdint>
#include <climits>

namespace halfbyte::gpu {

struct Warp;
struct Instruction;

enum class Outcome : uint8_t {
  kNext,     // go on with the following instruction
  kJumped,   // the handler moved or ended the fragment itself (branch, exit)
  kRetry,    // the fragment waits (Warp::wait_on was called); woken, it runs this instruction again
  kAdvance,  // the fragment waits; woken, it goes on with the following instruction
  kYield,    // go on with the following instruction, but let other warps run first
};

using Handler = Outcome (*)(Warp& warp, const Instruction& in, uint32_t mask);

enum class Convergence : uint8_t { kNone = 0, kAligned = 1, kMembermask = 2 };

constexpr int32_t kAbsent = INT32_MIN;  // an optional operand that the text leaves out
constexpr int32_t kAlwaysTrue = 0;      // predicate 0 reads as true; predicate 1 is a write sink

struct Instruction {
  Handler handler;
  const int32_t* operands;    // lowered operand list, in textual order (see lowering/operands.py)
  const int64_t* attributes;  // the form's integers
  int32_t index;              // position in the program; Python knows its text and line
  int32_t guard;              // predicate operand (~p when negated); kAlwaysTrue when unguarded
  int32_t membermask;         // operand slot that holds the membermask (Convergence::kMembermask)
  uint16_t num_operands;
  uint16_t num_attributes;
  Convergence convergence;
};

// Handlers register themselves by name before main; a program's load resolves names to pointers.
struct HandlerRegistration {
  HandlerRegistration(const char* name, Handler handler);
};

#define HALFBYTE_JOIN_(a, b) a##b
#define HALFBYTE_JOIN(a, b) HALFBYTE_JOIN_(a, b)
#define HALFBYTE_HANDLER(name, function) \
  static const ::halfbyte::gpu::HandlerRegistration HALFBYTE_JOIN(registration_, __COUNTER__)(name, function)

}  // namespace halfbyte::gpu
