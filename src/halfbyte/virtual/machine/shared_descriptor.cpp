#include "machine/shared_descriptor.h"

#include <algorithm>
#include <cstring>

#include "machine/report.h"

namespace halfbyte::gpu {
namespace {

constexpr uint32_t kChunk = 16;  // bytes

uint32_t field(uint64_t bits, uint32_t first, uint32_t count) {
  return static_cast<uint32_t>(bits >> first) & ((1u << count) - 1);
}

void decode_offsets(uint64_t bits, SharedDescriptor& descriptor) {
  descriptor.start = field(bits, 0, 14) << 4;
  descriptor.leading = field(bits, 16, 14) << 4;
  descriptor.stride = field(bits, 32, 14) << 4;
  descriptor.base_offset = field(bits, 49, 3);
}

inline uint32_t swizzle(const SharedDescriptor& descriptor, uint32_t address) {
  if (descriptor.swizzle == 0) return address;
  const uint32_t line = (address >> 7) - descriptor.base_offset;
  if (descriptor.has_wide_atoms) return address ^ ((line & 3) << 5);
  return address ^ ((line & ((1u << descriptor.swizzle) - 1)) << 4);
}

// Address, before the swizzle, of chunk `chunk` along K of a row.
inline uint32_t locate_k_major(const SharedDescriptor& d, uint32_t row, uint32_t chunk) {
  if (d.swizzle == 0) {
    return d.start + row % 8 * kChunk + row / 8 * d.stride + chunk * d.leading;
  }
  uint32_t base = d.start;
  uint32_t along = chunk * kChunk;
  if (d.leading_is_address && d.start % 128 + along >= 128) {
    along -= 128 - d.start % 128;
    base = d.leading;
  }
  return base + row % 8 * d.span + row / 8 * d.stride + along;
}

// Address, before the swizzle, of the chunk of row `k` of K that holds chunk `chunk` along M or N.
inline uint32_t locate_mn_major(const SharedDescriptor& d, uint32_t k, uint32_t chunk) {
  if (d.has_wide_atoms) {
    return d.start + chunk % 8 * kChunk + chunk / 8 * d.leading + k % 4 * 128 + k / 4 * d.stride;
  }
  if (d.swizzle == 0) return d.start + chunk * d.stride + k % 8 * kChunk + k / 8 * d.leading;
  const uint32_t group = d.span / kChunk;
  return d.start + chunk % group * kChunk + chunk / group * d.leading + k % 8 * d.span + k / 8 * d.stride;
}

}  // namespace

std::string decode_descriptor_sm90(uint64_t bits, SharedDescriptor& descriptor) {
  decode_offsets(bits, descriptor);
  constexpr uint32_t kSwizzles[4] = {0, 3, 2, 1};
  descriptor.swizzle = kSwizzles[field(bits, 62, 2)];
  descriptor.span = kChunk << descriptor.swizzle;
  return "";
}

std::string decode_descriptor_sm100(uint64_t bits, SharedDescriptor& descriptor) {
  decode_offsets(bits, descriptor);
  descriptor.leading_is_address = field(bits, 52, 1);
  const uint32_t layout = field(bits, 61, 3);
  switch (layout) {
    case 0: descriptor.swizzle = 0; break;
    case 1:
      descriptor.swizzle = 2;
      descriptor.has_wide_atoms = true;
      break;
    case 2: descriptor.swizzle = 3; break;
    case 4: descriptor.swizzle = 2; break;
    case 6: descriptor.swizzle = 1; break;
    default: return format_text("swizzling mode (bits 61-63) is %u, one of 0, 1, 2, 4, 6 wanted", layout);
  }
  descriptor.span = descriptor.has_wide_atoms ? 128 : kChunk << descriptor.swizzle;
  if (field(bits, 46, 3) != 1) {
    return format_text("bits 46-48 are %u, the constant 1 wanted", field(bits, 46, 3));
  }
  if (field(bits, 53, 8) != 0) return format_text("bits 53-60 are %u, 0 wanted", field(bits, 53, 8));
  return "";
}

ByteRange find_operand_range(const SharedDescriptor& d, const OperandExtent& extent) {
  const uint32_t chunks =
      extent.is_mn_major ? extent.rows * extent.element_bytes / kChunk : extent.depth_bytes / kChunk;
  const uint32_t lines =
      extent.is_mn_major ? extent.depth_bytes / extent.element_bytes : extent.rows;
  const auto locate = extent.is_mn_major ? locate_mn_major : locate_k_major;
  uint32_t first = UINT32_MAX;
  uint32_t last = 0;
  // Addresses grow with both indices but for their remainders, so the corners of the last atom suffice.
  const uint32_t tail_lines = std::min(lines, 8u);
  const uint32_t tail_chunks = std::min(chunks, 8u);
  for (uint32_t line = lines - tail_lines; line < lines; ++line) {
    for (uint32_t chunk = chunks - tail_chunks; chunk < chunks; ++chunk) {
      last = std::max(last, locate(d, line, chunk) + kChunk);
    }
  }
  first = d.leading_is_address ? std::min(d.start, d.leading) : d.start;
  if (d.swizzle) {
    first = first / d.span * d.span;
    last = (last + d.span - 1) / d.span * d.span;
  }
  return {first, last};
}

void gather_operand(const uint8_t* shared, const SharedDescriptor& d, const OperandExtent& extent,
                    uint32_t first_row, uint32_t row_count, uint8_t* bytes) {
  if (!extent.is_mn_major) {
    const uint32_t chunks = extent.depth_bytes / kChunk;
    for (uint32_t row = first_row; row < first_row + row_count; ++row) {
      for (uint32_t chunk = 0; chunk < chunks; ++chunk, bytes += kChunk) {
        std::memcpy(bytes, shared + swizzle(d, locate_k_major(d, row, chunk)), kChunk);
      }
    }
    return;
  }
  const uint32_t depth = extent.depth_bytes / extent.element_bytes;
  const uint32_t first_chunk = first_row * extent.element_bytes / kChunk;
  const uint32_t chunks = (row_count * extent.element_bytes + kChunk - 1) / kChunk;
  for (uint32_t k = 0; k < depth; ++k) {
    for (uint32_t chunk = first_chunk; chunk < first_chunk + chunks; ++chunk, bytes += kChunk) {
      std::memcpy(bytes, shared + swizzle(d, locate_mn_major(d, k, chunk)), kChunk);
    }
  }
}

}  // namespace halfbyte::gpu
