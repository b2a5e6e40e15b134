// Tensor copies: which rows a box has, what is filled in, how shared memory is swizzled.
#include "machine/tensor_copy.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "machine/report.h"

namespace halfbyte::gpu {

namespace {

constexpr uint32_t kChunk = 16;
constexpr uint32_t kLongestRow = 8192;  // 256 slices of 32 bytes
constexpr uint32_t kPixelsOfWideColumn = 128;
constexpr uint32_t kPixelsPerHalo = 32;

// Elements [first, last) of `count` from `start` on, `stride` apart, that lie inside [0, extent).
void clip(int64_t start, uint32_t count, uint32_t stride, uint64_t extent, TensorRow& row) {
  const int64_t step = stride;
  const int64_t first = start < 0 ? (-start + step - 1) / step : 0;
  const int64_t inside = static_cast<int64_t>(extent) - start;
  const int64_t last = inside <= 0 ? 0 : std::min<int64_t>(count, (inside + step - 1) / step);
  row.first = static_cast<uint32_t>(std::min<int64_t>(first, count));
  row.last = static_cast<uint32_t>(std::max<int64_t>(last, 0));
}

uint64_t row_start(const TensorMap& map, int64_t column) {
  const int64_t bits = column * map.unit_bits();
  return map.address + static_cast<uint64_t>(bits >> 3);
}

struct Extents {
  uint32_t count[kMaxRank];
};

Extents box_extents(const TensorMap& map) {
  Extents extents;
  for (int i = 0; i < kMaxRank; ++i) {
    extents.count[i] = (map.box[i] + map.element_strides[i] - 1) / map.element_strides[i];
  }
  if (map.is_interleaved_tile() && map.rank >= 3) extents.count[map.rank - 2] = 1;
  return extents;
}

// First and last global byte of the elements of a row that exist.
AddressSpan row_span(const TensorMap& map, const TensorRow& row) {
  const uint64_t step = static_cast<uint64_t>(map.element_strides[0]) * map.unit_bits();
  return {row.address + row.first * step / 8,
          row.address + ((row.last - 1) * step + map.unit_bits() + 7) / 8};
}

template <class Visit>
void visit_tile(const TensorRequest& request, Visit&& visit) {
  const TensorMap& map = request.map;
  const Extents extents = box_extents(map);
  TensorRow whole{};
  clip(request.coordinates[0], map.row_elements(), map.element_strides[0], map.dims[0], whole);
  const uint64_t start = row_start(map, request.coordinates[0]);
  uint32_t index[kMaxRank] = {};
  const uint32_t rows = request.num_rows();
  for (uint32_t n = 0; n < rows; ++n) {
    TensorRow row{start, whole.first, whole.last};
    for (uint32_t i = 1; i < map.rank; ++i) {
      const int64_t at = request.coordinates[i] + static_cast<int64_t>(index[i]) * map.element_strides[i];
      if (at < 0 || at >= static_cast<int64_t>(map.dims[i])) row.last = 0;
      row.address += static_cast<uint64_t>(at) * map.strides[i];
    }
    visit(row);
    for (uint32_t i = 1; i < map.rank; ++i) {
      if (++index[i] < extents.count[i]) break;
      index[i] = 0;
    }
  }
}

// gather4 and scatter4: coordinates {column, row, row, row, row}.
template <class Visit>
void visit_rows(const TensorRequest& request, Visit&& visit) {
  const TensorMap& map = request.map;
  TensorRow whole{};
  clip(request.coordinates[0], map.row_elements(), 1, map.dims[0], whole);
  for (int i = 1; i <= 4; ++i) {
    const int64_t at = request.coordinates[i];
    TensorRow row = whole;
    if (at < 0 || at >= static_cast<int64_t>(map.dims[1])) row.last = 0;
    row.address = row_start(map, request.coordinates[0]) + static_cast<uint64_t>(at) * map.strides[1];
    visit(row);
  }
}

// A pixel of an im2col column: W, H, D by dimension, then the image.
class PixelWalk {
 public:
  PixelWalk(const TensorRequest& request, int moving) : map_(request.map), moving_(moving) {
    spatial_ = static_cast<int>(map_.rank) - 2;
    for (int i = 0; i <= spatial_; ++i) at_[i] = request.coordinates[i + 1];
  }

