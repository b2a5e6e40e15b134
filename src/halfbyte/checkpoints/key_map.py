"""Names of a file to names of a model, told as data: patterns, never code.

A rule is PATTERN -> TARGET over dotted names. `*` stands for one component ("0", "attn"), `**` for
one or more. A pattern matches a whole name or its first components; the rest of the name is kept.
In the target the wildcards stand again, in the same order. The empty pattern matches every name (a
prefix is added), the empty target removes what the pattern matched. A target of None says that the
tensor is not wanted. The first rule that matches is used; a name that none matches stays.

    {"model.diffusion_model": ""}                       a prefix less
    {"blocks.*.attn.qkv": "layers.*.self_attn.qkv_proj"}
    {"**.rotary_emb.inv_freq": None}                    not loaded
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from halfbyte.errors import UsageError
from halfbyte.formats.safetensors_header import quoted

# Linears that models keep apart or as one, in the order of the fused rows.
FUSED_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "add_qkv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
_WILDCARD: Final = re.compile(r"\*\*|\*")
_EXPRESSIONS: Final = {"*": r"([^.]+)", "**": r"(.+)"}


@dataclass(frozen=True)
class KeyMap:
    """How the names of a file become names of a model.

    Attributes:
        renames: the rules, in the order in which they are tried.
        fused: last component of a fused linear -> those of its parts, in the order of its rows;
            beside `FUSED_NAMES`.
    """

    renames: Mapping[str, str | None] = field(default_factory=dict)
    fused: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the rules; UsageError names one that cannot be meant."""
        for pattern, target in self.renames.items():
            _check_rule(pattern, target)
        for name, parts in self.fused.items():
            is_list = not isinstance(parts, str) and len(parts) > 1
            if not is_list or any("." in part or not part for part in (name, *parts)):
                raise UsageError(
                    f"fused {quoted(name)}: got {quoted(parts)}, wanted two or more names without "
                    "dots, in the order of the rows"
                )

    def rename(self, names: Iterable[str]) -> dict[str, str | None]:
        """Return what each name becomes; None for a tensor that is not wanted.

        Raises:
            UsageError: a rule that no name matches, or two names that become one.
        """
        rules = [(pattern, _compile(pattern), target) for pattern, target in self.renames.items()]
        unused = dict.fromkeys(self.renames)
        renamed: dict[str, str | None] = {}
        for name in names:
            renamed[name] = name
            for pattern, expression, target in rules:
                match = expression.fullmatch(name)
                if match is not None:
                    unused.pop(pattern, None)
                    renamed[name] = None if target is None else _fill(target, match)
                    break
        if unused:
            listed = ", ".join(quoted(pattern) for pattern in unused)
            raise UsageError(
                f"key map: no name of the file is matched by {listed}; remove the rule"
            )
        _check_distinct(renamed)
        return renamed

    def list_fused(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return all fused names with those of their parts, the caller's first."""
        own = [(name, tuple(parts)) for name, parts in self.fused.items()]
        return [*own, *(item for item in FUSED_NAMES.items() if item[0] not in self.fused)]


def _check_rule(pattern: str, target: str | None) -> None:
    if not isinstance(pattern, str) or not (target is None or isinstance(target, str)):
        raise UsageError(
            f"key map {quoted(pattern)}: {quoted(target)}, wanted a pattern and a pattern or None"
        )
    if target is None:
        return
    wildcards = _WILDCARD.findall(pattern), _WILDCARD.findall(target)
    if wildcards[0] != wildcards[1]:
        raise UsageError(
            f"key map {quoted(pattern)} -> {quoted(target)}: the wildcards {wildcards[0]} and "
            f"{wildcards[1]} differ; each stands again in the target, in the same order"
        )


def _compile(pattern: str) -> re.Pattern[str]:
    if not pattern:
        return re.compile(r"(?P<rest>.*)", re.DOTALL)
    pieces = _WILDCARD.split(pattern)
    wildcards = [*(_EXPRESSIONS[found] for found in _WILDCARD.findall(pattern)), ""]
    text = "".join(
        re.escape(piece) + wildcard for piece, wildcard in zip(pieces, wildcards, strict=True)
    )
    return re.compile(rf"{text}(?P<rest>\..*)?", re.DOTALL)


def _fill(target: str, match: re.Match[str]) -> str:
    found = iter(match.groups())
    filled = _WILDCARD.sub(lambda _: next(found), target)
    rest = (match["rest"] or "").removeprefix(".")
    return ".".join(part for part in (filled, rest) if part)


def _check_distinct(renamed: Mapping[str, str | None]) -> None:
    owners: dict[str, str] = {}
    for name, target in renamed.items():
        if target is not None and owners.setdefault(target, name) != name:
            raise UsageError(
                f"key map: {quoted(owners[target])} and {quoted(name)} would both be "
                f"{quoted(target)}; make the patterns narrower"
            )
