"""The product that ends as the next layer's input: bytes, numbers, layouts, refusals, compilers."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import halfbyte.virtual
from halfbyte import ops
from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.input_rule import InputRule
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.kernels.gemm_w4a4.config import ACTIVATIONS as KERNEL_ACTIVATIONS
from halfbyte.ops.blackwell import BlackwellPlacer
from halfbyte.ops.placed_linears import find_placed
from halfbyte.reference import apply_activation, quantize_act_lora, w4a4_linear
from halfbyte.reference.decode import read_bytes, read_floats, unpack_codes
from halfbyte.reference.quantize_act_lora import quantize_input
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.kernels.gemm_w4a4.operands import list_scale_offsets
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear
from tests.tolerance import measure_error, run_in_torch

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
VIRTUAL = "virtual-b200"
BACKENDS = ["cpu", pytest.param(VIRTUAL, marks=needs_virtual_gpu)]
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda values: values,
    "gelu": functional.gelu,
    "gelu_tanh": lambda values: functional.gelu(values, approximate="tanh"),
    "silu": functional.silu,
}
NVFP4 = FORMAT_PAIRS[0]
M, N, K, NEXT_N = 70, 72, 200, 24


@dataclass(frozen=True)
class Chain:
    """Two linears after one another, and the call of the first.

    Attributes:
        first: formats of the first linear. after: activation format of the second.
        function: between them. n: output features of the first.
        dtype: of x, y and the optional parts. parts: whether both linears have them.
    """

    first: tuple[str, str | None] = NVFP4
    after: str = "nvfp4_static"
    function: str = "silu"
    n: int = N
    dtype: torch.dtype = torch.bfloat16
    parts: bool = True

    def make_first(self, rank: int = 20, k: int = K) -> QuantizedLinear:
        """Return the first linear, whose outputs are neither all large nor all small."""
        shape = LinearShape(self.n, k, rank, self.parts, self.dtype)
        linear = make_linear(shape, self.first)
        if linear.lora_down is None or linear.lora_up is None:
            return linear
        down, up = linear.lora_down / 8, linear.lora_up / 8
        return dataclasses.replace(linear, lora_down=down, lora_up=up)

    def make_next(self, rank: int = 0) -> QuantizedLinear:
        """Return the second linear."""
        shape = LinearShape(NEXT_N, self.n, rank, self.parts, self.dtype)
        weight = {"mxfp4": "mxfp4", "int4": "int4", "uint4_shifted": "int4"}.get(
            self.after, "nvfp4"
        )
        linear = make_linear(shape, (weight, self.after), seed=7)
        if linear.activation_global_scale is None:
            return linear
        return dataclasses.replace(linear, activation_global_scale=torch.tensor(0.021))


# Odd N, N of no whole word, both with and without each part; each is one compiled kernel.
CHAINS = {
    "static": Chain(),
    "one level": Chain(NVFP4, "nvfp4_one_level", "none", 41, torch.float16, parts=False),
    "unrounded after mxfp4": Chain(FORMAT_PAIRS[4], "nvfp4_nunchaku", "gelu", 136),
}
CPU_CHAINS = {
    "dynamic before": Chain(("nvfp4", "nvfp4_dynamic"), "nvfp4_one_level", "gelu_tanh", N),
    "dynamic": Chain(after="nvfp4_dynamic", n=41),
    "mxfp4": Chain(after="mxfp4", dtype=torch.float32),
    "int4": Chain(("int4", "int4"), "int4", n=64),
    "shifted": Chain(("int4", "int4"), "uint4_shifted", "gelu", n=64),
}
CASES = [
    pytest.param(chain, "cpu", id=f"{name}-cpu") for name, chain in (CHAINS | CPU_CHAINS).items()
] + [
    pytest.param(chain, VIRTUAL, id=f"{name}-virtual", marks=needs_virtual_gpu)
    for name, chain in CHAINS.items()
]


def arguments_of(linear: QuantizedLinear) -> tuple[list[torch.Tensor], str]:
    return ops.list_parts(linear), ops.make_spec(linear).encode()


def next_of(chain: Chain, output: str = "both") -> tuple[list[torch.Tensor], str]:
    linear = chain.make_next()
    return ops.list_next_parts(linear), ops.make_next_spec(linear, chain.function, output).encode()


def list_arguments(
    chain: Chain, backend: str, m: int = M, output: str = "both", **sizes: int
) -> tuple[Any, ...]:
    """Return the op's arguments for random x [m, K]."""
    linear = chain.make_first(**sizes)
    x = make_input(m, linear.in_features, chain.dtype)
    parts, spec = arguments_of(linear)
    act = list(ops.quantize_act_lora(x, parts, spec, backend))
    return (act, parts, spec, *next_of(chain, output), chain.dtype, backend)