  // The row of the pixel `shift` beyond the current one in each spatial dimension.
  TensorRow row(const TensorRow& channels, uint64_t start, const int64_t* shift) const {
    TensorRow row = channels;
    row.address = start;
    for (int i = 0; i <= spatial_; ++i) {
      const int64_t at = at_[i] + (i < spatial_ ? shift[i] : 0);
      if (at < 0 || at >= static_cast<int64_t>(map_.dims[i + 1])) row.last = 0;
      row.address += static_cast<uint64_t>(at) * map_.strides[i + 1];
    }
    return row;
  }

  // On to the next pixel of the bounding box; past its end, to the next image.
  void advance() {
    for (int i = 0; i < moving_; ++i) {
      at_[i] += map_.element_strides[i + 1];
      if (at_[i] < static_cast<int64_t>(map_.dims[i + 1]) + map_.upper[i]) return;
      at_[i] = map_.lower[i];
    }
    ++at_[spatial_];
  }

 private:
  const TensorMap& map_;
  int spatial_ = 0;
  int moving_ = 0;  // spatial dimensions that the column runs through
  int64_t at_[4] = {};
};

template <class Visit>
void visit_im2col(const TensorRequest& request, Visit&& visit) {
  const TensorMap& map = request.map;
  TensorRow channels{};
  clip(request.coordinates[0], map.row_elements(), 1, map.dims[0], channels);
  const uint64_t start = row_start(map, request.coordinates[0]);
  const bool is_wide = request.mode != TensorMode::kIm2col;
  int64_t shift[3] = {};
  for (int i = 0; i < 3 && !is_wide; ++i) shift[i] = request.offsets[i];
  if (is_wide) shift[0] = request.offsets[1];
  PixelWalk walk(request, is_wide ? 1 : static_cast<int>(map.rank) - 2);
  const uint32_t pixels = request.mode == TensorMode::kIm2colW128 ? kPixelsOfWideColumn : map.pixels;
  const uint32_t halo = is_wide ? request.offsets[0] : 0;
  const uint32_t per_halo = request.mode == TensorMode::kIm2colW128 ? kPixelsPerHalo : pixels;
  for (uint32_t n = 0; n < pixels; ++n) {
    visit(walk.row(channels, start, shift));
    if (halo && (n + 1) % per_halo == 0) {
      int64_t beyond[3] = {shift[0], 0, 0};
      for (uint32_t i = 0; i < halo; ++i) {
        beyond[0] += map.element_strides[1];
        visit(walk.row(channels, start, beyond));
      }
    }
    walk.advance();
  }
}

template <class Visit>
void visit_request(const TensorRequest& request, Visit&& visit) {
  switch (request.mode) {
    case TensorMode::kTile: return visit_tile(request, visit);
    case TensorMode::kRows: return visit_rows(request, visit);
    default: return visit_im2col(request, visit);
  }
}

// The 16-byte chunk i of a row holds `Bytes` bytes of data; the rest is padding, left as it is.
template <uint32_t Bytes>
void write_row(const Swizzle& swizzle, uint8_t* shared, uint32_t offset, const uint8_t* row,
               uint32_t chunks) {
  for (uint32_t i = 0; i < chunks; ++i, offset += kChunk) {
    std::memcpy(shared + swizzle.apply(offset), row + i * Bytes, Bytes);
  }
}

void write_flipped_row(const Swizzle& swizzle, uint8_t* shared, uint32_t offset, const uint8_t* row,
                       uint32_t chunks) {
  for (uint32_t i = 0; i < chunks; ++i, offset += kChunk) {
    const uint32_t first = swizzle.is_flipped(offset) ? 8 : 0;
    uint8_t* chunk = shared + swizzle.apply(offset);
    std::memcpy(chunk + first, row + i * kChunk, 8);
    std::memcpy(chunk + (8 - first), row + i * kChunk + 8, 8);
  }
}

void write_any_row(const TensorMap& map, const Swizzle& swizzle, uint8_t* shared, uint32_t offset,
                   const uint8_t* row, uint32_t chunks) {
  if (map.element == TensorElement::kU4Padded) return write_row<8>(swizzle, shared, offset, row, chunks);
  if (map.element == TensorElement::kU6Padded) return write_row<12>(swizzle, shared, offset, row, chunks);
  if (swizzle.flips_8) return write_flipped_row(swizzle, shared, offset, row, chunks);
  if (swizzle.mask == 0) {
    std::memcpy(shared + offset, row, chunks * kChunk);
    return;
  }
  write_row<kChunk>(swizzle, shared, offset, row, chunks);
}

// PTX ISA, .b6p2x16: four bytes of 6 + 2 bits each become three.
void pack_6_bits(const uint8_t* chunk, uint8_t* packed) {
  for (int group = 0; group < 4; ++group, chunk += 4, packed += 3) {
    const uint32_t bits = (chunk[0] & 63u) | (chunk[1] & 63u) << 6 | (chunk[2] & 63u) << 12 |
                          (chunk[3] & 63u) << 18;
    std::memcpy(packed, &bits, 3);
  }
}

void read_plain_row(const Swizzle& swizzle, const uint8_t* shared, uint32_t offset, uint8_t* row,
                    uint32_t chunks) {
  for (uint32_t i = 0; i < chunks; ++i, offset += kChunk) {
    std::memcpy(row + i * kChunk, shared + swizzle.apply(offset), kChunk);
  }
}

void read_row(const TensorMap& map, const Swizzle& swizzle, const uint8_t* shared, uint32_t offset,
              uint8_t* row, uint32_t chunks) {
  const bool is_packed = map.element == TensorElement::kU6Padded;
  if (!is_packed && !swizzle.flips_8) return read_plain_row(swizzle, shared, offset, row, chunks);
  for (uint32_t i = 0; i < chunks; ++i, offset += kChunk) {
    const uint8_t* chunk = shared + swizzle.apply(offset);
    if (is_packed) {
      pack_6_bits(chunk, row + i * 12);
    } else {
      const uint32_t first = swizzle.is_flipped(offset) ? 8 : 0;
      std::memcpy(row + i * kChunk, chunk + first, 8);
      std::memcpy(row + i * kChunk + 8, chunk + (8 - first), 8);
    }
  }
}

// The pattern that fills what lies outside the tensor.
void fill_row(const TensorMap& map, uint8_t* row, uint32_t bytes) {
  if (!map.fills_nan) {
    std::memset(row, 0, bytes);
    return;
  }
  // 16 bits, repeated for wider elements (seen on an H200).
  for (uint32_t i = 0; i < bytes; ++i) row[i] = i % 2 ? 0x7F : 0xF7;
}

// TF32 maps round on the way to shared memory, to nearest, and make NaN 0x7FFFE000; subnormal
// numbers stay, those of the types called .ftz too (seen on an H200).
void round_row_to_tf32(uint8_t* row, uint32_t first, uint32_t last) {
  for (uint32_t i = first; i < last; ++i) {
    uint32_t bits;
    std::memcpy(&bits, row + 4 * i, 4);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    bits = is_nan ? 0x7FFFE000u : (bits + 0xFFFu + (bits >> 13 & 1)) & 0xFFFFE000u;
    std::memcpy(row + 4 * i, &bits, 4);
  }
}

struct alignas(64) RowBuffer {
  uint8_t data[kLongestRow];
};

// The row's bytes as they go to shared memory, with what lies outside the tensor filled in.
const uint8_t* read_global_row(const TensorMap& map, const TensorRow& row, RowBuffer& buffer) {
  const uint32_t bits = map.unit_bits();
  const uint32_t bytes = map.packed_row_bytes();
  const auto* source = reinterpret_cast<const uint8_t*>(row.address);
  const uint32_t step = map.element_strides[0];
  fill_row(map, buffer.data, bytes);
  if (row.last <= row.first) return buffer.data;
  if (step == 1) {
    const uint32_t begin = row.first * bits / 8;
    std::memcpy(buffer.data + begin, source + begin, (row.last * bits + 7) / 8 - begin);
  } else {
    const uint32_t element = bits / 8;
    for (uint32_t i = row.first; i < row.last; ++i) {
      std::memcpy(buffer.data + i * element, source + static_cast<size_t>(i) * step * element, element);
    }
  }
  if (map.is_tf32) round_row_to_tf32(buffer.data, row.first * bits / 32, row.last * bits / 32);
  return buffer.data;
}

void write_global_row(const TensorMap& map, const TensorRow& row, const uint8_t* bytes,
                      ReduceElements reduce) {
  const uint32_t bits = map.unit_bits();
  const uint32_t elements = bits / map.element_bits();  // of a unit
  auto* target = reinterpret_cast<uint8_t*>(row.address);
  const uint32_t step = map.element_strides[0];
  const uint32_t begin = row.first * bits / 8;
  if (step == 1 && !reduce) {
    std::memcpy(target + begin, bytes + begin, row.last * bits / 8 - begin);
  } else if (step == 1) {
    reduce(target + begin, bytes + begin, (row.last - row.first) * elements);
  } else {
    const uint32_t element = bits / 8;
    for (uint32_t i = row.first; i < row.last; ++i) {
      uint8_t* at = target + static_cast<size_t>(i) * step * element;
      if (reduce) {
        reduce(at, bytes + i * element, elements);
      } else {
        std::memcpy(at, bytes + i * element, element);
      }
    }
  }
}

}  // namespace

uint32_t TensorRequest::num_rows() const {
  switch (mode) {
    case TensorMode::kRows: return 4;
    case TensorMode::kIm2col: return map.pixels;
    case TensorMode::kIm2colW: return map.pixels + offsets[0];
    case TensorMode::kIm2colW128:
      return kPixelsOfWideColumn / kPixelsPerHalo * (kPixelsPerHalo + offsets[0]);
    default: break;
  }
  const Extents extents = box_extents(map);
  uint32_t rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) rows *= extents.count[i];
  return rows;
}

