"""tcgen05.cp and tcgen05.shift (PTX ISA, sections of these names).

Attributes: cta_group; for cp also the shape (see exec/tcgen05_copy.cpp) and the bits of an element
in shared memory (8: nothing is decompressed).
"""

from halfbyte.ptx.forms.tcgen05_alloc import CTA_GROUP, CTA_GROUPS
from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import group, parse_modifiers

FAMILY = "tcgen05_copy"
RESOLVED_WORDS = ("tcgen05",)

SHAPES = {
    ("128x256b", ""): 0,
    ("4x256b", ""): 1,
    ("128x128b", ""): 2,
    ("64x128b", "warpx2::02_13"): 3,
    ("64x128b", "warpx2::01_23"): 4,
    ("32x128b", "warpx4"): 5,
}
SOURCES = {"b6x16_p32": 6, "b4x16_p64": 4}
COPY_GROUPS = (
    CTA_GROUP,
    group("shape", " ".join({shape for shape, _ in SHAPES}), least=1),
    group("multicast", " ".join({multicast for _, multicast in SHAPES})),
    group("destination", "b8x16"),
    group("source", " ".join(SOURCES)),
)
SHIFT_GROUPS = (CTA_GROUP, group("direction", "down", least=1))


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a tcgen05.cp or .shift, None for anything else."""
    modifiers = parse_modifiers(name, "tcgen05.shift", SHIFT_GROUPS)
    if modifiers is not None:
        cta_group = CTA_GROUPS[modifiers["cta_group"][0]]
        return InstructionForm(name, FAMILY, "[b32]", "tcgen05.shift", (cta_group,))
    modifiers = parse_modifiers(name, "tcgen05.cp", COPY_GROUPS)
    if modifiers is None or bool(modifiers["destination"]) != bool(modifiers["source"]):
        return None
    shape = SHAPES.get((modifiers["shape"][0], "".join(modifiers["multicast"])))
    if shape is None:
        return None
    bits = SOURCES[modifiers["source"][0]] if modifiers["source"] else 8
    attributes = (CTA_GROUPS[modifiers["cta_group"][0]], shape, bits)
    return InstructionForm(name, FAMILY, "[b32] b64", "tcgen05.cp", attributes)


def _list_names() -> list[str]:
    names = []
    for word in CTA_GROUPS:
        names.append(f"tcgen05.shift.{word}.down")
        for shape, multicast in SHAPES:
            for source in ("", *(f".b8x16.{source}" for source in SOURCES)):
                tail = f"{shape}.{multicast}" if multicast else shape
                names.append(f"tcgen05.cp.{word}.{tail}{source}")
    return names


FORMS: tuple[InstructionForm, ...] = tuple(
    form for form in map(resolve, _list_names()) if form is not None
)
