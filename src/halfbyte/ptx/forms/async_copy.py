"""Copies of 4, 8 or 16 bytes per thread (PTX ISA, "cp.async" and its commit and wait groups).

Attributes of cp.async: 1 when the operand after the size is a source size, 2 when it is the
predicate ignore-src. Attributes of the arrival: 1 for a generic address, 1 for `.noinc`.
"""

from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import CACHE_HINT, group, parse_modifiers

FAMILY = "async_copy"
RESOLVED_WORDS = ("cp",)

_GROUPS = (
    group("cache", "ca cg", least=1),
    group("space", "shared shared::cta global", least=2, most=2),
    CACHE_HINT,
    group("prefetch", "L2::64B L2::128B L2::256B"),
)
_SOURCE_SIZE, _IGNORE_SOURCE = 1, 2


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a cp.async copy, or None when the name is no legal one."""
    modifiers = parse_modifiers(name, "cp.async", _GROUPS)
    if modifiers is None or modifiers["space"][0] == "global" or modifiers["space"][1] != "global":
        return None
    hint = " b64" if modifiers["hint"] else ""

    def make(operands: str, kind: int) -> InstructionForm:
        return InstructionForm(name, FAMILY, operands + hint, "cp.async", (kind,))

    with_size = make("[b32] [b64] imm b32", _SOURCE_SIZE)
    with_predicate = make("[b32] [b64] imm pred", _IGNORE_SOURCE)
    return InstructionForm(
        name,
        FAMILY,
        "[b32] [b64] imm" + hint,
        "cp.async",
        (0,),
        alternatives=(with_size, with_predicate),
    )


_COPIES = tuple(
    resolve(f"cp.async.{cache}.{space}.global{hint}{prefetch}")
    for cache in ("ca", "cg")
    for space in ("shared", "shared::cta")
    for hint in ("", ".L2::cache_hint")
    for prefetch in ("", ".L2::64B", ".L2::128B", ".L2::256B")
)

FORMS = (
    *(form for form in _COPIES if form is not None),
    InstructionForm("cp.async.commit_group", FAMILY, "", "cp.async.commit_group"),
    InstructionForm("cp.async.wait_group", FAMILY, "imm", "cp.async.wait_group"),
    InstructionForm("cp.async.wait_all", FAMILY, "", "cp.async.wait_all"),
    *(
        InstructionForm(
            f"cp.async.mbarrier.arrive{noinc}{space}.b64",
            FAMILY,
            address,
            "cp.async.mbarrier.arrive",
            (int(space == ""), int(noinc != "")),
        )
        for noinc in ("", ".noinc")
        for space, address in (("", "[b64]"), (".shared", "[b32]"), (".shared::cta", "[b32]"))
    ),
)
