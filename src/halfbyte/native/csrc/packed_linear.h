// Linear layers on packed 4-bit operands: decoding of tiles and panels, and their product.
//
// Codes become integers (E2M1 doubled: 0 1 2 3 4 6 8 12), weights made unsigned by an offset, so
// that a block's products sum exactly in int32; each block sum is then scaled and added in
// float32. The offset's share, -offset * sum of the block's activations, is where a sum starts.
#pragma once
#include <cstdint>
#include <cstring>

#include "block_scales.h"

namespace {

constexpr int kE2M1Doubled[8] = {0, 1, 2, 3, 4, 6, 8, 12};

inline int element_value(int32_t element, int code) {
  if (element == kUint4) return code;
  if (element == kInt4) return code - 2 * (code & 8);
  const int size = kE2M1Doubled[code & 7];
  return code & 8 ? -size : size;
}
inline int weight_offset(int32_t element) { return element == kE2M1 ? 12 : element == kInt4 ? 8 : 0; }
// The factor by which integer element values exceed the numbers they stand for.
inline float element_unit(int32_t element) { return element == kE2M1 ? 0.5f : 1.0f; }

inline float e4m3_value(uint8_t code) {
  if ((code & 0x7F) == 0x7F) return float_of_bits(0x7FC00000);
  const int size = code & 0x7F;
  const float value = size < 8 ? (float)size * 0x1p-9f : float_of_bits(((uint32_t)size << 20) + (120u << 23));
  return code & 0x80 ? -value : value;
}

// Reads block scales; those of one byte through a table.
struct ScaleReader {
  const void* scales;
  int32_t rule;
  int32_t type;
  float table[256];

  ScaleReader(const void* source, int32_t scale_rule, int32_t scale_type)
      : scales(source), rule(scale_rule), type(scale_type) {
    for (uint32_t code = 0; rule != kFloatScale && code < 256; ++code) {
      const uint32_t power = code == 0 ? 1u << 22 : code == 255 ? 0x7FC00000u : code << 23;
      table[code] = rule == kE4M3Scale ? e4m3_value((uint8_t)code) : float_of_bits(power);
    }
  }
  float at(int64_t index) const {
    if (rule == kFloatScale) return load_value(scales, index, type);
    return table[((const uint8_t*)scales)[index]];
  }
};

void decode_tile(const LinearJob* job, const Activations* act, int64_t tile) {
  const int64_t blocks = job->depth / job->block_size;
  const int offset = weight_offset(job->w_element);
  const ScaleReader a_scales(job->a_scales, job->scale_rule, job->a_scale_type);
  int8_t low[256], high[256];
  for (int byte = 0; byte < 256; ++byte) {
    low[byte] = (int8_t)element_value(job->a_element, byte & 15);
    high[byte] = (int8_t)element_value(job->a_element, byte >> 4);
  }
  for (int r = 0; r < kTileRows; ++r) {
    const int64_t row = tile * kTileRows + r;
    const bool is_real = row < act->rows;
    const int64_t source = act->first_row + row;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t slot = (tile * blocks + b) * kTileRows + r;
      int8_t* out = act->codes + slot * job->block_size;
      act->scales[slot] = is_real ? a_scales.at(source * blocks + b) : 0.0f;
      if (!is_real) {
        std::memset(out, 0, job->block_size);
        act->starts[slot] = 0;
        continue;
      }
      const uint8_t* codes = job->a_codes + (source * blocks + b) * (job->block_size / 2);
      int sum = 0;
      for (int i = 0; i < job->block_size / 2; ++i) {
        out[2 * i] = low[codes[i]];
        out[2 * i + 1] = high[codes[i]];
        sum += low[codes[i]] + high[codes[i]];
      }
      act->starts[slot] = -offset * sum;
    }
  }
}

// Four nibbles in the low 16 bits of each lane -> one a byte.
inline I16 spread_nibbles(I16 word) {
  const I16 bytes = and_i(or_i(word, shift_left<8>(word)), splat_i(0x00FF00FF));
  return and_i(or_i(bytes, shift_left<4>(bytes)), splat_i(0x0F0F0F0F));
}

