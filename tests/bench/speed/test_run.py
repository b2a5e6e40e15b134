"""A run on a fake device: checks before timing, refusals, rows and reports."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.bench.speed.peers import make_copy, make_cublas, make_cublas_lora
from halfbyte.bench.speed.problem import Problem, make_problem
from halfbyte.bench.speed.report import make_csv, make_json, make_markdown, write_report
from halfbyte.bench.speed.result import MachineRates, SpeedResult, SpeedRow
from halfbyte.bench.speed.run import Bench, measure_host, measure_shape
from halfbyte.bench.speed.settings import LinearShape, TimingProtocol
from halfbyte.bench.speed.timing_device import Launch
from halfbyte.bench.speed.trial import (
    Expected,
    Operands,
    Trial,
    WrongResultError,
    check_expected,
    check_trial,
    make_sets,
)
from halfbyte.errors import HalfbyteError
from tests.bench.speed.fake_device import FakeDevice

SHAPE = LinearShape(3, 64, 48, 8)
CPU = torch.device("cpu")


def make_bench(device: FakeDevice | None = None) -> Bench:
    return Bench(
        device=device or FakeDevice(),
        place=CPU,
        protocol=TimingProtocol(visits=2, replays=2, graph_ms=0.5, min_visit_ms=0.1, max_sets=3),
        dtype=torch.bfloat16,
        seed=1,
        list_operations=lambda launch: ("a_kernel", "another"),
    )


def make_wrong(problem: Problem) -> Trial:
    trial = make_cublas(problem)

    def bind(given: Operands, out: Operands) -> Launch:
        return lambda: out["y"][:-1].zero_()  # the last row is never written

    return Trial(trial.operands, trial.outputs, bind, trial.expect)


def make_refused(problem: Problem) -> Trial:
    raise NotImplementedError("not on this machine\nand more")


@pytest.mark.parametrize("make", [make_cublas, make_cublas_lora, make_copy])
def test_a_peer_passes_the_check_against_its_own_definition(make: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        trial = make(make_problem(SHAPE, dtype, CPU, 0))
        assert check_trial(trial) <= 4e-3


def test_operands_are_fresh_for_every_seed_and_equal_for_one() -> None:
    first, again, other = (make_problem(SHAPE, torch.float16, CPU, seed) for seed in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


def test_sets_have_memory_of_their_own() -> None:
    trial = make_cublas(make_problem(SHAPE, torch.bfloat16, CPU, 0))
    seen: list[Operands] = []

    def bind(given: Operands, out: Operands) -> Launch:
        seen.append(given | out)
        return lambda: None

    make_sets(Trial(trial.operands, trial.outputs, bind, trial.expect), 3)
    for name in ("x", "weight", "y"):
        assert len({operands[name].data_ptr() for operands in seen}) == 3
    assert torch.equal(seen[0]["weight"], seen[2]["weight"])


def test_a_wrong_result_is_not_timed_and_a_refusal_does_not_end_the_run() -> None:
    cases = {"cublas": make_cublas, "wrong": make_wrong, "refused": make_refused}
    rows = {row.case: row for row in measure_shape(make_bench(), "linear", SHAPE, cases)}
    assert rows["cublas"].status == "timed"
    assert rows["cublas"].timing is not None
    assert rows["wrong"].status == "wrong"
    assert rows["wrong"].timing is None
    assert "nan" in rows["wrong"].message
    assert (rows["refused"].status, rows["refused"].message) == ("refused", "not on this machine")


def make_moody(problem: Problem, wrong_from: int) -> Trial:
    """cuBLAS's product, but one bit of y is another one from the given call on."""
    trial = make_cublas(problem)
    count = 0

    def bind(given: Operands, out: Operands) -> Launch:
        right = trial.bind(given, out)

        def launch() -> None:
            nonlocal count
            count += 1
            right()
            if count >= wrong_from:
                out["y"].view(torch.int16)[0, 0] ^= 1

        return launch

    return replace(trial, bind=bind, is_repeatable=True)


def test_a_wrong_case_s_launch_is_not_timed_and_has_a_wrong_row() -> None:
    cases = {"cublas": make_cublas, "wrong": make_wrong, "refused": make_refused}
    launches, rows = measure_host(make_bench(), SHAPE, cases)
    assert [row.case for row in launches] == ["cublas"]
    assert [(row.kind, row.case, row.status) for row in rows] == [("launch", "wrong", "wrong")]
    page = make_markdown(SpeedResult({}, None, tuple(rows), tuple(launches)))
    assert "| 3x64x48x8 | wrong | wrong |" in page


