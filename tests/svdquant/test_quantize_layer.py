"""One group of linears through SVDQuant: accuracy, what is shared, edge cases, errors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.reference import w4a4_linear
from halfbyte.svdquant.output_error import OutputError
from halfbyte.svdquant.presets import PRESETS, SVDQuantPreset, get_preset
from halfbyte.svdquant.quantize_layer import GroupChoice, quantize_linear_group
from halfbyte.svdquant.statistics import InputStatistics
from tests.svdquant.layer_cases import (
    LayerCase,
    load_minilm_case,
    make_outlier_case,
    needs_minilm,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = ("nvfp4", "int4", "mxfp4")


def gather(rows: torch.Tensor) -> InputStatistics:
    statistics = InputStatistics(rows.shape[1])
    statistics.update(rows)
    return statistics


def quantize_case(
    case: LayerCase, preset: SVDQuantPreset | str, with_data: bool = True
) -> tuple[QuantizedLinear, GroupChoice]:
    record = get_preset(preset) if isinstance(preset, str) else preset
    statistics = gather(case.calibration) if with_data else None
    linears, choice = quantize_linear_group([case.weight], [case.bias], statistics, record)
    return linears[0], choice


def measure_output_error(linear: QuantizedLinear, case: LayerCase) -> float:
    """Return the relative error on rows that did not calibrate, by the float64 reference."""
    rows = case.judging
    bias = case.bias.double().numpy()
    wanted = rows.double().numpy() @ case.weight.double().numpy().T
    error = w4a4_linear(rows, linear) - bias - wanted
    return float(np.linalg.norm(error) / np.linalg.norm(wanted))


@pytest.mark.parametrize("number", NUMBERS)
def test_svdquant_errs_less_than_plain_on_an_outlier_layer(number: str) -> None:
    case = make_outlier_case(96, 320)
    plain, _ = quantize_case(case, f"{number}_plain")
    linear, _ = quantize_case(case, f"{number}_svdquant_r32")
    assert measure_output_error(linear, case) < 0.8 * measure_output_error(plain, case)


@pytest.mark.model
@needs_minilm
@pytest.mark.parametrize(("number", "bar"), [("nvfp4", 0.0473), ("int4", 0.0859)])
def test_real_outlier_layer_errs_less_than_smoothing_and_svd_alone(number: str, bar: float) -> None:
    # The bars are what fake quantization with rank 32, smoothing and nearest rounding reached.
    case = load_minilm_case()
    plain, _ = quantize_case(case, f"{number}_plain")
    linear, choice = quantize_case(case, f"{number}_svdquant_r32")
    error = measure_output_error(linear, case)
    assert error < bar
    assert error < measure_output_error(plain, case)
    assert (choice.alpha, choice.beta) != (0.0, 0.0)


@pytest.mark.parametrize("number", NUMBERS)
def test_each_step_of_svdquant_gains(number: str) -> None:
    case = make_outlier_case(128, 320)
    full = replace(get_preset(f"{number}_svdquant_r32"), rank=8)
    nearest = replace(full, rounding="nearest")
    unsmoothed = replace(nearest, smoothing_points=0)
    plain = get_preset(f"{number}_plain")
    errors = [
        measure_output_error(quantize_case(case, preset)[0], case)
        for preset in (plain, unsmoothed, nearest, full)
    ]
    assert errors == sorted(errors, reverse=True), errors


@pytest.mark.parametrize("name", PRESETS)
def test_reported_error_is_that_of_the_record_on_the_held_out_rows(name: str) -> None:
    case = make_outlier_case(40, 100)
    linear, choice = quantize_case(case, name)
    held_out = replace(case, judging=gather(case.calibration).held_out.rows)
    assert choice.relative_error == pytest.approx(measure_output_error(linear, held_out), rel=1e-3)


@pytest.mark.parametrize("number", NUMBERS)
def test_linears_of_a_group_share_smooth_and_lora_down(number: str) -> None:
    case = make_outlier_case(160, 128)
    parts, biases = case.weight.split([64, 32, 64]), (case.bias[:64], None, case.bias[96:])
    linears, _ = quantize_linear_group(
        parts, biases, gather(case.calibration), get_preset(f"{number}_svdquant_r32")
    )
    assert [linear.out_features for linear in linears] == [64, 32, 64]
    for linear in linears:
        assert linear.rank == 32
        assert linear.lora_down is linears[0].lora_down
        assert linear.smooth is not None
        assert linears[0].smooth is not None
        assert torch.equal(linear.smooth, linears[0].smooth)
    assert [linear.bias is None for linear in linears] == [False, True, False]
    for linear, weight in zip(linears, parts, strict=True):
        bias = torch.zeros(weight.shape[0]) if linear.bias is None else linear.bias
        part = LayerCase(weight, bias, case.calibration, case.judging)
        assert measure_output_error(linear, part) < 0.15


def test_rank_of_a_group_is_cut_to_its_narrowest_linear() -> None:
    case = make_outlier_case(80, 64)
    linears, _ = quantize_linear_group(
        case.weight.split([70, 10]), (None, None), None, get_preset("nvfp4_svdquant_r32")
    )
    assert [linear.rank for linear in linears] == [10, 10]


@pytest.mark.parametrize("rank", [0, 1, 16, 24, 96, 128, 1000])
def test_any_rank_gives_weight_plus_low_rank_close_to_the_float_weight(rank: int) -> None:
    case = make_outlier_case(112, 144)
    preset = SVDQuantPreset("mine", "int4", "int4", rank, smoothing_points=3, rounding="optimal")
    linear, _ = quantize_case(case, preset)
    assert linear.rank == min(rank, 112)
    assert (linear.lora_down is None) == (rank == 0)
    assert linear.smooth is not None
    restored = dequantize(linear.weight) / linear.smooth.float()
    if linear.lora_down is not None and linear.lora_up is not None:
        restored = restored + linear.lora_up.float() @ linear.lora_down.float()
    error = float((restored - case.weight).norm() / case.weight.norm())
    assert error < (0.15 if rank < 112 else 0.002)  # a full rank leaves bfloat16 dust


def test_more_rank_never_costs_accuracy() -> None:
    case = make_outlier_case(112, 144)
    errors = []
    for rank in (0, 8, 32, 96):
        preset = SVDQuantPreset("mine", "nvfp4", None, rank)
        errors.append(measure_output_error(quantize_case(case, preset)[0], case))
    assert errors == sorted(errors, reverse=True), errors


@pytest.mark.parametrize("k", [1, 3, 17, 65, 130])
@pytest.mark.parametrize("number", NUMBERS)
def test_any_width_is_padded_inside(number: str, k: int) -> None:
    case = make_outlier_case(24, k)
    linear, _ = quantize_case(case, f"{number}_svdquant_r32")
    assert linear.in_features == k
    assert measure_output_error(linear, case) < 0.35


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("shape", [(1, 70), (5, 0), (0, 70), (1, 1)], ids=str)
def test_one_row_and_nothing_at_all_are_quantized(name: str, shape: tuple[int, int]) -> None:
    case = make_outlier_case(*shape)
    for with_data in (True, False):
        linear, _ = quantize_case(case, name, with_data)
        assert (linear.out_features, linear.in_features) == shape
        y = w4a4_linear(case.judging, linear)
        assert y.shape == (200, shape[0])
        assert bool(np.isfinite(y).all())
        if shape[1] == 0:
            assert np.array_equal(y, np.broadcast_to(case.bias.numpy(), y.shape))


@pytest.mark.parametrize("name", PRESETS)
def test_single_row_of_calibration_is_enough_to_run(name: str) -> None:
    case = replace(make_outlier_case(20, 70), calibration=make_outlier_case(20, 70).judging[:1])
    linear, choice = quantize_case(case, name)
    assert choice.relative_error is not None
    assert bool(np.isfinite(w4a4_linear(case.judging, linear)).all())


@pytest.mark.parametrize("name", PRESETS)
def test_zero_weight_and_zero_input_give_exactly_the_bias(name: str) -> None:
    case = make_outlier_case(20, 70)
    for zeroed in (
        replace(case, weight=torch.zeros(20, 70)),
        replace(case, calibration=torch.zeros(40, 70), judging=torch.zeros(9, 70)),
    ):
        linear, choice = quantize_case(zeroed, name)
        assert choice.relative_error == 0.0
        y = w4a4_linear(zeroed.judging, linear)
        assert np.array_equal(y, np.broadcast_to(case.bias.double().numpy(), y.shape))


def test_shifted_activation_is_folded_into_the_bias() -> None:
    case = make_outlier_case(48, 96)
    rows = torch.nn.functional.gelu(
        torch.randn(300, 96, generator=torch.Generator().manual_seed(2))
    )
    case = replace(case, calibration=rows[:200], judging=rows[200:])
    preset = SVDQuantPreset("mine", "int4", "uint4_shifted", 8, smoothing_points=4, rounding="gptq")
    linear, choice = quantize_case(case, preset)
    signed, _ = quantize_case(case, replace(preset, activation="int4"))
    assert linear.smooth is not None
    error = measure_output_error(linear, case)
    # x >= -.17, so 16 unsigned levels over the positive range are finer than 15 over both signs;
    # an unfolded shift would err by about the shift over the mean magnitude of x, .5.
    assert error < measure_output_error(signed, case)
    held_out = replace(case, judging=gather(case.calibration).held_out.rows)
    assert measure_output_error(linear, held_out) == pytest.approx(choice.relative_error, rel=1e-3)
    without, _ = quantize_linear_group([case.weight], [None], gather(case.calibration), preset)
    assert without[0].bias is not None
    assert linear.bias is not None
    assert torch.allclose(without[0].bias + case.bias, linear.bias, atol=1e-6)


def test_static_scale_needs_data_and_covers_all_of_it() -> None:
    case = make_outlier_case(48, 96)
    preset = SVDQuantPreset("static", "nvfp4", "nvfp4_static", 8, smoothing_points=4)
    with pytest.raises(FormatError, match="'nvfp4_static' needs calibration data"):
        quantize_case(case, preset, with_data=False)
    with pytest.raises(FormatError, match="needs calibration data"):
        quantize_linear_group([case.weight], [None], InputStatistics(96), preset)
    linear, _ = quantize_case(case, preset)
    assert linear.activation_global_scale is not None
    assert linear.smooth is not None
    amax = (case.calibration / linear.smooth.float()).abs().max()
    assert float(linear.activation_global_scale) == pytest.approx(float(amax) / 2688.0, rel=1e-6)
    assert measure_output_error(linear, case) < 0.12


@pytest.mark.parametrize("number", ["nvfp4", "int4"])
@pytest.mark.parametrize("with_data", [True, False])
def test_refinements_keep_the_best(number: str, with_data: bool) -> None:
    case = make_outlier_case(96, 160)
    preset = replace(get_preset(f"{number}_svdquant_r32"), rank=8)
    once, first = quantize_case(case, preset, with_data)
    refined, choice = quantize_case(case, replace(preset, refinements=5), with_data)
    assert 0 <= choice.refinements <= 5
    held_out = replace(case, judging=gather(case.calibration).held_out.rows)
    if with_data:
        assert measure_output_error(refined, held_out) <= measure_output_error(once, held_out)
    else:
        assert first.relative_error is None
        assert choice.refinements > 0  # on the weight alone the first rounds always gain
    same = torch.equal(refined.weight.data, once.weight.data)
    assert same == (choice.refinements == 0)


@pytest.mark.parametrize("number", ["nvfp4", "int4"])
def test_weight_only_gram_path_chooses_what_the_rows_choose(number: str) -> None:
    case = make_outlier_case(64, 96)
    preset = replace(
        get_preset(f"{number}_weight_only_r32"), rank=8, smoothing_points=5, rounding="gptq"
    )
    with_gram = gather(case.calibration)
    rows_only = InputStatistics(96, keep_gram=False)
    rows_only.update(case.calibration)
    (by_gram,), gram_choice = quantize_linear_group([case.weight], [None], with_gram, preset)
    (by_rows,), row_choice = quantize_linear_group([case.weight], [None], rows_only, preset)
    assert (gram_choice.alpha, gram_choice.beta) == (row_choice.alpha, row_choice.beta)
    assert gram_choice.relative_error == pytest.approx(row_choice.relative_error, rel=1e-3)
    # Two ways to sum one Gram matrix: a rounding may fall differently where it was a near tie.
    differing = (by_gram.weight.data != by_rows.weight.data).float().mean()
    assert float(differing) < 0.01


def test_weight_only_error_comes_from_the_gram_matrix_without_reading_rows() -> None:
    case = make_outlier_case(64, 96)
    statistics = gather(case.calibration)
    wrong = case.weight + 0.1
    direct = OutputError.measure(case.weight, statistics, None, None, (wrong, None))
    statistics.held_out.rows = torch.full((1, 96), float("nan"))
    blind = OutputError.measure(case.weight, statistics, None, None, (wrong, None))
    assert blind == direct
    rows = case.calibration[::4].double()
    wanted = float((rows @ (wrong - case.weight).double().T).square().sum())
    assert blind.squared == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", PRESETS)
def test_without_data_the_result_is_unsmoothed_and_close(name: str) -> None:
    case = make_outlier_case(48, 96)
    linear, choice = quantize_case(case, name, with_data=False)
    assert linear.smooth is None
    assert (choice.alpha, choice.beta, choice.relative_error) == (0.0, 0.0, None)
    assert measure_output_error(linear, case) < 0.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_any_float_dtype_are_taken_as_they_are(dtype: torch.dtype) -> None:
    case = make_outlier_case(32, 64)
    weight = case.weight.to(dtype)
    preset = get_preset("nvfp4_svdquant_r32")
    (low,), _ = quantize_linear_group([weight], [None], None, preset)
    (wide,), _ = quantize_linear_group([weight.float()], [None], None, preset)
    assert torch.equal(low.weight.data, wide.weight.data)
    assert low.lora_down is not None
    assert low.lora_down.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_of_the_low_rank_factors_is_made_up_for_by_the_residual(dtype: str) -> None:
    case = make_outlier_case(96, 160)
    preset = SVDQuantPreset("mine", "nvfp4", None, 32)
    exact, _ = quantize_case(case, replace(preset, low_rank_dtype="float32"))
    rounded, _ = quantize_case(case, replace(preset, low_rank_dtype=dtype))  # type: ignore[arg-type]
    assert rounded.lora_up is not None
    assert str(rounded.lora_up.dtype) == f"torch.{dtype}"
    # bfloat16 keeps 8 bits: left alone, its rounding would be an error of .002 of the low rank.
    assert measure_output_error(rounded, case) < 1.01 * measure_output_error(exact, case)


def test_same_call_gives_the_same_bytes_and_leaves_its_arguments_alone() -> None:
    case = make_outlier_case(64, 96)
    statistics = gather(case.calibration)
    weight = case.weight.clone()
    preset = get_preset("nvfp4_svdquant_r32")
    (one,), _ = quantize_linear_group([weight], [case.bias], statistics, preset)
    (two,), _ = quantize_linear_group([weight], [case.bias], statistics, preset)
    assert torch.equal(weight, case.weight)
    assert torch.equal(one.weight.data, two.weight.data)
    assert one.lora_down is not None
    assert two.lora_down is not None
    assert torch.equal(one.lora_down, two.lora_down)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_nan_and_infinity_name_the_weight(bad: float) -> None:
    weights = [torch.ones(4, 8), torch.ones(6, 8)]
    weights[1][2, 3] = bad
    with pytest.raises(FormatError, match="weight 1 of the group contains NaN/Inf: 1 of 48"):
        quantize_linear_group(weights, [None, None], None, get_preset("nvfp4_plain"))


def test_what_does_not_belong_together_is_named() -> None:
    preset = get_preset("nvfp4_plain")
    one, other = torch.ones(4, 8), torch.ones(4, 9)
    with pytest.raises(FormatError, match=r"weight 1 .*\(4, 9\).* 8 columns"):
        quantize_linear_group([one, other], [None, None], None, preset)
    with pytest.raises(FormatError, match=r"weight 0 .*torch\.int64"):
        quantize_linear_group([one.long()], [None], None, preset)
    with pytest.raises(FormatError, match=r"weight 0 .*shape \(\)"):
        quantize_linear_group([torch.ones(())], [None], None, preset)
    with pytest.raises(FormatError, match="1 weights and 2 biases"):
        quantize_linear_group([one], [None, None], None, preset)
    with pytest.raises(FormatError, match="0 weights"):
        quantize_linear_group([], [], None, preset)
    with pytest.raises(FormatError, match=r"bias 0 .*\(5,\), wanted"):
        quantize_linear_group([one], [torch.ones(5)], None, preset)
    with pytest.raises(FormatError, match="statistics: 9 columns, wanted 8"):
        quantize_linear_group([one], [None], InputStatistics(9), preset)


def test_two_threads_give_the_same_bytes_every_time_and_are_given_back() -> None:
    case = make_outlier_case(64, 96)
    torch.set_num_threads(2)  # the fixture puts the number back
    runs = [quantize_case(case, "int4_svdquant_r32") for _ in range(3)]
    assert torch.get_num_threads() == 2
    first, choice = runs[0]
    for linear, other in runs[1:]:
        assert torch.equal(linear.weight.data, first.weight.data)
        assert other == choice
