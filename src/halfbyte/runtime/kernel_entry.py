"""One compiled kernel on disk: a folder with its parts and a manifest, renamed into place whole.

A folder is never changed after it has its name. What a process that was killed left behind has
another name and is removed later; parts are compared with
the manifest's digests when they are read.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.runtime.kernel_key import FORMAT_VERSION, Toolchain
from halfbyte.version import __version__

MANIFEST = "manifest.json"
DEVICE_LIBRARY, VIRTUAL_LIBRARY = "kernel_device.so", "kernel_virtual.so"
# Instead of the libraries, where no C compiler could link them.
DEVICE_OBJECT, VIRTUAL_OBJECT = "kernel_device.o", "kernel_virtual.o"
PTX, CUBIN = "kernel.ptx", "kernel.cubin"
_PARTIAL = ".partial-"
_ABANDONED_S = 3600.0  # no compilation takes an hour


@dataclass(frozen=True)
class KernelFacts:
    """What a manifest says about its kernel.

    Attributes:
        name, config, target: of the source; the configuration as its repr.
        source_key: digest of the source, see `kernel_key`.
        function: name of the function that launches it.
        toolchain: what compiled it.
        ptxas: CUDA version of the ptxas inside CuTe DSL.
        ptx_version: version of the PTX ISA.
    """

    name: str
    config: str
    target: str
    source_key: str
    function: str
    toolchain: Toolchain
    ptxas: str
    ptx_version: str


@dataclass(frozen=True)
class KernelEntry:
    """A kernel on disk that was read and found whole in form; parts are checked on reading.

    Attributes:
        folder: where it lies.
        facts: what its manifest says.
        halfbyte: the version that built it.
        digests: part's file name -> SHA-256, hexadecimal.
    """

    folder: Path
    facts: KernelFacts
    halfbyte: str
    digests: Mapping[str, str]

    def has_part(self, name: str) -> bool:
        """Whether the entry has a part of that file name."""
        return name in self.digests

    def read_part(self, name: str) -> bytes:
        """Return the bytes of a part.

        Raises:
            CheckpointError: it is missing, cut short or changed.
        """
        path = self.folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise CheckpointError(
                f"compiled kernel: {path} cannot be read: {error}; {_name_remedy(self.folder)}"
            ) from None
        digest = hashlib.sha256(content).hexdigest()
        if digest != self.digests.get(name):
            raise CheckpointError(
                f"compiled kernel: {path} ({len(content)} bytes) is not what its manifest says; "
                f"{_name_remedy(self.folder)}"
            )
        return content


def write_entry(folder: Path, facts: KernelFacts, parts: Mapping[str, bytes]) -> KernelEntry:
    """Write an entry so that `folder` is there whole or not at all; one that is there gives way.

    Raises:
        OSError: the place cannot be written.
    """
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = folder.parent / f"{_PARTIAL}{uuid.uuid4().hex}"
    partial.mkdir(mode=0o700)
    try:
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}
        for name, content in parts.items():
            (partial / name).write_bytes(content)
        manifest = {
            "format": FORMAT_VERSION,
            "halfbyte": __version__,
            **asdict(facts),
            "parts": digests,
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return KernelEntry(folder, facts, __version__, digests)


def _rename(partial: Path, folder: Path) -> None:
    """Give a folder its name; what has the name already, perhaps damaged, is moved away first."""
    for _ in range(16):
        try:
            os.rename(partial, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        remove_entry(folder)
    raise OSError(f"{folder} comes back as often as it is replaced")


def remove_entry(folder: Path) -> None:
    """Remove an entry; a reader sees all of it or nothing."""
    aside = folder.parent / f"{_PARTIAL}{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _name_remedy(folder: Path) -> str:
    return f"remove the folder {folder} to have it built again"


def read_entry(folder: Path) -> KernelEntry | None:
    """Return the entry in `folder`, or None where there is none.

    Raises:
        CheckpointError: there is something, but no entry of this format.
    """
    path = folder / MANIFEST
    remedy = _name_remedy(folder)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(folder):
            problem = f"{folder} has no {MANIFEST}"
            raise CheckpointError(f"compiled kernel: {problem}; {remedy}") from None
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"compiled kernel: {path} cannot be read: {error}; {remedy}"
        ) from None
    try:
        return _make_entry(folder, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"compiled kernel: {path} is no manifest of one: {type(error).__name__} {error}; "
            f"{remedy}"
        ) from None


def _make_entry(folder: Path, manifest: dict[str, Any]) -> KernelEntry:
    if manifest["format"] != FORMAT_VERSION:
        raise CheckpointError(
            f"compiled kernel: {folder} has format {manifest['format']!r}, built by halfbyte "
            f"{manifest.get('halfbyte')}; halfbyte {__version__} reads format {FORMAT_VERSION}: "
            "build it again with `halfbyte build`"
        )
    tools = manifest["toolchain"]
    toolchain = Toolchain(
        cute_dsl=_read_text(tools, "cute_dsl"),
        wheels=tuple(map(str, tools["wheels"])),
        tvm_ffi=_read_text(tools, "tvm_ffi"),
        settings=tuple((str(name), str(value)) for name, value in tools["settings"]),
    )
    names = ("name", "config", "target", "source_key", "function", "ptxas", "ptx_version")
    texts = {name: _read_text(manifest, name) for name in names}
    digests = {str(name): str(digest) for name, digest in manifest["parts"].items()}
    if any(Path(name).name != name for name in digests):
        raise ValueError("a part lies outside the folder")
    return KernelEntry(
        folder, KernelFacts(toolchain=toolchain, **texts), str(manifest["halfbyte"]), digests
    )


def _read_text(mapping: Mapping[str, Any], name: str) -> str:
    value = mapping[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a text is wanted")
    return value


def remove_abandoned(parent: Path) -> None:
    """Remove what processes left behind that were killed while they wrote or removed an entry."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{_PARTIAL}*"):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