@cache
def run(chain: Chain, backend: str, m: int = M, output: str = "both") -> tuple[torch.Tensor, ...]:
    """Return the op's outputs; what several tests look at is computed once."""
    return tuple(ops.gemm_w4a4_quantized(*list_arguments(chain, backend, m, output)))


def assert_bytes_are_the_references(
    y: torch.Tensor, outputs: tuple[torch.Tensor, ...], chain: Chain, backend: str
) -> None:
    """Compare codes and scales with what the reference makes of this y, padding included."""
    m = y.shape[0]
    codes, scales, global_scale = outputs[:3]
    wanted = quantize_input(read_floats(y), InputRule.from_linear(chain.make_next()))
    found = unpack_codes(read_bytes(codes), 4)
    np.testing.assert_array_equal(found[:, : wanted.codes.shape[1]], wanted.codes)
    assert not found[:, wanted.codes.shape[1] :].any()
    assert global_scale.tolist() in ([], wanted.global_scale)
    if wanted.scale_bytes is None:
        np.testing.assert_array_equal(scales.double().numpy(), wanted.scales)
        return
    wanted_scales = wanted.scale_bytes
    if backend == VIRTUAL:
        blocks = wanted_scales.shape[1]
        wanted_scales = np.zeros(-(-m // 128) * -(-blocks // 4) * 512, dtype=np.uint8)
        wanted_scales[list_scale_offsets(np.arange(m), blocks)] = wanted.scale_bytes
    np.testing.assert_array_equal(scales.numpy(), wanted_scales)


@pytest.mark.parametrize("m", [3, M])
@pytest.mark.parametrize(("chain", "backend"), CASES)
def test_bytes_are_the_references_for_its_own_y(chain: Chain, backend: str, m: int) -> None:
    y, *outputs = run(chain, backend, m)
    assert (tuple(y.shape), y.dtype, y.is_contiguous()) == ((m, chain.n), chain.dtype, True)
    assert bool(y.isfinite().all())
    assert_bytes_are_the_references(y, tuple(outputs), chain, backend)


@pytest.mark.parametrize(("chain", "backend"), CASES)
def test_y_is_as_close_as_the_layer_in_torch(chain: Chain, backend: str) -> None:
    linear = chain.make_first()
    x = make_input(M, K, chain.dtype)
    y = run(chain, backend)[0]
    wanted = apply_activation(w4a4_linear(x, linear), chain.function)
    in_torch = FUNCTIONS[chain.function](run_in_torch(x, linear))
    assert measure_error(y, wanted) <= 2 * measure_error(in_torch, wanted)


@pytest.mark.parametrize(("chain", "backend"), CASES)
def test_outputs_are_those_of_quantizing_y_for_the_next_layer(chain: Chain, backend: str) -> None:
    y, *outputs = run(chain, backend)
    wanted = ops.quantize_act_lora(y, *arguments_of(chain.make_next()), backend)
    for ours, other in zip(outputs, wanted, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(ours, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rank", [0, 20])
def test_the_next_layer_takes_them(rank: int, backend: str) -> None:
    chain = CHAINS["static"]
    y, *act = run(chain, backend)
    after = chain.make_next(rank)
    arguments = arguments_of(after)
    if rank:
        act[3] = ops.project_lora(y, *arguments, backend)
    result = ops.gemm_w4a4(act, *arguments, chain.dtype, backend)
    wanted = w4a4_linear(y, after)
    assert measure_error(result, wanted) <= 2 * measure_error(run_in_torch(y, after), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_projection_is_that_of_the_quantizing_op(dtype: torch.dtype, backend: str) -> None:
    chain = Chain(dtype=dtype, n=N + 3)
    linear = chain.make_next(20)
    parts, spec = arguments_of(linear)
    assert linear.lora_down is not None
    y = make_input(2 * M, N + 3, dtype)[::2]
    lora_act = ops.project_lora(y, parts, spec, backend)
    other = ops.quantize_act_lora(y, parts, spec, backend)[3]
    assert (lora_act.shape, lora_act.dtype) == (other.shape, other.dtype)
    assert lora_act.is_contiguous()
    exact = quantize_act_lora(y, linear).lora_act
    assert exact is not None
    if backend == VIRTUAL:  # times a power of two that the placement has chosen
        factor = find_placed(parts, ops.decode_spec(spec), BlackwellPlacer(dtype)).lora_act_scale
        exact = np.pad(exact * factor, ((0, 0), (0, 4)))
    in_torch = (y.to(lora_act.dtype) @ linear.lora_down.to(lora_act.dtype).T).double().numpy()
    scaled = in_torch if backend == "cpu" else np.pad(in_torch * factor, ((0, 0), (0, 4)))
    assert measure_error(lora_act, exact) <= 2 * measure_error(torch.from_numpy(scaled), exact)
    checks = ("test_schema", "test_faketensor")
    for m in (0, 3):
        call = (make_input(m, N + 3, dtype), parts, spec, backend)
        torch.library.opcheck(torch.ops.halfbyte.project_lora.default, call, test_utils=checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_projection_of_rank_0_is_empty(backend: str) -> None:
    arguments = arguments_of(Chain().make_next())
    y = make_input(3, N, torch.bfloat16)
    ours = ops.project_lora(y, *arguments, backend)
    other = ops.quantize_act_lora(y, *arguments, backend)[3]
    assert (ours.shape, ours.dtype) == (other.shape, other.dtype)


def test_projection_refuses_what_it_cannot_know() -> None:
    y = make_input(3, N, torch.bfloat16)
    dynamic = arguments_of(Chain(after="nvfp4_dynamic").make_next(20))
    with pytest.raises(UnsupportedHardwareError, match=r"lora_act is divided by .*call that"):
        ops.project_lora(y, *dynamic, VIRTUAL)
    assert tuple(ops.project_lora(y, *dynamic, "cpu").shape) == (3, 20)
    weight_only = arguments_of(make_linear(LinearShape(8, N), ("nvfp4", None)))
    with pytest.raises(FormatError, match="weight-only"):
        ops.project_lora(y, *weight_only)
    with pytest.raises(FormatError, match=r"x: shape \(3, 71\)"):
        ops.project_lora(y[:, 1:], *dynamic)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_do_not_depend_on_whether_y_is_written(backend: str) -> None:
    chain = CHAINS["static"]
    _, *both = run(chain, backend)
    y, *alone = run(chain, backend, output="codes")
    assert (tuple(y.shape), y.dtype) == ((0,), chain.dtype)
    assert all(torch.equal(one, other) for one, other in zip(alone, both, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [(0, N, K), (3, 0, K), (3, N, 0)], ids=["m0", "n0", "k0"])
def test_empty_products(size: tuple[int, int, int], backend: str) -> None:
    m, n, k = size
    chain = dataclasses.replace(CHAINS["static"], n=n)
    y, *outputs = ops.gemm_w4a4_quantized(*list_arguments(chain, backend, m, k=k))
    assert tuple(y.shape) == (m, n)
    assert_bytes_are_the_references(y, tuple(outputs), chain, backend)
    if k == 0:  # the bias alone, as the function leaves it
        bias = chain.make_first(k=0).bias
        assert bias is not None
        wanted = apply_activation(bias.double().numpy(), chain.function)
        in_torch = functional.silu(bias)
        assert measure_error(y[0], wanted) <= 2 * measure_error(in_torch, wanted)
        assert torch.equal(y, y[:1].expand(m, n))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_spoilt_row_stays_alone(backend: str) -> None:
    chain = CHAINS["static"]
    linear = chain.make_first()
    x = make_input(M, K, chain.dtype)

    x[3, 77] = float("nan")
    act = list(ops.quantize_act_lora(x, *arguments_of(linear), backend))
    call = (act, *arguments_of(linear), *next_of(chain), chain.dtype, backend)
    spoilt = tuple(ops.gemm_w4a4_quantized(*call))
    whole = run(chain, backend)
    others = torch.arange(M) != 3
    assert bool(spoilt[0][3].isnan().all())
    assert not spoilt[1][3].any()
    for ours, wanted in zip(spoilt[:2], whole[:2], strict=True):
        assert torch.equal(ours[others], wanted[others])
    assert_bytes_are_the_references(spoilt[0], spoilt[1:], chain, backend)


@pytest.mark.parametrize(("chain", "backend"), CASES)
def test_fakes_agree_with_what_runs(chain: Chain, backend: str) -> None:
    torch.library.opcheck(
        torch.ops.halfbyte.gemm_w4a4_quantized.default,
        list_arguments(chain, backend, output="codes" if chain.n == N else "both"),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("m", [0, 1, 5])
def test_opcheck_passes(m: int) -> None:
    arguments = list_arguments(CHAINS["static"], "cpu", m)
    torch.library.opcheck(torch.ops.halfbyte.gemm_w4a4_quantized.default, arguments)
    torch.library.opcheck(
        torch.ops.halfbyte.gemm_w4a4.default, (*arguments[:3], torch.bfloat16, "cpu", "gelu")
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_layers_compile_to_one_graph_of_any_number_of_rows(backend: str) -> None:
    torch._dynamo.reset()
    chain = CHAINS["static"]
    first, after = arguments_of(chain.make_first()), arguments_of(chain.make_next())
    handed_on = next_of(chain, "codes")

    def run_both(x: torch.Tensor) -> torch.Tensor:
        act = list(torch.ops.halfbyte.quantize_act_lora(x, *first, backend))
        call = (act, *first, *handed_on, x.dtype, backend)
        _, *act = torch.ops.halfbyte.gemm_w4a4_quantized(*call)
        return torch.ops.halfbyte.gemm_w4a4(act, *after, x.dtype, backend)  # type: ignore[no-any-return]

    compiled = torch.compile(run_both, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (5, 17):
        x = make_input(m, K, chain.dtype)
        assert torch.equal(compiled(x), run_both(x))


def test_outputs_alias_no_input() -> None:
    call = list_arguments(CHAINS["static"], "cpu")
    global_scale = ops.gemm_w4a4_quantized(*call)[3]
    global_scale.zero_()
    assert call[3][1].item() != 0


@pytest.mark.parametrize(
    ("function", "backend"),
    [
        ("gelu", "cpu"),
        ("gelu_tanh", "cpu"),
        ("silu", "cpu"),
        pytest.param("silu", VIRTUAL, marks=needs_virtual_gpu),
    ],
)
def test_functions_follow_the_product_alone_too(function: str, backend: str) -> None:
    linear = CHAINS["static"].make_first()
    # gelu and gelu_tanh differ by less than bfloat16 can tell
    dtype = torch.float32 if backend == "cpu" else torch.bfloat16
    x = make_input(M, K, dtype)
    arguments = arguments_of(linear)
    y = ops.w4a4_linear(x, *arguments, backend, function)
    wanted = apply_activation(w4a4_linear(x, linear), function)
    in_torch = FUNCTIONS[function](run_in_torch(x, linear))
    assert measure_error(y, wanted) <= 2 * measure_error(in_torch, wanted)
    act = list(ops.quantize_act_lora(x, *arguments, backend))
    assert torch.equal(ops.gemm_w4a4(act, *arguments, x.dtype, backend, function), y)
    few = ops.w4a4_linear(x[:3], *arguments, backend, function)
    assert measure_error(few, wanted[:3]) <= 2 * measure_error(in_torch, wanted)
    bias_alone = make_linear(LinearShape(N, 0, dtype=dtype), NVFP4)
    assert bias_alone.bias is not None
    y = ops.w4a4_linear(x[:2, :0], *arguments_of(bias_alone), backend, function)
    exact = apply_activation(bias_alone.bias.double().numpy(), function)
    in_torch = FUNCTIONS[function](bias_alone.bias)
    assert measure_error(y[1], exact) <= 2 * measure_error(in_torch, exact)


def test_a_weight_only_layer_ends_with_a_function_too() -> None:
    linear = make_linear(LinearShape(n=40, k=K, dtype=torch.bfloat16), ("nvfp4", None))
    x = make_input(9, K, torch.bfloat16)
    y = ops.w4a4_linear(x, *arguments_of(linear), "cpu", "silu")
    wanted = apply_activation(w4a4_linear(x, linear), "silu")
    in_torch = functional.silu(run_in_torch(x, linear))
    assert y.dtype == torch.bfloat16
    assert measure_error(y, wanted) <= 2 * measure_error(in_torch, wanted)


def test_the_cpu_backend_has_the_functions_of_the_kernel() -> None:
    from halfbyte.cpu.gemm_w4a4 import ACTIVATIONS

    assert tuple(ACTIVATIONS) == KERNEL_ACTIVATIONS


@pytest.mark.parametrize("on_meta", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize(
    ("after", "message"),
    [
        (
            "nvfp4_dynamic",
            r"'nvfp4_dynamic': its global scale is the largest .*quantize_act_lora on",
        ),
        ("int4", r"next activation 'int4': the epilogue writes nvfp4_one_level.*cpu backend"),
        ("mxfp4", r"next activation 'mxfp4': the epilogue writes nvfp4_one_level"),
    ],
)
def test_next_layers_that_the_epilogue_cannot_serve_are_refused(
    after: str, message: str, on_meta: bool
) -> None:
    act, parts, spec, *_ = list_arguments(Chain(), "cpu")
    handed_on = next_of(Chain(after=after, n=N if after != "int4" else 64))
    if on_meta:
        act, parts = ([one.to("meta") for one in group] for group in (act, parts))
        handed_on = ([one.to("meta") for one in handed_on[0]], handed_on[1])
    if after == "int4":  # its smooth has 64 factors
        handed_on = ([parts[8].new_empty(0)] * 2, handed_on[1])
    with pytest.raises(UnsupportedHardwareError, match=message):
        ops.gemm_w4a4_quantized(act, parts, spec, *handed_on, torch.bfloat16, VIRTUAL)


def test_int4_weights_are_refused_on_blackwell() -> None:
    act, parts, spec, *_ = list_arguments(Chain(("int4", "int4")), "cpu")
    act[3] = act[3].bfloat16()
    with pytest.raises(UnsupportedHardwareError, match=r"no INT4 kind; the cpu backend runs it"):
        ops.gemm_w4a4_quantized(act, parts, spec, *next_of(Chain()), torch.bfloat16, VIRTUAL)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gelu/nvfp4_static", r"next spec 'gelu/nvfp4_static': wanted '<function>/"),
        ("relu/nvfp4_static/both", "activation 'relu' is unknown; use one of: none, gelu"),
        ("gelu/nvfp5/both", "activation format 'nvfp5' is unknown"),
        (
            "gelu/nvfp4_static/y",
            r"output 'y', wanted .*for y alone call gemm_w4a4 with activation=",
        ),
    ],
)
def test_a_bad_next_spec_is_named(spec: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        ops.decode_next_spec(spec)


def test_next_parts_that_do_not_fit_are_named() -> None:
    *call, next_parts, next_spec, dtype, backend = list_arguments(Chain(), "cpu")
    smooth, scale = next_parts
    wrong = {
        r"next: 1 tensors, wanted next_smooth, next_global_scale": [smooth],
        r"next_smooth: shape \(71,\), wanted \[N\] = \[72\]": [smooth[1:], scale],
        r"smooth: torch.float64": [smooth.double(), scale],
        r"activation 'nvfp4_static' needs its global scale": [smooth, scale.new_empty(0)],
        r"global_scale: torch.float32 \(1,\)": [smooth, scale.reshape(1)],
        r"next_smooth is on meta, act codes on cpu": [smooth.to("meta"), scale],
    }
    for message, parts in wrong.items():
        with pytest.raises(FormatError, match=message):
            ops.gemm_w4a4_quantized(*call, parts, next_spec, dtype, backend)
    one_level = "none/nvfp4_one_level/codes"
    with pytest.raises(FormatError, match="takes no global scale"):
        ops.gemm_w4a4_quantized(*call, next_parts, one_level, dtype, backend)
    with pytest.raises(FormatError, match="the next linear is weight-only"):
        ops.make_next_spec(make_linear(LinearShape(8, N), ("nvfp4", None)))


def test_what_the_product_refuses_is_refused() -> None:
    act, parts, spec, *rest = list_arguments(Chain(), "cpu")
    with pytest.raises(FormatError, match="act: 3 tensors"):
        ops.gemm_w4a4_quantized(act[:3], parts, spec, *rest)
    with pytest.raises(UsageError, match="backend 'gpu' is unknown"):
        ops.gemm_w4a4_quantized(act, parts, spec, *rest[:-1], "gpu")
    with pytest.raises(FormatError, match=r"out_dtype: dtype torch.float32; the GPU kernels"):
        ops.gemm_w4a4_quantized(act, parts, spec, *rest[:2], torch.float32, VIRTUAL)
    with pytest.raises(FormatError, match="activation 'relu' is unknown"):
        ops.gemm_w4a4(act, parts, spec, torch.bfloat16, "cpu", "relu")
    with pytest.raises(FormatError, match="activation 'relu' is unknown"):
        ops.w4a4_linear(make_input(2, K), parts, spec, "cpu", "relu")


def test_next_specs_round_trip() -> None:
    for pair in FORMAT_PAIRS[:7]:
        for function in KERNEL_ACTIVATIONS:
            spec = ops.make_next_spec(make_linear(LinearShape(8, 64), pair), function, "both")
            assert ops.decode_next_spec(spec.encode()) == spec
            assert spec.activation_format is get_activation_format(pair[1] or "")


@needs_virtual_gpu
def test_cuda_tensors_of_a_session_stay_on_its_gpu() -> None:
    chain = CHAINS["static"]
    first, after = chain.make_first(), chain.make_next(20)
    next_parts, next_spec = next_of(chain)
    y, *act = run(chain, VIRTUAL)
    projected = ops.project_lora(y, *arguments_of(after), VIRTUAL)
    with halfbyte.virtual.cuda("b200") as gpu:
        parts, spec = arguments_of(first)
        parts = [part.cuda() for part in parts]
        start = list(ops.quantize_act_lora(make_input(M, K, chain.dtype).cuda(), parts, spec))
        before = len(gpu.log)
        on_gpu = [part.cuda() for part in next_parts]
        call = (start, parts, spec, on_gpu, next_spec, chain.dtype)
        outputs = ops.gemm_w4a4_quantized(*call)
        records = list(gpu.log)[before:]
        assert len(records) == 1
        assert not [one for one in records[0].findings if not one.is_note]
        assert all(one.is_cuda for one in outputs)
        for ours, wanted in zip(outputs, (y, *act), strict=True):
            assert torch.equal(ours.cpu(), wanted)
        after_parts = [part.cuda() for part in ops.list_parts(after)]
        lora_act = ops.project_lora(outputs[0], after_parts, ops.make_spec(after).encode())
        assert torch.equal(lora_act.cpu(), projected)
        with pytest.raises(FormatError, match=r"next_smooth is on cpu, act codes on cuda:0"):
            ops.gemm_w4a4_quantized(start, parts, spec, next_parts, next_spec, chain.dtype)


def test_schemas_have_at_most_eight_parameters() -> None:
    for name in ("gemm_w4a4_quantized", "gemm_w4a4", "w4a4_linear", "project_lora"):
        assert len(getattr(torch.ops.halfbyte, name).default._schema.arguments) <= 8
