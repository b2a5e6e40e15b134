"""ctypes mirrors of the records in csrc/abi.h; `library()` compares their sizes at load."""

import ctypes

ABI_VERSION = 1

NUM_COUNTERS = 4  # of QuantizeJob.counts: saturated, flushed, zero, nonfinite


class QuantizeJob(ctypes.Structure):
    """One call of halfbyte_quantize; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("smooth", ctypes.c_void_p),
        ("shift", ctypes.c_float),
        ("multiplier", ctypes.c_float),
        ("divisor", ctypes.c_float),
        ("min_scale", ctypes.c_float),
        ("value_type", ctypes.c_int32),
        ("has_shift", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("scale_rule", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("scale_order", ctypes.c_int32),
        ("payload_order", ctypes.c_int32),
        ("zero_scale", ctypes.c_int32),
        ("flushed_scale", ctypes.c_int32),
        ("keeps_minus_zero", ctypes.c_int32),
        ("e8m0_rounding", ctypes.c_int32),
        ("search", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
    )


class AmaxJob(ctypes.Structure):
    """One call of halfbyte_amax; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("smooth", ctypes.c_void_p),
        ("shift", ctypes.c_float),
        ("value_type", ctypes.c_int32),
        ("has_shift", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("amax", ctypes.c_float),
        ("nonfinite", ctypes.c_int32),
    )


class LinearJob(ctypes.Structure):
    """One call of halfbyte_linear; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("a_codes", ctypes.c_void_p),
        ("a_scales", ctypes.c_void_p),
        ("w_codes", ctypes.c_void_p),
        ("w_scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("channel_scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("lora_act", ctypes.c_void_p),
        ("lora_up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("a_element", ctypes.c_int32),
        ("w_element", ctypes.c_int32),
        ("scale_rule", ctypes.c_int32),
        ("a_scale_type", ctypes.c_int32),
        ("w_scale_type", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("bias_type", ctypes.c_int32),
        ("lora_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class DequantizeJob(ctypes.Structure):
    """One call of halfbyte_dequantize; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("multiplier", ctypes.c_float),
        ("element", ctypes.c_int32),
        ("scale_rule", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class GptqJob(ctypes.Structure):
    """One call of halfbyte_gptq; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("factor", ctypes.c_void_p),
        ("divisors", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("element", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


class ProductJob(ctypes.Structure):
    """One call of halfbyte_product; fields as in csrc/abi.h, the weight's record flattened."""

    _fields_ = (
        *DequantizeJob._fields_,
        ("x", ctypes.c_void_p),
        ("x_rows", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


class ProjectJob(ctypes.Structure):
    """One call of halfbyte_project; fields as in csrc/abi.h."""

    _fields_ = (
        ("struct_bytes", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("down", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("value_type", ctypes.c_int32),
        ("down_type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


RECORDS: tuple[type[ctypes.Structure], ...] = (
    QuantizeJob,
    AmaxJob,
    LinearJob,
    DequantizeJob,
    GptqJob,
    ProductJob,
    ProjectJob,
)
