"""W4A4Linear in the modes of Hopper, on a virtual H200: one weight, several accuracies."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import halfbyte.virtual
from halfbyte.errors import UnsupportedHardwareError, UsageError
from halfbyte.nn import W4A4Linear, describe_placement, set_backend
from halfbyte.nn.low_rank_stack import LowRankDelta, set_delta_strength, stack_delta
from halfbyte.ops import hopper
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.mode_tolerance import assert_close_to_mode
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
BACKEND = "virtual-h200"
M, N, K = 33, 40, 200


def make_module(mode: str = "fp8", backend: str = BACKEND, **shape: Any) -> W4A4Linear:
    given = {"n": N, "k": K, "rank": 20, "dtype": torch.bfloat16, **shape}
    return W4A4Linear.from_record(make_linear(LinearShape(**given)), backend=backend, mode=mode)


def make_x(seed: int = 0) -> torch.Tensor:
    return make_input(M, K, torch.bfloat16, seed)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_cpu_tensors_go_in_and_come_out(mode: str) -> None:
    module, x = make_module(mode), make_x()
    y = module(x.reshape(3, 11, K))
    assert tuple(y.shape) == (3, 11, N)
    assert_close_to_mode(y.reshape(M, N), x, module.to_record(), mode)
    assert f"backend={BACKEND}, mode={mode}" in repr(module)


@needs_virtual_gpu
def test_a_module_of_a_session_runs_on_its_gpu() -> None:
    x = make_x()
    wanted = make_module("auto")(x)
    with halfbyte.virtual.cuda("h200"):
        y = make_module("auto", "auto").cuda()(x.cuda())
        assert y.is_cuda
        assert torch.equal(y.cpu(), wanted)


@needs_virtual_gpu
def test_modes_of_one_module_are_placed_side_by_side() -> None:
    module, x = make_module(), make_x()
    first = module(x)
    fp8_bytes = module.placed_bytes
    module.mode = "bf16"
    dense = module(x)
    assert not torch.equal(first, dense)
    assert module.placed_bytes == fp8_bytes + 2 * (N * K + N)
    module.mode = "fp8"
    assert torch.equal(module(x), first)
    assert module.half().placed_bytes == 0


@needs_virtual_gpu
def test_copies_and_pickles_keep_the_mode_and_nothing_that_was_placed() -> None:
    module, x = make_module(), make_x()
    size = len(pickle.dumps(module))
    wanted = module(x)
    assert len(pickle.dumps(module)) == size
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert (twin.backend, twin.mode, twin.placed_bytes) == (BACKEND, "fp8", 0)
        assert torch.equal(twin(x), wanted)


def test_modules_pickled_without_a_mode_take_the_fastest() -> None:
    module = make_module("auto", "auto")
    for name in ("mode", "tokens"):
        del module.__dict__[name]
    old = pickle.loads(pickle.dumps(module))
    assert (old.mode, old.tokens) == ("auto", "both")


@needs_virtual_gpu
def test_compiled_and_exported_modules_give_the_same_bits() -> None:
    torch._dynamo.reset()
    module, x = make_module().eval(), make_x()
    wanted = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), wanted)
    module.mode = "bf16"
    assert torch.equal(compiled(x), module(x))
    module.mode = "fp8"
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    assert torch.equal(program.module()(x), wanted)


def test_names_are_checked_where_they_are_given() -> None:
    message = "mode 'fp4' is unknown; choose one of auto, exact, fp8, int8, bf16"
    with pytest.raises(UsageError, match=message):
        make_module("fp4", "cpu")
    model = nn.Sequential(make_module("auto", "auto"))
    with pytest.raises(UsageError, match=message):
        set_backend(model, "auto", mode="fp4")
    with pytest.raises(UsageError, match="tokens 'all' is unknown; choose one of both, prefill"):
        set_backend(model, "auto", tokens="all")
    module = make_module("auto", "cpu")
    module.mode = "fp4"
    with pytest.raises(UsageError, match=message):
        module(make_x())


def test_set_backend_leaves_what_is_not_named() -> None:
    model = nn.Sequential(make_module("exact", "auto"), make_module("fp8", "auto"))
    assert set_backend(model, BACKEND, tokens="decode") == 2
    found = [(one.backend, one.mode, one.tokens) for one in model if isinstance(one, W4A4Linear)]
    assert found == [(BACKEND, "exact", "decode"), (BACKEND, "fp8", "decode")]
    set_backend(model, "cpu", mode="bf16")
    assert {(one.backend, one.mode) for one in model.modules() if isinstance(one, W4A4Linear)} == {
        ("cpu", "bf16")
    }


@needs_virtual_gpu
def test_an_adapter_is_placed_without_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = make_module(), make_x()
    module(x)

    def refuse(*_: Any) -> None:
        raise AssertionError("the weight was placed again")

    monkeypatch.setattr(hopper, "place_linear", refuse)
    draw = torch.Generator().manual_seed(7)
    down = torch.randn((8, K), generator=draw).bfloat16()
    up = torch.randn((N, 8), generator=draw).bfloat16()
    stack_delta(module, "style", LowRankDelta(down, up))
    record = module.to_record()
    for strength in (1.0, 0.5):
        set_delta_strength(module, "style", strength)
        assert record.lora_down is not None
        assert record.lora_up is not None
        lengthened = dataclasses.replace(
            record,
            lora_down=torch.cat([record.lora_down, down]),
            lora_up=torch.cat([record.lora_up, up * strength], 1),
        )
        assert_close_to_mode(module(x), x, lengthened, "fp8")


def test_the_report_says_what_runs_and_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hopper, "choose_mode", lambda request, modes: "bf16" if request.m == 256 else "fp8"
    )
    model = nn.ModuleDict({"named": make_module("exact"), "auto": make_module("auto")})
    model["auto"].tokens = "prefill"
    named, auto = describe_placement(model)
    assert (named.name, named.shape, named.dense_bytes) == ("named", (N, K), 2 * N * K)
    assert [call.tokens for call in named.calls] == [1, 16, 64, 256, 4352]
    assert {(call.mode, call.kernel) for call in named.calls} == {("exact", "gemm_w4_wgmma")}
    assert {call.num_bytes for call in named.calls} == {named.placed_bytes}  # one resident copy
    assert [(call.tokens, call.mode, call.kernel) for call in auto.calls] == [
        (256, "bf16", "torch"), (4352, "fp8", "gemm_w4_wgmma")
    ]  # fmt: skip
    assert auto.placed_bytes == sum(call.num_bytes for call in auto.calls)
    assert "128 channels x" in auto.calls[1].tile


@pytest.mark.parametrize(("backend", "kernel"), [("cpu", "cpu"), ("virtual-b200", "gemm_w4a4")])
def test_other_backends_report_their_one_kernel(backend: str, kernel: str) -> None:
    module = make_module("auto", backend)
    (layer,) = describe_placement(module, tokens=[1, 300])
    assert [(call.mode, call.kernel) for call in layer.calls] == [("exact", kernel)] * 2
    assert layer.name == ""


def test_four_bits_stay_below_a_third_of_sixteen() -> None:
    module = make_module(n=3072, k=3840, rank=32)
    (layer,) = describe_placement(module, tokens=[1])
    assert layer.calls[0].num_bytes == layer.placed_bytes
    assert layer.placed_bytes <= 0.31 * layer.dense_bytes


@pytest.mark.long  # a compilation for each tile, format and set of parts
@needs_virtual_gpu
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    m=st.integers(0, 200),
    rank=st.integers(0, 130),
    parts=st.booleans(),
    pair=st.sampled_from(FORMAT_PAIRS[:7]),
    mode=st.sampled_from(("exact", "fp8", "int8")),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_any_shape_in_any_mode(
    n: int,
    k: int,
    m: int,
    rank: int,
    parts: bool,
    pair: tuple[str, str],
    mode: str,
    dtype: torch.dtype,
) -> None:
    linear = make_linear(LinearShape(n=n, k=k, rank=rank, parts=parts, dtype=dtype), pair)
    if linear.lora_down is not None:  # float16 holds x @ lora_down.T of many columns
        linear = dataclasses.replace(linear, lora_down=linear.lora_down / k**0.5)
    x = make_input(m, k, dtype)
    module = W4A4Linear(linear, BACKEND, mode)
    try:
        y = module(x)
    except UnsupportedHardwareError as error:  # INT4's -8 in fp8, int8 without integers
        assert "-8" in str(error) or mode == "int8"  # noqa: PT017  # most draws do not raise
        return
    if m:
        assert_close_to_mode(y, x, linear, mode)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "bf16"])
def test_a_capture_before_the_first_call_is_refused_and_leaves_nothing(mode: str) -> None:
    x = make_x()
    wanted = make_module(mode)(x)
    with halfbyte.virtual.cuda("h200"):
        module = make_module(mode, "auto").cuda()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UsageError, match="call the layer once"), torch.cuda.graph(graph):
            module(x.cuda())
        assert module.placed_bytes == 0
        y = module(x.cuda()).cpu()
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-5)


@needs_virtual_gpu
@pytest.mark.parametrize("mode", ["fp8", "exact", "auto"])
def test_an_x_without_rows_costs_no_second_weight(mode: str) -> None:
    module, x = make_module(mode), make_x()
    assert tuple(module(x[:0]).shape) == (0, N)
    before = module.placed_bytes
    module(x)
    assert module.placed_bytes == before
    (report,) = describe_placement(module, tokens=[0])
    assert report.calls[0].kernel == "gemm_w4_wgmma"
    assert report.placed_bytes == before


@pytest.mark.parametrize("tokens", ["Both", None, 3, ["both"], {}])
def test_misspelled_tokens_of_a_layer_are_named(tokens: Any) -> None:
    module = make_module()
    module.tokens = tokens
    with pytest.raises(UsageError, match="choose one of both, prefill, decode"):
        describe_placement(module)


@pytest.mark.parametrize("rows", [[-1], [1.5], "decode", [None]])
def test_what_is_no_number_of_rows_is_named(rows: Any) -> None:
    with pytest.raises(UsageError, match="wanted a number of rows"):
        describe_placement(make_module(), tokens=rows)


def test_blocks_with_another_scale_are_reported() -> None:
    record = make_linear(LinearShape(n=N, k=K, rank=0, dtype=torch.bfloat16))
    codes = torch.full_like(record.weight.data, 0x22)
    scales = torch.full_like(record.weight.scales.view(torch.uint8), 0x40)
    scales[3, :2], scales[3, 2:] = 0x01, 0x7E
    weight = dataclasses.replace(record.weight, data=codes, scales=scales.view(torch.float8_e4m3fn))
    record = dataclasses.replace(record, weight=weight)
    for mode, requantized in (("fp8", 2), ("exact", 0)):
        module = W4A4Linear.from_record(record, backend=BACKEND, mode=mode)
        assert module.plan_call(8).requantized == requantized
    automatic = W4A4Linear.from_record(record, backend=BACKEND, mode="auto").plan_call(8)
    assert (automatic.mode, automatic.requantized) == ("exact", 0)
