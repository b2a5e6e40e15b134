// Decoding of tensor maps and the rules they must keep (CUDA Driver API, "Tensor Map Object
// Management"; PTX ISA, "Restriction on Tensor Copy instructions").
#include "machine/tensor_map.h"

#include <cstring>

#include "machine/report.h"

namespace halfbyte::gpu {

namespace {

uint32_t read_word(const uint8_t* bytes, int offset) {
  uint32_t word;
  std::memcpy(&word, bytes + offset, sizeof(word));
  return word;
}

constexpr uint32_t kElementBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 4, 4, 6};
constexpr const char* kElementNames[] = {"u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32",
                                         "f32.ftz", "f64", "bf16", "b4x16", "b4x16_p64", "b6x16_p32"};

// A field of `bits` bits as a signed number.
int32_t sign_extend(uint32_t value, int bits) {
  return static_cast<int32_t>(value << (32 - bits)) >> (32 - bits);
}

void decode_corners(const uint8_t* bytes, TensorMap& map) {
  const int spatial = static_cast<int>(map.rank) - 2;
  if (spatial < 1 || spatial > 3) return;
  const int bits = spatial == 1 ? 16 : spatial == 2 ? 8 : 5;
  const uint32_t corners = read_word(bytes, 56);
  for (int i = 0; i < spatial; ++i) {
    map.lower[i] = sign_extend((corners & 0xFFFF) >> (bits * i) & ((1u << bits) - 1), bits);
    map.upper[i] = sign_extend(corners >> 16 >> (bits * i) & ((1u << bits) - 1), bits);
  }
  map.pixels = (read_word(bytes, 60) & 0x3FF) + 1;
}

uint32_t row_alignment(const TensorMap& map) {
  return map.interleave_bytes == 32 || map.is_padded() ? 32 : 16;
}

std::string find_row_error(const TensorMap& map) {
  const uint32_t bytes = map.shared_row_bytes();
  if (map.is_padded()) {
    if (map.row_elements() != 128) {
      return format_text("a box of %u elements in dimension 0; type %s wants 128", map.box[0],
                         kElementNames[static_cast<uint32_t>(map.element)]);
    }
    if (map.dims[0] % 128) {
      return format_text("%llu elements in dimension 0; type %s wants a multiple of 128",
                         static_cast<unsigned long long>(map.dims[0]),
                         kElementNames[static_cast<uint32_t>(map.element)]);
    }
    if (map.swizzle_bytes != 0 && map.swizzle_bytes != 128) {
      return "types with padding take no swizzle or the 128-byte one";
    }
  }
  if (bytes % 16) {
    return format_text("inner box rows of %u bytes; they must be a multiple of 16", bytes);
  }
  if (map.swizzle_bytes && bytes > map.swizzle_bytes && !map.is_interleaved_tile()) {
    return format_text("inner box rows of %u bytes; a %u-byte swizzle allows at most %u", bytes,
                       map.swizzle_bytes, map.swizzle_bytes);
  }
  return "";
}

std::string find_layout_error(const TensorMap& map) {
  if (map.interleave_bytes && map.rank < 3) {
    return format_text("an interleave of %u bytes with rank %u; it wants rank 3 to 5",
                       map.interleave_bytes, map.rank);
  }
  if (map.interleave_bytes == 32 && map.swizzle_bytes != 0 && map.swizzle_bytes != 32) {
    return "an interleave of 32 bytes takes the 32-byte swizzle";
  }
  if (map.atom != SwizzleAtom::k16 && map.swizzle_bytes != 128) {
    return format_text("a swizzle atom above 16 bytes with a %u-byte swizzle; it wants the 128-byte one",
                       map.swizzle_bytes);
  }
  if (map.is_im2col && map.rank < 3) {
    return format_text("an im2col map of rank %u; im2col wants rank 3 to 5", map.rank);
  }
  if (!map.interleave_bytes && map.element_strides[0] != 1) {
    return format_text("an element stride of %u in dimension 0; without interleave it must be 1",
                       map.element_strides[0]);
  }
  return "";
}

}  // namespace

uint32_t TensorMap::element_bits() const { return kElementBits[static_cast<uint32_t>(element)]; }

uint32_t TensorMap::row_elements() const {
  return is_im2col ? box[0] : (box[0] + element_strides[0] - 1) / element_strides[0];
}

