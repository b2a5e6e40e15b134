"""What the checks share: which files belong to the repository, and how findings are printed."""

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPP_SUFFIXES = (".cpp", ".cc", ".h", ".hpp", ".cu", ".cuh")


@dataclass(frozen=True)
class Finding:
    """One broken rule: where (path relative to the root, line) and what was wanted."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        """`path:line: message`, which editors can follow."""
        return f"{self.path}:{self.line}: {self.message}"


def list_files(root: Path) -> list[Path]:
    """Return the repository's files, sorted: tracked, and untracked unless git ignores them.

    Outside a git work tree every file under `root` counts.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    listing = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=False)
    if listing.returncode == 0:
        names = {name for name in listing.stdout.decode().split("\0") if name}
        paths = [root / name for name in names]
    else:
        paths = list(root.rglob("*"))
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def list_python_files(root: Path) -> list[Path]:
    """Return the repository's Python files, sorted."""
    return [path for path in list_files(root) if path.suffix == ".py"]


def parse_python(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file; SyntaxError names the file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def run_check(
    summary: str,
    find: Callable[[Path], Iterable[Finding]],
    describe: Callable[[Path], str] | None = None,
    arguments: list[str] | None = None,
) -> int:
    """Print the findings under --root and one closing line; return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--root", type=Path, default=ROOT, help="repository to check")
    root = parser.parse_args(arguments).root.resolve()
    findings = sorted(find(root), key=lambda finding: (finding.path, finding.line))
    for finding in findings:
        print(finding)
    if describe is not None:
        print(describe(root))
    name = Path(sys.argv[0]).stem
    print(f"{name}: {len(findings)} findings" if findings else f"{name}: clean")
    return 1 if findings else 0
