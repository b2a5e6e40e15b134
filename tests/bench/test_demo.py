from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from halfbyte.bench import demo
from halfbyte.bench.demo import (
    count_linear_bytes,
    list_block_linears,
    restore_linears,
    run_demo,
)
from halfbyte.bench.demo_result import AS_SHIPPED, PRESETS, DemoSettings
from halfbyte.errors import HalfbyteError
from halfbyte.nn.models.llama import Llama, LlamaConfig
from halfbyte.nn.models.smollm2 import SmolLM2
from halfbyte.nn.report import LinearReport
from tests.bench.plain_quantizer import RoundedLinear, quantize_plainly

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=10000.0,
    rms_eps=1e-5,
    context_length=64,
)
SETTINGS = DemoSettings(num_calibration=16, num_evaluation=40)


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(0)
    model = Llama(CONFIG).requires_grad_(False).eval()
    model.embed_tokens.weight.mul_(0.25)  # the tied head then gives logits of about +-2
    return model


@pytest.fixture
def small_demo(model: Llama, monkeypatch: pytest.MonkeyPatch) -> Llama:
    """Makes run_demo use a random two-layer model and random tokens."""
    tokens = torch.randint(0, 97, (80,), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(demo, "load_smollm2", lambda num_layers: SmolLM2(model, None, None, 4321))
    monkeypatch.setattr(demo, "encode_topics", lambda tokenizer: tokens)
    return model


class Stages:
    def __init__(self) -> None:
        self.seen: list[list[object]] = []

    def start(self, stage: str, total: int) -> None:
        self.seen.append([stage, total, 0])

    def advance(self, count: int = 1) -> None:
        self.seen[-1][2] += count


def test_demo_measures_every_row_and_leaves_the_model_as_shipped(small_demo: Llama) -> None:
    before = {name: id(module) for name, module in small_demo.named_modules()}
    stages = Stages()
    result = run_demo(SETTINGS, quantize_plainly, stages)
    assert [row.name for row in result.rows] == [AS_SHIPPED, *PRESETS]
    assert {name: id(module) for name, module in small_demo.named_modules()} == before
    shipped, int4, _, nvfp4, _ = result.rows
    assert (shipped.accuracy.kl, shipped.accuracy.top1, shipped.num_bytes) == (0.0, 1.0, 4321)
    assert shipped.accuracy.num_tokens == 40
    # Random weights without outliers: 4 bits disturb the model, and not beyond recognition.
    assert 0 < nvfp4.accuracy.kl < 0.5
    assert 0 < int4.accuracy.kl < 0.5
    assert all(len(row.layers) == 14 for row in result.rows[1:])
    assert all(total == done for _, total, done in stages.seen)
    assert stages.seen[1][0] == "as_shipped: evaluate"


def test_demo_counts_bytes_with_scales(small_demo: Llama) -> None:
    result = run_demo(SETTINGS, quantize_plainly)
    weights = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    assert result.num_weights == weights
    # int4: half a byte each and a float16 for 64; nvfp4: a byte for 16 and a float32 a linear
    assert result.rows[1].num_bytes == weights // 2 + 2 * weights // 64
    assert result.rows[3].num_bytes == weights // 2 + weights // 16 + 4 * 14
    assert result.bits_per_weight(result.rows[1]) == 4.25


def test_demo_hands_only_the_calibration_slice_to_the_quantizer(small_demo: Llama) -> None:
    seen: list[torch.Tensor] = []

    def record(
        model: nn.Module, preset: str, calibration: torch.Tensor, on_linears: Callable[[int], None]
    ) -> Sequence[LinearReport]:
        seen.append(calibration)
        return quantize_plainly(model, preset, calibration, on_linears)

    result = run_demo(SETTINGS, record)
    assert len(seen) == 4
    assert all(torch.equal(tokens[0], result.slices.calibration) for tokens in seen)


def test_linear_that_was_skipped_is_an_error_and_the_model_is_restored(small_demo: Llama) -> None:
    linears = list_block_linears(small_demo)
    skipped = "layers.1.mlp.down_proj"

    def skip_one(
        model: nn.Module, preset: str, calibration: torch.Tensor, on_linears: Callable[[int], None]
    ) -> Sequence[LinearReport]:
        rows = quantize_plainly(model, preset, calibration, on_linears)
        restore_linears(model, {skipped: linears[skipped]})
        return rows

    with pytest.raises(HalfbyteError, match=r"layers\.1\.mlp\.down_proj was not quantized"):
        run_demo(SETTINGS, skip_one)
    assert list_block_linears(small_demo) == linears


def test_block_linears_leave_out_embedding_and_head(model: Llama) -> None:
    linears = list_block_linears(model)
    assert len(linears) == 14
    assert all(name.startswith("layers.") for name in linears)
    quantize_plainly(model, "int4_plain", torch.zeros(1, 1), lambda count: None)
    assert isinstance(model.layers[0].mlp.up_proj, RoundedLinear)
    assert count_linear_bytes(model, list(linears)) > 0