AddressSpan find_tile_span(const TensorRequest& request) {
  const TensorMap& map = request.map;
  const Extents extents = box_extents(map);
  TensorRow row{};
  clip(request.coordinates[0], map.row_elements(), map.element_strides[0], map.dims[0], row);
  if (row.last <= row.first) return {0, 0};
  row.address = row_start(map, request.coordinates[0]);
  uint64_t beyond = 0;  // from the first to the last row
  for (uint32_t i = 1; i < map.rank; ++i) {
    TensorRow outer{};
    clip(request.coordinates[i], extents.count[i], map.element_strides[i], map.dims[i], outer);
    if (outer.last <= outer.first) return {0, 0};
    const int64_t first =
        request.coordinates[i] + static_cast<int64_t>(outer.first) * map.element_strides[i];
    row.address += static_cast<uint64_t>(first) * map.strides[i];
    beyond += static_cast<uint64_t>(outer.last - 1 - outer.first) * map.element_strides[i] * map.strides[i];
  }
  const AddressSpan span = row_span(map, row);
  return {span.begin, span.end + beyond};
}

void for_each_row(const TensorRequest& request, const std::function<void(const TensorRow&)>& visit) {
  visit_request(request, visit);
}

void load_tensor(const TensorRequest& request, const std::vector<uint8_t*>& shared, uint32_t offset) {
  const TensorMap& map = request.map;
  const Swizzle swizzle = swizzle_of(map);
  const uint32_t elements = map.row_elements();
  const uint32_t chunks = map.shared_row_bytes() / kChunk;
  const uint32_t pitch = map.shared_row_pitch();
  const bool is_direct = map.element_strides[0] == 1 && !map.is_tf32;
  RowBuffer buffer;
  visit_request(request, [&](const TensorRow& row) {
    const bool is_whole = is_direct && row.first == 0 && row.last == elements;
    const uint8_t* source = is_whole ? reinterpret_cast<const uint8_t*>(row.address)
                                     : read_global_row(map, row, buffer);
    for (uint8_t* target : shared) write_any_row(map, swizzle, target, offset, source, chunks);
    offset += pitch;
  });
}