uint32_t TensorMap::shared_row_bytes() const {
  return is_padded() ? row_elements() : packed_row_bytes();
}

uint32_t TensorMap::packed_row_bytes() const { return row_elements() * unit_bits() / 8; }

uint32_t TensorMap::shared_row_pitch() const {
  const uint32_t bytes = shared_row_bytes();
  const bool is_padded_to_span = !is_interleaved_tile() && swizzle_bytes != 96;
  return is_padded_to_span && bytes < swizzle_bytes ? swizzle_bytes : bytes;
}

std::string TensorMap::describe() const {
  std::string text = format_text("%s map of %s [", is_im2col ? "im2col" : "tile",
                                 kElementNames[static_cast<uint32_t>(element)]);
  for (uint32_t i = 0; i < rank; ++i) {
    text += format_text("%s%llu", i ? ", " : "", static_cast<unsigned long long>(dims[i]));
  }
  return text + format_text("] at 0x%llx", static_cast<unsigned long long>(address));
}

TensorMap decode_tensor_map(const uint8_t* bytes) {
  TensorMap map;
  std::memcpy(&map.address, bytes, sizeof(map.address));
  const uint32_t flags = read_word(bytes, 8);
  map.is_im2col = flags & 1;
  map.rank = (flags >> 4 & 7) + 1;
  map.element = static_cast<TensorElement>(flags >> 7 & 15);
  map.interleave_bytes = (flags >> 11 & 3) * 16;
  const uint32_t swizzle = flags >> 13 & 3;
  map.swizzle_bytes = flags >> 22 & 1 ? 96 : swizzle ? 16u << swizzle : 0;
  map.fills_nan = flags >> 15 & 1;
  map.is_tf32 = flags >> 16 & 1;
  map.atom = static_cast<SwizzleAtom>(flags >> 19 & 3);
  const uint32_t rank = map.rank < kMaxRank ? map.rank : kMaxRank;
  const uint32_t high = read_word(bytes, 28);
  const uint64_t element_strides = read_word(bytes, 52) & 0xFFFFFF;
  for (uint32_t i = 0; i < rank; ++i) {
    map.dims[i] = static_cast<uint64_t>(read_word(bytes, 32 + 4 * static_cast<int>(i))) + 1;
    map.box[i] = i > 0 && map.is_im2col ? 1 : bytes[55 + i] + 1u;
    map.element_strides[i] = static_cast<uint32_t>(element_strides >> (3 * i) & 7) + 1;
    if (i == 0) continue;
    const uint64_t units = read_word(bytes, 8 + 4 * static_cast<int>(i)) |
                           static_cast<uint64_t>(high >> (4 * (i - 1)) & 15) << 32;
    map.strides[i] = units * 16;
  }
  if (map.is_im2col) decode_corners(bytes, map);
  return map;
}

std::string find_tensor_map_error(const TensorMap& map) {
  if (map.rank > kMaxRank) return format_text("rank %u; a tensor map has rank 1 to 5", map.rank);
  if (map.element >= TensorElement::kCount) {
    return format_text("element type code %u is not known", static_cast<uint32_t>(map.element));
  }
  const uint32_t alignment = row_alignment(map);
  if (map.address % alignment) {
    return format_text("the global address 0x%llx is not a multiple of %u",
                       static_cast<unsigned long long>(map.address), alignment);
  }
  for (uint32_t i = 1; i < map.rank; ++i) {
    if (map.strides[i] % alignment == 0) continue;
    return format_text("a stride of %llu bytes in dimension %u, not a multiple of %u",
                       static_cast<unsigned long long>(map.strides[i]), i, alignment);
  }
  const std::string error = find_layout_error(map);
  return error.empty() ? find_row_error(map) : error;
}

Swizzle swizzle_of(const TensorMap& map) {
  switch (map.swizzle_bytes) {
    case 32:
    case 96: return {1, 4, false};
    case 64: return {3, 4, false};
    case 128: break;
    default: return {0, 4, false};
  }
  switch (map.atom) {
    case SwizzleAtom::k32: return {3, 5, false};
    case SwizzleAtom::k32Flip8: return {3, 5, true};
    case SwizzleAtom::k64: return {1, 6, false};
    default: return {7, 4, false};
  }
}

}  // namespace halfbyte::gpu
