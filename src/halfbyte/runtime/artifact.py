"""Kernels compiled ahead of time: a folder of entries that load without the compiler.

An artifact folder is a cache whose entries are named by the source alone, and checked when it is
added: what was built by another version is refused with both versions named.
"""

import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfbyte.device.kernel_source import KernelSource
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.runtime.kernel_build import build_entry
from halfbyte.runtime.kernel_cache import expand_folder
from halfbyte.runtime.kernel_entry import (
    MANIFEST,
    KernelEntry,
    read_entry,
    remove_abandoned,
)
from halfbyte.runtime.kernel_key import FORMAT_VERSION, make_source_key, read_toolchain
from halfbyte.version import __version__

FOLDERS_VARIABLE = "HALFBYTE_ARTIFACTS"
INDEX = "artifacts.json"

_lock = threading.Lock()
_added: list[Path] = []
_read: dict[Path, dict[str, KernelEntry]] = {}


@dataclass(frozen=True)
class Artifacts:
    """A folder of kernels that was read.

    Attributes:
        folder: where they lie.
        entries: by source key.
    """

    folder: Path
    entries: dict[str, KernelEntry]


def build_artifacts(
    sources: Iterable[KernelSource],
    folder: Path,
    report: Callable[[KernelSource, KernelEntry], None] | None = None,
) -> Artifacts:
    """Compile sources into `folder`, beside what it holds already; return all it holds then.

    A kernel that is there, whole and made by the tools of today, is not compiled again: a build
    that was ended goes on where it was.

    Args:
        sources: what to compile; targets may differ.
        folder: made where it is missing.
        report: called with each kernel when it is there.

    Raises:
        MissingDependencyError: CuTe DSL or TVM FFI is not installed.
        HalfbyteError: a kernel cannot be compiled; those before it are kept.
        UsageError: the folder cannot be written, or holds other things than artifacts.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name one for the artifacts")
    others = [p for p in folder.iterdir() if p.name != INDEX] if folder.is_dir() else []
    strange = [p for p in others if not p.name.startswith(".") and not (p / MANIFEST).is_file()]
    if strange:
        raise UsageError(f"{folder} holds {strange[0].name}, which is no artifact: name a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_abandoned(folder)
        try:
            for source in sources:
                key = make_source_key(source)
                entry = _find_current(folder / key) or build_entry(source, key, folder / key)
                if report is not None:
                    report(source, entry)
        finally:  # what was built before an error is there to be used
            artifacts = Artifacts(folder, _list_entries(folder))
            _write_index(artifacts)
    except OSError as error:
        raise UsageError(f"the artifacts cannot be written to {folder}: {error}") from None
    return artifacts


def _find_current(folder: Path) -> KernelEntry | None:
    """Return the entry in `folder` if building it would give the same; else None."""
    try:
        entry = read_entry(folder)
        if entry is None or entry.facts.toolchain != read_toolchain():
            return None
        for name in entry.digests:
            entry.read_part(name)
    except CheckpointError:
        return None
    return entry


def _write_index(artifacts: Artifacts) -> None:
    """Write what a folder holds, for people and for the check of its version."""
    index = {
        "format": FORMAT_VERSION,
        "halfbyte": __version__,
        "kernels": [
            {
                "name": entry.facts.name,
                "target": entry.facts.target,
                "config": entry.facts.config,
                "key": key,
                "cute_dsl": entry.facts.toolchain.cute_dsl,
                "tvm_ffi": entry.facts.toolchain.tvm_ffi,
                "ptxas": entry.facts.ptxas,
            }
            for key, entry in sorted(artifacts.entries.items())
        ],
    }
    partial = artifacts.folder / f".{INDEX}.{os.getpid()}"
    partial.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, artifacts.folder / INDEX)


def _list_entries(folder: Path) -> dict[str, KernelEntry]:
    entries = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            entry = read_entry(path)
            if entry is not None:
                entries[path.name] = entry
    return entries


def read_artifacts(folder: Path) -> Artifacts:
    """Return the artifacts in a folder.

    Raises:
        UsageError: there is no such folder, or no artifacts in it.
        CheckpointError: another version of halfbyte built them, or an entry is damaged.
    """
    try:
        index: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index_format, builder = index["format"], index["halfbyte"]
    except OSError as error:
        raise UsageError(
            f"no artifacts in {folder} ({error}): `halfbyte build --out {folder}` makes them"
        ) from None
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / INDEX} is no list of artifacts: {error}") from None
    if index_format != FORMAT_VERSION:
        raise CheckpointError(
            f"the artifacts in {folder} have format {index_format}, built by halfbyte {builder}; "
            f"halfbyte {__version__} reads format {FORMAT_VERSION}: build them again with "
            "`halfbyte build`"
        )
    return Artifacts(folder, _list_entries(folder))


def use_artifacts(path: str | os.PathLike[str]) -> None:
    """Look for kernels in this folder first, before compiling any.

    Raises:
        UsageError: there are no artifacts in it.
        CheckpointError: another version of halfbyte built them, or an entry is damaged.
    """
    folder = expand_folder(path, "use_artifacts")
    artifacts = read_artifacts(folder)
    with _lock:
        _read[folder] = artifacts.entries
        if folder in _added:
            _added.remove(folder)
        _added.insert(0, folder)


def list_folders() -> list[Path]:
    """Return the artifact folders in use: those added, the last first, then HALFBYTE_ARTIFACTS.

    Raises:
        UsageError: HALFBYTE_ARTIFACTS names the home of nobody.
    """
    named = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    paths = [expand_folder(name, FOLDERS_VARIABLE) for name in named if name]
    with _lock:
        return list(dict.fromkeys([*_added, *paths]))


def find_artifact(source_key: str) -> KernelEntry | None:
    """Return the entry that was built from exactly this source, or None.

    Raises:
        UsageError, CheckpointError: as `read_artifacts`, for a folder of HALFBYTE_ARTIFACTS.
    """
    for folder in list_folders():
        entry = _get_entries(folder).get(source_key)
        if entry is not None:
            return entry
    return None


def _get_entries(folder: Path) -> dict[str, KernelEntry]:
    with _lock:
        entries = _read.get(folder)
    if entries is None:
        entries = read_artifacts(folder).entries
        with _lock:
            _read[folder] = entries
    return entries


def explain_absence(source: KernelSource) -> str:
    """Return why no artifact serves a source: what came nearest, with both versions or targets."""
    folders = list_folders()
    if not folders:
        return "no artifacts are in use (HALFBYTE_ARTIFACTS names folders of them)"
    places = ", ".join(map(str, folders))
    same_name = [
        entry
        for folder in folders
        for entry in _get_entries(folder).values()
        if entry.facts.name == source.name
    ]
    same_target = [one for one in same_name if one.facts.target == source.target]
    for entry in same_target:
        if entry.facts.config == repr(source.config):
            return (
                f"the artifact in {entry.folder} was built by halfbyte {entry.halfbyte} from other "
                f"source text than that of halfbyte {__version__}, which runs here: build it again "
                "with `halfbyte build`"
            )
    if same_target:
        return f"the artifacts in {places} hold {source.name} with other configurations"
    if same_name:
        targets = ", ".join(sorted({entry.facts.target for entry in same_name}))
        return (
            f"the artifacts in {places} hold {source.name} for {targets}, and {source.target} is "
            f"wanted: `halfbyte build --arch {source.target}` makes it"
        )
    return f"the artifacts in {places} hold no {source.name}"
