"""A killed quantization goes on where it stopped, and nothing else is taken for its state."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.nn import quantize_model
from halfbyte.nn.progress import QuantizationProgress
from halfbyte.nn.report import QuantizationReport
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset
from tests.nn.small_models import Decoder, ShiftedDecoder, make_model, make_tokens, read_state

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = SVDQuantPreset("quick", "nvfp4", "nvfp4_one_level", 8, smoothing_points=2, rounding="gptq")
ROOT = Path(__file__).resolve().parents[2]


class _KilledError(Exception):
    pass


def strip_time(report: QuantizationReport) -> dict[str, Any]:
    plain = report.to_json()
    return {key: plain[key] for key in ("preset", "layers", "left_out", "uncalibrated")}


def run(
    model: nn.Module, folder: Path | None, stop_at: int | None = None, **others: Any
) -> tuple[QuantizationReport, list[int]]:
    """Quantize; raise from the progress callback once `stop_at` linears are done."""
    done: list[int] = []

    def see(event: QuantizationProgress) -> None:
        done.append(event.done)
        if stop_at is not None and event.done >= stop_at:
            raise _KilledError

    arguments = {"preset": QUICK, "calibration": make_tokens(), **others}
    return quantize_model(model, state_dir=folder, progress=see, **arguments), done


@pytest.mark.parametrize("kind", [Decoder, ShiftedDecoder])
@pytest.mark.parametrize("stop_at", [3, 6, 7, 12, 15])
def test_rerun_after_a_stop_gives_the_same_bytes_and_report(
    kind: type[nn.Module], stop_at: int, tmp_path: Path
) -> None:
    whole = make_model(kind)
    report, _ = run(whole, None)
    with pytest.raises(_KilledError):
        run(make_model(kind), tmp_path, stop_at)
    again = make_model(kind)
    resumed, done = run(again, tmp_path)
    assert read_state(again) == read_state(whole)
    assert strip_time(resumed) == strip_time(report)
    finished = (stop_at - 1) // 6  # blocks of six linears; the last event comes before the file
    assert done[:finished] == [6 * (index + 1) for index in range(finished)]
    assert done[-1] == 18


def test_rerun_of_a_finished_run_restores_all_of_it(tmp_path: Path) -> None:
    whole, again = make_model(), make_model()
    report, _ = run(whole, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    resumed, done = run(again, tmp_path)
    assert done == [6, 12, 18]
    assert read_state(again) == read_state(whole)
    assert strip_time(resumed) == strip_time(report)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("calibration", [None, "tokens"])
def test_reports_without_data_or_with_unreached_linears_resume_alike(
    calibration: str | None, tmp_path: Path
) -> None:
    class Unreached(Decoder):
        def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    batches = None if calibration is None else make_tokens()
    whole, again = make_model(Unreached), make_model(Unreached)
    report, _ = run(whole, tmp_path, calibration=batches)
    resumed, _ = run(again, tmp_path, calibration=batches)
    assert strip_time(resumed) == strip_time(report)
    assert len(report.uncalibrated) == (0 if calibration is None else 6)
    assert read_state(again) == read_state(whole)


_KILLED_PROGRAM = """
import os, signal, sys
from tests.nn.small_models import make_model
from tests.nn.test_resume import run
from halfbyte.nn import resume

write = resume.write_halfbyte_file
def write_and_die(path, *arguments, **keywords):
    if sys.argv[3] == "after":
        write(path, *arguments, **keywords)
    if path.name == f"block-0000{sys.argv[2]}.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[3] == "before":
        write(path, *arguments, **keywords)
resume.write_halfbyte_file = write_and_die
run(make_model(), sys.argv[1])
"""


@pytest.mark.parametrize(("block", "when"), [(0, "after"), (1, "before"), (1, "after")])
def test_rerun_after_sigkill_gives_the_same_bytes(block: int, when: str, tmp_path: Path) -> None:
    threads = str(torch.get_num_threads())
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED_PROGRAM, str(tmp_path), str(block), when],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    kept = sorted(path.name for path in tmp_path.glob("block-*"))
    assert len(kept) == block + (when == "after")
    whole, again = make_model(), make_model()
    run(whole, None)
    run(again, tmp_path)
    assert read_state(again) == read_state(whole)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("preset", {"preset": "nvfp4_plain"}),
        ("rules", {"rules": LinearRules(exclude=("nothing",))}),
        ("calibration_sha256", {"calibration": make_tokens(2)}),
        ("calibration_sha256", {"calibration": None}),
        ("calibration_sha256", {"calibration": [(t, 2.0) for t in make_tokens()]}),
    ],
)
def test_state_of_another_run_is_refused_and_kept(
    what: str, change: dict[str, Any], tmp_path: Path
) -> None:
    run(make_model(num_layers=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = make_model(num_layers=1)
    with pytest.raises(CheckpointError, match=f"belongs to a run with other {what}; remove"):
        run(model, tmp_path, **change)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert read_state(model) == read_state(make_model(num_layers=1))


@pytest.mark.parametrize(
    "name", ["layers.0.up_proj.bias", "layers.0.norm.weight", "embed.weight", "lm_head.bias"]
)
def test_any_other_weight_of_the_model_makes_it_another_run(name: str, tmp_path: Path) -> None:
    run(make_model(num_layers=1), tmp_path)
    model = make_model(num_layers=1)
    model.get_parameter(name).view(-1)[0] += 0.5
    with pytest.raises(CheckpointError, match="belongs to a run with other weights_sha256"):
        run(model, tmp_path)


def test_stray_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not empty and without run\.json"):
        run(make_model(num_layers=1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_state_dir_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot be used as state_dir"):
        run(make_model(num_layers=1), file)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"preset": 1}'])
def test_damaged_run_file_is_a_named_error(text: str, tmp_path: Path) -> None:
    run(make_model(num_layers=1), tmp_path)
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run\.json: .*remove the directory"):
        run(make_model(num_layers=1), tmp_path)


def rewrite_reports(path: Path, text: str | None) -> None:
    from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file

    contents = read_halfbyte_file(path)
    metadata = {} if text is None else {"reports": text}
    write_halfbyte_file(path, contents.linears, metadata=metadata)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no reports", "bad reports", "swapped"])
def test_damaged_block_file_is_a_named_error(damage: str, tmp_path: Path) -> None:
    run(make_model(), tmp_path)
    path = tmp_path / "block-00001.safetensors"
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "flipped":
        path.write_bytes(b"\xff" * 8 + data[8:])
    elif damage == "no reports":
        rewrite_reports(path, None)
    elif damage == "bad reports":
        rewrite_reports(path, json.dumps([{"name": "x", "group": []}]))
    else:
        shutil.copy(tmp_path / "block-00000.safetensors", path)
    with pytest.raises(CheckpointError, match=r"block-00001\.safetensors"):
        run(make_model(), tmp_path)


def test_calibration_that_no_hash_can_tell_apart_is_refused(tmp_path: Path) -> None:
    calibration = [(tokens, object()) for tokens in make_tokens()]
    with pytest.raises(CheckpointError, match="calibration holds object; with state_dir"):
        run(make_model(), tmp_path, calibration=calibration)
    assert list(tmp_path.iterdir()) == []
