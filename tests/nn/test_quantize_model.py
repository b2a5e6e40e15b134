"""quantize_model: what is swapped, what is reported, and that every way of walking agrees."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import FormatError
from halfbyte.nn.progress import QuantizationProgress
from halfbyte.nn.report import QuantizationReport
from halfbyte.reference import w4a4_linear
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import PRESETS, SVDQuantPreset
from tests.nn.small_models import (
    QUICK,
    WIDTH,
    Decoder,
    ShiftedDecoder,
    count_hooks,
    list_swapped,
    make_model,
    make_tokens,
    quantize,
    read_state,
    record_of,
)
from tests.tolerance import assert_close_to_reference, measure_error

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPS = (
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    ("attention.o_proj",),
    ("up_proj",),
    ("down_proj",),
)


def name_groups(layers: int) -> list[tuple[str, ...]]:
    return [
        tuple(f"layers.{index}.{part}" for part in group)
        for index in range(layers)
        for group in GROUPS
    ]


def strip_time(report: QuantizationReport) -> dict[str, Any]:
    return {
        key: value
        for key, value in report.to_json().items()
        if key not in ("seconds", "peak_memory_bytes")
    }


def test_every_linear_of_the_blocks_is_swapped_and_the_others_are_listed() -> None:
    model = make_model()
    report = quantize(model, make_tokens())
    names = [name for group in name_groups(3) for name in group]
    assert sorted(list_swapped(model)) == sorted(names)
    assert [layer.name for layer in report.layers] == names
    assert report.left_out == ("layers.0.tiny", "layers.1.tiny", "layers.2.tiny", "lm_head")
    assert report.uncalibrated == ()
    assert type(model.lm_head) is nn.Linear


def test_linears_with_one_input_are_a_group_and_share_smooth_and_lora_down() -> None:
    model = make_model()
    report = quantize(model, make_tokens())
    assert list(dict.fromkeys(layer.group for layer in report.layers)) == name_groups(3)
    q, k, v = (record_of(model, f"layers.1.attention.{part}_proj") for part in "qkv")
    assert q.lora_down is not None
    for other in (k, v):
        assert other.lora_down is not None
        assert torch.equal(q.lora_down, other.lora_down)
        assert (q.smooth is None) == (other.smooth is None)
        if q.smooth is not None and other.smooth is not None:
            assert torch.equal(q.smooth, other.smooth)


@pytest.mark.parametrize("name", PRESETS)
def test_quantized_model_is_close_and_each_reported_error_is_true(name: str) -> None:
    model, tokens = make_model(), make_tokens()
    original = make_model()
    report = quantize(model, tokens, name)
    assert report.preset == name
    wanted = torch.cat([original(batch) for batch in tokens])
    y = torch.cat([model(batch) for batch in tokens])
    if not name.endswith("_plain"):  # which these outliers spoil
        assert float((y - wanted).norm() / wanted.norm()) < 0.2
    first = report.layers[0]
    assert first.name == "layers.0.attention.q_proj"
    rows = torch.cat([original.layers[0].norm(original.embed(batch))[0] for batch in tokens])[::4]
    linear = original.layers[0].attention.q_proj
    true = rows.double() @ linear.weight.double().T + linear.bias.double()
    got = torch.from_numpy(w4a4_linear(rows, record_of(model, first.name))).float()
    assert first.relative_error == pytest.approx(measure_error(got, true.numpy()), rel=1e-3)


def test_report_fields_are_sane_and_plain_json() -> None:
    model = make_model()
    report = quantize(model, make_tokens())
    for layer in report.layers:
        record = record_of(model, layer.name)
        assert layer.is_calibrated
        assert 0.0 < layer.relative_error < 0.3
        assert layer.snr_db == pytest.approx(-20 * math.log10(layer.relative_error))
        assert layer.blocks == record.out_features * -(-record.in_features // 64)
        assert layer.activation_blocks == 30 * -(-record.in_features // 64)  # 120 rows, 1 in 4
        counts = (layer.saturated, layer.flushed, layer.zero_scales)
        assert counts == (0, 0, 0)
        assert layer.activation_saturated == layer.activation_flushed == 0
        assert 0.0 <= layer.alpha <= 1.0
        assert layer.num_bytes == record.num_bytes
    assert report.seconds > 0.0
    assert report.peak_memory_bytes > 10**7
    plain = report.to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["layers"][0]["group"] == list(report.layers[0].group)


def test_zero_and_saturated_blocks_are_counted() -> None:
    model = make_model()
    weight = model.layers[0].up_proj.weight
    weight[:3] = 0.0
    report = quantize(model, make_tokens(), "nvfp4_plain")
    entry = next(layer for layer in report.layers if layer.name == "layers.0.up_proj")
    assert entry.zero_scales == 3 * WIDTH // 16
    tokens = make_tokens()
    huge = make_model()
    huge.layers[0].norm.bias[:] = 1e5  # one-level NVFP4 ends at 2688
    report = quantize(huge, tokens, "nvfp4_plain")
    assert report.layers[0].activation_saturated == report.layers[0].activation_blocks


def test_chained_and_replayed_walks_give_the_same_records_and_reports() -> None:
    chained, replayed = make_model(Decoder), make_model(ShiftedDecoder)
    one = quantize(chained, make_tokens())
    two = quantize(replayed, make_tokens())
    assert read_state(chained) == read_state(replayed)
    assert strip_time(one) == strip_time(two)


@pytest.mark.parametrize("preset", [QUICK, "nvfp4_weight_only_r32"], ids=["w4a4", "weight only"])
def test_two_runs_give_the_same_bytes(preset: Any) -> None:
    models = [make_model(), make_model()]
    reports = [quantize(model, make_tokens(), preset) for model in models]
    assert read_state(models[0]) == read_state(models[1])
    assert strip_time(reports[0]) == strip_time(reports[1])


def test_later_linears_see_the_error_of_earlier_ones() -> None:
    # Statistics of down_proj come from up_proj already in 4 bits.
    model, float_model = make_model(num_layers=1), make_model(num_layers=1)
    plain = SVDQuantPreset("static", "nvfp4", "nvfp4_static", 0)
    quantize(model, make_tokens(), plain)
    seen: list[torch.Tensor] = []
    for candidate in (model, float_model):
        handle = candidate.layers[0].down_proj.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].abs().max())
        )
        largest = [candidate(batch) for batch in make_tokens()]
        assert len(largest) == 3
        handle.remove()
    scale = record_of(model, "layers.0.down_proj").activation_global_scale
    assert scale is not None
    assert float(scale) == pytest.approx(float(max(seen[:3])) / 2688, rel=1e-5)
    assert float(scale) != pytest.approx(float(max(seen[3:])) / 2688, rel=1e-5)


def test_model_without_a_list_of_layers_is_one_block() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    report = quantize(model, torch.randn(50, 64))
    assert [layer.name for layer in report.layers] == ["0", "2"]
    assert all(layer.is_calibrated for layer in report.layers)
    assert list_swapped(model) == ["0", "2"]


def test_bare_list_of_layers_is_quantized_without_data() -> None:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    report = quantize(model, None)
    assert list_swapped(model) == ["0", "1"]
    assert report.uncalibrated == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_model_keeps_its_dtype(dtype: torch.dtype) -> None:
    model, original = make_model().to(dtype), make_model()
    quantize(model, make_tokens(), "nvfp4_svdquant_r32")
    y = model(make_tokens()[0])
    wanted = original(make_tokens()[0])
    assert y.dtype == dtype
    assert float((y.float() - wanted).norm() / wanted.norm()) < 0.2
    record = record_of(model, "layers.0.up_proj")
    for part in (record.lora_down, record.lora_up, record.bias):
        assert part is not None
        assert part.dtype == dtype


def test_float32_bias_beside_half_precision_weights_is_converted_once() -> None:
    model = make_model().half()
    bias = torch.arange(64.0) / 7
    model.layers[0].attention.q_proj.bias = nn.Parameter(bias, requires_grad=False)
    rules = LinearRules(include=("*.attention.q_proj",))
    quantize(model, None, "nvfp4_svdquant_r32", rules=rules)
    module = model.layers[0].attention.q_proj
    assert module.bias.dtype == torch.float16
    assert torch.equal(module(torch.zeros(2, 64).half()), bias.half().expand(2, 64))


@pytest.mark.parametrize("rank", [0, 16, 24, 96, 128])
def test_width_of_no_whole_block_and_any_rank_equal_the_reference(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3420, 130))
    preset = SVDQuantPreset("mine", "nvfp4", "nvfp4_one_level", rank, smoothing_points=2)
    quantize(model, torch.randn(20, 3420), preset)
    assert record_of(model, "0").rank == rank
    x = torch.randn(9, 2 * 3420)[:, :3420]  # rows lie apart
    assert_close_to_reference(model(x), x, record_of(model, "0"))
    # not the same bits: torch's product, without the library, orders sums by the number of rows
    assert_close_to_reference(model(x.expand(4, 9, 3420))[3], x, record_of(model, "0"))


@pytest.mark.parametrize("is_training", [True, False])
def test_training_mode_comes_back_on_swapped_modules_too(is_training: bool) -> None:
    model = make_model().train(is_training)
    model.layers[1].eval()
    quantize(model, make_tokens())
    modes = {name: module.training for name, module in model.named_modules()}
    wanted = {name: is_training and not name.startswith("layers.1") for name in modes}
    assert modes == wanted


def test_keyword_calibration_of_the_model() -> None:
    one, two = make_model(), make_model()
    quantize(one, [{"tokens": batch} for batch in make_tokens()])
    quantize(two, make_tokens())
    assert read_state(one) == read_state(two)


def test_rules_choose_by_name_and_size() -> None:
    model = make_model()
    rules = LinearRules(min_features=8, exclude=("*.attention.*",))
    report = quantize(model, make_tokens(), rules=rules)
    names = {layer.name.split(".", 2)[2] for layer in report.layers}
    assert names == {"up_proj", "down_proj", "tiny"}
    assert "layers.0.attention.q_proj" in report.left_out


def test_progress_counts_every_linear_and_ends_at_the_total() -> None:
    events: list[QuantizationProgress] = []
    quantize(make_model(), make_tokens(), progress=events.append)
    assert [event.done for event in events] == [3, 4, 5, 6, 9, 10, 11, 12, 15, 16, 17, 18]
    assert {event.total for event in events} == {18}
    assert [event.name for event in events] == [", ".join(group) for group in name_groups(3)]
    assert all(event.remaining_seconds is not None for event in events)
    assert events[-1].remaining_seconds == 0.0
    seconds = [event.seconds for event in events]
    assert seconds == sorted(seconds)
    assert events[0].peak_memory_bytes > 0


def test_bar_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    quantize(make_model(num_layers=1), make_tokens(1), progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "quick" in captured.err
    assert "6/6" in captured.err


class _OnPurposeError(Exception):
    pass


@pytest.mark.parametrize("kind", [Decoder, ShiftedDecoder])
@pytest.mark.parametrize("at", [1, 6, 12])
def test_an_exception_in_the_middle_leaves_no_hooks_and_the_mode_as_it_was(
    kind: type[nn.Module], at: int
) -> None:
    model = make_model(kind).train()
    count = 0

    def fail(_: QuantizationProgress) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise _OnPurposeError

    with pytest.raises(_OnPurposeError):
        quantize(model, make_tokens(), progress=fail)
    assert count_hooks(model) == 0
    assert all(module.training for module in model.modules())
    assert model(make_tokens()[0]).shape == (1, 40, 100)  # what was swapped works


def test_nan_in_a_weight_or_an_input_names_the_linear() -> None:
    model = make_model()
    model.layers[1].up_proj.weight[3, 4] = float("nan")
    with pytest.raises(FormatError, match=r"layers\.1\.up_proj: weight 0 .* NaN/Inf: 1 of"):
        quantize(model, make_tokens())
    assert count_hooks(model) == 0
    model = make_model()
    model.layers[0].norm.weight[5] = float("inf")
    with pytest.raises(FormatError, match=r"layers\.0\.attention\.q_proj, .*calibration input"):
        quantize(model, make_tokens())


def test_weights_elsewhere_or_of_another_dtype_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = Decoder()
    with pytest.raises(FormatError, match=r"layers\.0\.attention\.q_proj: weight on meta"):
        quantize(model, None)
    with pytest.raises(FormatError, match=r"q_proj: weight is torch\.float64, wanted float16"):
        quantize(make_model().double(), make_tokens())


@pytest.mark.parametrize("calibration", [[], {"tokens": 1}, "text", 5, [3]], ids=repr)
def test_calibration_that_is_none_is_refused_before_anything_is_changed(calibration: Any) -> None:
    model = make_model()
    before = read_state(model)
    with pytest.raises(FormatError, match="calibration"):
        quantize(model, calibration)
    assert read_state(model) == before


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(FormatError, match="preset 'nvfp5' is unknown"):
        quantize(make_model(), make_tokens(), "nvfp5")
    with pytest.raises(FormatError, match="model: int, wanted"):
        quantize(3, None)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="no linear to quantize"):
        quantize(nn.Sequential(nn.Linear(8, 8)), None)


def test_model_runs_on_any_batch_and_length_after_quantization() -> None:
    model = make_model()
    quantize(model, make_tokens())
    for shape in ((1, 1), (3, 7), (2, 130)):
        tokens = torch.zeros(shape, dtype=torch.int64)
        assert model(tokens).shape == (*shape, 100)
    assert model(torch.zeros((0, 5), dtype=torch.int64)).shape == (0, 5, 100)
