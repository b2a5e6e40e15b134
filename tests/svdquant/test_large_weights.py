"""Streaming a weight must give what holding it gives, up to the order of float32 sums."""

from dataclasses import replace

import pytest
import torch

from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant import rows as rows_module
from halfbyte.svdquant.large_weights import WeightRows, quantize_large_group
from halfbyte.svdquant.presets import PRESETS, SVDQuantPreset
from halfbyte.svdquant.quantize_layer import quantize_linear_group


def make_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a matrix with a decaying spectrum, as trained weights have."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, 24, generator=draw) * torch.logspace(0.5, -1, 24)
    noise = 0.3 * torch.randn(rows, columns, generator=draw)
    return left @ torch.randn(24, columns, generator=draw) + noise


def open_rows(weight: torch.Tensor) -> WeightRows:
    return WeightRows(*weight.shape, lambda start, stop: weight[start:stop])


def restore(linear: QuantizedLinear) -> torch.Tensor:
    restored = dequantize(linear.weight).double()
    if linear.lora_up is not None and linear.lora_down is not None:
        restored += linear.lora_up.double() @ linear.lora_down.double()
    return restored


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    # several chunks of uneven size even for a small matrix
    monkeypatch.setattr(rows_module, "ROW_CHUNK_ELEMENTS", 13 * 200)


def test_chunks_are_small_here() -> None:
    assert list(rows_module.iter_row_ranges(30, 200)) == [(0, 13), (13, 26), (26, 30)]


PRESET_CASES = {
    "nvfp4": PRESETS["nvfp4_weight_only_r32"],
    "int4": PRESETS["int4_weight_only_r32"],
    "mxfp4": PRESETS["mxfp4_weight_only_r32"],
    "nearest": replace(PRESETS["nvfp4_weight_only_r32"], rounding="nearest"),
    "rank-0": replace(PRESETS["nvfp4_weight_only_r32"], rank=0),
    "refined": replace(PRESETS["nvfp4_weight_only_r32"], rank=8, refinements=3),
    "activation": PRESETS["nvfp4_plain"],
}


@pytest.mark.parametrize("case", PRESET_CASES)
def test_streamed_group_is_as_good_as_the_held_one(case: str) -> None:
    preset: SVDQuantPreset = PRESET_CASES[case]
    weights = [make_weight(96, 200, 0), make_weight(40, 200, 1)]
    biases = [torch.randn(96), None]
    held, _ = quantize_linear_group(weights, biases, None, preset)
    streamed = quantize_large_group([open_rows(w) for w in weights], biases, preset)
    for weight, one, other in zip(weights, held, streamed, strict=True):
        assert one.activation == other.activation
        assert one.rank == other.rank
        assert one.weight.format == other.weight.format
        assert (one.bias is None) == (other.bias is None)
        error_held = (restore(one) - weight).norm() / weight.norm()
        error_streamed = (restore(other) - weight).norm() / weight.norm()
        # other last bits of the low rank move single codes to a neighbour, not the error
        assert float(error_streamed) == pytest.approx(float(error_held), rel=0.01)
    if streamed[0].lora_down is not None:
        assert streamed[0].lora_down is streamed[1].lora_down


def test_without_low_rank_the_bytes_are_those_of_the_held_weight() -> None:
    preset = PRESET_CASES["rank-0"]
    weight = make_weight(96, 200)
    (held,), _ = quantize_linear_group([weight], [None], None, preset)
    (streamed,) = quantize_large_group([open_rows(weight)], [None], preset)
    assert torch.equal(held.weight.data, streamed.weight.data)
    assert torch.equal(
        held.weight.scales.view(torch.uint8), streamed.weight.scales.view(torch.uint8)
    )


def test_low_rank_is_near_the_best_one() -> None:
    weight = make_weight(96, 200).double()
    preset = PRESETS["nvfp4_weight_only_r32"]
    (linear,) = quantize_large_group([open_rows(weight)], [None], replace(preset, rank=16))
    assert linear.lora_up is not None
    assert linear.lora_down is not None
    left = weight - linear.lora_up.double() @ linear.lora_down.double()
    best = torch.linalg.svdvals(weight)[16:].norm()
    assert float(left.norm()) < 1.01 * float(best)


def test_zero_weight_stays_zero() -> None:
    (linear,) = quantize_large_group(
        [open_rows(torch.zeros(64, 96))], [None], PRESETS["nvfp4_weight_only_r32"]
    )
    assert float(restore(linear).abs().max()) == 0
