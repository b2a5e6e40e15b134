"""Adapters that become part of a checkpoint while it is converted."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from halfbyte.checkpoints.convert import (
    ConvertEvent,
    ConvertRequest,
    ConvertResult,
    convert_checkpoint,
)
from halfbyte.checkpoints.family import is_same_linear
from halfbyte.cli.main import main
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.halfbyte_file import read_halfbyte_file, write_halfbyte_file
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.adapters import merge_into_records, read_adapter
from halfbyte.nn.adapters.conversion_merge import AdapterMerge, parse_merge, read_merges
from halfbyte.workers.settings import make_worker_settings
from tests.checkpoints import test_nunchaku
from tests.checkpoints.family_files import FamilyFile
from tests.nn.adapters.adapter_files import lengthen, make_factors, spell, write
from tests.random_linears import LinearShape, make_linear

N, K = 32, 64
NAMES = ("b.0.to_q", "b.0.to_k", "b.0.mod")
TARGETS = {name: make_factors(N, K, 4, seed) for seed, name in enumerate(NAMES[1:])}


def make_records() -> dict[str, QuantizedLinear]:
    """Rank 16, rank 16, and weight-only without a branch."""
    pair = ("nvfp4", "nvfp4_nunchaku")
    return {
        NAMES[0]: make_linear(LinearShape(N, K), pair, 0),
        NAMES[1]: make_linear(LinearShape(N, K), pair, 1),
        NAMES[2]: make_linear(LinearShape(N, K, 0), ("int4", None), 2),
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_halfbyte_file(tmp_path / "in.safetensors", make_records(), {"norm": torch.ones(4)})
    return tmp_path / "in.safetensors"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write(tmp_path / "style.safetensors", spell("diffusers", TARGETS))


def run(
    source: Path, target: Path, *merges: AdapterMerge, to: str = "halfbyte", ignore: str = ""
) -> ConvertResult:
    merge = read_merges(merges, [ignore] if ignore else [])
    request = ConvertRequest(source, target, to, verify=True, force=True)
    return convert_checkpoint(replace(request, merge=merge))


def test_records_grow_as_those_of_a_live_model(source: Path, adapter: Path, tmp_path: Path) -> None:
    second = write(
        tmp_path / "more.safetensors", spell("diffusers", {NAMES[1]: make_factors(N, K, 3, 9)})
    )
    target = tmp_path / "out.safetensors"
    report = run(source, target, AdapterMerge(adapter, 0.5), AdapterMerge(second, -2.0)).report
    records = make_records()
    wanted = merge_into_records(records, read_adapter(adapter), strength=0.5)
    wanted = merge_into_records(wanted, read_adapter(second), strength=-2.0)
    by_hand = lengthen(
        records[NAMES[1]], (TARGETS[NAMES[1]], 0.5), (make_factors(N, K, 3, 9), -2.0)
    )
    file = read_halfbyte_file(target)
    assert [file.linears[name].rank for name in NAMES] == [16, 23, 4]
    assert all(is_same_linear(file.linears[name], wanted[name]) for name in NAMES)
    assert is_same_linear(file.linears[NAMES[1]], by_hand)
    assert is_same_linear(file.linears[NAMES[0]], records[NAMES[0]])
    assert report is not None
    assert report["verified"]["identical"] == 3
    assert [line.split(": ")[1][:8] for line in report["merged"]] == ["2 layers", "1 layers"]
    assert [entry["rank"] for entry in report["layers"]] == [4, 23, 16]


def test_strength_0_changes_no_record(source: Path, adapter: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out.safetensors", AdapterMerge(adapter, 0.0))
    assert (tmp_path / "out.safetensors").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("precision", ["nvfp4", "int4"])
@pytest.mark.parametrize("via", ["nunchaku", "halfbyte"])
def test_nunchaku_files_keep_one_rank_of_whole_fragments(
    precision: str, via: str, tmp_path: Path
) -> None:
    layers = ("blocks.0.to_q", "blocks.0.to_k")
    tensors = {}
    for layer in layers:
        tensors |= test_nunchaku.load_golden(precision, layer)
    path = FamilyFile(tensors, test_nunchaku.make_metadata(precision)).write(tmp_path / "in")
    start = path / "model.safetensors" if path.is_dir() else path
    if via == "halfbyte":
        run(start, tmp_path / "own.safetensors")
        start = tmp_path / "own.safetensors"
    run(start, tmp_path / "plain.safetensors")
    before = read_halfbyte_file(tmp_path / "plain.safetensors").linears
    one = before[layers[0]]
    factors = make_factors(*one.weight.shape, 5)
    file = write(tmp_path / "a.safetensors", spell("kohya", {layers[0]: factors}))
    merge = AdapterMerge(file, 0.5)
    target = tmp_path / "out.safetensors"
    assert run(start, target, merge, to="nunchaku").report is not None
    run(target, tmp_path / "again.safetensors")
    after = read_halfbyte_file(tmp_path / "again.safetensors").linears
    rank = one.rank + 16
    assert [after[name].rank for name in layers] == [rank, rank]
    with safe_open(target, "pt") as opened:
        assert json.loads(opened.metadata()["quantization_config"])["rank"] == rank
    wanted = merge_into_records({layers[0]: one}, read_adapter(file), strength=0.5)[layers[0]]
    for name, linear in ((layers[0], wanted), (layers[1], before[layers[1]])):
        down, up = after[name].lora_down, after[name].lora_up
        assert down is not None
        assert up is not None
        assert linear.lora_down is not None
        assert torch.equal(down[: linear.rank], linear.lora_down)
        assert torch.equal(up[:, : linear.rank], linear.lora_up)  # type: ignore[arg-type]
        assert not down[linear.rank :].any()
        assert not up[:, linear.rank :].any()
    was, now = load_file(path / "model.safetensors" if path.is_dir() else path), load_file(target)
    for name in (f"{layer}.{part}" for layer in layers for part in ("qweight", "wscales")):
        assert torch.equal(was[name].view(torch.uint8), now[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("family", "activation", "ranks"),
    [
        ("modelopt", "nvfp4_static", [16, 19]),
        ("nunchaku_lite", "nvfp4_nunchaku", [32, 32]),
        ("vllm-omni", "nvfp4_one_level", [32, 32]),
        ("svdquant-kernels-product", "nvfp4_one_level", [16, 19]),
    ],
)
def test_families_with_a_branch_hold_what_was_merged(
    family: str, activation: str, ranks: list[int], tmp_path: Path
) -> None:
    shape = LinearShape(128, 128, 16, parts=False, dtype=torch.bfloat16)
    records = {f"l.{name}": make_linear(shape, ("nvfp4", activation)) for name in ("a", "b")}
    write_halfbyte_file(tmp_path / "in.safetensors", records, {})
    file = write(tmp_path / "x.safetensors", spell("comfyui", {"l.b": make_factors(128, 128, 3)}))
    written = tmp_path / "written"
    report = run(tmp_path / "in.safetensors", written, AdapterMerge(file), to=family).report
    assert report is not None
    assert [entry["rank"] for entry in report["layers"]] == ranks
    again = run(written, tmp_path / "again", AdapterMerge(file, -1.0), to=family).report
    assert again is not None  # from the family's own file: no stale rank, no stale bytes
    assert again["from"] == family
    assert again["layers"][1]["rank"] == {19: 22, 32: 48}[ranks[1]]


def test_what_cannot_be_merged_is_named_and_writes_nothing(
    source: Path, adapter: Path, tmp_path: Path
) -> None:
    other = write(
        tmp_path / "o.safetensors",
        spell("diffusers", {**TARGETS, "b.7.to_q": make_factors(N, K), "x.y": make_factors(N, K)}),
    )
    plain = make_linear(LinearShape(N, K, 0, parts=False), ("nvfp4", "nvfp4_static"))
    flat = tmp_path / "flat.safetensors"
    write_halfbyte_file(flat, dict.fromkeys(TARGETS, plain), {})
    run(flat, tmp_path / "held", to="compressed-tensors")
    there = sorted(os.listdir(tmp_path))
    target = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"2 of 4 target.*b\.7\.to_q.*x\.y"):
        run(source, target, AdapterMerge(other))
    with pytest.raises(CheckpointError, match=r"'b\.0\.mod': lora_down: .*no tensor"):
        run(flat, target, AdapterMerge(adapter), to="compressed-tensors")
    with pytest.raises(UsageError, match="twice"):
        run(source, target, AdapterMerge(adapter), AdapterMerge(adapter, 2.0))
    with pytest.raises(UsageError, match="--merge-ignore"):
        run(source, target, ignore="*")
    request = ConvertRequest(source, target, "halfbyte", workers=make_worker_settings(2, None, 1))
    with pytest.raises(UsageError, match="--merge and --workers"):
        convert_checkpoint(replace(request, merge=read_merges([AdapterMerge(adapter)])))
    assert sorted(os.listdir(tmp_path)) == there


def test_a_run_continues_with_the_same_adapters_alone(
    source: Path, adapter: Path, tmp_path: Path
) -> None:
    def begin(strength: float, *, stop: bool) -> tuple[ConvertResult | None, list[str]]:
        notes: list[str] = []

        def watch(event: ConvertEvent) -> None:
            if event.stage == "note":
                notes.append(event.text)
            if stop and event.stage == "verify":
                raise KeyboardInterrupt

        merge = read_merges([AdapterMerge(adapter, strength)])
        target = tmp_path / "out.safetensors"
        request = ConvertRequest(source, target, "halfbyte", verify=True, merge=merge)
        try:
            return convert_checkpoint(request, watch), notes
        except KeyboardInterrupt:
            return None, notes

    assert begin(0.5, stop=True) == (None, [])
    assert "starting over" in begin(0.75, stop=True)[1][0]
    state = adapter.stat()
    os.utime(adapter, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
    assert "starting over" in begin(0.75, stop=True)[1][0]
    result, notes = begin(0.75, stop=False)
    assert result is not None
    assert result.resumed_units == 2
    assert "continuing" in notes[0]
    wanted = merge_into_records(make_records(), read_adapter(adapter), strength=0.75)
    file = read_halfbyte_file(tmp_path / "out.safetensors")
    assert all(is_same_linear(file.linears[name], wanted[name]) for name in NAMES)


def test_an_adapter_and_its_strength_are_one_word(tmp_path: Path) -> None:
    assert parse_merge("a/b.safetensors") == AdapterMerge(Path("a/b.safetensors"), 1.0)
    assert parse_merge("a=b.safetensors=-0.5") == AdapterMerge(Path("a=b.safetensors"), -0.5)
    for word in ("a=", "a=much", "a=nan", "a=inf"):
        with pytest.raises(UsageError, match="finite number"):
            parse_merge(word)
    (tmp_path / "a=2").write_bytes(b"")
    assert parse_merge(f"{tmp_path}/a=2").path.name == "a=2"
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(UsageError, match="both"):
        parse_merge(f"{tmp_path}/a=2")


def test_the_command_merges_and_says_so(
    source: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.safetensors"
    words = ["convert", str(source), str(out), "--to", "halfbyte", "--json"]
    assert main([*words, "--merge", f"{adapter}=0.5", "--merge-ignore", "*mod*"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["report"]["merged"]
    assert line.startswith(f"{adapter} at strength 0.5: 1 layers")
    assert line.endswith("2 tensors left out")
    assert [read_halfbyte_file(out).linears[name].rank for name in NAMES] == [16, 20, 0]
    assert main([*words, "--merge", f"{adapter}=x"]) == 2
    assert main([*words, "--merge", str(tmp_path / "absent"), "--force"]) == 1
