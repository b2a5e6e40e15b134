"""What a command line asks for, the cases it gets, sensors, and launches timed on the host."""

import itertools

import pytest

from halfbyte.bench.speed.gemlite_peers import GEMLITE_PEERS
from halfbyte.bench.speed.launch_overhead import measure_launches
from halfbyte.bench.speed.plan import (
    DEFAULT_KINDS,
    SpeedRequest,
    list_cases,
    list_shapes,
    parse_request,
    run_speed,
)
from halfbyte.bench.speed.result import SpeedResult
from halfbyte.bench.speed.sensors import SensorReading, parse_smi, summarize
from halfbyte.bench.speed.settings import DEFAULT_SHAPES, LinearShape, TimingProtocol, parse_shapes
from halfbyte.errors import UsageError
from tests.bench.speed.test_run import make_bench

SHAPE = LinearShape(3, 64, 48, 8)


def test_shapes_are_read_and_doubles_dropped() -> None:
    assert parse_shapes("1x2x3,4x5x6x7, 1x2x3x0") == (
        LinearShape(1, 2, 3, 0),
        LinearShape(4, 5, 6, 7),
    )
    assert parse_shapes(",".join(map(str, DEFAULT_SHAPES))) == DEFAULT_SHAPES


@pytest.mark.parametrize("text", ["", "1x2", "0x2x3", "1x2x3x4x5", "ax2x3", "1x2x3,"])
def test_what_is_no_shape_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="wanted MxKxN"):
        parse_shapes(text)


def test_defaults_leave_out_what_tunes_itself_for_long() -> None:
    request = parse_request([], None, None, None, "bfloat16")
    assert request == SpeedRequest()
    assert request.kinds == DEFAULT_KINDS
    assert not set(GEMLITE_PEERS) & set(request.peers)
    assert "gemlite" in list_cases(parse_request([], None, "gemlite", "", "float16"), "linear", "x")


def test_peers_that_multiply_four_bits_are_listed_on_blackwell_alone() -> None:
    request = SpeedRequest()
    assert "flashinfer" in list_cases(request, "linear", "sm_100a")
    assert "flashinfer" not in list_cases(request, "linear", "sm_90a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((["gemm"], None, None, None, "float16"), "kind 'gemm'"),
        (([], None, "torch", None, "float16"), "peer 'torch'"),
        (([], None, None, "fp4", "float16"), "mode 'fp4'"),
        (([], None, None, None, "float32"), "dtype 'float32'"),
    ],
)
def test_unknown_names_are_refused_and_the_known_listed(words, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=f"{message}: choose from"):
        parse_request(*words)


def test_launches_are_measured_on_the_fewest_tokens_one_kernel_a_case() -> None:
    request = SpeedRequest(modes=("fp8",), peers=("cublas", "scaled_mm"))
    assert list_shapes(request, "launch") == (min(DEFAULT_SHAPES),)
    assert list(list_cases(request, "launch", "sm_90a")) == ["cublas", "fp8_gemm", "fp8_quantize"]


def test_a_protocol_without_samples_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        TimingProtocol(visits=0)


def test_a_run_has_rows_of_every_kind_and_launches() -> None:
    request = SpeedRequest(
        kinds=("copy", "launch"), shapes=(SHAPE,), peers=("cublas", "copy"), modes=()
    )
    kept: list[SpeedResult] = []
    result = run_speed(request, make_bench(), "sm_90a", {"gpu": "none"}, kept.append)
    assert [len(one.rows) + len(one.launches) for one in kept] == [1, 2]
    assert kept[-1] == result
    assert [(row.kind, row.case) for row in result.rows] == [("copy", "copy")]
    assert [row.case for row in result.launches] == ["cublas"]
    assert result.rates is None  # of no use to a copy


def test_host_time_is_of_one_launch_and_the_first_round_does_not_count() -> None:
    now = itertools.chain([0, 10**9], (value for i in range(1, 51) for value in (0, i * 100_000)))
    count = 0

    def launch() -> None:
        nonlocal count
        count += 1

    row = measure_launches("a", SHAPE, launch, lambda: None, lambda: next(now))
    assert count == 51 * 100
    assert row.median_us == pytest.approx(25.5)
    assert row.p90_us == pytest.approx(45.0)


def test_sensors_of_nvidia_smi_are_read_and_gaps_give_none() -> None:
    assert parse_smi("1980, 371.79, 39, 0x0000000000000004\n") == SensorReading(1980, 371.79, 39, 4)
    assert parse_smi("1980, [N/A], 39, 0x0\n") is None
    assert parse_smi("") is None
    assert summarize([]) is None


def test_the_scripted_device_is_the_only_clock() -> None:
    request = SpeedRequest(kinds=("copy",), shapes=(SHAPE,), peers=("copy",), modes=())
    row = run_speed(request, make_bench(), "sm_90a", {}).rows[0]
    assert row.timing is not None
    assert set(row.timing.samples_us) == {500.0}
