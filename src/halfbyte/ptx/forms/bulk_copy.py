"""Bulk copies without a tensor map (PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk").

The last two attributes of every copy are bit masks of the operand entries that are 32-bit and
64-bit slots: lanes with equal operands run one copy.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import InstructionForm, parse_operand_patterns
from halfbyte.ptx.modifiers import CACHE_HINT, group, parse_modifiers

FAMILY = "bulk_copy"
RESOLVED_WORDS = ("cp",)

# As machine/reduction.h numbers them; `.add.f32` flushes subnormals.
REDUCTIONS = {"add": 0, "min": 1, "max": 2, "inc": 3, "dec": 4, "and": 5, "or": 6, "xor": 7}
ELEMENTS = {
    "u32": 0, "s32": 1, "u64": 2, "s64": 3, "f16": 4, "bf16": 5, "f32": 8, "f64": 7,
    "b32": 0, "b64": 2,
}  # fmt: skip
_NO_REDUCTION = -1

# Types of each reduction to global memory and to shared memory of the cluster.
_INTEGERS = ("u32", "s32", "u64", "s64")
GLOBAL_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": (*_INTEGERS, "f16", "bf16"),
    "max": (*_INTEGERS, "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
}
SHARED_TYPES: dict[str, tuple[str, ...]] = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32",),
    "or": ("b32",),
    "xor": ("b32",),
}

COMPLETION = group("completion", "mbarrier::complete_tx::bytes bulk_group", least=1)
MULTICAST = group("multicast", "multicast::cluster")
_SPACES = group("space", "global shared::cta shared::cluster", least=2, most=2)
_COPY_GROUPS = (_SPACES, COMPLETION, MULTICAST, CACHE_HINT, group("mask", "cp_mask"))
_REDUCE_GROUPS = (
    _SPACES,
    COMPLETION,
    CACHE_HINT,
    group("operation", " ".join(REDUCTIONS), least=1),
    group("rounding", "noftz"),
    group("type", " ".join(ELEMENTS), least=1),
)


def find_slot_masks(operands: str) -> tuple[int, int]:
    """Return bit masks of the lowered entries of a pattern that are 32-bit and 64-bit slots."""
    masks = [0, 0]
    for entry, width in enumerate(_list_entries(operands)):
        if width:
            masks[width == "b64"] |= 1 << entry
    return masks[0], masks[1]


def _list_entries(operands: str) -> Iterator[str]:
    """Yield the width of each lowered entry; the empty string for offsets and immediates."""
    for pattern in parse_operand_patterns(operands):
        if pattern.kind == "tensor_address":
            yield from (pattern.width, "", *(pattern.second_width,) * pattern.count)
        elif pattern.kind == "address":
            yield from (pattern.width, "")
        elif pattern.kind == "value":
            yield from (pattern.width,) * pattern.count
        else:
            yield ""


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a bulk copy or reduction, or None when the name is no legal one."""
    copy = parse_modifiers(name, "cp.async.bulk", _COPY_GROUPS)
    if copy is not None:
        return _make_copy(name, copy)
    reduction = parse_modifiers(name, "cp.reduce.async.bulk", _REDUCE_GROUPS)
    return None if reduction is None else _make_reduction(name, reduction)


def make_form(
    name: str, operands: str, handler: str, attributes: tuple[int, ...]
) -> InstructionForm:
    """Return a form of this family with the slot masks behind its attributes."""
    return InstructionForm(
        name, FAMILY, operands, handler, (*attributes, *find_slot_masks(operands))
    )


def _make_copy(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm | None:
    target, source = modifiers["space"]
    uses_group = modifiers["completion"] == ("bulk_group",)
    hint = " b64" if modifiers["hint"] else ""
    has_mask, is_multicast = bool(modifiers["mask"]), bool(modifiers["multicast"])
    if (target, source) == ("global", "shared::cta"):
        if not uses_group or is_multicast:
            return None
        mask = " b32" if has_mask else ""
        mask_entry = (6 if hint else 5) if has_mask else -1
        operands = f"[b64] [b32] b32{hint}{mask}"
        return make_form(name, operands, "cp.async.bulk.store", (_NO_REDUCTION, 0, mask_entry))
    if uses_group or has_mask:
        return None
    if source == "global" and target != "global":
        cta_mask = " b32" if is_multicast else ""
        if is_multicast and target != "shared::cluster":
            return None
        operands = f"[b32] [b64] b32 [b32]{cta_mask}{hint}"
        attributes = (int(target == "shared::cta"), int(is_multicast))
        return make_form(name, operands, "cp.async.bulk.load", attributes)
    if (target, source) == ("shared::cluster", "shared::cta") and not is_multicast and not hint:
        operands = "[b32] [b32] b32 [b32]"
        return make_form(name, operands, "cp.async.bulk.send", (_NO_REDUCTION, 0))
    return None


def _make_reduction(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm | None:
    operation, type_name = modifiers["operation"][0], modifiers["type"][0]
    reduction = (REDUCTIONS[operation], ELEMENTS[type_name])
    uses_group = modifiers["completion"] == ("bulk_group",)
    if modifiers["space"] == ("global", "shared::cta"):
        if not uses_group or type_name not in GLOBAL_TYPES[operation]:
            return None
        operands = "[b64] [b32] b32" + (" b64" if modifiers["hint"] else "")
        return make_form(name, operands, "cp.async.bulk.store", (*reduction, -1))
    if modifiers["space"] != ("shared::cluster", "shared::cta") or modifiers["hint"]:
        return None
    if uses_group or type_name not in SHARED_TYPES[operation]:
        return None
    return make_form(name, "[b32] [b32] b32 [b32]", "cp.async.bulk.send", reduction)


def _list_names() -> Iterator[str]:
    """Yield one spelling of every direction, and of every reduction and type."""
    mbarrier = "mbarrier::complete_tx::bytes"
    for hint in ("", ".L2::cache_hint"):
        yield f"cp.async.bulk.shared::cta.global.{mbarrier}{hint}"
        for multicast in ("", ".multicast::cluster"):
            yield f"cp.async.bulk.shared::cluster.global.{mbarrier}{multicast}{hint}"
        for mask in ("", ".cp_mask"):
            yield f"cp.async.bulk.global.shared::cta.bulk_group{hint}{mask}"
    yield f"cp.async.bulk.shared::cluster.shared::cta.{mbarrier}"
    for operation, types in SHARED_TYPES.items():
        for type_name in types:
            stem = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{mbarrier}"
            yield f"{stem}.{operation}.{type_name}"
    for operation, types in GLOBAL_TYPES.items():
        for type_name in types:
            is_half = type_name in ("f16", "bf16")
            rounding = ".noftz" if operation == "add" and is_half else ""
            stem = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
            yield f"{stem}.{operation}{rounding}.{type_name}"


FORMS = (
    *(form for form in map(resolve, _list_names()) if form is not None),
    *(
        make_form(
            f"cp.async.bulk.prefetch.L2.global{hint}",
            "[b64] b32" + (" b64" if hint else ""),
            "cp.async.bulk.prefetch",
            (),
        )
        for hint in ("", ".L2::cache_hint")
    ),
    InstructionForm("cp.async.bulk.commit_group", FAMILY, "", "cp.async.bulk.commit_group"),
    InstructionForm("cp.async.bulk.wait_group", FAMILY, "imm", "cp.async.bulk.wait_group", (0,)),
    InstructionForm(
        "cp.async.bulk.wait_group.read", FAMILY, "imm", "cp.async.bulk.wait_group", (1,)
    ),
)
