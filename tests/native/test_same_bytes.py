"""The compiled quantizer against the torch statement of the formats: every byte and every count."""

from typing import Any

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_counts import BlockCounts
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.modes import MODES
from halfbyte.formats.quantize import dequantize, quantize_with_counts

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, dict[str, Any]] = {
    **{f"nvfp4-{mode}": {"format": "nvfp4", "mode": mode} for mode in MODES},
    **{f"one_level-{mode}": {"format": "nvfp4_one_level", "mode": mode} for mode in MODES},
    **{
        f"mxfp4-{rounding}": {"format": "mxfp4", "e8m0_rounding": rounding}
        for rounding in ("floor", "ceil", "even", "rceil")
    },
    **{f"int4-{dtype}": {"format": "int4", "scale_dtype": dtype} for dtype in DTYPES},
    "uint4": {"format": "uint4"},
    **{
        f"optimal-{name}": {"format": name, "scale_search": "optimal"}
        for name in ("nvfp4", "nvfp4_one_level", "mxfp4", "int4", "uint4")
    },
}


def make_wild(rows: int = 37, columns: int = 300) -> torch.Tensor:
    """Values over many magnitudes; zero rows, zero blocks, minus zeros, ties."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(rows, columns, generator=draw)
    x *= torch.exp(6 * torch.randn(rows, columns, generator=draw))
    x[3] = 0.0
    x[4, :70] = 0.0
    x[5] *= 1e-9
    x[6] *= 1e3
    x[7] = -0.0
    x[8, ::3] = -0.0
    x[9] = torch.randint(-28, 29, (columns,), generator=draw) / 4.0
    return x.clamp(-6e4, 6e4)


def quantize_both(
    x: torch.Tensor, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[BlockScaledTensor, BlockCounts], tuple[BlockScaledTensor, BlockCounts]]:
    compiled = quantize_with_counts(x, **case)
    with monkeypatch.context() as patch:
        patch.setenv("HALFBYTE_NATIVE", "0")
        return compiled, quantize_with_counts(x, **case)


def assert_same(
    left: tuple[BlockScaledTensor, BlockCounts], right: tuple[BlockScaledTensor, BlockCounts]
) -> None:
    assert torch.equal(left[0].data, right[0].data)
    assert torch.equal(left[0].scales.view(torch.uint8), right[0].scales.view(torch.uint8))
    assert left[1] == right[1]
    if left[0].global_scale is not None:
        assert right[0].global_scale is not None
        assert torch.equal(left[0].global_scale, right[0].global_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_codes_scales_and_counts_equal_the_torch_path(
    case: dict[str, Any], dtype: torch.dtype, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(*quantize_both(make_wild().to(dtype), case, monkeypatch))


@pytest.mark.parametrize("factor", [1e-40, 1e-25, 1e30], ids=str)
@pytest.mark.parametrize("case", ["nvfp4-halfbyte", "mxfp4-floor", "optimal-nvfp4", "optimal-int4"])
def test_values_near_the_ends_of_float32_give_the_same_bytes(
    case: str, factor: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_wild().clamp(-1e4, 1e4) * factor
    assert_same(*quantize_both(x, CASES[case], monkeypatch))


@pytest.mark.parametrize("columns", [0, 1, 15, 16, 17, 255, 257, 1023, 1025])
@pytest.mark.parametrize("case", ["nvfp4-halfbyte", "mxfp4-even", "int4-torch.float16", "uint4"])
def test_odd_widths_are_padded_with_zero_codes(
    case: str, columns: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_same(*quantize_both(make_wild(12, 1025)[:, :columns], CASES[case], monkeypatch))


@pytest.mark.parametrize("case", ["nvfp4-torchao", "mxfp4-floor", "optimal-int4"])
def test_strided_and_transposed_inputs_equal_their_contiguous_copy(case: str, level: str) -> None:
    wide = make_wild(40, 600)
    for view in (wide[:, :300], wide[::2], wide.t(), wide[:, ::2], wide[:1].expand(8, 600)):
        strided = quantize_with_counts(view, **CASES[case])
        assert_same(strided, quantize_with_counts(view.contiguous(), **CASES[case]))


@pytest.mark.parametrize("case", ["nvfp4-halfbyte", "optimal-nvfp4", "int4-torch.float16"])
def test_bytes_do_not_depend_on_the_number_of_threads(
    case: str, level: str, two_threads: None
) -> None:
    x = make_wild(700, 520)
    several = quantize_with_counts(x, **CASES[case])
    torch.set_num_threads(1)
    assert_same(several, quantize_with_counts(x, **CASES[case]))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_one_level", "mxfp4", "int4", "uint4"])
@pytest.mark.parametrize("columns", [1, 64, 300])
def test_dequantized_numbers_equal_the_torch_path(
    name: str, columns: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = quantize_with_counts(make_wild()[:, :columns], name)
    compiled = dequantize(quantized)
    monkeypatch.setenv("HALFBYTE_NATIVE", "0")
    wanted = dequantize(quantized)
    assert torch.equal(compiled.view(torch.int32), wanted.view(torch.int32))  # minus zeros too


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "int4", "uint4"])
def test_nan_and_infinity_are_refused_with_their_number(name: str, bad: float, level: str) -> None:
    x = make_wild()
    x[2, 299] = bad
    x[30, 0] = bad
    with pytest.raises(FormatError, match=r"NaN/Inf.*2"):
        quantize_with_counts(x, name)
