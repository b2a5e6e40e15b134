// The plain C interface of the library: records that Python fills through ctypes, and the table
// of kernels that each instruction-set unit provides. No unit with special flags may use std
// templates: the linker could keep their copy for every CPU.
#pragma once
#include <cstdint>

#define HALFBYTE_ABI_VERSION 1

namespace halfbyte {

enum ValueType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum ScaleRule : int32_t { kE4M3Scale = 0, kE8M0Scale = 1, kFloatScale = 2 };
enum Element : int32_t { kE2M1 = 0, kInt4 = 1, kUint4 = 2 };
// E4M3 scales from a block's amax a: (a / 6) / g, a / (6 * g), (a / 6) * h.
enum ScaleOrder : int32_t { kDivideTwice = 0, kScaleDivideProduct = 1, kMultiplyDivisor = 2 };
// E2M1 payloads under the stored scale s: x / (s * g), x * ((1 / g) / s), x / (s / h), x / (a / 6).
enum PayloadOrder : int32_t {
  kDivideProduct = 0,
  kReciprocal = 1,
  kDivideQuotient = 2,
  kUnrounded = 3,
};
enum Counter { kSaturated = 0, kFlushed = 1, kZero = 2, kNonfinite = 3, kNumCounters = 4 };

// Quantizes `rows` rows of `columns` values to 4-bit codes and one scale per block. Bytes of
// codes and scales are row-major and dense; the padding of the last block is zero.
struct QuantizeJob {
  int64_t struct_bytes;
  const void* x;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;  // elements
  const float* smooth;  // [columns] or null: x is (x + shift) / smooth before anything else
  float shift;
  float multiplier;  // global scale g; 1 where the format has none
  float divisor;     // global scale as its reciprocal h
  float min_scale;   // E4M3 block scales are clamped to this from below; 0 for no floor
  int32_t value_type;  // ValueType of x
  int32_t has_shift;
  int32_t element;     // Element
  int32_t scale_rule;  // ScaleRule
  int32_t scale_type;  // ValueType of float scales
  int32_t block_size;
  int32_t scale_order;    // ScaleOrder
  int32_t payload_order;  // PayloadOrder
  int32_t zero_scale;     // E4M3 byte of a block of zeros
  int32_t flushed_scale;  // E4M3 byte where the scale of a nonzero block rounds to zero
  int32_t keeps_minus_zero;
  int32_t e8m0_rounding;  // 0 floor, 1 ceil, 2 even, 3 rceil
  int32_t search;      // 1: error-optimal block scales
  int32_t threads;
  uint8_t* codes;
  void* scales;
  int64_t* counts;  // [kNumCounters], set
};

// Largest finite magnitude of `rows` rows, and whether any value was not finite.
struct AmaxJob {
  int64_t struct_bytes;
  const void* x;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;
  const float* smooth;
  float shift;
  int32_t value_type;
  int32_t has_shift;
  int32_t threads;
  float amax;          // out
  int32_t nonfinite;   // out
};

// out[m, n] = (sum_k a[m, k] * w[n, k]) * alpha * channel_scale[n] + bias[n]
//             + sum_r lora_act[m, r] * lora_up[n, r], from packed 4-bit codes and block scales.
struct LinearJob {
  int64_t struct_bytes;
  const uint8_t* a_codes;  // [rows, depth / 2]
  const void* a_scales;    // [rows, depth / block_size]
  const uint8_t* w_codes;  // [outputs, depth / 2]
  const void* w_scales;    // [outputs, depth / block_size]
  int64_t rows;
  int64_t outputs;
  int64_t depth;  // K, padded to whole blocks
  int64_t rank;
  const float* channel_scale;  // [outputs] or null
  const void* bias;            // [outputs] or null
  const float* lora_act;       // [rows, rank]
  const void* lora_up;         // [outputs, rank]
  void* out;                   // [rows, outputs]
  int64_t out_stride;          // elements
  float alpha;                 // product of the global scales
  int32_t a_element;
  int32_t w_element;
  int32_t scale_rule;    // ScaleRule of both operands
  int32_t a_scale_type;  // ValueType of float scales
  int32_t w_scale_type;
  int32_t block_size;
  int32_t bias_type;
  int32_t lora_type;
  int32_t out_type;
  int32_t threads;
};

// values[i, k] = element * (block scale * multiplier) of packed rows, float32.
struct DequantizeJob {
  int64_t struct_bytes;
  const uint8_t* codes;
  const void* scales;
  int64_t rows;
  int64_t columns;  // logical; the padding is not written
  float* values;
  int64_t row_stride;  // elements
  float multiplier;
  int32_t element;
  int32_t scale_rule;
  int32_t scale_type;
  int32_t block_size;
  int32_t threads;
};

// One block of GPTQ: rounds columns 0, 1, ... of `weights`; the error of column c, divided by
// factor[c][c], is carried into the columns behind it with weights factor[c][.].
constexpr int kMaxGptqColumns = 128;
struct GptqJob {
  int64_t struct_bytes;
  const float* weights;  // [rows, columns]
  int64_t rows;
  int64_t columns;       // at most kMaxGptqColumns
  int64_t row_stride;    // elements
  const float* factor;   // [columns, columns], upper triangular
  const float* divisors; // [rows, columns] scale of each element; where 0 the code is 0
  uint8_t* codes;        // [rows, columns], one a byte
  float* errors;         // [rows, columns]
  int32_t element;
  int32_t threads;
};

// out[m, n] = sum_k x[m, k] * w[n, k] in float32, w decoded row by row from packed codes: for few
// rows of x, where reading the weights is the work.
struct ProductJob {
  DequantizeJob weight;  // rows = outputs; values, row_stride unused
  const float* x;        // [x_rows, columns], dense
  int64_t x_rows;
  float* out;  // [x_rows, outputs], dense
};

// out[m, r] = sum_k x[m, k] * down[r, k] in float32: the low-rank projection of raw activations.
struct ProjectJob {
  int64_t struct_bytes;
  const void* x;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;  // elements
  const void* down;    // [rank, columns], dense
  int64_t rank;
  float* out;          // [rows, rank], dense
  int32_t value_type;  // ValueType of x
  int32_t down_type;
  int32_t threads;
};

// Activations of a chunk of rows, decoded to int8, by tiles of kTileRows rows:
// codes [tiles][blocks][kTileRows][block_size], starts and scales [tiles][blocks][kTileRows].
constexpr int kTileRows = 8;
struct Activations {
  int8_t* codes;
  int32_t* starts;  // first value of a block's sum: what the offset of unsigned weights adds, negated
  float* scales;
  int64_t first_row;
  int64_t rows;
};

// Weights of kPanelColumns outputs, decoded: codes [depth / 4][16][4] unsigned, the rest [.][16].
constexpr int kPanelColumns = 16;
struct Panel {
  uint8_t* codes;
  float* scales;
  float* lora_up;  // [rank][16]
  float* bias;     // [16]
  float* factor;   // [16]: alpha * channel_scale
};

// What one instruction-set unit provides. Row ranges are independent; counts are added.
struct Kernels {
  const char* name;
  void (*quantize_rows)(const QuantizeJob*, int64_t first, int64_t last, int64_t* counts);
  void (*amax_rows)(const AmaxJob*, int64_t first, int64_t last, float* amax, int32_t* nonfinite);
  void (*dequantize_rows)(const DequantizeJob*, int64_t first, int64_t last);
  void (*project_rows)(const ProjectJob*, int64_t first, int64_t last);
  // scratch: [depth, padded to whole blocks]
  void (*multiply_rows)(const ProductJob*, int64_t first, int64_t last, float* scratch);
  void (*decode_tile)(const LinearJob*, const Activations*, int64_t tile);
  void (*decode_panel)(const LinearJob*, int64_t panel, const Panel*);
  // sums: [rows][kPanelColumns], scratch
  void (*multiply_panel)(const LinearJob*, const Activations*, int64_t panel, const Panel*,
                         float* sums);
};

const Kernels* generic_kernels();
const Kernels* avx2_kernels();    // null where the unit was not built for this architecture
const Kernels* avx512_kernels();

// Runs task(context, i, worker) for i in 0..tasks-1 on at most `threads` threads, the caller's
// included; worker is below `threads` and never in use twice at once.
void run_tasks(int64_t tasks, int threads, void (*task)(void*, int64_t, int), void* context);

}  // namespace halfbyte
