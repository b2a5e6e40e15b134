"""Entries on disk: whole or not there, checked on reading, safe among processes and users."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.runtime.artifact import list_folders, use_artifacts
from halfbyte.runtime.compile_kernel import compile_kernel, find_entry
from halfbyte.runtime.kernel_cache import KernelCache, find_cache_folder
from halfbyte.runtime.kernel_entry import (
    MANIFEST,
    VIRTUAL_LIBRARY,
    KernelEntry,
    KernelFacts,
    read_entry,
    write_entry,
)
from halfbyte.runtime.kernel_key import FORMAT_VERSION, Toolchain
from halfbyte.virtual.driver.session import cuda
from tests.runtime.scaled_sum import make_source

FACTS = KernelFacts(
    name="some_kernel",
    config="Config()",
    target="sm_100a",
    source_key="0" * 64,
    function="halfbyte_some_kernel",
    toolchain=Toolchain("4.8.1", ("a wheel 1",), "0.1.15", (("NAME", "value"),)),
    ptxas="12.9",
    ptx_version="8.8",
)
PARTS = {"kernel.ptx": b".version 8.8", "kernel.cubin": bytes(range(256))}

FIND = """
from halfbyte.runtime.compile_kernel import find_entry
from tests.runtime.scaled_sum import make_source
{before}
print(find_entry(make_source()).folder)
"""


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_entry_reads_back_as_written(tmp_path: Path) -> None:
    written = write_entry(tmp_path / "key", FACTS, PARTS)
    found = read_entry(tmp_path / "key")
    assert found == written
    assert {name: found.read_part(name) for name in PARTS} == PARTS
    assert list_names(tmp_path) == ["key"]


def test_no_entry_is_none(tmp_path: Path) -> None:
    assert read_entry(tmp_path / "absent") is None
    assert KernelCache(tmp_path / "absent").find("key") is None


def test_an_entry_replaces_another_whole(tmp_path: Path) -> None:
    write_entry(tmp_path / "key", FACTS, PARTS)
    write_entry(tmp_path / "key", FACTS, {"kernel.ptx": b"other"})
    found = read_entry(tmp_path / "key")
    assert found is not None
    assert found.read_part("kernel.ptx") == b"other"
    assert not found.has_part("kernel.cubin")
    assert list_names(tmp_path) == ["key"]


@pytest.mark.parametrize("damage", ["cut", "changed", "missing"])
def test_a_damaged_part_is_refused_when_it_is_read(tmp_path: Path, damage: str) -> None:
    entry = write_entry(tmp_path / "key", FACTS, PARTS)
    path = entry.folder / "kernel.cubin"
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if damage == "cut" else b"\1" + content[1:])
    with pytest.raises(CheckpointError, match=r"kernel\.cubin"):
        entry.read_part("kernel.cubin")
    assert entry.read_part("kernel.ptx") == PARTS["kernel.ptx"]


MANIFESTS = {
    "empty": "",
    "cut": '{"format": 1, "na',
    "a list": "[]",
    "no fields": f'{{"format": {FORMAT_VERSION}}}',
    "nested": "[" * 100_000,
    "outside": None,
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_is_none_is_refused_and_removed_from_the_cache(
    tmp_path: Path, kind: str
) -> None:
    entry = write_entry(tmp_path / "key", FACTS, PARTS)
    path, text = entry.folder / MANIFEST, MANIFESTS[kind]
    if text is None:
        manifest = json.loads(path.read_text())
        manifest["parts"]["../../secret"] = "0" * 64
        text = json.dumps(manifest)
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is .*remove the folder .* built again"):
        read_entry(entry.folder)
    assert KernelCache(tmp_path).find("key") is None
    assert list_names(tmp_path) == []


def test_a_folder_that_is_no_entry_is_removed_from_the_cache(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    (tmp_path / "key" / "something").write_text("else")
    assert KernelCache(tmp_path).find("key") is None
    (tmp_path / "key").write_text("a file")
    assert KernelCache(tmp_path).find("key") is None
    write_entry(tmp_path / "key", FACTS, PARTS)
    assert KernelCache(tmp_path).find("key") is not None


def test_another_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    entry = write_entry(tmp_path / "key", FACTS, PARTS)
    manifest = json.loads((entry.folder / MANIFEST).read_text())
    manifest.update(format=999, halfbyte="77.0")
    (entry.folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"999.*77\.0.*format {FORMAT_VERSION}"):
        read_entry(entry.folder)


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    for age, key in enumerate(("new", "middle", "old")):
        entry = write_entry(tmp_path / key, FACTS, {"kernel.cubin": bytes(10_000)})
        past = time.time() - 100 * age
        os.utime(entry.folder / MANIFEST, (past, past))
    cache = KernelCache(tmp_path, most_bytes=25_000)
    assert cache.find("old") is not None  # used: "middle" is now the oldest
    cache.trim()
    assert list_names(tmp_path) == ["new", "old"]
    cache.clear()
    assert not tmp_path.exists()


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: Path) -> None:
    for name, age_s in ((".partial-old", 7200), (".partial-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    KernelCache(tmp_path).trim()
    assert list_names(tmp_path) == [".partial-new"]


def test_a_folder_that_others_may_write_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_entry(tmp_path / "key", FACTS, PARTS)
    tmp_path.chmod(0o777)
    assert KernelCache(tmp_path).find("key") is None
    assert "chmod go-w" in caplog.text
    tmp_path.chmod(0o755)
    assert KernelCache(tmp_path).find("key") is not None


def test_the_folder_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(tmp_path / "named"))
    assert find_cache_folder() == tmp_path / "named"
    monkeypatch.delenv("HALFBYTE_KERNEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache_folder() == tmp_path / "halfbyte" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder() == tmp_path / ".cache" / "halfbyte" / "kernels"


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HALFBYTE_KERNEL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", refuse)
    folder = find_cache_folder()
    assert folder.is_relative_to(tempfile.gettempdir())
    assert str(os.getuid()) in str(folder)  # not shared with other users


def test_a_home_of_nobody_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", "~no-such-user/kernels")
    with pytest.raises(UsageError, match="HALFBYTE_KERNEL_CACHE: ~no-such-user/kernels"):
        find_cache_folder()
    monkeypatch.setenv("HALFBYTE_ARTIFACTS", "~no-such-user/kernels")
    with pytest.raises(UsageError, match="HALFBYTE_ARTIFACTS: ~no-such-user/kernels"):
        list_folders()
    with pytest.raises(UsageError, match="use_artifacts: ~no-such-user"):
        use_artifacts("~no-such-user/kernels")


# With the compiler.


def test_four_processes_compile_the_same_kernel_at_once(
    compiled_cache: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    program = f"""