void decode_panel(const LinearJob* job, int64_t panel, const Panel* out) {
  const int64_t blocks = job->depth / job->block_size;
  const int64_t row_bytes = job->depth / 2;
  const int64_t left = job->outputs - panel * kPanelColumns;
  const int columns = (int)(left < kPanelColumns ? left : kPanelColumns);
  const ScaleReader w_scales(job->w_scales, job->scale_rule, job->w_scale_type);
  const uint8_t* rows[kPanelColumns];
  uint8_t table[16];
  for (int code = 0; code < 16; ++code) {
    table[code] =
        (uint8_t)(element_value(job->w_element, code) + weight_offset(job->w_element));
  }
  for (int c = 0; c < kPanelColumns; ++c) {  // missing columns repeat the last; nobody stores them
    const int64_t n = panel * kPanelColumns + (c < columns ? c : columns - 1);
    rows[c] = job->w_codes + n * row_bytes;
    for (int64_t b = 0; b < blocks; ++b) {
      out->scales[b * kPanelColumns + c] = w_scales.at(n * blocks + b);
    }
    for (int64_t r = 0; r < job->rank; ++r) {
      out->lora_up[r * kPanelColumns + c] =
          load_value(job->lora_up, n * job->rank + r, job->lora_type);
    }
    out->bias[c] = job->bias ? load_value(job->bias, n, job->bias_type) : 0.0f;
    out->factor[c] = job->alpha * element_unit(job->a_element) * element_unit(job->w_element) *
                     (job->channel_scale ? job->channel_scale[n] : 1.0f);
  }
  for (int64_t offset = 0; offset < row_bytes; offset += 4) {  // row_bytes is a multiple of 8
    const I16 words = load_strided(rows, offset);
    const I16 first = spread_nibbles(and_i(words, splat_i(0xFFFF)));
    const I16 second = spread_nibbles(shift_right<16>(words));
    int32_t* codes = (int32_t*)(out->codes + offset * 32);
    store_i32(codes, lookup_bytes(table, first));
    store_i32(codes + 16, lookup_bytes(table, second));
  }
}

template <int count>
struct Rows {
  static constexpr int value = count;
};

inline void store_row(const LinearJob& job, int64_t row, int64_t panel, F16 value) {
  const int64_t column = panel * kPanelColumns;
  const int64_t left = job.outputs - column;
  const int count = (int)(left < kPanelColumns ? left : kPanelColumns);
  const int64_t at = row * job.out_stride + column;
  if (job.out_type == kFloat32) {
    alignas(64) float buffer[kPanelColumns];
    store_f32(buffer, value);
    std::memcpy((float*)job.out + at, buffer, sizeof(float) * count);
    return;
  }
  alignas(32) uint16_t buffer[kPanelColumns];
  if (job.out_type == kFloat16) {
    store_f16(buffer, value);
  } else {
    const I16 bits = bits_of(value);
    const I16 size = and_i(bits, splat_i(0x7FFFFFFF));
    const F16 nan = floats_of_bits(splat_i(0x7FC0));
    const F16 rounded = floats_of_bits(round_mantissa<7>(bits));
    store_low_halves(buffer, bits_of(select_less_i(splat_i(kInfBits), size, nan, rounded)));
  }
  std::memcpy((uint16_t*)job.out + at, buffer, sizeof(uint16_t) * count);
}

