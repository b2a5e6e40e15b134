"""Artifacts: built once, loaded without the compiler, refused with both versions named."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import CheckpointError, HalfbyteError, MissingDependencyError, UsageError
from halfbyte.runtime import artifact
from halfbyte.runtime import compile_kernel as compile_module
from halfbyte.runtime.artifact import (
    INDEX,
    build_artifacts,
    find_artifact,
    read_artifacts,
    use_artifacts,
)
from halfbyte.runtime.compile_kernel import find_entry
from halfbyte.runtime.kernel_entry import MANIFEST, KernelEntry
from halfbyte.runtime.kernel_key import FORMAT_VERSION, make_source_key, read_toolchain
from halfbyte.version import __version__
from tests.runtime.scaled_sum import ScaledSumConfig, make_source
from tests.runtime.test_compile_kernel import BLOCK_COMPILER

SOURCES = [make_source(ScaledSumConfig(2.0, target)) for target in ("sm_100a", "sm_90a")]


@pytest.fixture(scope="module")
def built(compiled_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return artifacts of `SOURCES`; no test writes to them."""
    folder = tmp_path_factory.mktemp("artifacts") / "built"
    build_artifacts(SOURCES, folder)
    return folder


@pytest.fixture
def artifacts(built: Path, cache: Path, tmp_path: Path) -> Path:
    """Return a copy of the artifacts that may be damaged; not in use yet."""
    return Path(shutil.copytree(built, tmp_path / "artifacts"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "read_toolchain", lambda: None)


def test_the_index_lists_kernels_with_their_tools(built: Path) -> None:
    index = json.loads((built / INDEX).read_text())
    assert index["format"] == FORMAT_VERSION
    assert index["halfbyte"] == __version__
    assert {row["target"] for row in index["kernels"]} == {"sm_100a", "sm_90a"}
    for row in index["kernels"]:
        assert row["cute_dsl"].startswith("4.")
        assert (built / row["key"] / MANIFEST).exists()


def test_an_artifact_is_found_by_its_source_alone(artifacts: Path, no_compiler: None) -> None:
    use_artifacts(artifacts)
    for source in SOURCES:
        assert find_entry(source).folder == artifacts / make_source_key(source)
    assert find_artifact(make_source_key(make_source())) is None


def test_the_variable_names_folders(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: None
) -> None:
    monkeypatch.setenv("HALFBYTE_ARTIFACTS", os.pathsep.join([str(artifacts), ""]))
    assert find_entry(SOURCES[0]).folder.parent == artifacts


def test_more_kernels_are_added_to_a_folder(artifacts: Path) -> None:
    known = set(read_artifacts(artifacts).entries)
    added = build_artifacts([make_source(ScaledSumConfig(8.0))], artifacts)
    assert known < set(added.entries)
    assert len(json.loads((artifacts / INDEX).read_text())["kernels"]) == 3


def test_a_build_goes_on_where_it_was_ended(
    artifacts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (artifacts / INDEX).unlink()  # it is written last
    first, second = (artifacts / make_source_key(source) for source in SOURCES)
    (second / "kernel.cubin").write_bytes(b"cut")
    built: list[Path] = []
    build = artifact.build_entry

    def watch(source: KernelSource, key: str, folder: Path) -> KernelEntry:
        built.append(folder)
        return build(source, key, folder)

    monkeypatch.setattr(artifact, "build_entry", watch)
    build_artifacts(SOURCES, artifacts)
    assert built == [second]
    assert set(read_artifacts(artifacts).entries) == {first.name, second.name}
    tools = dataclasses.replace(read_toolchain() or pytest.fail("no tools"), tvm_ffi="0.0.7")
    monkeypatch.setattr(artifact, "read_toolchain", lambda: tools)
    build_artifacts(SOURCES[:1], artifacts)
    assert built == [second, first]


@pytest.mark.usefixtures("built_stand_in")
def test_artifacts_run_where_the_compiler_cannot_be_imported(
    artifacts: Path, run_python: Callable[..., str]
) -> None:
    program = f"""{BLOCK_COMPILER}
import torch
from halfbyte.runtime.run_kernel import run_kernel
from tests.runtime.scaled_sum import ScaledSumConfig, make_source
for gpu, target in (("b200", "sm_100a"), ("h200", "sm_90a")):
    a, y = torch.arange(500.0), torch.full((500,), float("nan"))
    run_kernel(make_source(ScaledSumConfig(2.0, target)), a, a, y, 500, virtual_gpu=gpu)
    assert torch.equal(y, 4 * torch.arange(500.0)), y
assert not any(name.partition(".")[0] == "cutlass" for name in sys.modules)
print("right")
"""
    assert run_python(program, HALFBYTE_ARTIFACTS=str(artifacts)).strip() == "right"


def test_another_target_is_refused_with_both(artifacts: Path, no_compiler: None) -> None:
    use_artifacts(artifacts)
    with pytest.raises(
        MissingDependencyError, match=r"scaled_sum for sm_100a, sm_90a, and sm_103a is wanted"
    ):
        find_entry(make_source(ScaledSumConfig(2.0, "sm_103a")))


def test_other_source_text_is_refused_with_both_versions(
    artifacts: Path, no_compiler: None
) -> None:
    for path in artifacts.glob(f"*/{MANIFEST}"):
        path.write_text(path.read_text().replace(f'"{__version__}"', '"0.0.7"', 1))
        path.parent.rename(artifacts / ("0" * 8 + path.parent.name[8:]))  # of other source text
    use_artifacts(artifacts)
    with pytest.raises(MissingDependencyError) as raised:
        find_entry(SOURCES[0])
    assert "built by halfbyte 0.0.7" in str(raised.value)
    assert f"halfbyte {__version__}" in str(raised.value)


def test_another_configuration_is_told(artifacts: Path, no_compiler: None) -> None:
    use_artifacts(artifacts)
    with pytest.raises(MissingDependencyError, match="with other configurations"):
        find_entry(make_source(ScaledSumConfig(9.0)))


def test_another_format_is_refused_with_both_versions(artifacts: Path) -> None:
    index = json.loads((artifacts / INDEX).read_text())
    (artifacts / INDEX).write_text(json.dumps({**index, "format": 999, "halfbyte": "77.0"}))
    with pytest.raises(
        CheckpointError, match=rf"format 999.*77\.0.*{__version__} reads format {FORMAT_VERSION}"
    ):
        use_artifacts(artifacts)


@pytest.mark.parametrize("text", ["", "[]", '{"format": 1}', "null"])
def test_an_index_that_is_none_is_refused(artifacts: Path, text: str) -> None:
    (artifacts / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        use_artifacts(artifacts)


def test_a_folder_without_artifacts_is_refused_with_the_verb(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="halfbyte build --out"):
        use_artifacts(tmp_path)


@pytest.mark.usefixtures("built_stand_in")
def test_a_damaged_artifact_is_told_and_not_replaced(artifacts: Path) -> None:
    from halfbyte.runtime.compile_kernel import compile_kernel
    from halfbyte.virtual.driver.session import cuda

    (library,) = (artifacts / make_source_key(SOURCES[0])).glob("kernel_virtual.so")
    library.write_bytes(library.read_bytes()[:-100])
    use_artifacts(artifacts)
    with cuda("b200"), pytest.raises(CheckpointError, match=r"kernel_virtual\.so"):
        compile_kernel(SOURCES[0])


@pytest.mark.parametrize("place", ["file", "strange"])
def test_a_place_for_other_things_is_refused(tmp_path: Path, place: str) -> None:
    out = tmp_path / "out"
    if place == "file":
        out.write_text("something")
    else:
        out.mkdir()
        (out / "thesis.txt").write_text("something")
    with pytest.raises(UsageError, match="no folder" if place == "file" else r"thesis\.txt"):
        build_artifacts(SOURCES, out)
    assert (out if place == "file" else out / "thesis.txt").read_text() == "something"


def test_kernels_before_one_that_fails_are_kept(cache: Path, tmp_path: Path) -> None:
    broken = dataclasses.replace(make_source(ScaledSumConfig(3.0)), make=lambda: 1 / 0)
    with pytest.raises(HalfbyteError, match=r"scale=3\.0"):
        build_artifacts([SOURCES[0], broken], tmp_path / "out")
    assert list(read_artifacts(tmp_path / "out").entries) == [make_source_key(SOURCES[0])]
