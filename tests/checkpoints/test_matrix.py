"""Every family x {read, write, there and back, to every other}, through real files."""

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from halfbyte.checkpoints.convert import ConvertRequest, convert_checkpoint
from halfbyte.checkpoints.family import Layer
from halfbyte.checkpoints.registry import FAMILIES
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.halfbyte_file import write_halfbyte_file
from halfbyte.svdquant.presets import PRESETS
from tests.svdquant.checkpoint_files import read_tree

ROOT = Path(__file__).resolve().parents[2]


@cache
def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_checkpoint_table", ROOT / "tools" / "make_checkpoint_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
WRITTEN = [name for name, family in FAMILIES.items() if TOOL.is_written(family)]


@dataclass(frozen=True)
class MadeFile:
    """A file of one layer in a family, converted from our own."""

    path: Path
    kind: Any


def suffix_of(family: str) -> str:
    return ".gguf" if FAMILIES[family].container == "gguf" else ""


def convert(source: Path, target: Path, to: str, origin: str | None = None) -> dict[str, Any]:
    request = ConvertRequest(source, target, to, origin, verify=True)
    report = convert_checkpoint(request).report
    assert report is not None
    return report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[MadeFile]]:
    """Files of every kind that each family holds, each proved on its way from our own format."""
    folder = tmp_path_factory.mktemp("matrix")
    files: dict[str, list[MadeFile]] = {name: [] for name in WRITTEN}
    for number, kind in enumerate(TOOL.KINDS):
        own = folder / f"{number}"
        own.mkdir()
        linear = TOOL.make_linear(kind, number)
        write_halfbyte_file(own / "model.safetensors", {kind.layer: linear})
        for name in WRITTEN:
            if TOOL.explain(FAMILIES[name], Layer(kind.layer, linear)) is None:
                path = folder / f"{number}-{name}{suffix_of(name)}"
                convert(own, path, name)
                files[name].append(MadeFile(path, kind))
    return files


@pytest.mark.parametrize("name", WRITTEN)
def test_there_and_back_gives_the_family_s_own_bytes(
    name: str, made: dict[str, list[MadeFile]], tmp_path: Path
) -> None:
    assert made[name], f"no kind of layer of the tool's is of {name}: add one"
    for number, file in enumerate(made[name]):
        own, back = tmp_path / f"own{number}", tmp_path / f"back{number}{suffix_of(name)}"
        convert(file.path, own, "halfbyte", name)
        convert(own, back, name)
        assert read_tree(back) == read_tree(file.path), file.kind.title


@pytest.mark.parametrize("origin", WRITTEN)
def test_every_other_family_takes_a_layer_or_says_why_not(
    origin: str, made: dict[str, list[MadeFile]], tmp_path: Path
) -> None:
    held = TOOL.list_held(origin)
    assert set(held) == {file.kind.title for file in made[origin]}
    for target in WRITTEN:
        taken = [f for f in made[origin] if is_taken(target, held[f.kind.title])]
        refused = [f for f in made[origin] if f not in taken]
        for file in taken[-1:]:
            place = tmp_path / f"{target}{suffix_of(target)}"
            report = convert(file.path, place, target, origin)
            assert report["totals"]["layers"] == 1
        for file in refused[-1:]:
            reason = TOOL.explain(FAMILIES[target], held[file.kind.title])
            with pytest.raises(CheckpointError) as error:
                convert(file.path, tmp_path / f"no-{target}{suffix_of(target)}", target, origin)
            assert f"cannot be written as {target}" in str(error.value)
            assert reason in str(error.value)


def is_taken(target: str, layer: Layer) -> bool:
    return TOOL.explain(FAMILIES[target], layer) is None


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(WRITTEN)))
def test_families_that_are_only_read_are_refused_as_targets(name: str, tmp_path: Path) -> None:
    linear = TOOL.make_linear(TOOL.KINDS[0])
    write_halfbyte_file(tmp_path / "a.safetensors", {"a": linear})
    with pytest.raises(UsageError, match="read, not written"):
        convert(tmp_path / "a.safetensors", tmp_path / "out", name)


def test_the_page_has_a_row_for_every_preset_with_a_low_rank_branch() -> None:
    shown = {(kind.weight, kind.activation) for kind in TOOL.KINDS if kind.rank}
    made = {
        name: (preset.weight_format, preset.activation)
        for name, preset in PRESETS.items()
        if preset.rank
    }
    assert [name for name, kind in made.items() if kind not in shown] == []


def test_the_page_says_what_the_families_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL.main(["--check"]) == 0, "run tools/make_checkpoint_table.py"


def test_a_page_that_is_out_of_date_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TOOL, "PAGE", tmp_path / "README.md")
    assert TOOL.main(["--check"]) == 1
    assert "make_checkpoint_table" in capsys.readouterr().out
    assert TOOL.main([]) == 0
    assert TOOL.main(["--check"]) == 0