// Adds the products of `count` blocks of `rows` rows (rows of one tile) to their sums.
template <int rows, int quads>
inline __attribute__((always_inline)) void multiply_run(const int8_t* a, const int32_t* starts,
                                                        const float* scales,
                                                        const uint8_t* weights,
                                                        const float* w_scales, int64_t count,
                                                        float* sums) {
  F16 run[rows];
  for (int r = 0; r < rows; ++r) run[r] = splat(0.0f);
  for (int64_t b = 0; b < count; ++b) {
    const F16 w_scale = load_f32(w_scales);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      const I16 dot = dot_block<quads>(splat_i(starts[r]), weights, a + r * (4 * quads));
      run[r] = mul_add(mul(to_float(dot), splat(scales[r])), w_scale, run[r]);
    }
    a += kTileRows * 4 * quads;
    starts += kTileRows;
    scales += kTileRows;
    weights += quads * 64;
    w_scales += kPanelColumns;
  }
  for (int r = 0; r < rows; ++r) {
    float* sum = sums + r * kPanelColumns;
    store_f32(sum, add(load_f32(sum), run[r]));
  }
}

// One run of blocks of a tile, as many rows at a time as the registers hold sums for.
template <int quads>
inline void multiply_tile(const Activations& act, int64_t slot, int rows, const uint8_t* weights,
                          const float* w_scales, int64_t count, float* sums) {
  const auto part = [&](auto width, int first) {
    multiply_run<decltype(width)::value, quads>(
        act.codes + (slot + first) * (4 * quads), act.starts + slot + first,
        act.scales + slot + first, weights, w_scales, count, sums + first * kPanelColumns);
  };
  int first = 0;
  for (; first + kRegisterRows <= rows; first += kRegisterRows) part(Rows<kRegisterRows>(), first);
  if (first + 4 <= rows) {
    part(Rows<4>(), first);
    first += 4;
  }
  for (; first + 2 <= rows; first += 2) part(Rows<2>(), first);
  if (first < rows) part(Rows<1>(), first);
}

// Runs of blocks are summed apart, so that rounding errors grow with the length of a run plus the
// number of runs and not with their product; and the weights of a run stay in the nearest cache
// while all rows pass by.
template <int quads>
void multiply_runs(const LinearJob& job, const Activations& act, const Panel& w, float* sums) {
  constexpr int64_t kRunBlocks = quads == 16 ? 8 : 16;
  const int64_t blocks = job.depth / (4 * quads);
  for (int64_t i = 0; i < act.rows * kPanelColumns; i += 16) store_f32(sums + i, splat(0.0f));
  for (int64_t b = 0; b < blocks; b += kRunBlocks) {
    const int64_t count = b + kRunBlocks < blocks ? kRunBlocks : blocks - b;
    for (int64_t row = 0; row < act.rows; row += kTileRows) {
      const int64_t left = act.rows - row;
      const int rows = (int)(left < kTileRows ? left : kTileRows);
      multiply_tile<quads>(act, row * blocks + b * kTileRows, rows, w.codes + b * (quads * 64),
                           w.scales + b * kPanelColumns, count, sums + row * kPanelColumns);
    }
  }
}

void multiply_panel(const LinearJob* job, const Activations* act, int64_t panel, const Panel* w,
                    float* sums) {
  if (job->block_size == 16) {
    multiply_runs<4>(*job, *act, *w, sums);
  } else if (job->block_size == 32) {
    multiply_runs<8>(*job, *act, *w, sums);
  } else {
    multiply_runs<16>(*job, *act, *w, sums);
  }
  const F16 factor = load_f32(w->factor), bias = load_f32(w->bias);
  for (int64_t r = 0; r < act->rows; ++r) {
    const int64_t row = act->first_row + r;
    F16 low_rank = splat(0.0f);  // summed apart: its terms would be rounded at the product's size
    for (int64_t i = 0; i < job->rank; ++i) {
      low_rank = mul_add(splat(job->lora_act[row * job->rank + i]),
                         load_f32(w->lora_up + i * kPanelColumns), low_rank);
    }
    const F16 product = load_f32(sums + r * kPanelColumns);
    store_row(*job, row, panel, add(mul_add(product, factor, bias), low_rank));
  }
}

// Writes packed rows as float32.
struct RowDecoder {
  const DequantizeJob& job;
  ScaleReader scales;
  int64_t blocks;
  alignas(64) float table[16];