import os, subprocess, sys
program = {FIND.format(before="")!r}
started = [
    subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for _ in range(4)
]
print(*{{one.communicate()[0].strip() for one in started}})
print(*{{one.returncode for one in started}})
"""
    folder, codes = run_python(program, HALFBYTE_KERNEL_CACHE=str(tmp_path)).splitlines()
    assert codes == "0"
    assert list_names(tmp_path) == [Path(folder).name]  # one entry, nothing partial
    entry = read_entry(Path(folder))
    assert entry is not None
    for name in entry.digests:
        entry.read_part(name)


def test_a_process_killed_while_it_writes_leaves_no_entry(
    compiled_cache: Path, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    kill = "import os, signal\nos.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    run_python(FIND.format(before=kill), check=False, HALFBYTE_KERNEL_CACHE=str(tmp_path))
    (left,) = list_names(tmp_path)
    assert left.startswith(".partial-")
    folder = run_python(FIND.format(before=""), HALFBYTE_KERNEL_CACHE=str(tmp_path)).strip()
    assert list_names(tmp_path) == sorted([left, Path(folder).name])


@pytest.mark.usefixtures("built_stand_in")
@pytest.mark.parametrize("damage", ["cut library", "foreign library", "manifest", "removed"])
def test_a_damaged_entry_is_built_again(entry: KernelEntry, damage: str) -> None:
    path = entry.folder / VIRTUAL_LIBRARY
    content = path.read_bytes()
    if damage == "cut library":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "foreign library":
        path.write_bytes(b"\x7fELF" + bytes(1000))
    elif damage == "manifest":
        (entry.folder / MANIFEST).write_text("{}")
    else:
        shutil.rmtree(entry.folder)
    with cuda("b200"):
        kernel = compile_kernel(make_source())
    assert kernel.entry.folder == entry.folder
    rebuilt = read_entry(entry.folder)
    assert rebuilt is not None
    assert rebuilt.digests == kernel.entry.digests
    for name in rebuilt.digests:
        rebuilt.read_part(name)


@pytest.mark.parametrize("obstacle", ["a file", "a loop", "read-only"])
def test_a_cache_that_cannot_be_written_is_done_without(
    cache: Path,
    obstacle: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = cache / "place"
    if obstacle == "a file":
        place.write_text("in the way")
        monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(place / "below"))
    elif obstacle == "a loop":
        place.symlink_to(place)
        monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(place))
    else:
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        place.mkdir(mode=0o500)
        monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(place))
    entry = find_entry(make_source())
    assert "cannot be written" in caplog.text
    assert not entry.folder.is_relative_to(cache)
    assert entry.read_part(VIRTUAL_LIBRARY)
