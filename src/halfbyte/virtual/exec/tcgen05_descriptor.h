// The instruction descriptor of tcgen05.mma: shapes, formats and modes of one product.
//
// PTX ISA, "Instruction descriptor" and "Matrix shape" (kinds, M, N, K); CUTLASS
// cute/arch/mma_sm100_desc.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "machine/number_tables.h"

namespace halfbyte::gpu {

// As ptx/forms/tcgen05_mma.py numbers them.
enum class MmaKind : int64_t { kF16 = 0, kTf32 = 1, kF8f6f4 = 2, kI8 = 3, kMxf8f6f4 = 4, kMxf4 = 5, kMxf4nvf4 = 6 };

enum class Accumulator : uint8_t { kF16 = 0, kF32 = 1, kS32 = 2 };

// What the instruction's text says.
struct MmaVariant {
  MmaKind kind;
  uint32_t cta_group;
  uint32_t block;      // elements along K per scale factor; 0: not block scaled
  bool is_stationary;  // .ws
  bool shifts_left;    // .ashift
  bool left_in_tensor_memory;
};

struct MmaShape {
  uint32_t rows = 0;     // M
  uint32_t columns = 0;  // N
  uint32_t depth = 0;    // K
  ElementFormat left = ElementFormat::kF16;
  ElementFormat right = ElementFormat::kF16;
  Accumulator accumulator = Accumulator::kF32;
  bool negates_left = false;
  bool negates_right = false;
  bool left_is_mn_major = false;
  bool right_is_mn_major = false;
  bool saturates = false;
  ScaleFormat scale_format = ScaleFormat::kUe4m3;
  uint32_t scales = 0;  // factors per row along K
  uint32_t left_scale_byte = 0;
  uint32_t right_scale_byte = 0;
};

bool is_block_scaled(MmaKind kind);
// Multiply-adds per cycle and SM (uncalibrated).
double mma_rate(MmaKind kind);

// Fills `shape`; returns an empty text, or what is illegal, naming the field.
std::string decode_instruction_descriptor(uint32_t bits, const MmaVariant& variant, MmaShape& shape);

}  // namespace halfbyte::gpu
