"""A record decoded into one dense weight: the layer without quantized activations."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.dense_linear import make_dense_linear
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference.decode import Float64Array, dequantize, read_floats
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_linear, pair_id

N, K = 40, 200
DECODING = 2.0**-22  # of two float32 products: element * (block scale * global scale)


def multiply_in_float64(x: Float64Array, linear: QuantizedLinear) -> Float64Array:
    """Return y of the record for an x that is not quantized, part by part."""
    shift = 0.0 if linear.activation is None else linear.activation.shift
    smoothed = x + shift
    if linear.smooth is not None:
        smoothed = smoothed / read_floats(linear.smooth)
    y = smoothed @ dequantize(linear.weight).T
    if linear.channel_scale is not None:
        y = y * read_floats(linear.channel_scale)
    if linear.bias is not None:
        y = y + read_floats(linear.bias)
    if linear.lora_down is not None and linear.lora_up is not None:
        y = y + (x @ read_floats(linear.lora_down).T) @ read_floats(linear.lora_up).T
    return np.asarray(y)


@pytest.mark.parametrize("parts", [True, False], ids=["scaled", "bare"])
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_dense_weight_is_the_layer_rounded_once(
    pair: tuple[str, str | None], dtype: torch.dtype, parts: bool
) -> None:
    linear = make_linear(LinearShape(N, K, rank=12, parts=parts), pair)
    dense = make_dense_linear(linear, dtype)
    zero, one = np.zeros((1, K)), np.eye(K)
    bias = multiply_in_float64(zero, linear)
    weight = (multiply_in_float64(one, linear) - bias).T
    assert linear.lora_up is not None
    assert linear.lora_down is not None
    low_rank = np.abs(read_floats(linear.lora_up)) @ np.abs(read_floats(linear.lora_down))
    rounding = torch.finfo(dtype).eps / 2
    decoding = DECODING * (np.abs(weight) + low_rank)  # the two may cancel
    difference = np.abs(dense.weight.double().numpy() - weight)
    assert (difference <= rounding * np.abs(weight) + decoding).all()
    assert (dense.bias is not None) == bool(parts or (pair[1] == "uint4_shifted"))
    if dense.bias is not None:
        limit = rounding * np.abs(bias[0]) + decoding.sum(1)
        assert (np.abs(dense.bias.double().numpy() - bias[0]) <= limit).all()
    assert dense.num_bytes == (N * K + (N if dense.bias is not None else 0)) * dtype.itemsize


def test_many_rows_are_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = make_linear(LinearShape(N, K, rank=12), ("int4", "uint4_shifted"))
    whole = make_dense_linear(linear, torch.float32)
    monkeypatch.setattr("halfbyte.formats.dense_linear._CHUNK_ELEMENTS", 7 * K)
    pieces = make_dense_linear(linear, torch.float32)
    assert torch.equal(pieces.weight, whole.weight)
    assert whole.bias is not None
    assert pieces.bias is not None
    assert torch.equal(pieces.bias, whole.bias)


def test_what_does_not_fit_is_named() -> None:
    linear = make_linear(LinearShape(N, K))
    wide = dataclasses.replace(linear, channel_scale=torch.full((N,), 1e7))
    with pytest.raises(FormatError, match=r"weight: .* not finite in torch.float16: .*bfloat16"):
        make_dense_linear(wide, torch.float16)
    spoilt = dataclasses.replace(linear, bias=torch.full((N,), float("nan")))
    with pytest.raises(FormatError, match=r"bias: .* a part of it is not") as refusal:
        make_dense_linear(spoilt, torch.bfloat16)
    assert "run the layer in torch.bfloat16" not in str(refusal.value)
    with pytest.raises(FormatError, match=r"dtype torch\.float64: wanted float16"):
        make_dense_linear(linear, torch.float64)
