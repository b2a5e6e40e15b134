"""Quantizing files: what comes out, and that nothing half-done ever does."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.errors import CheckpointError, HalfbyteError, UsageError
from halfbyte.formats import file_target
from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file
from halfbyte.formats.quantize import dequantize
from halfbyte.svdquant import quantize_file as quantize_file_module
from halfbyte.svdquant import unit_quantizer
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import (
    ProgressEvent,
    QuantizeFileRequest,
    QuantizeFileResult,
    quantize_file,
)

from .checkpoint_files import make_tensors, read_tree, write_directory, write_file

PRESET = PRESETS["nvfp4_weight_only_r32"]
ROOT = Path(__file__).resolve().parents[2]


def run(source: Path, target: Path, **changes: object) -> QuantizeFileResult:
    request = QuantizeFileRequest(source, target, PRESET)
    return quantize_file(replace(request, **changes))  # type: ignore[arg-type]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("name", ["nvfp4_weight_only_r32", "int4_weight_only_r32"])
def test_output_stands_for_the_input(name: str, tmp_path: Path) -> None:
    tensors = make_tensors()
    source = write_file(tmp_path / "in.safetensors", tensors)
    result = run(source, tmp_path / "out.safetensors", preset=PRESETS[name])
    assert result.status == "written"
    contents = read_halfbyte_file(tmp_path / "out.safetensors")
    assert result.report is not None
    reported = {layer["name"]: layer for layer in result.report["layers"]}
    assert set(contents.linears) == set(reported)
    assert len(reported) == 8
    for layer, linear in contents.linears.items():
        weight = tensors[f"{layer}.weight"].double()
        stored = dequantize(linear.weight).double()
        assert linear.lora_up is not None
        assert linear.lora_down is not None
        if linear.smooth is not None:
            stored /= linear.smooth.double()
        stored += linear.lora_up.double() @ linear.lora_down.double()
        error = float((stored - weight).norm() / weight.norm())
        # rank 32 of 64 carries over half of a random weight, so plain rounding's 9.5 % shrinks
        assert error < (0.08 if "nvfp4" in name else 0.10)
        # the report sums in float32 by rows: agreement to a part in a million, not to the bit
        assert reported[layer]["relative_error"] == pytest.approx(error, rel=1e-5)
        bias = tensors.get(f"{layer}.bias")
        assert (linear.bias is None) == (bias is None)
        if bias is not None:
            assert linear.bias is not None
            assert torch.equal(linear.bias, bias)


def test_everything_else_passes_through_byte_identical(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["fp8.weight"] = torch.randn(64, 64).to(torch.float8_e4m3fn)
    tensors["conv.weight"] = torch.randn(64, 64, 3)
    tensors["tiny.weight"] = torch.randn(8, 64)
    tensors["empty"] = torch.empty(0, 5)
    source = write_file(tmp_path / "in.safetensors", tensors)
    run(source, tmp_path / "out.safetensors")
    others = read_halfbyte_file(tmp_path / "out.safetensors").passthrough
    assert len(others) == 2 + 2 + 4
    for name, value in others.items():
        assert value.dtype == tensors[name].dtype
        assert value.shape == tensors[name].shape
        assert (
            value.reshape(-1).view(torch.uint8).equal(tensors[name].reshape(-1).view(torch.uint8))
        )


def test_linears_of_one_input_share_lora_down_across_shards(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    run(source, tmp_path / "out")
    linears = read_halfbyte_file(tmp_path / "out").linears
    down = {part: linears[f"model.layers.0.{part}"].lora_down for part in ("q_proj", "k_proj")}
    other = linears["model.layers.0.o_proj"].lora_down
    assert down["q_proj"] is not None
    assert down["k_proj"] is not None
    assert other is not None
    assert torch.equal(down["q_proj"], down["k_proj"])
    assert not torch.equal(down["q_proj"], other)


def test_directory_keeps_shards_and_takes_side_files_along(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    (tmp_path / "secret.json").write_text("secret")
    (source / "leak.json").symlink_to(tmp_path / "secret.json")
    (source / "inner.json").symlink_to(source / "config.json")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / "sub").mkdir()
    os.mkfifo(source / "pipe.json")
    result = run(source, tmp_path / "out")
    assert names(tmp_path / "out") == [
        "config.json",
        "inner.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
    ]
    assert result.report is not None
    assert result.report["not_copied"] == ["leak.json", "pipe.json", "pytorch_model.bin", "sub"]
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"\x00\x01"
    assert len(read_halfbyte_file(tmp_path / "out").linears) == 8


def test_directory_can_become_one_file_of_the_same_layers(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    run(source, tmp_path / "out.safetensors")
    run(source, tmp_path / "out")
    one = read_halfbyte_file(tmp_path / "out.safetensors")
    many = read_halfbyte_file(tmp_path / "out")
    assert set(one.linears) == set(many.linears)
    for name, linear in one.linears.items():
        assert torch.equal(linear.weight.data, many.linears[name].weight.data)
    assert set(one.passthrough) == set(many.passthrough)


def test_unindexed_tensors_are_kept_and_reported(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    index = source / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["weight_map"]["step"]
    index.write_text(json.dumps(table))
    result = run(source, tmp_path / "out")
    assert result.report is not None
    assert result.report["unindexed"] == ["step"]
    assert "step" in read_halfbyte_file(tmp_path / "out").passthrough


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(source, tmp_path / name / "out.safetensors")
    assert (
        read_tree(tmp_path / "a")["out.safetensors"] == read_tree(tmp_path / "b")["out.safetensors"]
    )


def test_output_rewritten_by_the_plain_writer_is_byte_equal(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    run(source, tmp_path / "out.safetensors")
    contents = read_halfbyte_file(tmp_path / "out.safetensors")
    again = tmp_path / "again.safetensors"
    write_halfbyte_file(again, contents.linears, contents.passthrough, contents.metadata)
    assert again.read_bytes() == (tmp_path / "out.safetensors").read_bytes()


def test_finished_output_is_left_alone(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    run(source, target)
    before = target.stat()
    os.utime(source)  # a new time on the same content is the same input
    assert run(source, target).status == "already_done"
    assert target.stat() == before
    assert run(source, target, force=True).status == "written"
    assert target.stat().st_ino != before.st_ino


def test_output_of_another_request_needs_force(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    run(source, target)
    first = target.read_bytes()
    other = PRESETS["int4_weight_only_r32"]
    with pytest.raises(UsageError, match="--force"):
        run(source, target, preset=other)
    assert target.read_bytes() == first
    assert run(source, target, preset=other, force=True).status == "written"
    assert target.read_bytes() != first
    assert names(tmp_path) == ["in.safetensors", "out.report.json", "out.safetensors"]


def test_force_replaces_a_directory(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    (tmp_path / "out").mkdir()
    assert run(source, tmp_path / "out").status == "written"  # an empty directory is no output
    (tmp_path / "out" / "stray").write_text("x")
    changed = PRESETS["int4_weight_only_r32"]
    with pytest.raises(UsageError, match="--force"):
        run(source, tmp_path / "out", preset=changed)
    run(source, tmp_path / "out", preset=changed, force=True)
    assert "stray" not in names(tmp_path / "out")
    assert names(tmp_path) == ["in", "out", "out.report.json"]


def test_include_and_exclude_choose_layers(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    rules = LinearRules(include=("*.q_proj", "model.embed_tokens"), exclude=("*.1.*",))
    run(source, tmp_path / "out.safetensors", rules=rules)
    linears = read_halfbyte_file(tmp_path / "out.safetensors").linears
    assert set(linears) == {"model.layers.0.q_proj", "model.embed_tokens"}
    with pytest.raises(UsageError, match=r"no linear is left.*model\.layers\.0\.k_proj"):
        run(source, tmp_path / "none.safetensors", rules=LinearRules(exclude=("*",)))


def test_rank_zero_has_no_low_rank_branch(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    run(source, tmp_path / "out.safetensors", preset=replace(PRESET, rank=0))
    linears = read_halfbyte_file(tmp_path / "out.safetensors").linears
    assert all(linear.rank == 0 for linear in linears.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(bad: float, tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.1.v_proj.weight"][3, 5] = bad
    source = write_file(tmp_path / "in.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"layers\.1\.v_proj.*NaN/Inf: 1 of 5120"):
        run(source, tmp_path / "out.safetensors")
    assert names(tmp_path) == ["in.safetensors"]


def test_nan_in_what_passes_through_is_no_error(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.embed_tokens.weight"][0, 0] = float("nan")
    run(write_file(tmp_path / "in.safetensors", tensors), tmp_path / "out.safetensors")


def test_paths_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    file = write_file(tmp_path / "in.safetensors")
    link = tmp_path / "link.safetensors"
    link.symlink_to(file)
    (tmp_path / "folder").mkdir()
    for one, target, word in (
        (file, file, "the same"),
        (file, link, "the same"),
        (link, file, "the same"),
        (source, source, "the same"),
        (source, source / "out", "inside"),
        (source, source / "out.safetensors", "inside"),
        (source, tmp_path, "contains"),
        (file, tmp_path / "folder", "is a directory"),
        (file, tmp_path / "absent" / "out.safetensors", "does not exist"),
        (file, file / "out.safetensors", "is a file"),
    ):
        with pytest.raises(UsageError, match=word):
            run(one, target)
    with pytest.raises(UsageError, match="report"):
        run(file, tmp_path / "out.safetensors", report=file)
    with pytest.raises(CheckpointError, match="no such file"):
        run(tmp_path / "absent", tmp_path / "out.safetensors")
    assert names(tmp_path) == ["folder", "in", "in.safetensors", "link.safetensors"]


def test_kind_of_target_must_fit(tmp_path: Path) -> None:
    source = write_directory(tmp_path / "in")
    (tmp_path / "out").write_bytes(b"a file")
    with pytest.raises(UsageError, match="a file stands there"):
        run(source, tmp_path / "out", force=True)
    assert (tmp_path / "out").read_bytes() == b"a file"


def test_full_disk_is_told_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_file(tmp_path / "in.safetensors")
    usage = file_target.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(file_target.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(
        quantize_file_module, "check_input", lambda *a: pytest.fail("work has started")
    )
    with pytest.raises(CheckpointError, match="1000 left"):
        run(source, tmp_path / "out.safetensors")
    assert names(tmp_path) == ["in.safetensors"]


def test_file_size_limit_is_an_error_without_traces(tmp_path: Path) -> None:
    """A real ENOSPC-like failure: the process may write no file beyond 4 KiB."""
    source = write_file(tmp_path / "in.safetensors")
    script = (
        "import resource, signal, sys; from halfbyte.cli.main import main;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); sys.exit(main(sys.argv[1:]))"
    )
    command = [
        sys.executable,
        "-c",
        script,
        "quantize",
        str(source),
        str(tmp_path / "o.safetensors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1, done.stderr
    assert "larger than this system" in done.stderr
    assert names(tmp_path) == ["in.safetensors"]


def test_error_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_file(tmp_path / "in.safetensors")
    real = unit_quantizer.quantize_linear_group
    calls = 0

    def fail_third(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise HalfbyteError("broken on purpose")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_quantizer, "quantize_linear_group", fail_third)
    with pytest.raises(HalfbyteError, match="on purpose"):
        run(source, tmp_path / "out.safetensors")
    assert names(tmp_path) == ["in.safetensors"]


class Interrupter:
    """Raises KeyboardInterrupt before unit `number`; counts the groups that were quantized."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.events: list[ProgressEvent] = []

    def __call__(self, event: ProgressEvent) -> None:
        self.events.append(event)
        seen = sum(1 for event in self.events if event.stage == "quantize")
        if seen == self.number:
            raise KeyboardInterrupt

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.events if event.stage == "note"]


