"""What silicon gave: committed outputs and tensor maps of every program, and how they got there.

    python -m tests.virtual.conformance.silicon_results DIRECTORY

takes the `results.zip` and `status.json` that `silicon_runner.py` wrote.
"""

import io
import json
import shutil
import sys
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .programs import list_programs

DIRECTORY = Path(__file__).with_name("silicon")
MANIFEST = DIRECTORY / "manifest.json"


@dataclass(frozen=True)
class SiliconRun:
    """One program on silicon: `error` is the driver's, "" where it ended well."""

    digest: str
    error: str
    is_stable: bool
    outputs: dict[str, np.ndarray]
    tensor_maps: dict[str, np.ndarray]  # the address is zero


@lru_cache(maxsize=1)
def read_manifest() -> dict[str, Any]:
    """Return date, GPU, driver and the state of each program."""
    manifest: dict[str, Any] = json.loads(MANIFEST.read_text())
    return manifest


@lru_cache(maxsize=32)
def _read_family(family: str) -> dict[str, np.ndarray]:
    with np.load(DIRECTORY / f"{family}.npz") as archive:
        return dict(archive)


def read_silicon(name: str) -> SiliconRun:
    """Return what silicon gave for a program. Raises KeyError for one that has not run there."""
    entry = read_manifest()["programs"][name]
    arrays = {} if entry["error"] else _read_family(name.split("_")[0])
    parts: dict[str, dict[str, np.ndarray]] = {"out": {}, "map": {}}
    for key, value in arrays.items():
        program, kind, label = key.split("/")
        if program == name:
            parts[kind][label] = value
    return SiliconRun(
        entry["digest"], entry["error"], entry["is_stable"], parts["out"], parts["map"]
    )


def write_silicon(results: Path) -> None:
    """Replace the committed results by those of a run. Raises SystemExit where texts differ."""
    status = json.loads((results / "status.json").read_text())
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    programs: dict[str, Any] = {}
    families: dict[str, dict[str, np.ndarray]] = {}
    with zipfile.ZipFile(results / "results.zip") as archive:
        for program in list_programs():
            state = status["programs"][program.name]
            if status["digests"][program.name] != program.digest():
                raise SystemExit(
                    f"{program.name}: the run was of another program; export, run again"
                )
            is_done = state["state"] == "done"
            programs[program.name] = {
                "digest": program.digest(),
                "error": "" if is_done else str(state["value"]),
                "is_stable": state["value"] is True,
            }
            if is_done:
                with np.load(io.BytesIO(archive.read(f"{program.name}.npz"))) as arrays:
                    for key, value in arrays.items():
                        kind, _, label = key.partition(".")
                        family = families.setdefault(program.family, {})
                        family[f"{program.name}/{kind}/{label}"] = value
    for family, arrays in families.items():
        np.savez_compressed(DIRECTORY / f"{family}.npz", **arrays)
    manifest = {
        "date": status["date"],
        **status["machine"],
        "driver": status["driver"],
        "programs": dict(sorted(programs.items())),
    }
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    write_silicon(Path(sys.argv[1]))
    size = sum(path.stat().st_size for path in DIRECTORY.iterdir())
    print(f"{len(read_manifest()['programs'])} programs, {size / 1e6:.2f} MB")
