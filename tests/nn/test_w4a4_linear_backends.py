"""W4A4Linear on a virtual GPU: the same layer, whatever is done to the module."""

import copy
import dataclasses
import io
import pickle
import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import halfbyte.virtual
from halfbyte.errors import FormatError, UnsupportedHardwareError, UsageError
from halfbyte.nn import W4A4Linear, set_backend
from halfbyte.ops import blackwell
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear
from tests.tolerance import assert_close_to_reference

MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_virtual_gpu = pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}")
BACKEND = "virtual-b200"
M, N, K = 70, 40, 200


def make_module(backend: str = BACKEND, seed: int = 0) -> W4A4Linear:
    linear = make_linear(LinearShape(n=N, k=K, rank=20, dtype=torch.bfloat16), seed=seed)
    return W4A4Linear.from_record(linear, backend=backend)


def make_x(seed: int = 0) -> torch.Tensor:
    return make_input(M, K, torch.bfloat16, seed)


@needs_virtual_gpu
def test_cpu_tensors_go_in_and_come_out() -> None:
    module, x = make_module(), make_x()
    y = module(x.reshape(2, 35, K))
    assert tuple(y.shape) == (2, 35, N)
    assert y.device.type == "cpu"
    assert_close_to_reference(y.reshape(M, N), x, module.to_record())
    on_cpu = make_module("cpu")(x)
    assert_close_to_reference(on_cpu, x, module.to_record())
    assert not torch.cuda.is_available()  # torch was left as it is


@needs_virtual_gpu
def test_a_module_of_a_session_runs_on_its_gpu() -> None:
    x = make_x()
    wanted = make_module()(x)
    with halfbyte.virtual.cuda("b200"):
        y = make_module("auto").cuda()(x.cuda())
        assert y.is_cuda
        assert torch.equal(y.cpu(), wanted)


@needs_virtual_gpu
def test_placed_tensors_are_made_once_and_follow_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    place = blackwell.place_linear
    monkeypatch.setattr(
        blackwell, "place_linear", lambda *given: made.append(given) or place(*given)
    )
    module, other, x = make_module(), make_module(seed=3), make_x()
    first = module(x)
    assert torch.equal(module(x), first)
    assert len(made) == 1
    module.load_state_dict(other.state_dict())
    loaded = module(x)
    assert not torch.equal(loaded, first)
    assert torch.equal(loaded, other(x))
    assert module.placed_bytes > 0
    assert module.to(torch.float16).placed_bytes == 0
    assert module.to(torch.bfloat16).placed_bytes == 0
    assert_close_to_reference(module(x), x, module.to_record())


@needs_virtual_gpu
def test_state_copies_and_pickles_hold_nothing_that_was_placed() -> None:
    module, x = make_module(), make_x()
    keys, size = list(module.state_dict()), len(pickle.dumps(module))
    wanted = module(x)
    assert list(module.state_dict()) == keys
    assert len(pickle.dumps(module)) == size
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        W4A4Linear.from_state_dict(state, backend=BACKEND),
    ):
        assert twin.backend == BACKEND
        assert twin.placed_bytes == 0
        assert torch.equal(twin(x), wanted)


@needs_virtual_gpu
def test_memory_is_reported() -> None:
    module = make_module()
    assert module.placed_bytes == 0
    assert "placed_bytes" not in repr(module)
    module(make_x())
    # codes and block scales padded, low-rank factors, three float32 vectors of N, N and K
    codes, scales = N * 112, 128 * 16
    low_rank = 2 * (24 * 224 + N * 24)
    assert module.placed_bytes == codes + scales + low_rank + 4 * (N + N + K)
    assert f"placed_bytes={module.placed_bytes}, backend={BACKEND}" in repr(module)


@needs_virtual_gpu
def test_compiled_modules_place_once_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    module, x = make_module(), make_x()
    wanted = module(x)
    made = []
    place = blackwell.place_linear
    monkeypatch.setattr(
        blackwell, "place_linear", lambda *given: made.append(given) or place(*given)
    )
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), wanted)
    assert not made


@needs_virtual_gpu
def test_exported_modules_keep_their_backend() -> None:
    module, x = make_module().eval(), make_x()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: rows},))
    assert torch.equal(program.module()(x), module(x))


def test_the_backend_is_checked_where_it_is_named() -> None:
    with pytest.raises(UsageError, match="backend 'b200' is unknown"):
        make_module("b200")
    with pytest.raises(UnsupportedHardwareError, match="kernel for sm_120a does not exist yet"):
        make_module("virtual-rtx5090")
    linear = nn.Linear(64, 64)
    assert W4A4Linear.from_linear(linear, "nvfp4_plain", backend="cpu").backend == "cpu"
    with pytest.raises(UsageError, match="backend 'b200'"):
        set_backend(nn.Sequential(linear), "b200")


@pytest.mark.parametrize("backend", [None, 3, b"cpu", "virtual-b2000"])
def test_a_backend_set_on_the_module_is_checked_at_the_call(backend: Any) -> None:
    module = make_module()
    module.backend = backend
    with pytest.raises(UsageError, match=re.escape(f"backend {backend!r} is unknown")):
        module(make_x())


@needs_virtual_gpu
def test_threads_share_a_module() -> None:
    module, x = make_module(), make_x()
    wanted, found = module(x), []

    def call() -> None:
        try:
            found.extend(torch.equal(module(x), wanted) for _ in range(3))
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12


@needs_virtual_gpu
def test_a_negative_static_scale_is_named() -> None:
    linear = make_linear(LinearShape(n=N, k=K, dtype=torch.bfloat16), ("nvfp4", "nvfp4_static"))
    linear = dataclasses.replace(linear, activation_global_scale=torch.tensor(-0.5))
    with pytest.raises(FormatError, match=r"activation_global_scale is -0.5, wanted positive"):
        W4A4Linear(linear, BACKEND)(make_x())


def test_set_backend_reaches_every_module() -> None:
    model = nn.Sequential(make_module("auto"), nn.ReLU(), nn.Sequential(make_module("auto")))
    assert set_backend(model, BACKEND) == 2
    assert [m.backend for m in model.modules() if isinstance(m, W4A4Linear)] == [BACKEND] * 2


def test_modules_pickled_without_a_backend_follow_the_device() -> None:
    module = make_module("auto")
    del module.__dict__["backend"]
    old = pickle.loads(pickle.dumps(module))
    assert old.backend == "auto"


def test_float32_needs_a_conversion_or_the_cpu() -> None:
    with pytest.raises(FormatError, match=r"x: dtype torch.float32; the GPU kernels"):
        make_module()(make_x().float())


@pytest.mark.long  # a compilation for each tile, format and set of parts
@needs_virtual_gpu
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    k=st.integers(1, 700),
    m=st.integers(0, 200),
    rank=st.integers(0, 130),
    parts=st.booleans(),
    pair=st.sampled_from(FORMAT_PAIRS[:5]),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_any_shape(
    n: int, k: int, m: int, rank: int, parts: bool, pair: tuple[str, str | None], dtype: torch.dtype
) -> None:
    linear = make_linear(LinearShape(n=n, k=k, rank=rank, parts=parts, dtype=dtype), pair)
    if linear.lora_down is not None:  # float16 holds x @ lora_down.T of many columns
        linear = dataclasses.replace(linear, lora_down=linear.lora_down / k**0.5)
    x = make_input(m, k, dtype)
    assert_close_to_reference(W4A4Linear(linear, BACKEND)(x), x, linear)
