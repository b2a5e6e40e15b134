"""torch.compile over W4A4 layers: one graph, dynamic row counts, the eager numbers."""

import shutil

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from halfbyte.nn.w4a4_linear import W4A4Linear
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def make_module(pair: tuple[str, str | None]) -> W4A4Linear:
    return W4A4Linear(make_linear(LinearShape(n=24, k=100), pair))


def check_full_graph(pair: tuple[str, str | None], dtype: torch.dtype) -> None:
    module = make_module(pair)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = make_input(5, 100, dtype)
    assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_full_graph_equals_eager_in_every_format(pair: tuple[str, str | None]) -> None:
    check_full_graph(pair, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_graph_equals_eager_in_every_dtype(dtype: torch.dtype) -> None:
    check_full_graph(FORMAT_PAIRS[0], dtype)


def test_dynamic_rows_compile_once() -> None:
    module = make_module(FORMAT_PAIRS[0])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for m in (5, 2, 33, 128, 129, 2048):
        x = make_input(m, 100)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), module(x))
    assert counter.frame_count == 1


def test_unmarked_rows_become_dynamic_after_one_recompile() -> None:
    module = make_module(FORMAT_PAIRS[0])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for m in (5, 6, 7, 40, 100):
        compiled(make_input(m, 100))
    assert counter.frame_count == 2


def test_dynamic_leading_dimensions_compile_once() -> None:
    module = make_module(FORMAT_PAIRS[0])
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for batch, length in ((2, 3), (4, 7), (3, 16)):
        x = make_input(batch * length, 100).reshape(batch, length, 100)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), module(x))
    assert counter.frame_count == 1


def test_module_exports_with_a_dynamic_row_count() -> None:
    module = make_module(FORMAT_PAIRS[0]).eval()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(module, (make_input(5, 100),), dynamic_shapes=({0: rows},))
    x = make_input(17, 100)
    assert torch.equal(program.module()(x), module(x))


def test_inductor_runs_the_layer() -> None:
    module = make_module(FORMAT_PAIRS[0])
    compiled = torch.compile(module, fullgraph=True)
    for m in (5, 9):
        x = make_input(m, 100)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), module(x))


@pytest.mark.long  # inductor compiles its C++ prelude: up to 40 s
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor's CPU kernels need g++")
def test_inductor_runs_two_layers_with_a_pointwise_between() -> None:
    first = W4A4Linear(make_linear(LinearShape(n=48, k=100), FORMAT_PAIRS[0]))
    second = W4A4Linear(make_linear(LinearShape(n=24, k=48), FORMAT_PAIRS[5]))
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    compiled = torch.compile(model, fullgraph=True)
    for m in (5, 9):
        x = make_input(m, 100)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_a_module_without_optional_parts_exports(pair: tuple[str, str | None]) -> None:
    module = W4A4Linear(make_linear(LinearShape(24, 96, 0, parts=False), pair)).eval()
    x = make_input(3, 96)
    program = torch.export.export(module, (x,), strict=False)
    assert torch.equal(program.module()(x), module(x))
