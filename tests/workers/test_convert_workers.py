"""Converting by worker processes: the bytes of one process, whoever dies."""

import json
from pathlib import Path

import pytest

from halfbyte.checkpoints import conversion_plan
from halfbyte.checkpoints import convert as convert_module
from halfbyte.checkpoints.convert import ConvertEvent, ConvertRequest, convert_checkpoint
from halfbyte.errors import CheckpointError, WorkerError
from halfbyte.workers.identity import Identity
from halfbyte.workers.settings import WorkerSettings
from tests.checkpoints.test_convert import make_modelopt, make_shards
from tests.svdquant.checkpoint_files import read_tree
from tests.workers.broken_jobs import ConvertJobThatDies


def run(source: Path, target: Path, workers: int | None, notes: list[str] | None = None) -> None:
    def listen(event: ConvertEvent) -> None:
        if notes is not None and event.stage == "note":
            notes.append(event.text)

    settings = None if workers is None else WorkerSettings(workers)
    request = ConvertRequest(source, target, "halfbyte", verify=True, workers=settings)
    assert convert_checkpoint(request, listen).status == "written"


def test_any_number_of_workers_makes_the_same_bytes(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_plan, "UNIT_BYTES", 1)  # a unit for each layer
    for source in (make_shards(tmp_path / "shards"), make_modelopt(tmp_path / "one", layers=4)):
        trees, reports = [], []
        for workers in (None, 1, 2, 3):
            folder = tmp_path / f"{source.name}-{workers}"
            folder.mkdir()
            run(source, folder / "out", workers)
            trees.append(read_tree(folder / "out"))
            report = json.loads((folder / "out.report.json").read_text())
            reports.append({**report, "output": ""})
        assert all(tree == trees[0] for tree in trees)
        assert all(report == reports[0] for report in reports)


def test_layers_of_killed_workers_are_redone(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_plan, "UNIT_BYTES", 1)
    source = make_modelopt(tmp_path / "in")
    run(source, tmp_path / "one", None)
    monkeypatch.setattr(convert_module, "ConvertJob", ConvertJobThatDies)
    notes: list[str] = []
    run(source, tmp_path / "out", 1, notes)
    assert any("a worker died at" in note for note in notes)
    assert read_tree(tmp_path / "out") == read_tree(tmp_path / "one")


def test_unfit_worker_is_refused_and_what_is_done_is_kept(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_modelopt(tmp_path / "in")
    other = Identity("9.9.9", "", "", "", "", "", "1")
    with monkeypatch.context() as patch:
        patch.setattr(Identity, "read", staticmethod(lambda threads: other))
        with pytest.raises(WorkerError, match=r"halfbyte .* \(wanted '9\.9\.9'\)"):
            run(source, tmp_path / "out", 2)
    assert (tmp_path / ".out.halfbyte-progress").exists()
    run(source, tmp_path / "out", 2)
    with pytest.raises(CheckpointError):
        run(tmp_path / "absent", tmp_path / "out2", 2)
