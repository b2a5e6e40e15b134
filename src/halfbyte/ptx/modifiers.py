"""Opcodes taken apart by a grammar of modifiers, for families with too many forms to list.

`ld.relaxed.gpu.global.L1::evict_last.v4.b32` is one of some hundred thousand spellings of a load. A
family says which words its modifiers may be, in groups, and how many of each group there may be;
what the words mean is the family's business. Order within an opcode is kept inside a group only:
compilers spell some forms (`cp.async.bulk.tensor`) in more than one order.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModifierGroup:
    """Words that exclude each other: an opcode has `least` to `most` of them."""

    name: str
    words: frozenset[str]
    least: int = 0
    most: int = 1


def group(name: str, words: str, least: int = 0, most: int = 1) -> ModifierGroup:
    """Return the group of the words that `words` lists with spaces between them."""
    return ModifierGroup(name, frozenset(words.split()), least, most)


MEMORY_ORDER = group("order", "weak volatile relaxed acquire release acq_rel mmio", most=2)
SCOPE = group("scope", "cta cluster gpu sys")
CACHE = group(
    "cache",
    "ca cg cs lu cv wb wt L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last "
    "L1::no_allocate L2::evict_normal L2::evict_first L2::evict_last L2::64B L2::128B L2::256B",
    most=3,
)
CACHE_HINT = group("hint", "L2::cache_hint")


def parse_modifiers(
    opcode: str, stem: str, groups: Iterable[ModifierGroup]
) -> dict[str, tuple[str, ...]] | None:
    """Return the modifiers after `stem` by group, or None when the groups do not allow them.

    Every group is a key of the result; a group the opcode does not use has the empty tuple.
    """
    if opcode != stem and not opcode.startswith(f"{stem}."):
        return None
    groups = tuple(groups)
    found: dict[str, list[str]] = {each.name: [] for each in groups}
    rest = opcode[len(stem) + 1 :]
    for word in rest.split(".") if rest else ():
        owner = next((each for each in groups if word in each.words), None)
        if owner is None:
            return None
        found[owner.name].append(word)
    if any(not each.least <= len(found[each.name]) <= each.most for each in groups):
        return None
    return {name: tuple(words) for name, words in found.items()}