  explicit RowDecoder(const DequantizeJob& source)
      : job(source),
        scales(source.scales, source.scale_rule, source.scale_type),
        blocks((source.columns + source.block_size - 1) / source.block_size) {
    for (int code = 0; code < 16; ++code) {
      table[code] = (float)element_value(job.element, code) * element_unit(job.element);
      if (job.element == kE2M1 && code == 8) table[code] = -0.0f;
    }
  }
  void decode(int64_t row, float* out, int64_t columns) const {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = row * blocks + b;
      float scale = scales.at(at);
      if (job.scale_rule == kE4M3Scale) scale *= job.multiplier;
      const uint8_t* codes = job.codes + at * (job.block_size / 2);
      for (int i = 0; i < job.block_size; i += 16) {
        const int64_t column = b * job.block_size + i;
        const F16 value = mul(lookup16(table, load_nibbles(codes + i / 2)), splat(scale));
        if (column + 16 <= columns) {
          store_f32(out + column, value);
        } else if (column < columns) {
          alignas(64) float buffer[16];
          store_f32(buffer, value);
          std::memcpy(out + column, buffer, sizeof(float) * (columns - column));
        }
      }
    }
  }
};

void dequantize_rows(const DequantizeJob* job, int64_t first, int64_t last) {
  const RowDecoder decoder(*job);
  for (int64_t row = first; row < last; ++row) {
    decoder.decode(row, job->values + row * job->row_stride, job->columns);
  }
}

void multiply_rows(const ProductJob* job, int64_t first, int64_t last, float* scratch) {
  const RowDecoder decoder(job->weight);
  const int64_t columns = job->weight.columns;
  for (int64_t row = first; row < last; ++row) {
    decoder.decode(row, scratch, columns);
    for (int64_t m = 0; m < job->x_rows; ++m) {
      const float* x = job->x + m * columns;
      F16 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
      int64_t k = 0;
      for (; k + 64 <= columns; k += 64) {
        for (int i = 0; i < 4; ++i) {
          sums[i] = mul_add(load_f32(x + k + 16 * i), load_f32(scratch + k + 16 * i), sums[i]);
        }
      }
      float sum = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
      for (; k < columns; ++k) sum += x[k] * scratch[k];
      job->out[m * job->weight.rows + row] = sum;
    }
  }
}

void project_rows(const ProjectJob* job, int64_t first, int64_t last) {
  constexpr int kRows = 4;         // of x that share one pass over `down`
  constexpr int64_t kChunk = 512;  // columns summed apart, and converted at a time
  const Source in = {job->x, job->columns, job->row_stride, nullptr, 0.0f, 0, job->value_type};
  const Source down = {job->down, job->columns, job->columns, nullptr, 0.0f, 0, job->down_type};
  alignas(64) float x[kRows][kChunk];
  alignas(64) float d[kChunk];
  for (int64_t row = first; row < last; row += kRows) {
    const int rows = (int)(last - row < kRows ? last - row : kRows);
    std::memset(job->out + row * job->rank, 0, sizeof(float) * rows * job->rank);
    for (int64_t column = 0; column < job->columns; column += kChunk) {
      const int64_t left = job->columns - column;
      const int64_t count = left < kChunk ? left : kChunk;
      const int64_t padded = (count + 15) / 16 * 16;
      for (int r = 0; r < rows; ++r) load_row(in, row + r, column, count, padded, x[r]);
      for (int r = rows; r < kRows; ++r) std::memset(x[r], 0, sizeof(x[r]));
      for (int64_t rank = 0; rank < job->rank; ++rank) {
        load_row(down, rank, column, count, padded, d);
        F16 sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = splat(0.0f);
        for (int64_t k = 0; k < padded; k += 16) {
          const F16 value = load_f32(d + k);
          for (int r = 0; r < kRows; ++r) sums[r] = mul_add(load_f32(x[r] + k), value, sums[r]);
        }
        for (int r = 0; r < rows; ++r) job->out[(row + r) * job->rank + rank] += sum_lanes(sums[r]);
      }
    }
  }
}

}  // namespace
