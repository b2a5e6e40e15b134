// The host's floating-point rounding mode, for a while.
#pragma once

#include <cfenv>

#include "machine/warp.h"

namespace halfbyte::gpu {

class RoundingScope {
 public:
  explicit RoundingScope(int mode) : previous_(std::fegetround()) { std::fesetround(mode); }
  ~RoundingScope() { std::fesetround(previous_); }
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  int previous_;
};

// Runs a handler with a directed rounding mode. Operands and results live in the register file,
// which the calls around the handler might touch for all the compiler knows: no arithmetic moves
// out of the scope.
template <Handler handler, int mode>
__attribute__((noinline)) Outcome with_rounding(Warp& warp, const Instruction& in, uint32_t mask) {
  RoundingScope scope(mode);
  return handler(warp, in, mask);
}

}  // namespace halfbyte::gpu
