"""The CPU backend against the float64 reference, on every path; and the failure cases it meets."""

from dataclasses import replace

import pytest
import torch

from halfbyte import cpu
from halfbyte.errors import FormatError
from halfbyte.formats.compiled import make_operand
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.native import library
from halfbyte.native.packed_linear import Epilogue, multiply_packed
from tests.random_linears import FORMAT_PAIRS, LinearShape, make_input, make_linear, pair_id
from tests.tolerance import assert_close_to_reference

W4A4_PAIRS = tuple(pair for pair in FORMAT_PAIRS if pair[1] is not None)
SHORT_PAIRS = (("nvfp4", "nvfp4_nunchaku"), ("int4", "int4"), ("nvfp4", None))


def check(m: int, linear: QuantizedLinear, dtype: torch.dtype = torch.float32) -> None:
    x = make_input(m, linear.in_features, dtype)
    assert_close_to_reference(cpu.w4a4_linear(x, linear), x, linear)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_every_format_and_dtype_matches_the_reference(
    pair: tuple[str, str | None], dtype: torch.dtype, path: str
) -> None:
    check(19, make_linear(LinearShape(n=50, k=320, dtype=dtype), pair), dtype)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 31, 32, 33, 127, 128, 129, 256, 512])
@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=pair_id)
def test_numbers_of_rows_that_meet_and_miss_the_tiles(
    m: int, pair: tuple[str, str | None], path: str
) -> None:
    check(m, make_linear(LinearShape(n=40, k=256), pair))


@pytest.mark.long
@pytest.mark.parametrize("m", [1, 8, 32, 512, 1024, 1536, 2048])
@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=pair_id)
def test_many_rows_at_depth_2048(m: int, pair: tuple[str, str | None], path: str) -> None:
    check(m, make_linear(LinearShape(n=256, k=2048), pair))


@pytest.mark.parametrize("rank", [0, 1, 7, 16, 24, 96, 128])
@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=pair_id)
def test_any_rank_equals_the_unfused_layer(
    rank: int, pair: tuple[str, str | None], path: str
) -> None:
    check(9, make_linear(LinearShape(n=33, k=192, rank=rank), pair))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
@pytest.mark.parametrize("k", [1, 3420, 3696])
@pytest.mark.parametrize("pair", [*SHORT_PAIRS, ("mxfp4", "mxfp4")], ids=pair_id)
def test_odd_sizes_are_padded_inside(
    n: int, k: int, pair: tuple[str, str | None], path: str
) -> None:
    check(3, make_linear(LinearShape(n=n, k=k, rank=4), pair))


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_a_linear_of_codes_alone_needs_no_other_part(
    pair: tuple[str, str | None], path: str
) -> None:
    check(4, make_linear(LinearShape(n=20, k=100, rank=0, parts=False), pair))


@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=pair_id)
def test_strided_and_transposed_x_equal_their_contiguous_copy(
    pair: tuple[str, str | None], path: str
) -> None:
    linear = make_linear(LinearShape(n=24, k=100), pair)
    big = make_input(100, 200)
    for x in (big[:, :100], big[:60:2, 100:], big[:, :50].t(), big[:1, :100].expand(5, 100)):
        whole = cpu.w4a4_linear(x.contiguous(), linear)
        assert torch.equal(cpu.w4a4_linear(x, linear), whole)


@pytest.mark.parametrize("pair", FORMAT_PAIRS, ids=pair_id)
def test_no_rows_and_no_columns(pair: tuple[str, str | None], path: str) -> None:
    linear = make_linear(LinearShape(n=24, k=100), pair)
    assert tuple(cpu.w4a4_linear(torch.empty(0, 100), linear).shape) == (0, 24)
    hollow = make_linear(LinearShape(n=24, k=0), pair)
    assert hollow.bias is not None
    y = cpu.w4a4_linear(torch.empty(5, 0), hollow)
    assert torch.equal(y, hollow.bias.expand(5, 24))
    y = cpu.w4a4_linear(torch.empty(5, 0), replace(hollow, bias=None))
    assert torch.equal(y, torch.zeros(5, 24))


