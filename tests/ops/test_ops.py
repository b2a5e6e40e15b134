"""The three torch ops: numbers against reference/, schema and fake kernels, named errors."""

import numpy as np
import pytest
import torch

from halfbyte import ops
from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops import checks
from halfbyte.reference import quantize_act_lora, w4a4_linear
from halfbyte.reference.decode import read_bytes, unpack_codes
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id
from tests.tolerance import assert_close_to_reference, measure_error, measure_torch_error

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
W4A4_PAIRS = FORMAT_PAIRS[:-2]


def arguments_of(linear: QuantizedLinear) -> tuple[list[torch.Tensor], str]:
    return ops.list_parts(linear), ops.make_spec(linear).encode()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_w4a4_linear_matches_reference(pair: tuple[str, str | None], dtype: torch.dtype) -> None:
    linear = make_linear(LinearShape(n=40, k=200, dtype=dtype), pair)
    x = make_input(9, 200, dtype)
    assert_close_to_reference(ops.w4a4_linear(x, *arguments_of(linear)), x, linear)


@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_quantize_act_lora_writes_the_bytes_of_the_reference(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=8, k=200), pair)
    x = make_input(9, 200, torch.bfloat16)
    codes, scales, global_scale, lora_act = ops.quantize_act_lora(x, *arguments_of(linear))
    wanted = quantize_act_lora(x, linear)
    np.testing.assert_array_equal(unpack_codes(read_bytes(codes), 4), wanted.codes)
    if wanted.scale_bytes is not None:
        np.testing.assert_array_equal(scales.numpy(), wanted.scale_bytes)
    else:
        np.testing.assert_array_equal(scales.double().numpy(), wanted.scales)
    assert global_scale.tolist() in ([], wanted.global_scale)
    assert lora_act.dtype == torch.float32
    assert wanted.lora_act is not None
    assert linear.lora_down is not None
    torch_error = measure_error(x.float() @ linear.lora_down.T, wanted.lora_act)
    assert measure_error(lora_act, wanted.lora_act) <= 2 * torch_error


@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_gemm_of_quantized_activation_equals_the_whole_linear(
    pair: tuple[str, str | None],
) -> None:
    linear = make_linear(LinearShape(n=24, k=100), pair)
    x = make_input(5, 100, torch.bfloat16)
    act = list(ops.quantize_act_lora(x, *arguments_of(linear)))
    y = ops.gemm_w4a4(act, *arguments_of(linear), torch.bfloat16)
    assert torch.equal(y, ops.w4a4_linear(x, *arguments_of(linear)))
    assert_close_to_reference(y, x, linear)


def test_gemm_rounds_to_the_asked_dtype() -> None:
    linear = make_linear(LinearShape(n=24, k=100))
    act = list(ops.quantize_act_lora(make_input(5, 100), *arguments_of(linear)))
    exact = ops.gemm_w4a4(act, *arguments_of(linear), torch.float32)
    for dtype in DTYPES:
        y = ops.gemm_w4a4(act, *arguments_of(linear), dtype)
        assert torch.equal(y, exact.to(dtype))


def run_opcheck(shape: LinearShape, pair: tuple[str, str | None], x: torch.Tensor) -> None:
    parts, spec = arguments_of(make_linear(shape, pair))
    torch.library.opcheck(torch.ops.halfbyte.w4a4_linear.default, (x, parts, spec))
    if pair[1] is None:
        return
    torch.library.opcheck(torch.ops.halfbyte.quantize_act_lora.default, (x, parts, spec))
    act = list(ops.quantize_act_lora(x, parts, spec))
    torch.library.opcheck(torch.ops.halfbyte.gemm_w4a4.default, (act, parts, spec, x.dtype))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_opcheck_passes_on_every_op(pair: tuple[str, str | None]) -> None:
    run_opcheck(LinearShape(n=8, k=72), pair, make_input(5, 72, torch.bfloat16))


@pytest.mark.parametrize("m", [0, 1])
def test_opcheck_passes_without_rows_and_without_optional_parts(m: int) -> None:
    shape = LinearShape(n=8, k=72, rank=0, parts=False)
    run_opcheck(shape, ("nvfp4", "nvfp4_static"), make_input(m, 72, torch.float16))


