"""convert_published_operands: the same product from the published layout, and what does not fit."""

import dataclasses

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError, UnsupportedHardwareError
from halfbyte.kernels.gemm_w4a4.placement import GemmOperands
from halfbyte.kernels.gemm_w4a4.published_operands import (
    PublishedOperands,
    convert_published_operands,
    publish_scales,
)
from halfbyte.reference.decode import (
    Float64Array,
    make_value_table,
    read_bytes,
    read_floats,
    unpack_codes,
)
from tests.kernels.gemm_w4a4.published import RANK, K, M, N, make_published, multiply_published


def multiply_converted(o: GemmOperands) -> Float64Array:
    """Return the float64 y of the GEMM's formula on converted operands."""

    def decode(codes: torch.Tensor, sf: torch.Tensor) -> Float64Array:
        rows = codes.shape[0]
        scales = read_bytes(publish_scales(sf, rows, o.columns)).T
        values = make_value_table("e2m1")[unpack_codes(read_bytes(codes), 4)][:, : o.columns]
        return values * np.repeat(make_value_table("e4m3")[scales], 16, axis=1)

    y = decode(o.act_codes, o.act_sf) @ decode(o.weight_codes, o.weight_sf).T
    if o.lora_act is not None and o.lora_up is not None:
        y = y + read_floats(o.lora_act) @ read_floats(o.lora_up).T
    if o.column_scale is not None:
        y = y * read_floats(o.column_scale)
    return y if o.bias is None else y + read_floats(o.bias)


def measure_error(y: Float64Array, wanted: Float64Array) -> float:
    return float(np.linalg.norm(y - wanted) / np.linalg.norm(wanted))


def check_conversion(published: PublishedOperands, dtype: torch.dtype) -> GemmOperands:
    """Assert the product within twice the error of the same low-rank product in torch."""
    operands = convert_published_operands(published, dtype)
    wanted = multiply_published(published)
    limit = 2.0**-24  # column_scale is rounded to float32 once
    if published.lora_act_in is not None and published.lora_up is not None:
        product = published.lora_act_in.to(dtype).double() @ published.lora_up.to(dtype).double().T
        exact = multiply_published(dataclasses.replace(published, lora_act_in=None, lora_up=None))
        limit += 2 * measure_error(exact + product.numpy(), wanted)
    assert measure_error(multiply_converted(operands), wanted) <= limit
    return operands


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("alpha", [1.0, 2.0**-20, 2.0**20, 0.0])
def test_converted_operands_give_the_published_product(alpha: float, dtype: torch.dtype) -> None:
    operands = check_conversion(make_published(alpha=alpha), dtype)
    assert tuple(operands.act_codes.shape) == (M, 32)
    assert operands.lora_act is not None
    assert operands.lora_up is not None
    assert tuple(operands.lora_act.shape) == (M, 8)
    assert operands.lora_act.dtype == operands.lora_up.dtype == dtype


def test_optional_operands_may_be_absent() -> None:
    bare = {"lora_act_in": None, "lora_up": None, "wcscales": None, "bias": None, "alpha": 1.0}
    operands = check_conversion(make_published(**bare), torch.float16)
    assert operands.lora_act is operands.lora_up is operands.column_scale is operands.bias is None
    check_conversion(make_published(wcscales=None), torch.bfloat16)


