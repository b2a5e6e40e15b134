"""tcgen05.mma and tcgen05.mma.ws, dense (PTX ISA, sections of these names).

One name has several operand lists: A in shared memory (a descriptor) or in tensor memory (an
address), with or without disable-output-lane, with or without an operand after the predicate. Each
is an alternative. Attributes: kind, cta_group, elements along K per scale factor (0: none), .ws,
.ashift, A in tensor memory, words of disable-output-lane, 1 where an operand follows the predicate.
Collector hints change nothing that shows.
"""

from dataclasses import replace

from halfbyte.ptx.forms.tcgen05_alloc import CTA_GROUP, CTA_GROUPS
from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import group, parse_modifiers

FAMILY = "tcgen05_mma"
RESOLVED_WORDS = ("tcgen05",)

KINDS = {
    "kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2, "kind::i8": 3,
    "kind::mxf8f6f4": 4, "kind::mxf4": 5, "kind::mxf4nvf4": 6,
}  # fmt: skip
# Block sizes by kind and qualifier; "" is what the kind defaults to.
BLOCKS = {
    "kind::mxf8f6f4": {"": 32, "scale_vec::1X": 32, "block32": 32},
    "kind::mxf4": {"": 32, "scale_vec::2X": 32, "block32": 32},
    "kind::mxf4nvf4": {"scale_vec::2X": 32, "block32": 32, "scale_vec::4X": 16, "block16": 16},
}
SCALED_INPUT_KINDS = ("kind::f16", "kind::tf32")
OPERATIONS = ("fill", "use", "lastuse", "discard")
GROUPS = (
    CTA_GROUP,
    group("kind", " ".join(KINDS), least=1),
    group("scaled", "block_scale"),
    group("block", "scale_vec::1X scale_vec::2X scale_vec::4X block16 block32"),
    group("ashift", "ashift"),
    group(
        "collector",
        " ".join(f"collector::{part}::{word}" for part in ("a", "b0", "b1", "b2", "b3")
                 for word in OPERATIONS),
    ),
)  # fmt: skip


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a tcgen05.mma, with its alternatives; None if it is not legal."""
    is_stationary = name.startswith("tcgen05.mma.ws.")
    stem = "tcgen05.mma.ws" if is_stationary else "tcgen05.mma"
    modifiers = parse_modifiers(name, stem, GROUPS)
    if modifiers is None:
        return None
    kind = modifiers["kind"][0]
    block_word = "".join(modifiers["block"])
    block = BLOCKS.get(kind, {"": 0}).get(block_word)
    if block is None or bool(block) != bool(modifiers["scaled"]):
        return None
    collector = "".join(modifiers["collector"])
    cta_group = CTA_GROUPS[modifiers["cta_group"][0]]
    if is_stationary:
        if block or modifiers["ashift"] or cta_group == 2 or collector.startswith("collector::a"):
            return None
    elif collector.startswith("collector::b"):
        return None
    shifts = bool(modifiers["ashift"])
    if shifts and (block or collector.endswith(("::fill", "::use"))):
        return None
    head = (KINDS[kind], cta_group, block, int(is_stationary), int(shifts))
    return _make_form(name, kind, head)


def _make_form(name: str, kind: str, head: tuple[int, ...]) -> InstructionForm:
    _, cta_group, block, is_stationary, shifts = head
    masks: tuple[int, ...] = (0,) if block or is_stationary else (0, 4 * cta_group)
    last: tuple[str, ...] = ("",)
    if is_stationary:
        last = ("", " b64")
    elif kind in SCALED_INPUT_KINDS:
        last = ("", " imm")
    forms = []
    for in_tensor_memory in (1,) if shifts else (0, 1):
        for mask in masks:
            for operand in last:
                left = "[b32]" if in_tensor_memory else "b64"
                scales = " [b32] [b32]" if block else ""
                words = f" b32*{mask}" if mask else ""
                operands = f"[b32] {left} b64 b32{scales}{words} pred{operand}"
                attributes = (*head, in_tensor_memory, mask, int(bool(operand)))
                forms.append(InstructionForm(name, FAMILY, operands, "tcgen05.mma", attributes))
    return replace(forms[0], alternatives=tuple(forms[1:]))


def _list_names() -> list[str]:
    names = []
    for kind in KINDS:
        for word in CTA_GROUPS:
            blocks = [f".block_scale.{b}" if b else ".block_scale" for b in BLOCKS.get(kind, {})]
            for block in blocks or [""]:
                names.append(f"tcgen05.mma.{word}.{kind}{block}")
            if not blocks:
                names.append(f"tcgen05.mma.{word}.{kind}.ashift")
        names.append(f"tcgen05.mma.ws.cta_group::1.{kind}")
    return names


FORMS: tuple[InstructionForm, ...] = tuple(
    form for form in map(resolve, _list_names()) if form is not None
)