@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_zero_blocks_among_others_give_finite_outputs(
    pair: tuple[str, str | None], path: str
) -> None:
    linear = make_linear(LinearShape(n=24, k=192), pair)
    x = make_input(4, 192)
    x[0, :64] = 0.0
    x[2] = 0.0
    y = cpu.w4a4_linear(x, linear)
    assert y.isfinite().all()
    assert_close_to_reference(y, x, linear)
    if pair[1] != "uint4_shifted":  # there a zero is not the code zero
        assert linear.bias is not None
        assert torch.equal(y[2], linear.bias)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_a_nan_or_infinity_spoils_its_row_and_no_other(
    pair: tuple[str, str | None], bad: float, path: str
) -> None:
    linear = make_linear(LinearShape(n=24, k=100), pair)
    x = make_input(11, 100)
    x[4] *= 0.01  # so that the row is not the one that sets a dynamic global scale
    clean = cpu.w4a4_linear(x, linear)
    x[4, 99] = bad
    y = cpu.w4a4_linear(x, linear)
    assert y[4].isnan().all()
    others = [row for row in range(11) if row != 4]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("pair", W4A4_PAIRS, ids=pair_id)
def test_activation_bytes_and_counts_are_the_same_on_every_path(
    pair: tuple[str, str | None], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = make_linear(LinearShape(n=8, k=200, dtype=torch.bfloat16), pair)
    x = make_input(9, 200, torch.bfloat16)
    x[2] *= 1e4
    x[3] *= 1e-6
    here = cpu.quantize_act_lora(x, linear)
    monkeypatch.setenv("HALFBYTE_NATIVE", "0")
    wanted = cpu.quantize_act_lora(x, linear)
    assert torch.equal(here.values.data, wanted.values.data)
    assert torch.equal(here.values.scales.view(torch.uint8), wanted.values.scales.view(torch.uint8))
    assert here.counts == wanted.counts
    assert here.counts.blocks == wanted.values.scales.numel()
    if pair[1] == "nvfp4_nunchaku":  # one level: 20 * 1e4 / 6 > 448, 1e-6 / 6 rounds to zero
        assert here.counts.saturated > 0
        assert here.counts.flushed > 0


@pytest.mark.parametrize("pair", SHORT_PAIRS, ids=pair_id)
def test_output_does_not_depend_on_the_number_of_threads(
    pair: tuple[str, str | None], path: str
) -> None:
    if path == "torch" or pair[1] is None:
        pytest.skip("the promise is about the compiled product; torch picks its own order of sums")
    linear = make_linear(LinearShape(n=520, k=512, rank=0), pair)
    x = make_input(64, 512)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = cpu.w4a4_linear(x, linear)
        torch.set_num_threads(3)
        assert torch.equal(cpu.w4a4_linear(x, linear), single)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("poison", [float("nan"), 3e38], ids=str)
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_nunchaku"), ("int4", "int4")], ids=pair_id)
def test_all_of_a_poisoned_strided_output_is_written_and_nothing_beside_it(
    pair: tuple[str, str | None], poison: float, path: str
) -> None:
    loaded = library()
    if loaded is None:
        pytest.skip("only the compiled product writes into a buffer of the caller")
    linear = make_linear(LinearShape(n=21, k=128, rank=0, parts=False), pair)
    x = make_input(11, 128)
    act = cpu.quantize_act_lora(x, linear)
    buffer = torch.full((11, 40), poison)
    a, w = make_operand(act.values), make_operand(linear.weight)
    multiply_packed(loaded, a, w, Epilogue(), buffer[:, :21])
    wanted = torch.empty(11, 21)
    multiply_packed(loaded, a, w, Epilogue(), wanted)
    assert torch.equal(buffer[:, :21], wanted)
    rest = buffer[:, 21:]
    assert bool((rest.isnan() if poison != poison else rest == poison).all())
    assert_close_to_reference(wanted, x, linear)


def test_what_does_not_fit_is_named() -> None:
    linear = make_linear(LinearShape(n=8, k=64, rank=4))
    with pytest.raises(FormatError, match=r"x: shape \(2, 65\), wanted \[M, 64\]"):
        cpu.w4a4_linear(torch.ones(2, 65), linear)
    with pytest.raises(FormatError, match="float64"):
        cpu.w4a4_linear(torch.ones(2, 64, dtype=torch.float64), linear)
    with pytest.raises(FormatError, match="weight-only"):
        cpu.quantize_act_lora(torch.ones(2, 64), replace(linear, activation=None))
    act = cpu.quantize_act_lora(torch.ones(2, 64), linear)
    with pytest.raises(FormatError, match="out_dtype"):
        cpu.gemm_w4a4(act, linear, torch.float64)
    with pytest.raises(FormatError, match="rank 4"):
        cpu.gemm_w4a4(replace(act, lora_act=None), linear, torch.float32)