void store_tensor(const TensorRequest& request, const uint8_t* shared, uint32_t offset,
                  ReduceElements reduce) {
  const TensorMap& map = request.map;
  const Swizzle swizzle = swizzle_of(map);
  const uint32_t elements = map.row_elements();
  const uint32_t chunks = map.shared_row_bytes() / kChunk;
  const uint32_t pitch = map.shared_row_pitch();
  // Whole rows of plain elements go straight to global memory.
  const bool is_direct = !reduce && !map.is_padded() && !swizzle.flips_8 && map.element_strides[0] == 1;
  RowBuffer buffer;
  visit_request(request, [&](const TensorRow& row) {
    if (is_direct && row.first == 0 && row.last == elements) {
      read_plain_row(swizzle, shared, offset, reinterpret_cast<uint8_t*>(row.address), chunks);
    } else if (row.first < row.last) {
      read_row(map, swizzle, shared, offset, buffer.data, chunks);
      write_global_row(map, row, buffer.data, reduce);
    }
    offset += pitch;
  });
}

ReduceElements find_tensor_reduction(const TensorMap& map, Reduction operation) {
  switch (map.element) {
    case TensorElement::kU32: return find_reduction(operation, Element::kU32);
    case TensorElement::kS32: return find_reduction(operation, Element::kS32);
    case TensorElement::kU64: return find_reduction(operation, Element::kU64);
    case TensorElement::kS64: return find_reduction(operation, Element::kS64);
    case TensorElement::kF16: return find_reduction(operation, Element::kF16);
    case TensorElement::kBf16: return find_reduction(operation, Element::kBf16);
    case TensorElement::kF32: return find_reduction(operation, Element::kF32);
    case TensorElement::kF32Ftz: return find_reduction(operation, Element::kF32Flush);
    case TensorElement::kF64: return find_reduction(operation, Element::kF64);
    default: return nullptr;
  }
}

