// tcgen05.mma: a thread hands the tensor core one product, D = A*B (+ D), that it computes in its turn.
#include <memory>

#include "exec/tcgen05_descriptor.h"
#include "exec/tcgen05_pipe.h"
#include "exec/tcgen05_product.h"

namespace halfbyte::gpu {
namespace {

// What the operand list holds; ptx/forms/tcgen05_mma.py picks by the syntax. Attributes: kind,
// cta_group, block, .ws, .ashift, A in tensor memory, words of disable-output-lane, 1 where an operand
// follows the predicate (scale-input-d, or the zero-column mask of .ws).
struct OperandList {
  const int32_t* result;
  const int32_t* left;
  const int32_t* right;
  const int32_t* descriptor;
  const int32_t* left_scales;
  const int32_t* right_scales;
  const int32_t* disabled;
  const int32_t* accumulates;
  const int32_t* last;
};

MmaVariant read_variant(const Instruction& in) {
  const int64_t* a = in.attributes;
  return {static_cast<MmaKind>(a[0]), static_cast<uint32_t>(a[1]), static_cast<uint32_t>(a[2]),
          a[3] != 0, a[4] != 0, a[5] != 0};
}

OperandList locate_operands(const Instruction& in, const MmaVariant& variant) {
  OperandList list = {};
  list.result = in.operands;
  list.left = in.operands + 2;
  list.right = list.left + (variant.left_in_tensor_memory ? 2 : 1);
  list.descriptor = list.right + 1;
  const int32_t* next = list.descriptor + 1;
  if (variant.block) {
    list.left_scales = next;
    list.right_scales = next + 2;
    next += 4;
  }
  list.disabled = next;
  list.accumulates = next + in.attributes[6];
  list.last = list.accumulates + 1;
  return list;
}

void read_shared_operand(Warp& warp, const Instruction& in, int lane, const int32_t* operand, const char* name,
                         SharedDescriptor& descriptor) {
  const std::string problem = decode_descriptor_sm100(warp.read64(*operand)[lane], descriptor);
  if (!problem.empty()) raise_fault(warp, in, lane, "shared-descriptor", std::string(name) + ": " + problem);
}

// tf32 transposed exists with 32-byte swizzle atoms alone, everything else without them alone.
void check_major(Warp& warp, const Instruction& in, int lane, const char* name, bool is_mn_major,
                 const SharedDescriptor& descriptor, ElementFormat format) {
  if (is_mn_major) {
    const bool wants_wide_atoms = format == ElementFormat::kTf32;
    if (descriptor.has_wide_atoms != wants_wide_atoms) {
      raise_fault(warp, in, lane, "shared-descriptor",
                  format_text("%s: a transposed matrix of this type wants %s", name,
                              wants_wide_atoms ? "128-byte swizzle with 32-byte atoms" : "16-byte swizzle atoms"));
    }
  }
  if (descriptor.leading_is_address && (is_mn_major || descriptor.swizzle != 3 || descriptor.has_wide_atoms)) {
    raise_fault(warp, in, lane, "shared-descriptor",
                format_text("%s: an absolute leading dimension address wants K major and 128-byte swizzle", name));
  }
}

void check_result_lane(Warp& warp, const Instruction& in, int lane, const MmaRequest& request) {
  const bool is_half_used = request.variant.cta_group == 1 && !request.variant.is_stationary && request.shape.rows == 64;
  const uint32_t d = request.result.lane;
  if (d != 0 && !(is_half_used && d == 16)) {
    raise_fault(warp, in, lane, "tensor-memory-address",
                format_text("d-tmem names lane %u; 0%s wanted for M = %u", d, is_half_used ? " or 16" : "",
                            request.shape.rows));
  }
  if (request.variant.left_in_tensor_memory && request.left_place.lane != d) {
    raise_fault(warp, in, lane, "tensor-memory-address",
                format_text("a-tmem names lane %u, d-tmem lane %u: both must agree", request.left_place.lane, d));
  }
}

void read_last_operand(Warp& warp, const Instruction& in, int lane, const OperandList& list, MmaRequest& request) {
  if (!in.attributes[7]) return;
  if (request.variant.is_stationary) {
    request.zero_columns = warp.read64(*list.last)[lane];
    if (request.shape.right_is_mn_major && request.zero_columns >> 56 & 0x3F) {
      raise_fault(warp, in, lane, "unsupported", "column shift of a transposed B is not modelled");
    }
    return;
  }
  request.scale_shift = static_cast<uint32_t>(*list.last);
  const bool has_scale = request.variant.kind == MmaKind::kF16 || request.variant.kind == MmaKind::kTf32;
  if (request.scale_shift > 15 || !has_scale) {
    raise_fault(warp, in, lane, "scale-input-d",
                format_text("scale-input-d is %u; 0 to 15 wanted, with kind::f16 and kind::tf32", request.scale_shift));
  }
}

MmaRequest read_request(Warp& warp, const Instruction& in, int lane, const OperandList& list) {
  MmaRequest request;
  request.variant = read_variant(in);
  const MmaVariant& variant = request.variant;
  request.group = find_cta_group(warp, in, lane, variant.cta_group);
  const uint32_t bits = warp.read32(*list.descriptor)[lane];
  const std::string problem = decode_instruction_descriptor(bits, variant, request.shape);
  if (!problem.empty()) {
    raise_fault(warp, in, lane, "instruction-descriptor", format_text("idesc 0x%08x: ", bits) + problem);
  }
  if (request.shape.depth == 96 && warp.simulation->config.compute_capability != 103) {
    raise_fault(warp, in, lane, "instruction-descriptor",
                format_text("idesc 0x%08x: field 'K dimension' asks for K = 96, which sm_103a alone has", bits));
  }
  request.result = read_tensor_address(warp, in, lane, list.result, "d-tmem");
  if (variant.left_in_tensor_memory) {
    request.left_place = read_tensor_address(warp, in, lane, list.left, "a-tmem");
  } else {
    read_shared_operand(warp, in, lane, list.left, "a-desc", request.left);
    check_major(warp, in, lane, "a-desc", request.shape.left_is_mn_major, request.left, request.shape.left);
  }
  read_shared_operand(warp, in, lane, list.right, "b-desc", request.right);
  check_major(warp, in, lane, "b-desc", request.shape.right_is_mn_major, request.right, request.shape.right);
  check_result_lane(warp, in, lane, request);
  if (variant.block) {
    request.left_scales = read_tensor_address(warp, in, lane, list.left_scales, "scale-A-tmem");
    request.right_scales = read_tensor_address(warp, in, lane, list.right_scales, "scale-B-tmem");
  }
  for (int64_t i = 0; i < in.attributes[6]; ++i) request.disabled_lanes[i] = warp.read32(list.disabled[i])[lane];
  request.accumulates = warp.predicate(*list.accumulates) >> lane & 1;
  read_last_operand(warp, in, lane, list, request);
  return request;
}

// 64 rows of one CTA fill 16 lanes of every 32: the lower ones, or the upper by the address.
uint8_t find_result_halves(const MmaRequest& request) {
  if (request.group.count != 1 || request.shape.rows != 64 || request.variant.is_stationary) return 3;
  return request.result.lane & 16 ? 2 : 1;
}

// Registers everything that the product reads and writes.
void register_ranges(TensorWork& work, const MmaRequest& request) {
  for (uint32_t i = 0; i < request.group.count; ++i) {
    Cta& cta = *request.group.ctas[i];
    if (request.variant.left_in_tensor_memory) {
      work.read_columns(cta, request.left_place.column, count_left_columns(request), "A of tcgen05.mma");
    } else {
      const ByteRange left = find_operand_range(request.left, find_left_extent(request));
      work.read_shared(cta, left.first, left.last, "A of tcgen05.mma");
    }
    const ByteRange right = find_operand_range(request.right, find_right_extent(request));
    work.read_shared(cta, right.first, right.last, "B of tcgen05.mma");
    if (request.variant.block) {
      work.read_columns(cta, request.left_scales.column, count_left_scale_columns(request), "scale A of tcgen05.mma");
      work.read_columns(cta, request.right_scales.column, count_right_scale_columns(request), "scale B of tcgen05.mma");
    }
    work.write_columns(cta, request.result.column, count_result_columns(request), "D of tcgen05.mma",
                       find_result_halves(request));
  }
}

Outcome tcgen05_mma(Warp& warp, const Instruction& in, uint32_t mask) {
  if (count_lanes(mask) > 1) {
    warp.simulation->findings.add("tcgen05-many-issuers",
                                  format_text("%d lanes issue tcgen05.mma, and each of them a product of its own",
                                              count_lanes(mask)),
                                  warp.place(in, first_lane(mask)));
  }
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = first_lane(rest);
    const OperandList list = locate_operands(in, read_variant(in));
    auto request = std::make_shared<MmaRequest>(read_request(warp, in, lane, list));
    TensorWork work(warp, in, lane, request->group);
    register_ranges(work, *request);
    const MmaShape& shape = request->shape;
    const double multiply_adds = static_cast<double>(shape.rows) * shape.columns * shape.depth;
    work.enqueue(multiply_adds / (mma_rate(request->variant.kind) * request->variant.cta_group),
                 [request] { multiply(*request); });
  }
  return Outcome::kNext;
}

HALFBYTE_HANDLER("tcgen05.mma", tcgen05_mma);

}  // namespace
}  // namespace halfbyte::gpu