def test_schemas_have_at_most_eight_parameters() -> None:
    for name in ("quantize_act_lora", "gemm_w4a4", "w4a4_linear"):
        assert len(getattr(torch.ops.halfbyte, name).default._schema.arguments) <= 8


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_strided_x_equals_its_contiguous_copy(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=16, k=64), pair)
    wide = make_input(8, 128)
    wide[:, 64:] = float("nan")  # what lies beside the slice must not be read
    views = (wide[:, :64], make_input(64, 8).t(), wide[::2, :64], wide[:1, :64].expand(8, 64))
    for x in views:
        y = ops.w4a4_linear(x, *arguments_of(linear))
        assert torch.equal(y, ops.w4a4_linear(x.contiguous(), *arguments_of(linear)))
        assert_close_to_reference(y, x, linear)


@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_nunchaku"), ("int4", "int4")], ids=pair_id)
def test_every_row_count_matches_the_reference(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=256, k=512), pair)
    x = make_input(2048, 512, torch.bfloat16)
    # rows are independent in these formats: one reference serves every M
    wanted = np.concatenate([w4a4_linear(chunk, linear) for chunk in x.split(256)])
    limit = 2 * measure_torch_error(x[:64], linear)
    for m in (1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 129, 256, 512, 1024, 1536, 2048):
        y = ops.w4a4_linear(x[:m], *arguments_of(linear))
        assert measure_error(y, wanted[:m]) <= limit, m


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_no_rows_and_no_columns(pair: tuple[str, str | None]) -> None:
    linear = make_linear(LinearShape(n=16, k=64), pair)
    y = ops.w4a4_linear(torch.empty((0, 64), dtype=torch.float16), *arguments_of(linear))
    assert (tuple(y.shape), y.dtype) == ((0, 16), torch.float16)
    columnless = make_linear(LinearShape(n=16, k=0), pair)
    y = ops.w4a4_linear(torch.empty((5, 0)), *arguments_of(columnless))
    assert columnless.bias is not None
    assert torch.equal(y, columnless.bias.expand(5, 16))
    bare = make_linear(LinearShape(n=16, k=0, rank=0, parts=False), pair)
    y = ops.w4a4_linear(torch.empty((5, 0)), *arguments_of(bare))
    assert torch.equal(y, torch.zeros(5, 16))


@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_split_ops_take_no_rows_and_no_columns(pair: tuple[str, str | None], m: int) -> None:
    linear = make_linear(LinearShape(n=16, k=64 if m == 0 else 0), pair)
    x = torch.empty((m, linear.in_features))
    act = list(ops.quantize_act_lora(x, *arguments_of(linear)))
    assert act[0].shape[0] == act[1].shape[0] == act[3].shape[0] == m
    y = ops.gemm_w4a4(act, *arguments_of(linear), torch.float32)
    assert linear.bias is not None
    assert torch.equal(y, linear.bias.expand(m, 16))


