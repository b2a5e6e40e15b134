"""The ops on the Hopper kernels, by way of a virtual H200: modes, layouts, named refusals."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import halfbyte.virtual
from halfbyte import ops
from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.ops import hopper
from halfbyte.ops.dense import DensePlacer
from halfbyte.ops.placed_linears import count_placed_bytes, find_placed
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.mode_tolerance import assert_close_to_mode
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
BACKEND = "virtual-h200"
M, N, K = 70, 40, 200
SHAPE = LinearShape(n=N, k=K, rank=20, dtype=torch.bfloat16)
NVFP4, DYNAMIC, INT4 = FORMAT_PAIRS[0], FORMAT_PAIRS[3], FORMAT_PAIRS[5]


def arguments_of(linear: QuantizedLinear) -> tuple[list[torch.Tensor], str]:
    return ops.list_parts(linear), ops.make_spec(linear).encode()


def make_lively_linear(
    pair: tuple[str, str | None] = NVFP4, shape: LinearShape = SHAPE
) -> QuantizedLinear:
    """Return a linear whose low-rank branch is about as large as its 4-bit product."""
    linear = make_linear(shape, pair)
    if linear.lora_down is None or linear.lora_up is None:
        return linear
    return dataclasses.replace(linear, lora_down=linear.lora_down / 4, lora_up=linear.lora_up / 4)


def run(x: torch.Tensor, linear: QuantizedLinear, mode: str = "fp8") -> torch.Tensor:
    return ops.w4a4_linear(x, *arguments_of(linear), BACKEND, "none", mode)


@pytest.fixture
def h200() -> Iterator[halfbyte.virtual.cuda]:
    """Return a session in which "cuda" is a virtual H200."""
    with halfbyte.virtual.cuda("h200") as gpu:
        yield gpu


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "exact"])
@pytest.mark.parametrize("pair", FORMAT_PAIRS[:5], ids=pair_id)
def test_every_mode_matches_its_definition(pair: tuple[str, str | None], mode: str) -> None:
    linear = make_lively_linear(pair)
    x = make_input(M, K, torch.bfloat16)
    y = run(x, linear, mode)
    assert y.device.type == "cpu"
    assert y.is_contiguous()
    assert_close_to_mode(y, x, linear, mode)
    act = list(ops.quantize_act_lora(x, *arguments_of(linear), BACKEND, mode))
    again = ops.gemm_w4a4(act, *arguments_of(linear), torch.bfloat16, BACKEND, "none", mode)
    assert torch.equal(again, y)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_float16_without_optional_parts_and_with_an_odd_number_of_features(mode: str) -> None:
    bare = LinearShape(n=41, k=K, rank=0, parts=False, dtype=torch.float16)
    linear = make_lively_linear(shape=bare)
    x = make_input(M, K, torch.float16)
    y = run(x, linear, mode)
    assert tuple(y.shape) == (M, 41)
    assert y.is_contiguous()
    assert_close_to_mode(y, x, linear, mode)


@needs_virtual_gpu
@pytest.mark.parametrize("m", [1, 17])
def test_few_rows(m: int) -> None:
    linear = make_lively_linear()
    x = make_input(m, K, torch.bfloat16)
    assert_close_to_mode(run(x, linear), x, linear, "fp8")


@needs_virtual_gpu
@pytest.mark.parametrize("parts", [True, False], ids=["scaled", "bare"])
def test_a_weight_only_layer_runs_in_the_modes_that_are_named(parts: bool) -> None:
    shape = dataclasses.replace(SHAPE, rank=20 if parts else 0, parts=parts)
    linear = make_lively_linear(("nvfp4", None), shape)
    x = make_input(M, K, torch.bfloat16)
    for mode in ("fp8", "exact"):
        assert_close_to_mode(run(x, linear, mode), x, linear, mode)
    assert torch.equal(run(x, linear, "auto"), run(x, linear, "bf16"))


def without_the_code_minus_8(linear: QuantizedLinear) -> QuantizedLinear:
    """Return an INT4 linear whose codes -8 are -7."""
    low, high = linear.weight.data & 0x0F, linear.weight.data >> 4
    data = torch.where(low == 8, 9, low) | torch.where(high == 8, 9, high) << 4
    weight = dataclasses.replace(linear.weight, data=data.to(torch.uint8))
    return dataclasses.replace(linear, weight=weight)


@needs_virtual_gpu
@pytest.mark.parametrize("pair", FORMAT_PAIRS[5:7], ids=pair_id)
def test_int4_in_every_mode(pair: tuple[str, str | None]) -> None:
    linear = make_lively_linear(pair)
    x = make_input(M, K, torch.bfloat16)
    results = {mode: run(x, linear, mode) for mode in ("int8", "exact")}
    with pytest.raises(UnsupportedHardwareError, match="INT4 code -8"):
        run(x, linear, "fp8")
    assert torch.equal(run(x, linear, "auto"), results["int8"])  # what the values allow
    for mode, y in results.items():
        assert_close_to_mode(y, x, linear, mode)
    symmetric = without_the_code_minus_8(linear)
    y = run(x, symmetric, "fp8")
    assert_close_to_mode(y, x, symmetric, "fp8")
    assert torch.equal(run(x, symmetric, "auto"), y)


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
        assert torch.equal(run(x, linear), run(x.contiguous(), linear)), name


@needs_virtual_gpu
def test_cuda_tensors_of_a_session_run_on_its_gpu(h200: halfbyte.virtual.cuda) -> None:
    linear = make_lively_linear()
    parts, spec = arguments_of(linear)
    x = make_input(M, K, torch.bfloat16)
    wanted = run(x, linear)
    start = len(h200.log)
    on_gpu = [part.cuda() for part in parts]
    y = ops.w4a4_linear(x.cuda(), on_gpu, spec, "auto", "none", "fp8")
    assert y.is_cuda
    assert torch.equal(y.cpu(), wanted)
    assert len(h200.log) == start + 2  # quantize, multiply
    assert not [one for record in h200.log for one in record.findings if not one.is_note]
    with pytest.raises(FormatError, match="weight_data is on cpu, x on cuda:0"):
        ops.w4a4_linear(x.cuda(), parts, spec)
    dense = ops.w4a4_linear(x.cuda(), on_gpu, spec, "auto", "none", "bf16")
    torch.testing.assert_close(dense.cpu(), run(x, linear, "bf16"), rtol=2**-7, atol=2**-5)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["auto", "exact"])
@pytest.mark.parametrize("pair", [NVFP4, DYNAMIC, INT4], ids=pair_id)
def test_fakes_agree_with_the_kernels(pair: tuple[str, str | None], mode: str) -> None:
    parts, spec = arguments_of(make_lively_linear(pair))
    x = make_input(M, K, torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    op = torch.ops.halfbyte
    linear_arguments = (x, parts, spec, BACKEND, "none", mode)
    torch.library.opcheck(op.w4a4_linear.default, linear_arguments, test_utils=checks)
    arguments = (x, parts, spec, BACKEND, mode)
    torch.library.opcheck(op.quantize_act_lora.default, arguments, test_utils=checks)
    act = list(ops.quantize_act_lora(*arguments))
    product = (act, parts, spec, x.dtype, BACKEND, "none", mode)
    torch.library.opcheck(op.gemm_w4a4.default, product, test_utils=checks)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "exact", "auto"])
@pytest.mark.parametrize("pair", [NVFP4, DYNAMIC], ids=pair_id)
@pytest.mark.parametrize("size", [(0, 40, 64), (3, 0, 64), (3, 40, 0)], ids=["m0", "n0", "k0"])
def test_empty_products_need_no_launch(
    pair: tuple[str, str | None], size: tuple[int, int, int], mode: str
) -> None:
    m, n, k = size
    linear = make_linear(LinearShape(n=n, k=k, rank=5), pair)
    arguments = arguments_of(linear)
    x = make_input(m, k, torch.bfloat16)
    y = run(x, linear, mode)
    assert (tuple(y.shape), y.dtype) == ((m, n), torch.bfloat16)
    if k == 0:
        assert linear.bias is not None
        assert torch.equal(y, linear.bias.to(torch.bfloat16).expand(m, n))
    if n:
        act = list(ops.quantize_act_lora(x, *arguments, BACKEND, mode))
        again = ops.gemm_w4a4(act, *arguments, torch.bfloat16, BACKEND, "none", mode)
        assert torch.equal(again, y)


def test_what_hopper_has_no_kernel_for_is_named() -> None:
    linear = make_lively_linear()
    arguments = arguments_of(linear)
    x = make_input(M, K, torch.bfloat16)
    with pytest.raises(FormatError, match=r"x: dtype torch.float32; the GPU kernels"):
        run(x.float(), linear)
    with pytest.raises(UnsupportedHardwareError, match=r"'gelu': Hopper's kernel writes y itself"):
        ops.w4a4_linear(x, *arguments, BACKEND, "gelu")
    with pytest.raises(UnsupportedHardwareError, match="project_lora has no kernel for Hopper"):
        ops.project_lora(x, *arguments, BACKEND)
    with pytest.raises(UnsupportedHardwareError, match=r"'nvfp4' in mode 'int8': .*mode='fp8'"):
        run(x, linear, "int8")
    with pytest.raises(UnsupportedHardwareError, match=r"weight-only 'int4' in mode 'exact'"):
        run(x, make_lively_linear(("int4", None)), "exact")
    with pytest.raises(UsageError, match="mode 'bf16' quantizes no activations"):
        ops.quantize_act_lora(x, *arguments, BACKEND, "bf16")
    act = [torch.empty(0)] * 4
    following = make_lively_linear(shape=dataclasses.replace(SHAPE, k=N))
    spec = ops.make_next_spec(following).encode()
    with pytest.raises(UnsupportedHardwareError, match="gemm_w4a4_quantized has no kernel for Ho"):
        ops.gemm_w4a4_quantized(
            act, *arguments, ops.list_next_parts(following), spec, torch.bfloat16, BACKEND
        )


@needs_virtual_gpu
def test_activations_of_another_mode_are_named() -> None:
    arguments = arguments_of(make_lively_linear())
    x = make_input(M, K, torch.bfloat16)
    act = list(ops.quantize_act_lora(x, *arguments, BACKEND, "fp8"))
    message = r"act codes: torch.uint8 \(70, 256\), wanted contiguous torch.float16 .*mode 'exact'"
    with pytest.raises(FormatError, match=message):
        ops.gemm_w4a4(act, *arguments, torch.bfloat16, BACKEND, "none", "exact")
    for index, name in ((1, "scales"), (3, "lora_act")):
        wrong = list(act)
        wrong[index] = act[index][1:]
        with pytest.raises(FormatError, match=rf"act {name}: .*what quantize_act_lora returns"):
            ops.gemm_w4a4(wrong, *arguments, x.dtype, BACKEND)
    with pytest.raises(FormatError, match=r"act codes: shape \(1, 70, 256\), wanted \[M, K_pad\]"):
        ops.gemm_w4a4([act[0][None], *act[1:]], *arguments, x.dtype, BACKEND)


@needs_virtual_gpu
def test_activations_at_odd_addresses_give_the_same_bits() -> None:
    arguments = arguments_of(make_lively_linear())
    act = ops.quantize_act_lora(make_input(M, K, torch.bfloat16), *arguments, BACKEND)
    wanted = ops.gemm_w4a4(list(act), *arguments, torch.bfloat16, BACKEND)
    odd = [part.new_zeros(part.numel() + 1)[1:].view(part.shape).copy_(part) for part in act]
    assert torch.equal(ops.gemm_w4a4(odd, *arguments, torch.bfloat16, BACKEND), wanted)


@needs_virtual_gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_a_spoilt_row_stays_alone(mode: str, value: float) -> None:
    linear = make_lively_linear()
    x = make_input(M, K, torch.bfloat16)
    wanted = run(x, linear, mode)
    x[3, 77] = value
    y = run(x, linear, mode)
    assert bool(y[3].isnan().all())
    assert torch.equal(y[:3], wanted[:3])
    assert torch.equal(y[4:], wanted[4:])


@needs_virtual_gpu
def test_a_captured_graph_replays_the_linear(h200: halfbyte.virtual.cuda) -> None:
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


def place(linear: QuantizedLinear, m: int, mode: str = "auto") -> object:
    parts, spec = ops.list_parts(linear), ops.make_spec(linear)
    return hopper.choose_placed(parts, spec, (m, torch.bfloat16), mode)


def test_auto_runs_bf16_where_it_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    linear = make_lively_linear()
    parts, spec = arguments_of(linear)
    monkeypatch.setattr(
        hopper, "choose_mode", lambda request, modes: "bf16" if request.m == 5 else modes[0]
    )
    decoded = ops.decode_spec(spec)
    dense = find_placed(parts, decoded, DensePlacer(torch.bfloat16))
    assert hopper.choose_placed(parts, decoded, (5, torch.bfloat16), "auto") is dense
    x = make_input(5, K, torch.bfloat16)
    by_name = ops.w4a4_linear(x, parts, spec, BACKEND, "none", "bf16")
    assert torch.equal(ops.w4a4_linear(x, parts, spec, BACKEND), by_name)
    assert count_placed_bytes(parts) == dense.num_bytes == 2 * (N * K + N)
    placed = find_placed(parts, decoded, hopper.WgmmaPlacer("fp8", torch.bfloat16))
    assert hopper.choose_placed(parts, decoded, (6, torch.bfloat16), "auto") is placed
    assert count_placed_bytes(parts) == dense.num_bytes + placed.num_bytes - placed.shared_bytes


def test_a_mode_that_is_named_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "choose_mode", lambda request, modes: "bf16")
    placed = place(make_lively_linear(), 5, "fp8")
    assert isinstance(placed, hopper.PlacedWgmmaLinear)
    assert placed.mode == "fp8"


def test_prefill_and_decode_read_one_copy() -> None:
    linear = make_lively_linear()
    parts, spec = ops.list_parts(linear), ops.make_spec(linear)
    placed = [hopper.choose_placed(parts, spec, (m, torch.bfloat16), "fp8") for m in (1, 4352)]
    assert placed[0] is placed[1]
    assert count_placed_bytes(parts) == placed[0].num_bytes - placed[0].shared_bytes


def test_another_low_rank_branch_keeps_the_placed_weight() -> None:
    linear = make_lively_linear()
    parts, spec = ops.list_parts(linear), ops.make_spec(linear)
    placer = hopper.WgmmaPlacer("fp8", torch.bfloat16)
    first = find_placed(parts, spec, placer)
    parts[6], parts[7] = torch.randn(50, K), torch.randn(N, 50)
    second = find_placed(parts, spec, placer)
    assert second.weight_blocks is first.weight_blocks
    assert second.rank == 50
    anew = placer.place(ops.linear_parts.make_linear(parts, spec))
    assert second.lora_blocks is not None
    assert anew.lora_blocks is not None
    assert torch.equal(second.lora_blocks, anew.lora_blocks)
    assert second.lora_factor == anew.lora_factor
