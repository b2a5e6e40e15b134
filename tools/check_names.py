"""Check names against the naming rules, and all text for paths and hosts of one machine."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from repository import CPP_SUFFIXES, Finding, list_files, parse_python, run_check

# Words that say nothing about a thing, or tell its history; git keeps history.
BANNED_WORDS = {"utils", "util", "helpers", "helper", "common", "misc", "base", "v2", "new"}
BANNED_VERBS = {"compute", "process", "handle", "do"}

# Written so that no pattern matches its own text in this file.
BANNED_TEXT = (
    (r"/(?:work|tmp)[/]", "a path of one machine"),
    (r"\bshared/(?:design|facts|style|data|prototype|seeds)", "a path outside the repository"),
    (r"\b(?:pypi[.]org|pythonhosted[.]org|npmjs[.]|debian[.]org)", "a registry host"),
    (r"\bsub[-]?agents?\b|\bAI[ ]agents?\b|\bcoding[ ]agents?\b", "a word about how it was made"),
    (r"\bissue[ ]#?\d", "an issue number"),
)
_BANNED_TEXT = [(re.compile(pattern, re.IGNORECASE), what) for pattern, what in BANNED_TEXT]


def find_bad_names(root: Path) -> Iterator[Finding]:
    """Yield a Finding for each banned module name, identifier, verb or piece of text."""
    for path in list_files(root):
        relative = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # pictures and other binary files hold no names
        yield from find_bad_text(relative, text)
        if path.suffix == ".py" or path.suffix in CPP_SUFFIXES:
            for part in (*path.relative_to(root).parent.parts, path.stem):
                if set(split_words(part)) & BANNED_WORDS:
                    yield Finding(relative, 1, f"module name {part!r} has a banned word")
        if path.suffix == ".py":
            yield from _find_bad_identifiers(relative, parse_python(path))


def find_bad_text(relative: str, text: str) -> Iterator[Finding]:
    """Yield a Finding for each line with text that belongs to one machine or workplace."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, what in _BANNED_TEXT:
            match = pattern.search(line)
            if match:
                yield Finding(relative, number, f"{match[0]!r} is {what}")


def split_words(name: str) -> list[str]:
    """Return the lower-case words of a snake_case or CamelCase name."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in re.split(r"[_.\-]+", spaced) if word]


def _list_overrides(tree: ast.Module) -> set[int]:
    """Return the ids of methods in classes with a parent, which may have named them."""
    return {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
        for child in node.body
    }


def _find_bad_identifiers(relative: str, tree: ast.Module) -> Iterator[Finding]:
    overrides = _list_overrides(tree)
    for node in ast.walk(tree):
        for name, line in _list_defined_names(node):
            if name.startswith("__"):
                continue  # Python's own names, such as __new__
            words = set(split_words(name)) & BANNED_WORDS
            if words:
                yield Finding(relative, line, f"name {name!r} has a banned word: {min(words)}")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in overrides:
            verb = split_words(node.name)[:1]
            if set(verb) & BANNED_VERBS and not node.name.startswith("__"):
                yield Finding(
                    relative, node.lineno, f"function {node.name!r}: banned verb {verb[0]}"
                )


def _list_defined_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno


if __name__ == "__main__":
    sys.exit(run_check(__doc__ or "", find_bad_names))
