"""Multicast memory (PTX ISA, "multimem.ld_reduce", "multimem.st", "multimem.red").

A virtual GPU is a multicast group of one device: its multicast addresses are plain global ones, a
load reduces one value, a store and a reduction reach one memory.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.memory_access import SPACES, VECTORS
from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm
from halfbyte.ptx.modifiers import MEMORY_ORDER, SCOPE, group, parse_modifiers

FAMILY = "multimem"
RESOLVED_WORDS = ("multimem",)

_PACKED = ("e4m3x2", "e4m3x4", "e5m2x2", "e5m2x4")
_WIDTHS = {**TYPE_WIDTHS, "e4m3x2": "b16", "e5m2x2": "b16", "e4m3x4": "b32", "e5m2x4": "b32"}
_VALUES = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")
_OPERATIONS = ("add", "min", "max", "and", "or", "xor")
_BITS = ("and", "or", "xor")

_GROUPS = (
    MEMORY_ORDER,
    SCOPE,
    group("space", "global"),
    group("accumulator", "acc::f32 acc::f16"),
    group("vector", " ".join(VECTORS)),
    group("type", " ".join((*_VALUES, *_PACKED)), least=1),
)
_REDUCE_GROUPS = (*_GROUPS, group("operation", " ".join(_OPERATIONS), least=1))
_UNTYPED = {"s32": "u32", "s64": "u64"}


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a multimem instruction, or None when the name is no legal one."""
    for stem, groups, make in (
        ("multimem.ld_reduce", _REDUCE_GROUPS, _make_load),
        ("multimem.st", _GROUPS, _make_store),
        ("multimem.red", _REDUCE_GROUPS, _make_reduction),
    ):
        modifiers = parse_modifiers(name, stem, groups)
        if modifiers is not None:
            return make(name, modifiers)
    return None


def _find_value(modifiers: dict[str, tuple[str, ...]]) -> tuple[str, int, str]:
    """Return the operand pattern of the value, its vector length, and the handler's suffix."""
    width = _WIDTHS[modifiers["type"][0]]
    count = VECTORS[modifiers["vector"][0]] if modifiers["vector"] else 1
    value = f"{width}*{count}" if modifiers["vector"] else width
    return value, count, f"{int(width[1:]) // 8}x{count}"


def _make_load(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm:
    value, _, suffix = _find_value(modifiers)
    attributes = (SPACES["global"], 1)
    return InstructionForm(name, FAMILY, f"={value} [b64]", f"ld.{suffix}", attributes)


def _make_store(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm:
    value, _, suffix = _find_value(modifiers)
    attributes = (SPACES["global"], 1)
    return InstructionForm(name, FAMILY, f"[b64] {value}", f"st.{suffix}", attributes)


def _make_reduction(name: str, modifiers: dict[str, tuple[str, ...]]) -> InstructionForm | None:
    operation, type_name = modifiers["operation"][0], modifiers["type"][0]
    if type_name in _PACKED or (operation in _BITS) != (
        type_name[0] == "b" and "f" not in type_name
    ):
        return None
    if operation in ("min", "max") and type_name in ("f32", "f64"):
        return None
    value, count, _ = _find_value(modifiers)
    arithmetic = _UNTYPED.get(type_name, type_name) if operation == "add" else type_name
    attributes = (SPACES["global"], 1, count, 0)
    return InstructionForm(
        name, FAMILY, f"[b64] {value}", f"atom.{operation}.{arithmetic}", attributes
    )


def _list_names() -> Iterator[str]:
    """Yield one spelling of every operation, vector and type."""
    vectors = {"f32": ("", ".v2", ".v4"), "f64": ("",), "f16": (".v2", ".v4", ".v8")}
    for type_name in _VALUES:
        is_float = "f" in type_name
        lengths = vectors.get(type_name, ("", ".v2", ".v4") if "x2" in type_name else ("",))
        for vector in lengths:
            yield f"multimem.st.weak.global{vector}.{type_name}"
            for operation in ("add", "min", "max") if type_name[0] != "b" or is_float else _BITS:
                yield f"multimem.ld_reduce.weak.global.{operation}{vector}.{type_name}"
                yield f"multimem.red.relaxed.gpu.global.{operation}{vector}.{type_name}"


FORMS = tuple(form for form in map(resolve, _list_names()) if form is not None)
