"""Allocation of tensor memory, commit and fence: tcgen05.alloc and its kin (PTX ISA).

Attributes: cta_group; for alloc also 1 for a generic destination; for commit also 1 for a generic
mbarrier address, 1 for a multicast.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import group, parse_modifiers

FAMILY = "tcgen05_alloc"
RESOLVED_WORDS = ("tcgen05",)

CTA_GROUPS = {"cta_group::1": 1, "cta_group::2": 2}
CTA_GROUP = group("cta_group", " ".join(CTA_GROUPS), least=1)
COMMIT_GROUPS = (
    CTA_GROUP,
    group("mechanism", "mbarrier::arrive::one", least=1),
    group("space", "shared::cluster shared::cta"),
    group("multicast", "multicast::cluster"),
    group("type", "b64", least=1),
)


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a tcgen05.commit, None for anything else."""
    modifiers = parse_modifiers(name, "tcgen05.commit", COMMIT_GROUPS)
    if modifiers is None:
        return None
    is_generic = not modifiers["space"]
    is_multicast = bool(modifiers["multicast"])
    attributes = (CTA_GROUPS[modifiers["cta_group"][0]], int(is_generic), int(is_multicast))
    operands = ("[b64]" if is_generic else "[b32]") + (" b16" if is_multicast else "")
    return InstructionForm(name, FAMILY, operands, "tcgen05.commit", attributes)


def _list_allocations() -> Iterator[InstructionForm]:
    for word, count in CTA_GROUPS.items():
        for space, address in ((".shared::cta", "[b32]"), ("", "[b64]")):
            yield InstructionForm(
                f"tcgen05.alloc.{word}.sync.aligned{space}.b32",
                FAMILY,
                f"{address} b32",
                "tcgen05.alloc",
                (count, int(not space)),
                "aligned",
            )
        yield InstructionForm(
            f"tcgen05.dealloc.{word}.sync.aligned.b32",
            FAMILY,
            "b32 b32",
            "tcgen05.dealloc",
            (count,),
            "aligned",
        )
        yield InstructionForm(
            f"tcgen05.relinquish_alloc_permit.{word}.sync.aligned",
            FAMILY,
            "",
            "tcgen05.relinquish_alloc_permit",
            (count,),
            "aligned",
        )


def _list_commits() -> Iterator[InstructionForm]:
    for word in CTA_GROUPS:
        for space in (".shared::cluster", ""):
            for multicast in ("", ".multicast::cluster"):
                name = f"tcgen05.commit.{word}.mbarrier::arrive::one{space}{multicast}.b64"
                form = resolve(name)
                assert form is not None, name
                yield form


FORMS: tuple[InstructionForm, ...] = (
    *_list_allocations(),
    *_list_commits(),
    InstructionForm("tcgen05.fence::before_thread_sync", FAMILY, "", "tcgen05.fence"),
    InstructionForm("tcgen05.fence::after_thread_sync", FAMILY, "", "tcgen05.fence"),
)