def interrupt(source: Path, target: Path, number: int = 3) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize_file(QuantizeFileRequest(source, target, PRESET), Interrupter(number))


def test_interrupted_run_continues_where_it_stopped(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    run(source, tmp_path / "whole.safetensors")
    target = tmp_path / "out.safetensors"
    interrupt(source, target)
    assert not target.exists()
    watcher = Interrupter(None)
    result = quantize_file(QuantizeFileRequest(source, target, PRESET), watcher)
    assert result.resumed_units == 2
    assert "2 of 5 units" in watcher.notes[0]
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    reports = [
        json.loads((tmp_path / f"{name}.report.json").read_text()) for name in ("out", "whole")
    ]
    assert reports[0]["layers"] == reports[1]["layers"]
    assert len(names(tmp_path)) == 5


@pytest.mark.parametrize("what", ["input", "preset", "rules"])
def test_interrupted_run_of_something_else_starts_over(what: str, tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    interrupt(source, target)
    request = QuantizeFileRequest(source, target, PRESET)
    if what == "input":
        stamp = source.stat()
        tensors = make_tensors()
        tensors["model.layers.1.o_proj.weight"][63, 79] += 1  # one value, in the last rows
        write_file(source, tensors)
        os.utime(source, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # even if the time stays
    elif what == "preset":
        request = replace(request, preset=replace(PRESET, rank=16))
    else:
        request = replace(request, rules=LinearRules(exclude=("*.k_proj",)))
    watcher = Interrupter(None)
    result = quantize_file(request, watcher)
    assert result.resumed_units == 0
    assert "starting over" in watcher.notes[0]
    fresh = replace(request, target=tmp_path / "fresh.safetensors")
    quantize_file(fresh)
    assert target.read_bytes() == fresh.target.read_bytes()


def test_damaged_unfinished_output_is_worked_off_again(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"
    interrupt(source, target, number=4)
    (partial,) = (tmp_path / ".out.safetensors.halfbyte-partial").iterdir()
    data = bytearray(partial.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = 8 + length + header["model.layers.0.o_proj.weight_codes"]["data_offsets"][0]
    data[start] ^= 1
    partial.write_bytes(data)
    with open(tmp_path / ".out.safetensors.halfbyte-progress", "ab") as journal:
        journal.write(b'{"name":"cut by a ki')
    assert run(source, target).resumed_units == 2
    run(source, tmp_path / "whole.safetensors")
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize(
    "text", [b"", b"\x00\xff\n", b"[]\n", b'{"fingerprint": 3}\n', b"{}\n{}\n"]
)
def test_journal_of_junk_is_a_fresh_start(text: bytes, tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    (tmp_path / ".out.safetensors.halfbyte-progress").write_bytes(text)
    (tmp_path / ".out.safetensors.halfbyte-partial").mkdir()
    assert run(source, tmp_path / "out.safetensors").resumed_units == 0
    assert len(names(tmp_path)) == 3


def test_line_cut_by_a_kill_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    source, target = write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    interrupt(source, target, number=2)
    with open(tmp_path / ".out.safetensors.halfbyte-progress", "ab") as journal:
        journal.write(b'{"name":"cut by a ki')
    interrupt(source, target, number=4)
    assert run(source, target).resumed_units == 3


def test_rank_is_cut_to_the_smallest_linear_of_a_group(tmp_path: Path) -> None:
    tensors = {
        "l.q_proj.weight": torch.randn(128, 112),
        "l.k_proj.weight": torch.randn(64, 112),
        "l.o_proj.weight": torch.randn(128, 112),
    }
    source = write_file(tmp_path / "in.safetensors", tensors)
    run(source, tmp_path / "out.safetensors", preset=replace(PRESET, rank=120))
    linears = read_halfbyte_file(tmp_path / "out.safetensors").linears
    ranks = {name: linear.rank for name, linear in linears.items()}
    assert ranks == {"l.q_proj": 64, "l.k_proj": 64, "l.o_proj": 112}


def test_large_group_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_file(tmp_path / "in.safetensors")
    monkeypatch.setattr(unit_quantizer, "MAX_HELD_WEIGHTS", 64 * 80)
    real, held = unit_quantizer.quantize_linear_group, []

    def note_size(weights: list[torch.Tensor], *arguments: object) -> object:
        held.append(sum(weight.numel() for weight in weights))
        return real(weights, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_quantizer, "quantize_linear_group", note_size)
    run(source, tmp_path / "out.safetensors")
    assert held == [64 * 80] * 2  # the two o_proj; q/k/v are streamed
    assert len(read_halfbyte_file(tmp_path / "out.safetensors").linears) == 8


def test_two_runs_on_one_target_do_not_mix(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    target = tmp_path / "out.safetensors"

    def run_again(event: ProgressEvent) -> None:
        if event.stage == "quantize" and event.done_bytes:
            with pytest.raises(UsageError, match="another run"):
                run(source, target)

    quantize_file(QuantizeFileRequest(source, target, PRESET), run_again)
    assert target.exists()


def test_input_that_changes_during_the_run_is_an_error(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")

    def touch(event: ProgressEvent) -> None:
        if event.stage == "quantize":
            os.utime(source, ns=(1, 1))

    with pytest.raises(CheckpointError, match="changed while"):
        quantize_file(QuantizeFileRequest(source, tmp_path / "out.safetensors", PRESET), touch)
    assert names(tmp_path) == ["in.safetensors"]


def test_input_without_linears_is_an_error(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", {"norm.weight": torch.ones(64)})
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        run(source, tmp_path / "out.safetensors")


def test_quantized_input_is_refused(tmp_path: Path) -> None:
    run(write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors")
    with pytest.raises(CheckpointError, match="already"):
        run(tmp_path / "out.safetensors", tmp_path / "twice.safetensors")


def test_bias_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["model.layers.0.q_proj.bias"] = torch.zeros(63)
    source = write_file(tmp_path / "in.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias"):
        run(source, tmp_path / "out.safetensors")


def test_preset_that_needs_data_is_refused(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors")
    preset = replace(PRESET, activation="nvfp4_static")
    with pytest.raises(UsageError, match="calibration"):
        run(source, tmp_path / "out.safetensors", preset=preset)


def test_float32_and_float16_weights_are_taken(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(64, 64),
        "b.weight": torch.randn(96, 70).half(),
        "b.bias": torch.randn(96),
    }
    run(write_file(tmp_path / "in.safetensors", tensors), tmp_path / "out.safetensors")
    linears = read_halfbyte_file(tmp_path / "out.safetensors").linears
    assert linears["b"].weight.shape == (96, 70)
    assert linears["b"].bias is not None
    assert linears["b"].bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("mode", "stride"),
    [
        ("file", 3),
        ("force", 5),
        pytest.param("file", 1, marks=pytest.mark.long),
        pytest.param("directory", 1, marks=pytest.mark.long),
        pytest.param("force", 1, marks=pytest.mark.long),
    ],
)
def test_kill_at_any_disk_change_and_rerun_gives_the_same_bytes(
    mode: str, stride: int, tmp_path: Path
) -> None:
    tensors = make_tensors(layers=1)
    if mode == "file":
        source, target = write_file(tmp_path / "in.safetensors", tensors), "out.safetensors"
    else:
        source, target = write_directory(tmp_path / "in", tensors), "out"
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "tests.svdquant.kill_everywhere"]
    command += [str(source), str(tmp_path / "work" / target), str(stride)]
    if mode == "force":
        command.append("--force")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["kills"] * stride > 40


def test_sigkill_from_outside_and_rerun_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_file(tmp_path / "in.safetensors", make_tensors(layers=6))
    target = tmp_path / "out.safetensors"
    journal = tmp_path / ".out.safetensors.halfbyte-progress"
    command = [sys.executable, "-m", "halfbyte.cli.main", "quantize", str(source)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [*command, str(target)], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    while child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > 3:
            break
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not target.exists()
    for name in ("out", "whole"):
        path = tmp_path / f"{name}.safetensors"
        subprocess.run([*command, str(path)], cwd=ROOT, env=environment, check=True)
    assert target.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert len(names(tmp_path)) == 5


def test_library_reads_the_output(tmp_path: Path) -> None:
    run(write_file(tmp_path / "in.safetensors"), tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert loaded["model.layers.0.q_proj.weight_codes"].dtype == torch.uint8
    save_file(loaded, tmp_path / "again.safetensors")
