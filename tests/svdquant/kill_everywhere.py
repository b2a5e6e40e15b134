"""Kills quantize_file at every system call that changes the disk, reruns it, compares bytes.

Runs in a process of its own with one thread: it forks, and a fork loses OpenMP's threads.
Usage: python -m tests.svdquant.kill_everywhere IN OUT STRIDE {--force}; prints JSON.
"""

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfbyte.svdquant.presets import PRESETS
from halfbyte.svdquant.quantize_file import QuantizeFileRequest, quantize_file
from tests.svdquant.checkpoint_files import read_tree

CALLS = ("pwrite", "write", "fsync", "replace", "rename", "ftruncate", "mkdir", "unlink", "rmdir")
OLD_OUTPUT = {"a.txt": b"old", "b.txt": b"output"}  # what --force replaces, whole or not at all


def kill_at_call(number: int) -> None:
    """Patch `os` so that its `number`-th disk change kills the process before it happens."""
    count = 0

    def make_counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return counted

    for name in CALLS:
        setattr(os, name, make_counted(getattr(os, name)))


def run(act: Callable[[], object], kill_at: int | None) -> int:
    """Run once in a fork; return its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kill_at is not None:
                kill_at_call(kill_at)
            act()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def clear(target: Path, old: Path | None) -> None:
    """Put the directory of `target` back to where a first run starts."""
    shutil.rmtree(target.parent)
    target.parent.mkdir()
    if old is not None:
        shutil.copytree(old, target)


def make_old_output(target: Path) -> Path:
    """Make a directory of OLD_OUTPUT beside the target's own and return it."""
    old = target.parent.parent / "old"
    old.mkdir()
    for name in OLD_OUTPUT:
        (old / name).write_bytes(OLD_OUTPUT[name])
    return old


def try_every_call(
    act: Callable[[], object], target: Path, stride: int, old: Path | None
) -> dict[str, Any]:
    """Kill `act` at call 1, 1 + stride, ... until a run gets through unharmed.

    Returns the number of kills, and in words what went wrong after them.
    """
    clear(target, old)
    assert run(act, None) == 0
    wanted, names = read_tree(target), sorted(os.listdir(target.parent))
    failures: list[str] = []
    for kill_at in itertools.count(1, stride):
        clear(target, old)
        if run(act, kill_at) == 0:
            break
        half = read_tree(target) if target.exists() else {}
        if half not in ({}, wanted, OLD_OUTPUT):
            failures.append(f"call {kill_at}: half an output is visible")
        if run(act, None) != 0:
            failures.append(f"call {kill_at}: the second run failed")
        elif read_tree(target) != wanted or sorted(os.listdir(target.parent)) != names:
            failures.append(f"call {kill_at}: {sorted(os.listdir(target.parent))} differs")
    return {"kills": (kill_at - 1) // stride, "failures": failures}


def main() -> None:
    """Quantize IN, killed everywhere."""
    source, target, stride = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    force = "--force" in sys.argv
    old = make_old_output(target) if force else None
    preset = PRESETS["nvfp4_weight_only_r32"]
    request = QuantizeFileRequest(source, target, preset, force=force)
    print(json.dumps(try_every_call(lambda: quantize_file(request), target, stride, old)))


if __name__ == "__main__":
    main()
