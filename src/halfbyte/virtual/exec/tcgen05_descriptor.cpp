#include "exec/tcgen05_descriptor.h"

#include "machine/report.h"

namespace halfbyte::gpu {
namespace {

struct Field {
  const char* name;
  uint32_t first;
  uint32_t count;
};

constexpr Field kSparsity = {"sparsity", 2, 1};
constexpr Field kSaturate = {"saturate", 3, 1};
constexpr Field kResult = {"D type", 4, 2};
constexpr Field kLeft = {"A type", 7, 3};
constexpr Field kRight = {"B type", 10, 3};
constexpr Field kRightFp4 = {"B type", 10, 2};  // kernels are known that set the reserved bit above it
constexpr Field kNegateLeft = {"negate A", 13, 1};
constexpr Field kNegateRight = {"negate B", 14, 1};
constexpr Field kTransposeLeft = {"transpose A", 15, 1};
constexpr Field kTransposeRight = {"transpose B", 16, 1};
constexpr Field kColumns = {"N", 17, 6};
constexpr Field kRows = {"M", 24, 5};
constexpr Field kRightScaleId = {"scale factor id of B", 4, 2};
constexpr Field kScaleType = {"scale type", 23, 1};
constexpr Field kScaledRows = {"M", 27, 2};
constexpr Field kLeftScaleId = {"scale factor id of A", 29, 2};
constexpr Field kDepth = {"K dimension", 31, 1};

uint32_t read(uint32_t bits, const Field& field) { return bits >> field.first & ((1u << field.count) - 1); }

std::string complain(const Field& field, uint32_t value, const std::string& wanted) {
  return format_text("field '%s' (bits %u-%u) is %u, ", field.name, field.first, field.first + field.count - 1,
                     value) +
         wanted;
}

std::string check_zero(uint32_t bits, const Field& field, const char* why) {
  const uint32_t value = read(bits, field);
  return value == 0 ? "" : complain(field, value, why);
}

bool is_packed_fp4(MmaKind kind) { return kind == MmaKind::kMxf4 || kind == MmaKind::kMxf4nvf4; }
bool is_mixed_fp8(MmaKind kind) { return kind == MmaKind::kF8f6f4 || kind == MmaKind::kMxf8f6f4; }

// Sub-byte elements of the fp8 kinds: padded groups of 16 in shared memory, bytes in tensor memory.
bool find_mixed_format(uint32_t value, bool is_in_tensor_memory, ElementFormat& format) {
  switch (value) {
    case 0: format = ElementFormat::kE4m3; return true;
    case 1: format = ElementFormat::kE5m2; return true;
    case 3: format = is_in_tensor_memory ? ElementFormat::kE2m3 : ElementFormat::kE2m3Padded; return true;
    case 4: format = is_in_tensor_memory ? ElementFormat::kE3m2 : ElementFormat::kE3m2Padded; return true;
    case 5: format = is_in_tensor_memory ? ElementFormat::kE2m1 : ElementFormat::kE2m1Padded; return true;
    default: return false;
  }
}

std::string decode_format(uint32_t bits, const Field& field, const MmaVariant& variant, bool is_in_tensor_memory,
                          ElementFormat& format) {
  const uint32_t value = read(bits, field);
  switch (variant.kind) {
    case MmaKind::kF16:
      if (value > 1) return complain(field, value, "0 (f16) or 1 (bf16) wanted for kind::f16");
      format = value ? ElementFormat::kBf16 : ElementFormat::kF16;
      return "";
    case MmaKind::kTf32:
      if (value != 2) return complain(field, value, "2 (tf32) wanted for kind::tf32");
      format = ElementFormat::kTf32;
      return "";
    case MmaKind::kI8:
      if (value > 1) return complain(field, value, "0 (u8) or 1 (s8) wanted for kind::i8");
      format = value ? ElementFormat::kS8 : ElementFormat::kU8;
      return "";
    case MmaKind::kF8f6f4:
    case MmaKind::kMxf8f6f4:
      if (find_mixed_format(value, is_in_tensor_memory, format)) return "";
      return complain(field, value, "0 (e4m3), 1 (e5m2), 3 (e2m3), 4 (e3m2) or 5 (e2m1) wanted");
    default:
      if (value != 1) return complain(field, value, "1 (e2m1) wanted for the fp4 kinds");
      format = ElementFormat::kE2m1Packed;
      return "";
  }
}

std::string check_rows(const Field& field, const MmaVariant& variant, uint32_t rows) {
  const bool is_legal = variant.is_stationary       ? rows == 32 || rows == 64 || rows == 128
                        : variant.cta_group == 2    ? rows == 128 || rows == 256
                        : is_block_scaled(variant.kind) ? rows == 128
                                                        : rows == 64 || rows == 128;
  if (!is_legal) {
    return format_text("field '%s' gives M = %u, which does not exist for .cta_group::%u%s", field.name, rows,
                       variant.cta_group, variant.is_stationary ? " with .ws" : "");
  }
  if (variant.shifts_left && rows < 128) return format_text("M = %u with .ashift, 128 or 256 wanted", rows);
  return "";
}

std::string check_columns(const MmaVariant& variant, const MmaShape& shape) {
  const uint32_t n = shape.columns;
  if (variant.is_stationary) {
    if (n == 64 || n == 128 || n == 256) return "";
    return format_text("field 'N' gives N = %u; .ws has 64, 128 and 256", n);
  }
  uint32_t step = variant.cta_group == 2 ? 16 : 8;
  if (variant.kind == MmaKind::kI8) step = variant.cta_group == 2 ? 32 : n > 32 ? 16 : 8;
  // Chunks of 16 bytes along N (PTX ISA, "Various combinations of N shape ... for 8bit transpose B").
  if (shape.right_is_mn_major && element_bits(shape.right) == 8) step = variant.cta_group == 2 ? 32 : 16;
  if (n >= step && n <= 256 && n % step == 0) return "";
  return format_text("field 'N' gives N = %u; a multiple of %u in [%u, 256] wanted here", n, step, step);
}

std::string decode_majors(uint32_t bits, const MmaVariant& variant, MmaShape& shape) {
  shape.left_is_mn_major = read(bits, kTransposeLeft);
  shape.right_is_mn_major = read(bits, kTransposeRight);
  if (shape.left_is_mn_major && variant.left_in_tensor_memory) {
    return complain(kTransposeLeft, 1, "0 wanted: A is in tensor memory");
  }
  const auto is_sub_byte = [](ElementFormat format) {
    return format >= ElementFormat::kE2m3 && format <= ElementFormat::kE2m1Packed;
  };
  if (shape.left_is_mn_major && is_sub_byte(shape.left)) {
    return complain(kTransposeLeft, 1, "0 wanted: elements of fewer than 8 bits are K major");
  }
  if (shape.right_is_mn_major && is_sub_byte(shape.right)) {
    return complain(kTransposeRight, 1, "0 wanted: elements of fewer than 8 bits are K major");
  }
  return "";
}

std::string decode_scales(uint32_t bits, const MmaVariant& variant, MmaShape& shape) {
  for (const Field& field : {Field{"reserved", 0, 2}, Field{"reserved", 3, 1}, Field{"reserved", 6, 1},
                             Field{"reserved", 24, 3}}) {
    const std::string problem = check_zero(bits, field, "0 wanted");
    if (!problem.empty()) return problem;
  }
  shape.scale_format = static_cast<ScaleFormat>(read(bits, kScaleType));
  const bool may_be_ue4m3 = variant.kind == MmaKind::kMxf4nvf4 && variant.block == 16;
  if (shape.scale_format == ScaleFormat::kUe4m3 && !may_be_ue4m3) {
    return complain(kScaleType, 0, "1 (ue8m0) wanted: ue4m3 exists for kind::mxf4nvf4 with blocks of 16 alone");
  }
  if (read(bits, kDepth)) {
    if (!is_packed_fp4(variant.kind)) return complain(kDepth, 1, "0 wanted: K = 96 exists for the fp4 kinds alone");
    shape.depth = 96;
  }
  shape.scales = shape.depth / variant.block;
  shape.left_scale_byte = read(bits, kLeftScaleId);
  shape.right_scale_byte = read(bits, kRightScaleId);
  if (shape.depth == 96) return "";
  const uint32_t step = shape.scales;
  if (shape.left_scale_byte % step) return complain(kLeftScaleId, shape.left_scale_byte, format_text("a multiple of %u wanted", step));
  if (shape.right_scale_byte % step) return complain(kRightScaleId, shape.right_scale_byte, format_text("a multiple of %u wanted", step));
  return "";
}

std::string decode_plain(uint32_t bits, const MmaVariant& variant, MmaShape& shape) {
  for (const Field& field : {Field{"reserved", 6, 1}, Field{"reserved", 23, 1}, Field{"reserved", 29, 1}}) {
    const std::string problem = check_zero(bits, field, "0 wanted");
    if (!problem.empty()) return problem;
  }
  shape.saturates = read(bits, kSaturate);
  const bool is_integer = variant.kind == MmaKind::kI8;
  if (shape.saturates && !is_integer) return complain(kSaturate, 1, "0 wanted: saturation is for kind::i8");
  if (is_integer && read(bits, {"negate", 13, 2})) return complain({"negate", 13, 2}, read(bits, {"negate", 13, 2}), "0 wanted for kind::i8");
  const uint32_t result = read(bits, kResult);
  shape.accumulator = static_cast<Accumulator>(result);
  const bool has_half = shape.left != ElementFormat::kBf16 && shape.right != ElementFormat::kBf16 &&
                        variant.kind != MmaKind::kTf32;
  const bool is_legal = is_integer ? result == 2 : result == 1 || (result == 0 && has_half);
  if (!is_legal) return complain(kResult, result, "a D type of this kind and these formats wanted");
  return "";
}

}  // namespace

bool is_block_scaled(MmaKind kind) {
  return kind == MmaKind::kMxf8f6f4 || kind == MmaKind::kMxf4 || kind == MmaKind::kMxf4nvf4;
}

double mma_rate(MmaKind kind) {
  if (is_packed_fp4(kind)) return 16384;
  if (is_mixed_fp8(kind) || kind == MmaKind::kI8) return 8192;
  return kind == MmaKind::kF16 ? 4096 : 2048;
}

std::string decode_instruction_descriptor(uint32_t bits, const MmaVariant& variant, MmaShape& shape) {
  const bool is_scaled = is_block_scaled(variant.kind);
  if (read(bits, kSparsity)) return complain(kSparsity, 1, "0 wanted: this is no .sp instruction");
  shape.depth = is_packed_fp4(variant.kind) ? 64 : variant.kind == MmaKind::kF16 ? 16 : variant.kind == MmaKind::kTf32 ? 8 : 32;
  std::string problem = decode_format(bits, kLeft, variant, variant.left_in_tensor_memory, shape.left);
  if (problem.empty()) problem = decode_format(bits, is_packed_fp4(variant.kind) ? kRightFp4 : kRight, variant, false, shape.right);
  if (problem.empty()) problem = is_scaled ? decode_scales(bits, variant, shape) : decode_plain(bits, variant, shape);
  if (problem.empty()) problem = decode_majors(bits, variant, shape);
  if (!problem.empty()) return problem;
  shape.negates_left = read(bits, kNegateLeft);
  shape.negates_right = read(bits, kNegateRight);
  shape.columns = read(bits, kColumns) << 3;
  shape.rows = is_scaled ? read(bits, kScaledRows) << 7 : read(bits, kRows) << 4;
  problem = check_rows(is_scaled ? kScaledRows : kRows, variant, shape.rows);
  return problem.empty() ? check_columns(variant, shape) : problem;
}

}  // namespace halfbyte::gpu
