// The inner loop of GPTQ: rounds the columns of one block in order, carrying each error into the
// columns behind it. Baseline instructions: the compiler vectorizes over the rows of a tile.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "abi.h"
#include "dispatch.h"

namespace halfbyte {
namespace {

constexpr int kRows = 16;  // rows of a tile; a block of 128 columns is 8 KiB

// One column of a tile: sixteen values, their numbers and their codes.
struct Column {
  float value[kRows];
  float number[kRows];
  uint8_t code[kRows];
};

// Adding and taking off 1.5 * 2^(22 + k) rounds to multiples of 2^(k - 1), ties to even.
inline float round_to_step(float value, float shifter) { return (value + shifter) - shifter; }

// Steps of E2M1: 1/2 below 2, 1 below 4, 2 up to 6. Ties go to the even code.
void round_e2m1(Column& column) {
  for (int r = 0; r < kRows; ++r) {
    const float value = column.value[r];
    const float size = std::min(std::fabs(value), 6.0f);
    const float shifter = size < 2.0f ? 6291456.0f : size < 4.0f ? 12582912.0f : 25165824.0f;
    const float number = round_to_step(size, shifter);
    const int halves = (int)(number * 2.0f);  // 0 1 2 3 4 6 8 12
    const int code = halves < 4 ? halves : halves < 8 ? 2 + halves / 2 : 4 + halves / 4;
    column.number[r] = std::copysign(number, value);
    column.code[r] = (uint8_t)(code | (std::signbit(value) ? 8 : 0));
  }
}

void round_integer(Column& column, float low, float high) {
  for (int r = 0; r < kRows; ++r) {
    const float value = std::min(std::max(column.value[r], low), high);
    column.number[r] = round_to_step(value, 12582912.0f);
    column.code[r] = (uint8_t)((int)column.number[r] & 15);
  }
}

void round_column(int32_t element, Column& column) {
  if (element == kE2M1) return round_e2m1(column);
  if (element == kInt4) return round_integer(column, -8.0f, 7.0f);
  round_integer(column, 0.0f, 15.0f);
}

void round_tile(const GptqJob& job, int64_t first, int rows) {
  const int columns = (int)job.columns;
  float tile[kMaxGptqColumns][kRows] = {};  // transposed: one column is one vector
  for (int r = 0; r < rows; ++r) {
    const float* row = job.weights + (first + r) * job.row_stride;
    for (int c = 0; c < columns; ++c) tile[c][r] = row[c];
  }
  for (int c = 0; c < columns; ++c) {
    const float pivot = job.factor[(int64_t)c * columns + c];
    Column column = {};
    float divisor[kRows] = {};
    for (int r = 0; r < rows; ++r) {
      divisor[r] = job.divisors[(first + r) * columns + c];
      // a block whose scale is zero holds zeros; its codes carry no sign either
      column.value[r] = divisor[r] == 0.0f ? 0.0f : tile[c][r] / divisor[r];
    }
    round_column(job.element, column);
    float carried[kRows];
    for (int r = 0; r < kRows; ++r) carried[r] = (tile[c][r] - column.number[r] * divisor[r]) / pivot;
    for (int r = 0; r < rows; ++r) {
      job.codes[(first + r) * columns + c] = column.code[r];
      job.errors[(first + r) * columns + c] = carried[r];
    }
    const float* factor = job.factor + (int64_t)c * columns;
    for (int behind = c + 1; behind < columns; ++behind) {
      const float weight = factor[behind];
      for (int r = 0; r < kRows; ++r) tile[behind][r] -= carried[r] * weight;
    }
  }
}

void gptq_task(void* context, int64_t index, int) {
  const auto& job = *static_cast<const GptqJob*>(context);
  const int64_t first = index * kRows;
  round_tile(job, first, (int)std::min<int64_t>(kRows, job.rows - first));
}

}  // namespace

void run_gptq(const GptqJob& job) {
  run_tasks((job.rows + kRows - 1) / kRows, job.threads, gptq_task, const_cast<GptqJob*>(&job));
}

}  // namespace halfbyte
