// ldmatrix, stmatrix, movmatrix: 8x8 matrices of 16 bits, and the shapes of 8 and fewer bits.
//
// PTX ISA, "ldmatrix", "stmatrix", "movmatrix". Lane i gives the address of row i (of matrix i / 8, or
// i / 16 for the shapes of 16 rows). A register holds two 16-bit or four 8-bit elements of a row.
#include <cstring>

#include "machine/access.h"
#include "machine/number_tables.h"
#include "machine/warp.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kRowBytes = 16;

// ldmatrix and stmatrix: attributes are space, registers per thread, transposed or not, and for the
// 8-bit shapes the rows of one matrix and the bits of an element in memory.
struct Shape {
  Space space;
  uint32_t registers;
  bool is_transposed;
  uint32_t rows;  // of one matrix
  uint32_t bits;  // of one element in memory
};

Shape read_shape(const Instruction& in) {
  return {static_cast<Space>(in.attributes[0]), static_cast<uint32_t>(in.attributes[1]),
          in.attributes[2] != 0, static_cast<uint32_t>(in.attributes[3]),
          static_cast<uint32_t>(in.attributes[4])};
}

// Pointers of the rows that the instruction touches: those of the first `rows` lanes.
void locate_rows(Warp& warp, const Instruction& in, const int32_t* address, Space space, uint32_t rows,
                 bool is_write, LanePointers& pointers) {
  const uint32_t lanes = rows >= kLanes ? kFullMask : (1u << rows) - 1;
  const bool is_wide = space == Space::kGeneric;
  locate_lanes(warp, in, space, {lanes, kRowBytes, is_write, address[0], address[1], is_wide}, pointers);
}

void check_whole_warp(Warp& warp, const Instruction& in, uint32_t mask) {
  if (mask != kFullMask) {
    raise_fault(warp, in, first_lane(mask), "partial-warp",
                format_text("lanes 0x%08x execute a matrix instruction that needs all 32", mask));
  }
}

// Element (row, column) of an 8x8 matrix of 16 bits is half column % 2 of lane 4 * row + column / 2.
void transpose_halves(const uint16_t* source, uint16_t* target) {
  for (int row = 0; row < 8; ++row) {
    for (int column = 0; column < 8; ++column) target[8 * column + row] = source[8 * row + column];
  }
}

Outcome ldmatrix_b16(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  LanePointers rows;
  locate_rows(warp, in, in.operands + shape.registers, shape.space, 8 * shape.registers, false, rows);
  uint16_t matrix[4][64], turned[64];
  for (uint32_t m = 0; m < shape.registers; ++m) {
    for (uint32_t row = 0; row < 8; ++row) std::memcpy(matrix[m] + 8 * row, rows.at[8 * m + row], kRowBytes);
  }
  for (uint32_t m = 0; m < shape.registers; ++m) {
    const uint16_t* result = matrix[m];
    if (shape.is_transposed) {
      transpose_halves(matrix[m], turned);
      result = turned;
    }
    std::memcpy(warp.write32(in.operands[m]), result, sizeof turned);
  }
  return Outcome::kNext;
}

Outcome stmatrix_b16(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  LanePointers rows;
  locate_rows(warp, in, in.operands, shape.space, 8 * shape.registers, true, rows);
  for (uint32_t m = 0; m < shape.registers; ++m) {
    uint16_t matrix[64], turned[64];
    std::memcpy(matrix, warp.read32(in.operands[2 + m]), sizeof matrix);
    if (shape.is_transposed) transpose_halves(matrix, turned);
    const uint16_t* source = shape.is_transposed ? turned : matrix;
    for (uint32_t row = 0; row < 8; ++row) std::memcpy(rows.at[8 * m + row], source + 8 * row, kRowBytes);
  }
  return Outcome::kNext;
}

// One row in memory as 16 bytes, sub-byte elements spread to one per byte.
void read_row(const uint8_t* source, uint32_t bits, uint8_t* row) {
  if (bits == 8) {
    std::memcpy(row, source, kRowBytes);
  } else {
    unpack_sixteen(bits, source, row);
  }
}

// m8n16: register m holds columns 4 * (lane % 4) to +3 of row lane / 4 of matrix m.
// m16n16.trans: registers 2m and 2m + 1 hold the same columns of rows lane / 4 and lane / 4 + 8 of the
// transposed matrix m.
Outcome ldmatrix_b8(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  const uint32_t registers_per_matrix = shape.rows / 8;
  const uint32_t matrices = shape.registers / registers_per_matrix;
  LanePointers rows;
  locate_rows(warp, in, in.operands + shape.registers, shape.space, shape.rows * matrices, false, rows);
  uint8_t results[4][kLanes][4];
  for (uint32_t m = 0; m < matrices; ++m) {
    uint8_t matrix[16][16] = {};
    for (uint32_t row = 0; row < shape.rows; ++row) {
      read_row(rows.at[shape.rows * m + row], shape.bits, matrix[row]);
    }
    for (uint32_t r = 0; r < registers_per_matrix; ++r) {
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        for (uint32_t i = 0; i < 4; ++i) {
          const uint32_t row = lane / 4 + 8 * r;
          const uint32_t column = 4 * (lane % 4) + i;
          results[registers_per_matrix * m + r][lane][i] =
              shape.is_transposed ? matrix[column][row] : matrix[row][column];
        }
      }
    }
  }
  for (uint32_t r = 0; r < shape.registers; ++r) {
    std::memcpy(warp.write32(in.operands[r]), results[r], sizeof results[r]);
  }
  return Outcome::kNext;
}

// m16n8.trans: bytes 0 and 1 of lane l are row l / 4 of columns 2 * (l % 4) and the next, bytes 2 and 3
// the same of row l / 4 + 8 (CUTLASS, SM100_U8x4_STSM_T). Memory gets one column per row of 16 bytes.
Outcome stmatrix_b8(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  const Shape shape = read_shape(in);
  LanePointers rows;
  locate_rows(warp, in, in.operands, shape.space, 8 * shape.registers, true, rows);
  for (uint32_t m = 0; m < shape.registers; ++m) {
    const auto* source = reinterpret_cast<const uint8_t*>(warp.read32(in.operands[2 + m]));
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      uint8_t* column = rows.at[8 * m + 2 * (lane % 4)];
      uint8_t* next_column = rows.at[8 * m + 2 * (lane % 4) + 1];
      for (uint32_t half = 0; half < 2; ++half) {
        column[lane / 4 + 8 * half] = source[4 * lane + 2 * half];
        next_column[lane / 4 + 8 * half] = source[4 * lane + 2 * half + 1];
      }
    }
  }
  return Outcome::kNext;
}

Outcome movmatrix_b16(Warp& warp, const Instruction& in, uint32_t mask) {
  check_whole_warp(warp, in, mask);
  uint16_t matrix[64], turned[64];
  std::memcpy(matrix, warp.read32(in.operands[1]), sizeof matrix);
  transpose_halves(matrix, turned);
  std::memcpy(warp.write32(in.operands[0]), turned, sizeof turned);
  return Outcome::kNext;
}

HALFBYTE_HANDLER("ldmatrix.b16", ldmatrix_b16);
HALFBYTE_HANDLER("ldmatrix.b8", ldmatrix_b8);
HALFBYTE_HANDLER("stmatrix.b16", stmatrix_b16);
HALFBYTE_HANDLER("stmatrix.b8", stmatrix_b8);
HALFBYTE_HANDLER("movmatrix.b16", movmatrix_b16);

}  // namespace
}  // namespace halfbyte::gpu
