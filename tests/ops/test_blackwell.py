"""The ops on the Blackwell kernels, by way of virtual GPUs: numbers, layouts, named refusals."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import halfbyte.virtual
from halfbyte import ops
from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.kernels.gemm_w4a4.placed_arithmetic import measure_column_error, multiply_in_torch
from tests.kernels.gemm_w4a4.published import (
    make_published,
    multiply_published,
    multiply_published_in_torch,
)
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id
from tests.tolerance import assert_close_to_reference, measure_error

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
BACKEND = "virtual-b200"
M, N, K = 70, 40, 200
SHAPE = LinearShape(n=N, k=K, rank=20, dtype=torch.bfloat16)
DYNAMIC = ("nvfp4", "nvfp4_dynamic")


def arguments_of(linear: QuantizedLinear) -> tuple[list[torch.Tensor], str]:
    return ops.list_parts(linear), ops.make_spec(linear).encode()


def make_lively_linear(
    pair: tuple[str, str | None] = FORMAT_PAIRS[0], shape: LinearShape = SHAPE
) -> QuantizedLinear:
    """Return a linear whose low-rank branch is about as large as its 4-bit product."""
    linear = make_linear(shape, pair)
    if linear.lora_down is None or linear.lora_up is None:
        return linear
    return dataclasses.replace(linear, lora_down=linear.lora_down / 4, lora_up=linear.lora_up / 4)


@pytest.fixture
def b200() -> Iterator[halfbyte.virtual.cuda]:
    """Return a session in which "cuda" is a virtual B200."""
    with halfbyte.virtual.cuda("b200") as gpu:
        yield gpu


@needs_virtual_gpu
@pytest.mark.parametrize("pair", FORMAT_PAIRS[:5], ids=pair_id)
def test_every_format_matches_the_reference(pair: tuple[str, str | None]) -> None:
    linear = make_lively_linear(pair)
    x = make_input(M, K, torch.bfloat16)
    y = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    assert y.device.type == "cpu"
    assert y.is_contiguous()
    assert_close_to_reference(y, x, linear)
    act = list(ops.quantize_act_lora(x, *arguments_of(linear), BACKEND))
    assert torch.equal(ops.gemm_w4a4(act, *arguments_of(linear), torch.bfloat16, BACKEND), y)


@needs_virtual_gpu
def test_float16_without_optional_parts_and_with_an_odd_number_of_features() -> None:
    bare = LinearShape(n=41, k=K, rank=0, parts=False, dtype=torch.float16)
    linear = make_lively_linear(shape=bare)
    x = make_input(M, K, torch.float16)
    y = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    assert tuple(y.shape) == (M, 41)
    assert y.is_contiguous()
    assert_close_to_reference(y, x, linear)


@needs_virtual_gpu
def test_a_b300_gives_the_bits_of_a_b200() -> None:
    linear = make_lively_linear()
    x = make_input(M, K, torch.bfloat16)
    wanted = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    assert torch.equal(ops.w4a4_linear(x, *arguments_of(linear), "virtual-b300"), wanted)


@needs_virtual_gpu
def test_strides_and_offsets_of_x_change_no_bit() -> None:
    linear = make_lively_linear()
    wide = make_input(M, 2 * K + 1, torch.bfloat16)
    wide[:, 2 * K :] = float("nan")  # what lies beside the slices must not be read
    narrow = make_input(K, M, torch.bfloat16)
    views = {
        "row stride": wide[:, :K],
        "odd offset": wide[:, 1 : K + 1],
        "columns apart": wide[:, : 2 * K : 2],
        "transposed": narrow.t(),
        "one row": narrow.t()[:1].expand(M, K),
    }
    for name, x in views.items():
        wanted = ops.w4a4_linear(x.contiguous(), *arguments_of(linear), BACKEND)
        assert torch.equal(ops.w4a4_linear(x, *arguments_of(linear), BACKEND), wanted), name


@needs_virtual_gpu
def test_cuda_tensors_of_a_session_run_on_its_gpu(b200: halfbyte.virtual.cuda) -> None:
    linear = make_lively_linear(DYNAMIC)
    parts, spec = arguments_of(linear)
    x = make_input(M, K, torch.bfloat16)
    wanted = ops.w4a4_linear(x, parts, spec, BACKEND)
    start = len(b200.log)
    on_gpu = [part.cuda() for part in parts]
    y = ops.w4a4_linear(x.cuda(), on_gpu, spec)
    assert y.is_cuda
    assert torch.equal(y.cpu(), wanted)
    assert len(b200.log) == start + 3  # amax, quantize, multiply
    assert not [one for record in b200.log for one in record.findings if not one.is_note]
    with pytest.raises(FormatError, match="weight_data is on cpu, x on cuda:0"):
        ops.w4a4_linear(x.cuda(), parts, spec)
    with pytest.raises(FormatError, match=r"backend 'cpu' takes tensors on the cpu.*on cuda:0"):
        ops.w4a4_linear(x.cuda(), on_gpu, spec, "cpu")


@needs_virtual_gpu
def test_another_gpu_is_named_with_what_runs_instead() -> None:
    parts, spec = arguments_of(make_lively_linear())
    x = make_input(M, K, torch.bfloat16)
    message = r"RTX 5090 \(sm_120\): .* sm_103a, sm_90a\); the cpu backend runs it: .to\('cpu'\)"
    with halfbyte.virtual.cuda("rtx5090"):
        on_gpu = [part.cuda() for part in parts]
        with pytest.raises(UnsupportedHardwareError, match=message):
            ops.w4a4_linear(x.cuda(), on_gpu, spec)


@needs_virtual_gpu
@pytest.mark.parametrize("pair", [FORMAT_PAIRS[0], DYNAMIC], ids=pair_id)
def test_fakes_agree_with_the_kernels(pair: tuple[str, str | None]) -> None:
    parts, spec = arguments_of(make_lively_linear(pair))
    x = make_input(M, K, torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.halfbyte
    torch.library.opcheck(op.w4a4_linear.default, (x, parts, spec, BACKEND), test_utils=checks)
    torch.library.opcheck(
        op.quantize_act_lora.default, (x, parts, spec, BACKEND), test_utils=checks
    )
    act = list(ops.quantize_act_lora(x, parts, spec, BACKEND))
    arguments = (act, parts, spec, x.dtype, BACKEND)
    torch.library.opcheck(op.gemm_w4a4.default, arguments, test_utils=checks)


@needs_virtual_gpu
@pytest.mark.parametrize("pair", [FORMAT_PAIRS[0], FORMAT_PAIRS[2], DYNAMIC], ids=pair_id)
@pytest.mark.parametrize("size", [(0, 40, 64), (3, 0, 64), (3, 40, 0)], ids=["m0", "n0", "k0"])
def test_empty_products_need_no_launch(
    pair: tuple[str, str | None], size: tuple[int, int, int]
) -> None:
    m, n, k = size
    linear = make_linear(LinearShape(n=n, k=k, rank=5), pair)
    arguments = arguments_of(linear)
    x = make_input(m, k, torch.bfloat16)
    act = list(ops.quantize_act_lora(x, *arguments, BACKEND)) if n else None
    y = ops.w4a4_linear(x, *arguments, BACKEND)
    assert (tuple(y.shape), y.dtype) == ((m, n), torch.bfloat16)
    if k == 0:
        assert linear.bias is not None
        assert torch.equal(y, linear.bias.to(torch.bfloat16).expand(m, n))
    if act is not None:
        assert torch.equal(ops.gemm_w4a4(act, *arguments, torch.bfloat16, BACKEND), y)


def test_float32_is_refused_with_the_fix() -> None:
    arguments = arguments_of(make_lively_linear())
    x = make_input(M, K)
    for op in (ops.w4a4_linear, ops.quantize_act_lora):
        with pytest.raises(
            FormatError, match=r"x: dtype torch.float32; the GPU kernels .*bfloat16\)"
        ):
            op(x, *arguments, BACKEND)
    act = [torch.empty(0)] * 4
    with pytest.raises(FormatError, match=r"out_dtype: dtype torch.float32; .*or use the cpu"):
        ops.gemm_w4a4(act, *arguments, torch.float32, BACKEND)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("int4", "int4"), r"no INT4 kind; the cpu backend runs it: .to\('cpu'\)"),
        (("nvfp4", None), "weight-only nvfp4"),
    ],
)
def test_formats_without_an_mma_are_refused(pair: tuple[str, str | None], message: str) -> None:
    x = make_input(M, K, torch.bfloat16)
    with pytest.raises(UnsupportedHardwareError, match=message):
        ops.w4a4_linear(x, *arguments_of(make_lively_linear(pair)), BACKEND)


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("gpu", UsageError, "backend 'gpu' is unknown; choose one of auto, cpu, virtual-b200"),
        ("virtual-h100", UsageError, "backend 'virtual-h100' is unknown"),
        ("virtual-rtx5090", UnsupportedHardwareError, "the kernel for sm_120a does not exist yet"),
    ],
)
def test_backends_that_are_not_there_are_named(
    backend: str, error: type[Exception], message: str
) -> None:
    arguments = arguments_of(make_lively_linear())
    x = make_input(M, K, torch.bfloat16)
    with pytest.raises(error, match=message):
        ops.w4a4_linear(x, *arguments, backend)
    with pytest.raises(error, match=message):
        ops.w4a4_linear(
            x.to("meta"), [part.to("meta") for part in arguments[0]], arguments[1], backend
        )


def test_the_cpu_backend_by_name_is_the_one_chosen_by_itself() -> None:
    arguments = arguments_of(make_lively_linear())
    x = make_input(M, K)
    assert torch.equal(ops.w4a4_linear(x, *arguments, "cpu"), ops.w4a4_linear(x, *arguments))


@needs_virtual_gpu
def test_activations_of_another_layout_are_named() -> None:
    arguments = arguments_of(make_lively_linear())
    x = make_input(M, K, torch.bfloat16)
    on_cpu = list(ops.quantize_act_lora(x, *arguments))
    with pytest.raises(FormatError, match=r"act lora_act: dtype torch.float32"):
        ops.gemm_w4a4(on_cpu, *arguments, torch.bfloat16, BACKEND)
    act = list(ops.quantize_act_lora(x, *arguments, BACKEND))
    for index, name in ((0, "codes"), (1, "sf"), (3, "lora_act")):
        wrong = list(act)
        wrong[index] = act[index][1:]
        with pytest.raises(FormatError, match=rf"act {name}: .*what quantize_act_lora returns"):
            ops.gemm_w4a4(
                wrong if index else [act[0][:, 1:], *act[1:]], *arguments, x.dtype, BACKEND
            )


@needs_virtual_gpu
def test_activations_at_odd_addresses_give_the_same_bits() -> None:
    arguments = arguments_of(make_lively_linear())
    act = ops.quantize_act_lora(make_input(M, K, torch.bfloat16), *arguments, BACKEND)
    wanted = ops.gemm_w4a4(list(act), *arguments, torch.bfloat16, BACKEND)
    odd = [part.new_zeros(part.numel() + 1)[1:].view(part.shape).copy_(part) for part in act]
    assert torch.equal(ops.gemm_w4a4(odd, *arguments, torch.bfloat16, BACKEND), wanted)


@needs_virtual_gpu
def test_a_spoilt_row_stays_alone() -> None:
    linear = make_lively_linear()
    x = make_input(M, K, torch.bfloat16)
    wanted = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    x[3, 77] = float("nan")
    y = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    assert bool(y[3].isnan().all())
    assert torch.equal(y[:3], wanted[:3])
    assert torch.equal(y[4:], wanted[4:])


@needs_virtual_gpu
def test_published_operands_give_their_product() -> None:
    published = make_published(M)
    wanted = multiply_published(published)
    y = ops.gemm_published(published, torch.bfloat16, BACKEND)
    assert (y.dtype, y.is_contiguous()) == (torch.bfloat16, True)
    in_torch = multiply_published_in_torch(published, torch.bfloat16)
    assert measure_error(y, wanted) <= 2 * measure_error(in_torch, wanted)


def test_published_operands_need_a_blackwell_kernel() -> None:
    with pytest.raises(UnsupportedHardwareError, match=r"or name backend 'virtual-b200'"):
        ops.gemm_published(make_published(), torch.bfloat16)
    with pytest.raises(FormatError, match=r"out_dtype: dtype torch.float32"):
        ops.gemm_published(make_published(), torch.float32, BACKEND)


def with_factors(linear: QuantizedLinear, alpha: float, channel_scale: torch.Tensor) -> Any:
    """Return `linear` with another weight global scale and channel scale."""
    weight = dataclasses.replace(linear.weight, global_scale=torch.tensor(alpha))
    return dataclasses.replace(linear, weight=weight, channel_scale=channel_scale)


@needs_virtual_gpu
def test_extreme_factors_come_out_right_in_float16() -> None:
    shape = LinearShape(n=N, k=K, rank=20, dtype=torch.float16)
    linear = make_lively_linear(shape=shape)
    assert linear.channel_scale is not None
    scale = linear.channel_scale
    with_zeros = torch.where(torch.arange(N) % 7 == 3, 0.0, scale)
    x = make_input(M, K, torch.float16)
    for name, alpha, channel_scale in (
        ("small alpha", 2.0**-20, scale),
        ("large alpha", 2.0**20, scale * 2.0**-18),  # y itself fits float16
        ("zeros", 2.0**-5, with_zeros),
        ("zeros beside a small alpha", 2.0**-20, with_zeros),
        ("mixed", 2.0**-5, torch.linspace(-8, 8, N).exp2()),
    ):
        given = with_factors(linear, alpha, channel_scale)
        y = ops.w4a4_linear(x, *arguments_of(given), BACKEND)
        limit = 2 * measure_column_error(multiply_in_torch(x, given), x, given)
        assert measure_column_error(y, x, given) <= limit, name


@needs_virtual_gpu
def test_a_captured_graph_replays_the_linear(b200: halfbyte.virtual.cuda) -> None:
    linear = make_lively_linear()
    parts, spec = arguments_of(linear)
    parts = [part.cuda() for part in parts]
    first, second = (make_input(M, K, torch.bfloat16, seed).cuda() for seed in (0, 1))
    wanted = [ops.w4a4_linear(x, parts, spec).cpu() for x in (first, second)]
    x = first.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.w4a4_linear(x, parts, spec)
    for given, result in zip((first, second), wanted, strict=True):
        x.copy_(given)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y.cpu(), result)


@needs_virtual_gpu
@pytest.mark.parametrize("m", [1, 33])
def test_few_rows_take_the_kernel_for_few_tokens(m: int) -> None:
    linear = make_lively_linear()
    x = make_input(m, K, torch.bfloat16)
    y = ops.w4a4_linear(x, *arguments_of(linear), BACKEND)
    assert_close_to_reference(y, x, linear)