@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_static"), ("mxfp4", "mxfp4")], ids=pair_id)
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(
    pair: tuple[str, str | None],
) -> None:
    parts, spec = arguments_of(make_linear(LinearShape(n=8, k=72), pair))
    x = make_input(5, 72)
    real = ops.quantize_act_lora(x, parts, spec)
    meta = ops.quantize_act_lora(x.to("meta"), [part.to("meta") for part in parts], spec)
    for ours, fake in zip(real, meta, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (fake.shape, fake.dtype, fake.stride())


def test_outputs_do_not_alias_the_record() -> None:
    linear = make_linear(LinearShape(n=8, k=72), ("nvfp4", "nvfp4_static"))
    assert linear.activation_global_scale is not None
    parts, spec = arguments_of(linear)
    global_scale = ops.quantize_act_lora(make_input(2, 72), parts, spec)[2]
    global_scale.zero_()
    assert linear.activation_global_scale.item() != 0


def test_x_of_a_wrong_shape_or_dtype_is_named() -> None:
    parts, spec = arguments_of(make_linear(LinearShape(n=8, k=72)))
    for op in (ops.w4a4_linear, ops.quantize_act_lora):
        with pytest.raises(FormatError, match=r"x: shape \(2, 73\), wanted \[M, 72\]"):
            op(make_input(2, 73), parts, spec)
        with pytest.raises(FormatError, match=r"x: dtype torch\.float64"):
            op(make_input(2, 72).double(), parts, spec)
        with pytest.raises(FormatError, match=r"x: dtype torch\.int64"):
            op(make_input(2, 72).long(), parts, spec)
    act = list(ops.quantize_act_lora(make_input(2, 72), parts, spec))
    with pytest.raises(FormatError, match=r"out_dtype: dtype torch\.float64"):
        ops.gemm_w4a4(act, parts, spec, torch.float64)
    with pytest.raises(FormatError, match="act: 3 tensors"):
        ops.gemm_w4a4(act[:3], parts, spec, torch.float32)


def test_weight_only_has_no_quantized_activation() -> None:
    parts, spec = arguments_of(make_linear(LinearShape(n=8, k=72), ("nvfp4", None)))
    with pytest.raises(FormatError, match="weight-only"):
        ops.quantize_act_lora(make_input(2, 72), parts, spec)
    with pytest.raises(FormatError, match="weight-only"):
        ops.gemm_w4a4([torch.empty(0)] * 4, parts, spec, torch.float32)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nvfp4", "linear spec 'nvfp4'"),
        ("nvfp4/none/x", "linear spec"),
        ("fp4/none/72", "format 'fp4' is unknown"),
        ("nvfp4/int3/72", "activation format 'int3' is unknown"),
    ],
)
def test_a_bad_spec_is_named(spec: str, message: str) -> None:
    parts, _ = arguments_of(make_linear(LinearShape(n=8, k=72)))
    with pytest.raises(FormatError, match=message):
        ops.w4a4_linear(make_input(2, 72), parts, spec)


def test_bytes_of_another_format_are_refused() -> None:
    parts, _ = arguments_of(make_linear(LinearShape(n=8, k=64), ("int4", "int4")))
    with pytest.raises(FormatError, match=r"nvfp4 scales: dtype torch.float16, wanted torch.uint8"):
        ops.w4a4_linear(make_input(2, 64), parts, "nvfp4/nvfp4_nunchaku/64")
    with pytest.raises(FormatError, match="8 tensors, wanted 9"):
        ops.w4a4_linear(make_input(2, 64), parts[:8], "int4/int4/64")


def test_spec_round_trips() -> None:
    for pair in FORMAT_PAIRS:
        spec = ops.make_spec(make_linear(LinearShape(n=8, k=72), pair))
        assert ops.decode_spec(spec.encode()) == spec


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_nan_or_inf_in_x_spoils_its_row_and_no_other(
    pair: tuple[str, str | None], value: float
) -> None:
    linear = make_linear(LinearShape(n=8, k=72), pair)
    x = make_input(3, 72)
    x[1, 71] = 1000.0  # largest of all and inside the spoilt block: a dynamic scale still sees it
    wanted = ops.w4a4_linear(x, *arguments_of(linear))
    x[1, 70] = value
    y = ops.w4a4_linear(x, *arguments_of(linear))
    assert not torch.isfinite(y[1]).any()
    assert torch.equal(y[::2], wanted[::2])
    assert not np.isfinite(w4a4_linear(x, linear)[1]).any()
    if pair[1] is None:
        return
    assert y[1].isnan().all()
    codes, scales, _, _ = ops.quantize_act_lora(x, *arguments_of(linear))
    reference = quantize_act_lora(x, linear)
    np.testing.assert_array_equal(unpack_codes(read_bytes(codes), 4), reference.codes)
    if reference.scale_bytes is not None:
        np.testing.assert_array_equal(scales.numpy(), reference.scale_bytes)
    else:
        np.testing.assert_array_equal(scales.double().numpy(), reference.scales)


def test_a_device_without_kernel_is_named_with_what_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    message = (
        r"NVIDIA L40S \(sm_89\): this kernel does not exist yet .*backend runs it: .to\('cpu'\)"
    )
    with pytest.raises(UnsupportedHardwareError, match=message):
        checks.check_device("w4a4_linear", torch.device("cuda", 0), [])
    with pytest.raises(FormatError, match="weight_data is on cpu, x on cuda:0"):
        checks.check_device("w4a4_linear", torch.device("cuda", 0), [torch.empty(1)])