namespace {

std::string find_mode_error(const TensorRequest& request) {
  const TensorMap& map = request.map;
  const bool wants_im2col = request.mode >= TensorMode::kIm2col;
  if (wants_im2col != map.is_im2col) {
    return format_text("the instruction is in %s mode and the map was encoded for %s mode",
                       wants_im2col ? "im2col" : "tile", map.is_im2col ? "im2col" : "tile");
  }
  if (request.mode == TensorMode::kRows) {
    if (map.rank != 2 || map.box[1] != 1) {
      return format_text("a map of rank %u whose box has %u rows; gather4 and scatter4 want rank 2 and "
                         "a box of one row", map.rank, map.box[1]);
    }
    if (map.interleave_bytes) return "gather4 and scatter4 take no interleave";
  }
  const bool is_wide = request.mode > TensorMode::kIm2col;
  if (is_wide && map.interleave_bytes) return "im2col::w modes take no interleave";
  const uint32_t halo_limit = request.mode == TensorMode::kIm2colW128 ? 32 : 512;
  if (is_wide && (request.offsets[0] >= halo_limit || request.offsets[1] >= 32)) {
    return format_text("wHalo %u and wOffset %u; they must be below %u and 32", request.offsets[0],
                       request.offsets[1], halo_limit);
  }
  return "";
}

}  // namespace

namespace {

std::string find_store_error(const TensorRequest& request) {
  const TensorMap& map = request.map;
  for (uint32_t i = 0; i < map.rank && request.mode != TensorMode::kRows; ++i) {
    if (request.coordinates[i] >= 0) continue;
    return format_text("coordinate %d in dimension %u; a store must not start before the tensor",
                       request.coordinates[i], i);
  }
  for (uint32_t i = 0; map.is_im2col && i + 2 < map.rank; ++i) {
    if (map.lower[i] >= 0) continue;
    return format_text("lower corner %d in dimension %u; an im2col store wants none below 0",
                       map.lower[i], i + 1);
  }
  return "";
}

}  // namespace

std::string find_request_error(const TensorRequest& request, bool is_store, bool is_reduction) {
  const std::string error = find_mode_error(request);
  if (!error.empty()) return error;
  const TensorMap& map = request.map;
  if (is_store && map.element == TensorElement::kU4Padded) {
    return "type b4x16_p64 cannot be stored to global memory";
  }
  if (is_reduction && map.element_bits() < 8) return "types of less than 8 bits have no reduction";
  if (map.is_padded() && request.coordinates[0] % 128) {
    return format_text("first coordinate %d; types with padding want a multiple of 128",
                       request.coordinates[0]);
  }
  // Silicon (an H200) ends the kernel with an illegal instruction for each of these.
  if (static_cast<int64_t>(request.coordinates[0]) * map.unit_bits() % 128) {
    return format_text("first coordinate %d of %u-bit elements; a box starts at a multiple of 16 bytes",
                       request.coordinates[0], map.unit_bits());
  }
  return is_store ? find_store_error(request) : "";
}

}  // namespace halfbyte::gpu
