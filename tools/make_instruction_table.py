"""Writes docs/instructions.md from the instruction forms, or with --check compares it."""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from halfbyte.ptx.forms import INSTRUCTION_FORMS
from halfbyte.ptx.instruction_form import InstructionForm

PAGE = Path(__file__).parents[1] / "docs" / "instructions.md"
HEAD = """# Instruction forms of the virtual GPU

<!-- made by tools/make_instruction_table.py -->

Every full PTX form that the virtual GPU runs, {count} in all, as its own tables list them
(`halfbyte.ptx.forms`). Braces hold alternatives; all combinations of one line exist. Operands: `=`
marks a result, `b32*4` a vector of four, `[b64]` an address with a 64-bit register, `pred` a
predicate, `a|b` a pair, `?` what may be left out. Anything else raises an error that names the
instruction and its line, when a kernel reaches it. Loads, stores and atomics also take every cache
operator, memory order, scope and hint that their grammar allows (`resolve` of the family's module).
"""

Segments = tuple[frozenset[str], ...]


def merge_names(names: set[tuple[str, ...]]) -> list[Segments]:
    """Return products of alternatives that together spell exactly `names` (equal lengths)."""
    groups: set[Segments] = {tuple(frozenset((part,)) for part in name) for name in names}
    length = len(next(iter(groups)))
    for position in reversed(range(length)):
        same_rest: dict[Segments, set[str]] = defaultdict(set)
        for group in groups:
            same_rest[group[:position] + group[position + 1 :]] |= group[position]
        groups = {
            (*rest[:position], frozenset(parts), *rest[position:])
            for rest, parts in same_rest.items()
        }
    return sorted(groups, key=lambda group: [sorted(parts) for parts in group])


def format_group(group: Segments) -> str:
    """Return `add.{s32,u32}` of a product of alternatives."""
    parts = (sorted(alternatives) for alternatives in group)
    return ".".join(p[0] if len(p) == 1 else "{" + ",".join(p) + "}" for p in parts)


def make_page() -> str:
    """Return the page: one table per family, one row per operand shape and product of names."""
    families: dict[str, dict[tuple[str, int], set[tuple[str, ...]]]] = defaultdict(
        lambda: defaultdict(set)
    )
    count = 0
    for listed in INSTRUCTION_FORMS.values():
        shapes: tuple[InstructionForm, ...] = (listed, *listed.alternatives)
        count += len(shapes)
        for form in shapes:
            name = tuple(form.name.split("."))
            families[form.family][(form.operands, len(name))].add(name)
    lines = [HEAD.format(count=f"{count:,}")]
    for family in sorted(families):
        lines += [f"## {family.replace('_', ' ')}", "", "| forms | operands |", "|---|---|"]
        rows = [
            (format_group(group), operands)
            for (operands, _), names in families[family].items()
            for group in merge_names(names)
        ]
        for spelled, shape in sorted(rows):
            escaped = shape.replace("|", "\\|") or "-"
            lines.append(f"| `{spelled}` | `{escaped}` |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    page = make_page()
    if parser.parse_args(arguments).check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            print(f"{PAGE.name} is not what the forms say: run tools/make_instruction_table.py")
            return 1
        return 0
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
