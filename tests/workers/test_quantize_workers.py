"""Quantizing by worker processes: the bytes of one process, whoever dies."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.errors import CheckpointError, MissingDependencyError, UsageError, WorkerError
from halfbyte.formats.output_files import WorkUnit
from halfbyte.svdquant import quantize_file as quantize_file_module
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import QuantizeFileRequest, QuantizeFileResult, quantize_file
from halfbyte.workers.identity import Identity
from halfbyte.workers.ray_workers import RayWorkers
from halfbyte.workers.settings import WorkerSettings, make_worker_settings
from tests.svdquant.checkpoint_files import make_tensors, read_tree, write_directory, write_file
from tests.workers.broken_jobs import (
    DyingJob,
    QuantizeJobOfAnotherFile,
    QuantizeJobThatDies,
    QuantizeJobWithoutInput,
)

PRESET = PRESETS["nvfp4_weight_only_r32"]
ROOT = Path(__file__).resolve().parents[2]
UNITS = [WorkUnit(f"unit{index}", ("layer",), (), index) for index in range(3)]


def run(source: Path, target: Path, workers: int | None, **changes: Any) -> QuantizeFileResult:
    settings = None if workers is None else WorkerSettings(workers)
    request = QuantizeFileRequest(source, target, PRESET, workers=settings)
    return quantize_file(replace(request), **changes)


def test_any_number_of_workers_makes_the_same_bytes(cluster: None, tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    trees, reports = [], []
    for workers in (None, 1, 2, 3):
        folder = tmp_path / str(workers)
        folder.mkdir()
        run(source, folder / "out", workers)
        trees.append(read_tree(folder / "out"))
        report = json.loads((folder / "out.report.json").read_text())
        reports.append({**report, "output": ""})
        assert sorted(os.listdir(folder)) == ["out", "out.report.json"]
    assert all(tree == trees[0] for tree in trees)
    assert all(report == reports[0] for report in reports)


def test_layers_of_killed_workers_are_redone(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_file(tmp_path / "in.safetensors")
    run(source, tmp_path / "one.safetensors", None)
    monkeypatch.setattr(quantize_file_module, "QuantizeJob", QuantizeJobThatDies)
    notes: list[str] = []

    def listen(event: quantize_file_module.ProgressEvent) -> None:
        if event.stage == "note":
            notes.append(event.text)

    run(source, tmp_path / "out.safetensors", 2, on_progress=listen)
    assert len(notes) == 2
    assert all("a worker died at" in note for note in notes)
    assert len(list(tmp_path.glob("died.*"))) == 2
    assert (tmp_path / "out.safetensors").read_bytes() == (
        tmp_path / "one.safetensors"
    ).read_bytes()


def test_killed_coordinator_is_resumed(cluster: None, tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", make_tensors(layers=4))
    run(source, tmp_path / "one.safetensors", None)
    target = tmp_path / "out.safetensors"
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from halfbyte.svdquant.presets import PRESETS\n"
        "from halfbyte.svdquant.quantize_file import QuantizeFileRequest, quantize_file\n"
        "from halfbyte.workers import unit_journal\n"
        "from halfbyte.workers.settings import WorkerSettings\n"
        "unit_journal.BATCH_SECONDS = 0\n"
        "shown = []\n"
        "def listen(event):\n"
        "    shown.append(event.stage)\n"
        "    if shown.count('quantize') == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "request = QuantizeFileRequest(Path(sys.argv[1]), Path(sys.argv[2]),\n"
        "    PRESETS['nvfp4_weight_only_r32'], workers=WorkerSettings(2))\n"
        "quantize_file(request, listen)\n"
    )
    command = [sys.executable, "-c", script, str(source), str(target)]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not target.exists()
    assert run(source, target, 2).resumed_units == 3
    assert target.read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_unfit_worker_is_refused_and_what_is_done_is_kept(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    mine = Identity.read(1)
    with monkeypatch.context() as patch:
        other = replace(mine, halfbyte="9.9.9", native_instructions="generic2")
        patch.setattr(Identity, "read", staticmethod(lambda threads: other))
        with pytest.raises(WorkerError, match=r"worker \d+ on .*halfbyte .* \(wanted '9\.9\.9'\)"):
            run(source, target, 2)
    assert (tmp_path / ".out.safetensors.halfbyte-progress").exists()
    assert run(source, target, 2).status == "written"


def test_worker_that_reads_another_input_is_refused(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_file(tmp_path / "in.safetensors")
    other = make_tensors()
    other["model.layers.1.o_proj.weight"][63, 79] += 1
    write_file(tmp_path / "other.safetensors", other)
    monkeypatch.setattr(quantize_file_module, "QuantizeJob", QuantizeJobOfAnotherFile)
    with pytest.raises(WorkerError, match=r"reads another input.*layers\.1\.o_proj"):
        run(source, tmp_path / "out.safetensors", 1)
    monkeypatch.setattr(quantize_file_module, "QuantizeJob", QuantizeJobWithoutInput)
    with pytest.raises(WorkerError, match=r"cannot read the input.*under the same path"):
        run(source, tmp_path / "out.safetensors", 1)


def test_error_of_the_work_itself_is_raised_as_here(cluster: None, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.0.o_proj.weight"] = torch.full((64, 80), 3e38)
    source = write_file(tmp_path / "in.safetensors", tensors)
    messages = []
    for workers in (None, 2):
        with pytest.raises(CheckpointError) as caught:
            run(source, tmp_path / "out.safetensors", workers)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_other_number_of_threads_does_not_continue_a_run(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    shown: list[str] = []

    def stop(event: quantize_file_module.ProgressEvent) -> None:
        shown.append(event.stage)
        if shown.count("quantize") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, target, None, on_progress=stop)
    torch.set_num_threads(2)
    assert run(source, target, None).resumed_units == 0


def test_results_arrive_exactly_and_dead_workers_are_replaced(
    cluster: None, tmp_path: Path
) -> None:
    notes: list[str] = []
    job = DyingJob(tmp_path, deaths=1)
    with RayWorkers(WorkerSettings(3), notes.append) as workers:
        found = {unit.name: result for unit, result in workers.run(job, job.open(), UNITS)}
    assert sorted(found) == [unit.name for unit in UNITS]
    assert len(notes) == len(UNITS)
    for name, result in found.items():
        assert bytes(result.tensors["name"].tolist()).decode() == name
        assert result.tensors["scale"].dtype == torch.float8_e4m3fn
        assert result.tensors["scale"].float().tolist() == [0.5, -2.0]
        assert result.tensors["one"].shape == ()


def test_unit_that_kills_every_worker_ends_the_run(cluster: None, tmp_path: Path) -> None:
    job = DyingJob(tmp_path, deaths=100)
    with (
        RayWorkers(WorkerSettings(1)) as workers,
        pytest.raises(WorkerError, match=r"unit0: 3 workers died at it.*give the same command"),
    ):
        list(workers.run(job, job.open(), UNITS[:1]))
    assert len(list(tmp_path.iterdir())) == 3


def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    source = write_file(tmp_path / "in.safetensors")
    with pytest.raises(MissingDependencyError, match=r"pip install 'halfbyte\[cluster\]'"):
        run(source, tmp_path / "out.safetensors", 2)
    assert os.listdir(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize(
    ("address", "word"),
    [
        ("127.0.0.1:1", "no Ray cluster at 127"),
        ("ray://127.0.0.1:1", "no Ray cluster at ray"),
        ("127.0.0.1:99999999", "no Ray cluster"),
        ("somewhere", "wanted host:port"),
        ("host:", "wanted host:port"),
    ],
)
def test_cluster_that_is_not_there_is_told_at_once(address: str, word: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    source = write_file(tmp_path / "in.safetensors")
    request = QuantizeFileRequest(source, tmp_path / "out.safetensors", PRESET)
    with pytest.raises(UsageError, match=word):
        quantize_file(replace(request, workers=WorkerSettings(cluster=address)))
    assert os.listdir(tmp_path) == ["in.safetensors"]


def test_settings_that_cannot_be_meant_are_refused() -> None:
    assert make_worker_settings(None, None, None) is None
    assert make_worker_settings(None, "auto", None) == WorkerSettings(None, "auto", 1)
    for given, word in (
        ((0, None, None), "0 workers"),
        ((-1, None, None), "-1 workers"),
        ((10**6, None, None), "wanted 1 to"),
        ((2, None, 0), "0 threads"),
        ((None, None, 2), "without --workers"),
        ((None, " ", None), "address of the cluster is empty"),
    ):
        with pytest.raises(UsageError, match=word):
            make_worker_settings(*given)
