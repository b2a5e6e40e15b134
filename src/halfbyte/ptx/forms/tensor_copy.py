"""Tensor copies (PTX ISA, "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor", prefetch).

Attributes: mode, number of coordinates, number of im2col offsets; loads add 1 for `.shared::cta`, 1
for multicast, 1 for `.cta_group::2`; stores add the reduction or -1. The last two are the slot
masks of `bulk_copy.find_slot_masks`.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.bulk_copy import COMPLETION, MULTICAST, REDUCTIONS, find_slot_masks
from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import CACHE_HINT, group, parse_modifiers

FAMILY = "tensor_copy"
RESOLVED_WORDS = ("cp",)

# Modes as machine/tensor_copy.h numbers them.
LOAD_MODES = {"tile": 0, "tile::gather4": 1, "im2col": 2, "im2col::w": 3, "im2col::w::128": 4}
STORE_MODES = {"tile": 0, "tile::scatter4": 1, "im2col_no_offs": 2}
_NO_REDUCTION = -1
_ROW_COORDINATES = 5  # of gather4 and scatter4

_DIMENSIONS = group("dimensions", "1d 2d 3d 4d 5d", least=1)
_COPY_GROUPS = (
    _DIMENSIONS,
    group("space", "global shared::cta shared::cluster", least=2, most=2),
    group("mode", " ".join({**LOAD_MODES, **STORE_MODES})),
    COMPLETION,
    MULTICAST,
    group("cta_group", "cta_group::1 cta_group::2"),
    CACHE_HINT,
)
_REDUCE_GROUPS = (*_COPY_GROUPS, group("operation", " ".join(REDUCTIONS), least=1))
_PREFETCH_GROUPS = (
    _DIMENSIONS,
    group("level", "L2", least=1),
    group("space", "global", least=1),
    group("mode", " ".join(LOAD_MODES)),
    CACHE_HINT,
)


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a tensor copy, reduction or prefetch, or None when it is no legal one."""
    copy = parse_modifiers(name, "cp.async.bulk.tensor", _COPY_GROUPS)
    if copy is not None:
        if copy["space"] == ("global", "shared::cta"):
            return _make_store(name, copy, _NO_REDUCTION)
        return _make_load(name, copy)
    reduction = parse_modifiers(name, "cp.reduce.async.bulk.tensor", _REDUCE_GROUPS)
    if reduction is not None:
        if reduction["space"] != ("global", "shared::cta"):
            return None
        return _make_store(name, reduction, REDUCTIONS[reduction["operation"][0]])
    prefetch = parse_modifiers(name, "cp.async.bulk.prefetch.tensor", _PREFETCH_GROUPS)
    return None if prefetch is None else _make_prefetch(name, prefetch)


def _make_form(
    name: str, operands: str, handler: str, attributes: tuple[int, ...]
) -> InstructionForm:
    return InstructionForm(
        name, FAMILY, operands, handler, (*attributes, *find_slot_masks(operands))
    )


def _find_mode(modifiers: dict[str, tuple[str, ...]]) -> str:
    return modifiers["mode"][0] if modifiers["mode"] else "tile"


def _count_coordinates(mode: str, modifiers: dict[str, tuple[str, ...]]) -> int | None:
    """Return how many coordinates the instruction takes; None when the mode forbids the rank."""
    dimensions = int(modifiers["dimensions"][0][0])
    if mode in ("tile::gather4", "tile::scatter4"):
        return _ROW_COORDINATES if dimensions == 2 else None
    if mode.startswith("im2col") and dimensions < 3:
        return None
    return dimensions


def _count_offsets(mode: str, coordinates: int) -> int:
    if mode == "im2col":
        return coordinates - 2
    return 2 if mode.startswith("im2col::w") else 0


def _make_load(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm | None:
    target, source = modifiers["space"]
    mode = _find_mode(modifiers)
    if source != "global" or target == "global" or mode not in LOAD_MODES:
        return None
    is_multicast = bool(modifiers["multicast"])
    coordinates = _count_coordinates(mode, modifiers)
    if coordinates is None or modifiers["completion"] == ("bulk_group",):
        return None
    if is_multicast and target != "shared::cluster":
        return None
    offsets = _count_offsets(mode, coordinates)
    operands = f"[b32] [b64,{{b32*{coordinates}}}] [b32]"
    operands += f" b16*{offsets}" if offsets else ""
    operands += " b32" if is_multicast else ""
    operands += " b64" if modifiers["hint"] else ""
    attributes = (
        LOAD_MODES[mode],
        coordinates,
        offsets,
        int(target == "shared::cta"),
        int(is_multicast),
        int(modifiers["cta_group"] == ("cta_group::2",)),
    )
    return _make_form(name, operands, "cp.async.bulk.tensor.load", attributes)


def _make_store(
    name: str, modifiers: dict[str, tuple[str, ...]], reduction: int
) -> InstructionForm | None:
    mode = _find_mode(modifiers)
    if mode not in STORE_MODES or modifiers["completion"] != ("bulk_group",):
        return None
    if reduction != _NO_REDUCTION and mode == "tile::scatter4":
        return None
    coordinates = _count_coordinates(mode, modifiers)
    if coordinates is None or modifiers["multicast"] or modifiers["cta_group"]:
        return None
    operands = f"[b64,{{b32*{coordinates}}}] [b32]" + (" b64" if modifiers["hint"] else "")
    attributes = (STORE_MODES[mode], coordinates, 0, reduction)
    return _make_form(name, operands, "cp.async.bulk.tensor.store", attributes)


def _make_prefetch(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm | None:
    mode = _find_mode(modifiers)
    coordinates = _count_coordinates(mode, modifiers)
    if coordinates is None:
        return None
    offsets = _count_offsets(mode, coordinates)
    operands = f"[b64,{{b32*{coordinates}}}]"
    operands += f" b16*{offsets}" if offsets else ""
    operands += " b64" if modifiers["hint"] else ""
    attributes = (LOAD_MODES[mode], coordinates, offsets)
    return _make_form(name, operands, "cp.async.bulk.tensor.prefetch", attributes)


def _list_names() -> Iterator[str]:
    """Yield one spelling of every direction, mode, rank and reduction."""
    mbarrier = "mbarrier::complete_tx::bytes"
    for dimensions in range(1, 6):
        copy = f"cp.async.bulk.tensor.{dimensions}d"
        for mode in LOAD_MODES:
            for hint in ("", ".L2::cache_hint"):
                yield f"{copy}.shared::cta.global.{mode}.{mbarrier}{hint}"
                yield f"cp.async.bulk.prefetch.tensor.{dimensions}d.L2.global.{mode}{hint}"
                for multicast in ("", ".multicast::cluster"):
                    for pair in ("", ".cta_group::1", ".cta_group::2"):
                        modifiers = f"{mode}.{mbarrier}{multicast}{pair}{hint}"
                        yield f"{copy}.shared::cluster.global.{modifiers}"
        for mode in STORE_MODES:
            yield f"{copy}.global.shared::cta.{mode}.bulk_group"
            yield f"{copy}.global.shared::cta.{mode}.bulk_group.L2::cache_hint"
            for operation in REDUCTIONS:
                stem = f"cp.reduce.async.bulk.tensor.{dimensions}d.global.shared::cta"
                yield f"{stem}.{operation}.{mode}.bulk_group"


FORMS = tuple(form for form in map(resolve, _list_names()) if form is not None)
