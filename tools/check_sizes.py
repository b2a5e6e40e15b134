"""Check that files, functions and parameter lists stay small enough to be read in one go."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from repository import CPP_SUFFIXES, Finding, list_files, parse_python, run_check

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ROLE_LINES = 80  # a warp role (`*_role`) is one straight program of one warp
MAX_KERNEL_LINES = 130  # the entry `kernel` under kernels/ allocates and hands out roles
MAX_PARAMETERS = 8
NUM_SHOWN = 5

EXCEPTIONS_FILE = "tools/size_exceptions.txt"


@dataclass(frozen=True)
class Measure:
    """One measured thing: a file (name "") or a function, its size and its limit."""

    path: str
    name: str
    line: int
    size: int
    limit: int
    unit: str

    @property
    def key(self) -> str:
        """What an exception names: `path` or `path:function`."""
        return f"{self.path}:{self.name}" if self.name else self.path


def list_measures(root: Path) -> Iterator[Measure]:
    """Yield a Measure for every source file, function and parameter list."""
    for path in list_files(root):
        relative = path.relative_to(root).as_posix()
        if path.suffix != ".py" and path.suffix not in CPP_SUFFIXES:
            continue
        text = path.read_text(encoding="utf-8")
        yield Measure(relative, "", 1, len(text.splitlines()), MAX_FILE_LINES, "lines")
        if path.suffix == ".py":
            yield from _list_python_functions(relative, parse_python(path))
        else:
            yield from list_cpp_functions(relative, text)


def _list_python_functions(relative: str, tree: ast.Module) -> Iterator[Measure]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = choose_function_limit(relative, node.name)
        yield Measure(relative, node.name, node.lineno, lines, limit, "lines")
        if not relative.startswith("tests/"):  # fixtures and parametrized arguments are no API
            count = _count_parameters(node.args)
            yield Measure(relative, node.name, node.lineno, count, MAX_PARAMETERS, "parameters")


def choose_function_limit(relative: str, name: str) -> int:
    """Return the line limit of a function: roles and kernel entries may be longer."""
    if name.endswith("_role"):
        return MAX_ROLE_LINES
    if name == "kernel" and "kernels" in Path(relative).parts:
        return MAX_KERNEL_LINES
    return MAX_FUNCTION_LINES


def _count_parameters(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return len([a for a in named if a.arg not in ("self", "cls")]) + len(variadic)


_CPP_NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_CPP_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$")
_CPP_NAME = re.compile(r"(?!__attribute__|alignas|decltype|noexcept)(?<![\w:~])([~\w:]+)\s*\(")


def list_cpp_functions(relative: str, text: str) -> Iterator[Measure]:
    """Yield a Measure for each outermost C++ function body, found by its braces.

    Comments, strings and preprocessor lines are blanked first; scopes (namespace, class, extern
    "C") are entered, and whatever else has a parenthesis before its brace is a function.
    """
    blanked = _CPP_NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    depth = 0  # braces inside the current function; 0 outside
    head_start = 0
    name, start_line = "", 0
    for position, character in enumerate(blanked):
        if character == ";" and depth == 0:
            head_start = position + 1
        elif character == "{":
            head = blanked[head_start:position]
            found = _CPP_NAME.search(head)
            if depth == 0 and (found is None or _CPP_SCOPE.search(head)):
                head_start = position + 1
                continue
            if depth == 0 and found is not None:
                name = found[1]
                first = head_start + len(head) - len(head.lstrip())
                start_line = blanked.count("\n", 0, first) + 1
            depth += 1
        elif character == "}":
            depth = max(depth - 1, 0)
            if depth == 0 and name:
                lines = blanked.count("\n", 0, position) + 2 - start_line
                yield Measure(relative, name, start_line, lines, MAX_FUNCTION_LINES, "lines")
                name = ""
            if depth == 0:
                head_start = position + 1


def read_exceptions(root: Path) -> dict[str, tuple[int, int]]:
    """Return key -> (limit, line in the exceptions file); ValueError for a malformed line.

    A line is `path[:function] | limit | reason`; the reason must not be empty.
    """
    path = root / EXCEPTIONS_FILE
    if not path.exists():
        return {}
    exceptions: dict[str, tuple[int, int]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 3 or not parts[1].isdigit() or not parts[2]:
            raise ValueError(f"{EXCEPTIONS_FILE}:{number}: wanted `path[:name] | limit | reason`")
        exceptions[parts[0]] = (int(parts[1]), number)
    return exceptions


def find_oversized(root: Path) -> Iterator[Finding]:
    """Yield a Finding for each thing over its limit and for each exception nobody needs."""
    exceptions = read_exceptions(root)
    needed = set[str]()
    for measure in list_measures(root):
        if measure.size <= measure.limit:
            continue
        what = measure.name or "file"
        if measure.key in exceptions:
            needed.add(measure.key)
            if measure.size <= exceptions[measure.key][0]:
                continue
        message = f"{what} has {measure.size} {measure.unit}, limit {measure.limit}: split it"
        yield Finding(measure.path, measure.line, message)
    for key in exceptions.keys() - needed:
        yield Finding(EXCEPTIONS_FILE, exceptions[key][1], f"{key} needs no exception any more")


def describe_biggest(root: Path) -> str:
    """Return the biggest files and functions, a line each."""
    measures = [measure for measure in list_measures(root) if measure.unit == "lines"]
    lines = []
    for title, is_file in (("files", True), ("functions", False)):
        chosen = [measure for measure in measures if (measure.name == "") == is_file]
        chosen.sort(key=lambda measure: -measure.size)
        shown = [f"{measure.size} {measure.key}" for measure in chosen[:NUM_SHOWN]]
        lines.append(f"biggest {title}: " + ", ".join(shown))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_check(__doc__ or "", find_oversized, describe_biggest))