def test_padding_is_zero_and_bytes_come_back() -> None:
    published = make_published()
    operands = convert_published_operands(published, torch.float16)
    assert not operands.act_codes[:, K // 2 :].any()
    assert torch.equal(operands.act_codes[:, : K // 2], published.act)
    assert torch.equal(operands.weight_codes[:, : K // 2], published.wgt)
    for sf, scales, rows in (
        (operands.act_sf, published.ascales, M),
        (operands.weight_sf, published.wscales, N),
    ):
        back = publish_scales(sf, rows, K)
        assert back.dtype == torch.float8_e4m3fn
        assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_int8_codes_byte_scales_and_half_vectors_are_the_same_operands() -> None:
    published = make_published(lora_up=torch.randn(N, RANK).half())
    assert published.wcscales is not None
    wanted = convert_published_operands(published, torch.float16)
    same = convert_published_operands(
        dataclasses.replace(
            published,
            act=published.act.view(torch.int8),
            wgt=published.wgt.view(torch.int8),
            ascales=published.ascales.view(torch.uint8),
        ),
        torch.float16,
    )
    for field in dataclasses.fields(GemmOperands):
        ours, other = getattr(wanted, field.name), getattr(same, field.name)
        assert torch.equal(ours, other) if isinstance(ours, torch.Tensor) else ours == other


def test_strided_operands_are_read_as_they_are() -> None:
    published = make_published()
    wide = torch.full((M, K), 0x7F, dtype=torch.uint8)
    wide[:, : K // 2] = published.act
    strided = dataclasses.replace(
        published, act=wide[:, : K // 2], ascales=published.ascales.t().contiguous().t()
    )
    check_conversion(strided, torch.bfloat16)


def test_no_rows_convert() -> None:
    empty = make_published(
        act=torch.empty(0, K // 2, dtype=torch.uint8),
        ascales=torch.empty(K // 16, 0, dtype=torch.uint8),
        lora_act_in=torch.empty(0, RANK),
    )
    assert convert_published_operands(empty, torch.float16).act_codes.shape[0] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act": torch.zeros(M, K // 2)}, r"act: got torch.float32 .*wanted uint8 \[M, K/2\]"),
        ({"act": torch.zeros(M, 8, dtype=torch.uint8)}, "act: got K/2 = 8, wanted that of wgt, 24"),
        ({"wgt": torch.zeros(N, dtype=torch.uint8)}, r"wgt: got torch.uint8 \(24,\)"),
        (
            {"ascales": torch.zeros(M, K // 16, dtype=torch.uint8)},
            r"ascales: .*\[K/16, M\] = \[3, 37\]: pass ascales.t\(\)",
        ),
        ({"wscales": torch.zeros(4, N, dtype=torch.uint8)}, r"wscales: .*\[K/16, N\] = \[3, 24\]"),
        ({"wscales": torch.zeros(3, N, dtype=torch.int32)}, "wscales: got torch.int32"),
        ({"wscales": torch.full((3, N), 0x7F, dtype=torch.uint8)}, "wscales: got a NaN or neg"),
        ({"wcscales": torch.ones(N + 1)}, r"wcscales: .*wanted a float \[N\] = \[24\]"),
        ({"wcscales": torch.full((N,), float("inf"))}, "wcscales: got NaN or infinite"),
        ({"bias": torch.zeros(N, dtype=torch.int32)}, "bias: got torch.int32"),
        ({"lora_up": None}, "lora_up: got None, wanted lora_act_in and lora_up together"),
        ({"lora_up": torch.zeros(N, 6)}, r"lora_act_in: .*one R for both"),
        ({"lora_up": torch.full((N, RANK), float("nan"))}, "lora_up: got NaN"),
        ({"bias": torch.zeros(N, device="meta")}, "bias: got a tensor on meta"),
        ({"alpha": float("inf")}, "leaves float32"),
        ({"alpha": float("nan")}, "leaves float32"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        convert_published_operands(make_published(**changes), torch.float16)


def test_a_depth_that_is_no_multiple_of_a_block_is_named() -> None:
    short = {
        "act": torch.zeros(M, 12, dtype=torch.uint8),
        "wgt": torch.zeros(N, 12).to(torch.uint8),
    }
    with pytest.raises(FormatError, match=r"wgt: got K = 24, wanted a multiple of 16"):
        convert_published_operands(make_published(**short), torch.float16)


def test_int4_operands_are_refused_with_what_runs_them() -> None:
    with pytest.raises(
        UnsupportedHardwareError, match=r"ascales: torch.float16 .*cpu backend runs"
    ):
        convert_published_operands(
            make_published(ascales=torch.ones(1, M, dtype=torch.float16)), torch.float16
        )


def test_another_output_dtype_is_named() -> None:
    with pytest.raises(FormatError, match=r"dtype: got torch.float32, wanted torch.float16 or"):
        convert_published_operands(make_published(), torch.float32)


def test_a_spoilt_row_of_lora_act_stays_in_its_row() -> None:
    published = make_published()
    assert published.lora_act_in is not None
    lora_act = published.lora_act_in.clone()
    lora_act[3, 1] = float("inf")
    y = multiply_converted(
        convert_published_operands(
            dataclasses.replace(published, lora_act_in=lora_act), torch.float16
        )
    )
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()