def test_what_is_not_the_same_again_is_wrong() -> None:
    problem = make_problem(SHAPE, torch.bfloat16, CPU, 0)
    assert check_trial(make_moody(problem, 100)) <= 4e-3
    with pytest.raises(WrongResultError, match="when it ran again"):
        check_trial(make_moody(problem, 3))


def test_outputs_are_compared_again_after_the_timing() -> None:
    cases = {"moody": lambda problem: make_moody(problem, 6), "cublas": make_cublas}
    rows = {row.case: row for row in measure_shape(make_bench(), "linear", SHAPE, cases)}
    assert rows["moody"].status == "wrong"
    assert rows["moody"].timing is None
    assert "after the timing" in rows["moody"].message
    assert rows["cublas"].status == "timed"


def test_one_wrong_element_of_many_is_seen() -> None:
    wanted = torch.randn(4096, 64, dtype=torch.float64)
    wanted[:, 7] *= 1e-3  # a column of its own size
    actual = wanted.clone()
    actual[5, 7] += 1e-3
    limits = Expected("y", actual, wanted, 1e-4, 0.06)
    with pytest.raises(WrongResultError, match="one element"):
        check_expected(limits)
    assert check_expected(replace(limits, element_limit=math.inf)) < 1e-5
    assert check_expected(replace(limits, actual=wanted)) == 0.0


def test_a_limit_of_zero_wants_every_number_equal() -> None:
    wanted = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64)
    assert check_expected(Expected("codes", -wanted.neg(), wanted, 0.0)) == 0.0
    for wrong in (math.nan, 1.5):
        actual = wanted.clone()
        actual[0, 1] = wrong
        with pytest.raises(WrongResultError, match=r"share of wrong elements 0\.25"):
            check_expected(Expected("codes", actual, wanted, 0.0))


def test_a_gpu_in_an_error_ends_the_run_and_the_case_is_named() -> None:
    class BrokenDevice(FakeDevice):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    with pytest.raises(HalfbyteError, match="refused 3x64x48x8 left the GPU in an error"):
        measure_shape(make_bench(BrokenDevice()), "linear", SHAPE, {"refused": make_refused})


def test_a_gpu_that_fails_during_the_timing_is_no_defect_of_ours_and_the_case_is_named() -> None:
    class FailingDevice(FakeDevice):
        def time_replays(self, graph, untimed, timed, while_busy):  # type: ignore[no-untyped-def]
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    with pytest.raises(HalfbyteError, match=r"cublas the last: CUDA error: unspecified launch"):
        measure_shape(make_bench(FailingDevice()), "linear", SHAPE, {"cublas": make_cublas})


def make_result() -> SpeedResult:
    cases = {"cublas": make_cublas, "cublas_lora": make_cublas_lora, "wrong": make_wrong}
    rows = measure_shape(make_bench(), "linear", SHAPE, cases)
    rates = MachineRates(bf16_tflops=1e-4, fp8_tflops=2e-4, copy_bytes_per_s=1e12)
    return SpeedResult({"gpu": "a GPU", "date": "today"}, rates, tuple(rows), seconds=1.0)


def test_tflops_count_the_product_alone_and_are_compared_with_the_measured_rate() -> None:
    row = make_json(make_result())["rows"][0]
    assert row["median_us"] == pytest.approx(500.0)
    flops = 2 * SHAPE.m * SHAPE.k * SHAPE.n
    assert SHAPE.flops == flops
    assert row["share_of_rate"] == pytest.approx(flops / 500e-6 / 1e12 / 1e-4, abs=1e-3)
    assert row["operations"] == "a_kernel + another"


def test_reports_hold_every_row_and_name_the_machine(tmp_path: Path) -> None:
    result = make_result()
    paths = write_report(result, tmp_path / "speed")
    assert {path.name for path in paths} >= {"speed.csv", "speed.json", "speed.md"}
    text = make_csv(result)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    assert [row["case"] for row in rows] == ["cublas", "cublas_lora", "wrong"]
    assert "# gpu: a GPU" in text
    assert json.loads((tmp_path / "speed" / "speed.json").read_text())["machine"]["gpu"] == "a GPU"
    page = make_markdown(result)
    assert "| 3x64x48x8 | wrong | wrong |" in page
    assert "`a_kernel`" in page


def test_a_table_row_has_as_many_cells_as_its_head() -> None:
    lines = make_markdown(make_result()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| MxKxNxR"))
    assert len({line.count("|") for line in lines[start : start + 5]}) == 1


def test_wrong_rows_are_what_the_exit_code_depends_on() -> None:
    result = make_result()
    assert [row.case for row in result.wrong] == ["wrong"]
    refused = SpeedRow("linear", "x", SHAPE, "refused")
    assert SpeedResult({}, None, (refused,)).wrong == ()
