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

// E2M1 numbers; a value rounds to the nearest, ties to the even code. Midpoints are exact.
constexpr float kNumbers[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

inline int encode_e2m1(float value) {
  const float size = std::fabs(value);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                   (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return code | (std::signbit(value) ? 8 : 0);
}

inline float number_e2m1(int code) { return code & 8 ? -kNumbers[code & 7] : kNumbers[code & 7]; }

// Nearest integer, ties to even, for |value| < 2^22.
inline float round_to_integer(float value) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: its unit in the last place is 1
  return (value + shifter) - shifter;
}

inline float clamp(float value, float low, float high) {
  return std::min(std::max(value, low), high);
}

struct Rounded {
  uint8_t code;
  float number;
};

inline Rounded round_value(int32_t element, float value) {
  if (element == kE2M1) {
    const int code = encode_e2m1(value);
    return {(uint8_t)code, number_e2m1(code)};
  }
  const float low = element == kInt4 ? -8.0f : 0.0f;
  const float high = element == kInt4 ? 7.0f : 15.0f;
  const float number = round_to_integer(clamp(value, low, high));
  return {(uint8_t)((int)number & 15), number};
}

void round_tile(const GptqJob& job, int64_t first, int rows) {
  const int columns = (int)job.columns;
  float tile[kMaxGptqColumns][kRows] = {};  // transposed: one column is one vector
  for (int r = 0; r < rows; ++r) {
    const float* row = job.weights + (first + r) * job.row_stride;
    for (int c = 0; c < columns; ++c) tile[c][r] = row[c];
  }
  for (int c = 0; c < columns; ++c) {
    float carried[kRows] = {};
    const float pivot = job.factor[(int64_t)c * columns + c];
    for (int r = 0; r < rows; ++r) {
      const int64_t at = (first + r) * columns + c;
      const float divisor = job.divisors[at];
      const Rounded rounded = divisor == 0.0f ? Rounded{0, 0.0f}
                                              : round_value(job.element, tile[c][r] / divisor);
      carried[r] = (tile[c][r] - rounded.number * divisor) / pivot;
      job.codes[at] = rounded.code;
      job.errors[at] = carried[r];
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
