"""`halfbyte budget`: tables of the GEMM and of programs, refusals with arithmetic, exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from halfbyte.cli.main import main
from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts

PROGRAM = Path(__file__).parents[1] / "checks" / "programs" / "low_rank_product.py"
CUTE_MISSING = [*find_missing_parts(), *find_absent_packages()]
needs_cute = pytest.mark.skipif(bool(CUTE_MISSING), reason=f"needs {'; '.join(CUTE_MISSING)}")


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["budget", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_apart(*arguments: str) -> tuple[int, str, str]:
    """Run in a process of its own: CuTe DSL keeps the CUDA runtime that it finds at its start."""
    command = [sys.executable, "-m", "halfbyte.cli.main", "budget", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def read_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = read(capsys, *arguments)
    assert code == 0
    record: dict[str, Any] = json.loads(out)
    return record


def test_the_large_tile_keeps_five_ring_slots(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--m", "4352", "--n", "3072", "--k", "3840", "--rank", "128")
    found = read_json(capsys, "gemm_w4a4", *shape, "--tile", "256x256", "--json")
    assert found["stages"] == 5
    assert found["capacity_bytes"] - found["used_bytes"] == found["slack_bytes"] >= 0
    total = sum(row["total_bytes"] for row in found["shared"])
    assert total == found["used_bytes"]
    sizes = {row["name"]: row["slot_bytes"] for row in found["shared"]}
    assert sizes["lora_up"] == sizes["lora_act"] == 16384
    assert (found["tiles"], found["blocks_per_tile"], found["chunks_per_tile"]) == (204, 15, 2)
    assert max(b["first"] + b["num_columns"] for b in found["tensor_memory"]) == 512


def test_the_narrow_tile_keeps_seven(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_json(capsys, "gemm_w4a4", "--tile", "256x128", "--json")
    assert found["stages"] >= 7


def test_the_table_names_every_operand(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = read(capsys, "gemm_w4a4", "--tile", "256x256", "--cta-group", "2")
    assert code == 0
    for name in ("act_codes", "weight_sf", "lora_up", "in weight_codes", "slack", "scales of B"):
        assert name in out
    assert "5 ring slots of 38,912 bytes" in out


def test_few_tokens_swap_the_operands(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_json(capsys, "gemm_w4a4", "--m", "16", "--json")
    assert found["config"]["tile"]["swap"]
    assert found["shared"][0]["name"] == "weight_codes"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--stages", "6", "--tile", "256x256"), 1, "6 ring slots of 38912 = 233472 bytes"),
        (("--gpu", "rtx5090"), 1, "sm_120a"),
        (("--format", "int4"), 1, "INT4"),
        (("--tile", "256x256", "--cta-group", "1"), 1, "of two CTAs 256"),
        (("--tile", "large"), 2, "MxN is wanted"),
        (("--tile", "\u00b2x\u00b3"), 2, "MxN is wanted"),
        (("--tile", "9" * 5000 + "x1"), 2, "MxN is wanted"),
        (("--declare", "lora_up=\u00b2"), 2, "NAME=BYTES"),
        (("--declare", "lora_up=" + "9" * 5000), 2, "NAME=BYTES"),
        (("--layout", "--gpu", "h200"), 2, "is a kernel for sm_100a, sm_103a"),
        (("--cta-group", "2"), 2, "goes with --tile"),
        (("--rank", "-1"), 2, "--rank -1"),
        (("--stage", "6"), 2, "unrecognized arguments"),
        (("--declare", "lora_up"), 2, "NAME=BYTES"),
        (("--declare", "lora_up:3=5"), 2, "gemm_w4a4 has names"),
        (("--declare", "lora_down=5"), 2, "nothing is called"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    arguments: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, error = read(capsys, "gemm_w4a4", *arguments)
    assert message in error
    assert found == code


def test_a_low_rank_budget_twice_too_large_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    declared = ("--declare", "lora_up=32768", "--declare", "lora_act=16384")
    code, out, _ = read(capsys, "gemm_w4a4", "--tile", "256x256", *declared)
    assert code == 1
    assert "declared 32768 bytes for lora_up, its layout takes 16384" in out
    assert "lora_act, its layout" not in out


def test_options_of_the_verb_may_stand_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    record = read_json(capsys, "--json", "--gpu", "b300", "gemm_w4a4")
    assert record["config"]["target"] == "sm_103a"


@needs_cute
def test_the_accumulators_of_both_products_agree() -> None:
    code, out, _ = run_apart("gemm_w4a4", "--layout")
    assert code == 0
    assert "128x256x1cta: 32,768 cells" in out
    assert "256x256x2cta: 65,536 cells" in out
    assert out.count("the same in all three") == 2


def test_accumulators_that_differ_exit_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from halfbyte.runtime import accumulator_layouts
    from halfbyte.runtime.accumulator_layouts import AccumulatorLayouts

    def swap_rows(shape: tuple[int, int], num_ctas: int, target: str) -> tuple[Any, Any]:
        m, n = shape
        fragment = f"((128,{n}),1,1):((65536,1),0,0)"
        right = f"({num_ctas},(128,{n})):(128,(1,{m}))"
        wrong = f"({num_ctas},(2,64,{n})):(128,(64,1,{m}))"
        return (
            AccumulatorLayouts("scaled", right, fragment),
            AccumulatorLayouts("low rank", wrong, fragment),
        )

    monkeypatch.setattr(accumulator_layouts, "read_accumulator_layouts", swap_rows)
    code, out, _ = read(capsys, "gemm_w4a4", "--layout")
    assert code == 1
    assert "NOT the same" in out
    assert "cells differ; first (1, 0)" in out


@needs_cute
def test_a_program_shows_what_its_launches_take() -> None:
    declared = ("--declare", "lora_act:0=16384", "--declare", "lora_up:1=32768")
    code, out, error = run_apart("--json", "--facts", *declared, str(PROGRAM), "--rank", "128")
    assert code == 1
    assert "0 of 16384 elements differ" in error  # the program's own output
    record = json.loads(out)
    assert record["facts"] == []  # no block-scaled MMA
    (launch,) = record["launches"]
    assert [o["name"] for o in launch["operands"]] == ["lora_act", "lora_up"]
    assert [o["slot_bytes"] for o in launch["operands"]] == [16384, 16384]
    assert launch["tensor_columns"] == 128
    (barrier,) = launch["barriers"]
    assert barrier["expected_bytes"] == barrier["loaded_bytes"] == 32768
    (finding,) = launch["findings"]
    assert finding["message"].startswith("declared 32768 bytes for lora_up, its layout takes 16384")


def test_a_figure_that_no_launch_has_is_misuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if find_missing_parts():
        pytest.skip(f"needs {'; '.join(find_missing_parts())}")
    program = tmp_path / "quiet.py"
    program.write_text("print('nothing')\n")
    code, _, error = read(capsys, "--declare", "x=1", str(program))
    assert code == 2
    assert "no launch has x; there are no launches" in error
    code, out, error = read(capsys, str(program))
    assert (code, out) == (0, "the program launched no kernel\n")
    assert "nothing" in error


@needs_cute
def test_a_program_s_output_stays_out_of_the_json(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nprint('by Python')\nos.write(1, b'by C')\nos.system('echo by a child')\n"
    )
    code, out, error = run_apart("--json", str(program))
    assert code == 0
    assert json.loads(out)["launches"] == []
    for text in ("by Python", "by C", "by a child"):
        assert text in error


def test_a_program_that_is_not_there_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = read(capsys, "not_there.py")
    assert code == 2
    assert "not_there.py" in error
    assert read(capsys, "--foo", "x.py")[0] == 2
    code, _, error = read(capsys, "--facts", "gemm_w4a4")
    assert code == 2
    assert "those of launches" in error
