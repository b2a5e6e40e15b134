"""Which configuration is chosen: legal, by what was measured near, else by the rule."""

import json
from dataclasses import asdict, replace

import pytest

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.kernels.gemm_w4_wgmma import choose
from halfbyte.kernels.gemm_w4_wgmma.choose import (
    check_request,
    choose_config,
    choose_mode,
    count_resident_clusters,
    estimate_us,
    list_candidates,
)
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmRequest, check_legal
from halfbyte.kernels.gemm_w4_wgmma.measured_choices import (
    MeasuredChoice,
    find_nearest,
    parse_choices,
)

REQUEST = WgmmaGemmRequest(
    m=16, n=3072, k=3840, rank=128, mode="fp8", weight="e2m1",
    out_dtype="bfloat16", lora_dtype="bfloat16", has_bias=True, use_pdl=True,
)  # fmt: skip
MEASURED = MeasuredChoice(
    mode="fp8", weight="e2m1", out_dtype="bfloat16", m=20, n=3000, k=4000, rank=32,
    tokens=32, stages=3, cluster=1, splits=2, total_us=9.0, bf16_us=10.0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clear_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose without a table, and anew."""
    with_measured(monkeypatch)


def with_measured(monkeypatch: pytest.MonkeyPatch, *rows: MeasuredChoice) -> None:
    """Choose as if `rows` were the table."""
    monkeypatch.setattr(choose, "read_choices", lambda: rows)
    choose_config.cache_clear()
    choose_mode.cache_clear()


@pytest.mark.parametrize("mode", ["fp8", "exact"])
@pytest.mark.parametrize("m", [1, 8, 9, 33, 64, 65, 200, 1000, 4352])
@pytest.mark.parametrize(("n", "k"), [(16, 40), (3072, 3840), (15360, 3840), (3840, 15360)])
def test_candidates_are_legal_and_compute_the_request(m: int, n: int, k: int, mode: str) -> None:
    request = replace(REQUEST, m=m, n=n, k=k, mode=mode)  # type: ignore[arg-type]
    candidates = list_candidates(request)
    assert 1 <= len(candidates) <= 24
    assert len(set(candidates)) == len(candidates)
    for config in candidates:
        check_legal(config)
        check_request(config, request)
        assert count_resident_clusters(config) >= 1
    times = [estimate_us(request, config) for config in candidates]
    assert times == sorted(times)
    assert choose_config(request) == candidates[0]


def test_few_tokens_split_k_until_the_gpu_is_full() -> None:
    narrow = choose_config(REQUEST)
    assert (narrow.tokens, narrow.splits > 2) == (16, True)
    wide = choose_config(replace(REQUEST, n=15360))
    assert (wide.tokens, wide.splits) == (16, 1)


def test_many_tokens_take_wide_tiles() -> None:
    config = choose_config(replace(REQUEST, m=4352, n=15360))
    assert config.tokens >= 192
    assert config.splits == 1


def test_integer_products_have_narrow_tiles() -> None:
    request = replace(REQUEST, m=4352, mode="int8", weight="int4")
    assert max(config.tokens for config in list_candidates(request)) == 128


def test_a_measured_configuration_near_by_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with_measured(monkeypatch, MEASURED)
    config = choose_config(REQUEST)
    assert (config.tokens, config.stages, config.splits) == (32, 3, 2)
    assert config.has_bias
    with_measured(monkeypatch, replace(MEASURED, extra=(("pairs", 2), ("ahead", 3), ("old", 1))))
    config = choose_config(REQUEST)
    assert (config.tokens, config.pairs, config.ahead) == (32, 2, 3)
    with_measured(monkeypatch, MEASURED)
    assert choose_config(replace(REQUEST, m=64)).splits > 2
    assert choose_config(replace(REQUEST, mode="exact")).tokens == 16


def test_a_measured_configuration_that_does_not_fit_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_measured(monkeypatch, replace(MEASURED, stages=40))
    assert choose_config(REQUEST).tokens == 16
    with_measured(monkeypatch, replace(MEASURED, k=130, splits=8))
    assert choose_config(replace(REQUEST, k=130)).splits <= 2


def test_the_fastest_mode_by_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = ("fp8", "exact")
    assert choose_mode(REQUEST, modes) == "fp8"
    assert choose_mode(REQUEST, ()) == "bf16"
    with_measured(monkeypatch, MEASURED, replace(MEASURED, mode="exact", total_us=8.0))
    assert choose_mode(REQUEST, modes) == "exact"
    assert choose_mode(REQUEST, ("fp8",)) == "fp8"
    with_measured(monkeypatch, replace(MEASURED, total_us=10.1))
    assert choose_mode(REQUEST, modes) == "bf16"
    assert choose_mode(replace(REQUEST, m=4096), modes) == "fp8"  # nothing measured is near


def test_the_nearest_of_measured_shapes() -> None:
    rows = [MEASURED, replace(MEASURED, m=40), replace(MEASURED, m=40, splits=4)]
    assert find_nearest(rows, (17, 3000, 4000), 0.5) == rows[0]
    assert find_nearest(rows, (40, 3000, 4000), 0.5) == rows[1]
    assert find_nearest(rows, (40, 9000, 4000), 0.5) is None
    assert find_nearest([], (40, 9000, 4000), 0.5) is None


def test_lines_of_the_table() -> None:
    fields = {name: value for name, value in asdict(MEASURED).items() if name != "extra"}
    line = json.dumps(fields | {"gpu": "NVIDIA H200", "fastest": "kernel"})
    assert parse_choices(line + "\n\n") == (MEASURED,)
    longer = line[:-1] + ', "extra": {"pairs": 2, "ahead": 3}}'
    assert parse_choices(longer) == (replace(MEASURED, extra=(("pairs", 2), ("ahead", 3))),)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"m": 0}, "m is 0"),
        ({"n": "3000"}, "n is '3000'"),
        ({"k": None}, "k is None"),
        ({"rank": -1}, "rank is -1"),
        ({"splits": 0}, "splits is 0"),
        ({"tokens": 2.5}, "tokens is 2.5"),
        ({"mode": 8}, "mode is 8"),
        ({"total_us": float("nan")}, "total_us is nan"),
        ({"bf16_us": "x"}, "bf16_us is 'x'"),
        ({"extra": []}, "extra"),
        ({"extra": {"pairs": "2"}}, "extra"),
    ],
)
def test_a_damaged_line_of_the_table_is_named(damage: dict[str, object], message: str) -> None:
    line = json.dumps(asdict(MEASURED) | {"extra": {}})
    damaged = json.dumps(json.loads(line) | damage)
    with pytest.raises(CheckpointError, match=f"table line 2 .*{message}"):
        parse_choices(f"{line}\n{damaged}\n", "table")


@pytest.mark.parametrize(
    "text", ['{"mode": "fp8", "m', "[]", "null", "{}", "\x00\ufffd", "[" * 9999]
)
def test_a_line_that_is_no_object_is_named(text: str) -> None:
    with pytest.raises(CheckpointError, match="table line 1 is no measured choice"):
        parse_choices(text, "table")


def test_sizes_that_no_configuration_computes_are_named() -> None:
    with pytest.raises(FormatError, match="nothing to multiply"):
        choose_config(replace(REQUEST, m=0))
    with pytest.raises(FormatError, match="32-bit"):
        choose_config(replace(REQUEST, m=2**40))


def test_a_configuration_of_another_request_is_named() -> None:
    config = choose_config(REQUEST)
    with pytest.raises(FormatError, match=r"out_dtype.*float16"):
        check_request(config, replace(REQUEST, out_dtype="float16"))
    with pytest.raises(FormatError, match="rank 0"):
        check_request(config, replace(REQUEST, rank=0))
    with pytest.raises(FormatError, match="at most 2"):
        check_request(replace(config, splits=4), replace(REQUEST, k=256))
    with pytest.raises(FormatError, match="nothing to multiply"):
        check_request(config, replace(REQUEST, m=0))
