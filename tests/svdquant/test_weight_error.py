"""The error of a stored weight, against plain formulas and the counts of the quantizer itself."""

import math
from dataclasses import replace

import pytest
import torch

from halfbyte.formats.quantize import dequantize, quantize_with_counts
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.svdquant import rows
from halfbyte.svdquant.weight_error import (
    make_relative_error,
    make_snr_db,
    measure_weight_error,
)


def make_weight() -> torch.Tensor:
    """Return 24 rows of 200: zero blocks, blocks too small and blocks too large for a scale."""
    weight = torch.randn(24, 200, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0.0
    weight[5, 64:128] = 1e-9  # flushed under float16 and one-level E4M3 scales
    weight[7, 128:192] = 1e6  # saturates both
    return weight


@pytest.mark.parametrize("name", ["int4", "nvfp4", "nvfp4_one_level", "mxfp4"])
def test_counts_and_error_are_those_of_the_quantizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROW_CHUNK_ELEMENTS", 1000)  # five rows at a time
    weight = make_weight()
    stored, counts = quantize_with_counts(weight, name)
    found = measure_weight_error(lambda start, stop: weight[start:stop], QuantizedLinear(stored))
    if name == "nvfp4":  # by one rounding the tensor's own widest blocks seem to want over 448
        counts = replace(counts, saturated=0)
    assert found.counts == counts
    assert counts.zero > 0
    if name in ("int4", "nvfp4_one_level"):
        assert counts.flushed > 0
        assert counts.saturated > 0
    error = (dequantize(stored).double() - weight.double()).norm() / weight.double().norm()
    assert found.relative_error == pytest.approx(float(error), rel=1e-5)


def test_relative_error_and_snr_at_their_ends() -> None:
    assert make_relative_error(0.0, 0.0) == 0.0
    assert make_relative_error(1.0, 0.0) == math.inf
    assert make_relative_error(1.0, 4.0) == 0.5
    assert make_snr_db(0.0) is None
    assert make_snr_db(0.1) == pytest.approx(20.0)
