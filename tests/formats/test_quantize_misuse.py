"""Inputs that are no dense matrix of numbers: refused by name, not by a torch internal."""

from typing import Any

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_format import FORMATS, get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_writer import tensor_bytes
from halfbyte.reference.decode import read_floats

X = torch.arange(128.0).reshape(2, 64)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "x",
    [
        None,
        X.tolist(),
        X.numpy(),
        X.to_sparse(),
        X.to_sparse_csr(),
        torch.nested.nested_tensor([X[0], X[1]]),
        X.to("meta"),
    ],
    ids=["none", "list", "numpy", "sparse", "csr", "nested", "meta"],
)
def test_what_is_no_dense_tensor_is_refused(x: Any, name: str) -> None:
    with pytest.raises(FormatError, match="x: "):
        quantize(x, name)


@pytest.mark.parametrize("format", [None, 1, ["nvfp4"]])
def test_a_format_or_mode_of_another_type_is_refused(format: Any) -> None:
    with pytest.raises(FormatError, match="is unknown; use one of"):
        quantize(X, format)
    with pytest.raises(FormatError, match="is unknown; use one of"):
        quantize(X, "nvfp4", mode=format)


@pytest.mark.parametrize("scale", [1.0, torch.ones((), device="meta")], ids=["float", "meta"])
def test_a_global_scale_without_a_value_is_refused(scale: Any) -> None:
    with pytest.raises(FormatError, match="global_scale: "):
        quantize(X, "nvfp4", global_scale=scale)


def test_records_of_other_types_are_refused() -> None:
    t = quantize(X, "nvfp4")
    for arguments in (
        (None, t.data, t.scales, t.global_scale, 64),
        (get_format("nvfp4"), None, t.scales, t.global_scale, 64),
        (get_format("nvfp4"), t.data, [1], t.global_scale, 64),
        (get_format("nvfp4"), t.data, t.scales, 1.0, 64),
        (get_format("nvfp4"), t.data, t.scales, t.global_scale, 64.0),
        (get_format("nvfp4"), t.data, t.scales, t.global_scale, -64),
    ):
        with pytest.raises(FormatError, match="wanted"):
            BlockScaledTensor(*arguments)  # type: ignore[arg-type]
    for fields in ({"weight": None}, {"weight": t, "bias": [0.0]}, {"weight": t, "smooth": 1}):
        with pytest.raises(FormatError, match="wanted"):
            QuantizedLinear(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 3)])
def test_bytes_of_a_tensor_with_any_stride_in_a_dimension_of_one(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float16, torch.float32):
        x = torch.empty_strided(shape, (7, 5)[-len(shape) :], dtype=dtype).fill_(1.5)
        assert bytes(tensor_bytes(x)) == bytes(view_as_bytes(x).tolist())
        assert read_floats(x).tolist() == x.tolist()
