"""Writes docs/cli/<verb>.md from the program's own help, or with --check compares them."""

import argparse
import sys
from pathlib import Path
from typing import Any

import typer.main

from halfbyte.cli.main import app

FOLDER = Path(__file__).parents[1] / "docs" / "cli"


def make_pages() -> dict[str, str]:
    """Return the text of every page by file name."""
    group: Any = typer.main.get_command(app)  # typer's own copy of click has no public types
    return {f"{name}.md": make_page(name, command) for name, command in group.commands.items()}


def make_page(name: str, command: Any) -> str:
    """Return the page of one verb: what it does, usage, arguments and options, examples."""
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join(p.metavar or p.name.upper() for p in arguments)
    lines = [f"# halfbyte {name}", "", "<!-- made by tools/make_cli_pages.py -->", ""]
    for paragraph in (command.help or "").strip().split("\n\n"):
        lines += [paragraph.replace("\n", " "), ""]
    lines += [
        "```",
        " ".join(["halfbyte", name, *([usage] if usage else []), "[OPTIONS]"]),
        "```",
        "",
    ]
    rows = [(usage, getattr(p, "help", None)) for p in arguments]
    rows += [(_name_option(p), p.help) for p in options]
    lines += ["| argument or option | meaning |", "|---|---|"]
    lines += [f"| `{left}` | {right or ''} |".replace("  ", " ") for left, right in rows]
    lines += ["", command.epilog or ""]
    return "\n".join(lines).rstrip() + "\n"


def _name_option(option: Any) -> str:
    name = ", ".join((*option.opts, *option.secondary_opts))
    if option.is_flag or option.count:
        return name
    return f"{name} {option.metavar or option.name.upper()}"


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds a page that is missing, left over or out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args(arguments).check
    pages = make_pages()
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    if check:
        wrong = sorted(name for name in {*pages, *found} if pages.get(name) != found.get(name))
        print("\n".join(f"docs/cli/{name} is not what the program says" for name in wrong))
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
