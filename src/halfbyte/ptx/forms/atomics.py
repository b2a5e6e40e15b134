"""Atomic read-modify-write (PTX ISA, "atom", "red").

Attributes: state space, 1 for a 64-bit address, vector length, 1 for atom (the old value is
wanted). Memory order and scope change nothing that a sequential machine shows.
"""

from collections.abc import Iterator

from halfbyte.ptx.forms.memory_access import GENERIC, NARROW_SPACES, SPACES, VECTORS
from halfbyte.ptx.instruction_form import TYPE_WIDTHS, InstructionForm
from halfbyte.ptx.modifiers import CACHE_HINT, MEMORY_ORDER, SCOPE, group, parse_modifiers

FAMILY = "atomics"
RESOLVED_WORDS = ("atom", "red")

# Types of each operation, and the type whose arithmetic the core has for it.
_UNTYPED = {"s32": "u32", "s64": "u64"}
_INTEGERS = ("u32", "s32", "u64", "s64")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
OPERATION_TYPES: dict[str, tuple[str, ...]] = {
    "add": (*_INTEGERS, *_HALVES, "f32", "f64"),
    "min": (*_INTEGERS, *_HALVES),
    "max": (*_INTEGERS, *_HALVES),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("b32", "b64"),
    "or": ("b32", "b64"),
    "xor": ("b32", "b64"),
    "exch": ("b32", "b64", "b128", *_INTEGERS, "f32"),
    "cas": ("b16", "b32", "b64", "b128", *_INTEGERS),
}
VECTOR_TYPES = {"f32": 4, "f16x2": 4, "bf16x2": 4, "f16": 8, "bf16": 8}  # longest vector

_GROUPS = (
    MEMORY_ORDER,
    SCOPE,
    group("space", "global shared shared::cta shared::cluster"),
    CACHE_HINT,
    group("operation", " ".join(OPERATION_TYPES), least=1),
    group("rounding", "noftz"),
    group("vector", " ".join(VECTORS)),
    group("type", "b16 b32 b64 b128 u32 s32 u64 s64 f16 f16x2 bf16 bf16x2 f32 f64", least=1),
)


def resolve(name: str) -> InstructionForm | None:
    """Return the form of an atom or red, or None when the name is no legal one."""
    for stem in ("atom", "red"):
        modifiers = parse_modifiers(name, stem, _GROUPS)
        if modifiers is not None:
            return _make_form(name, stem, modifiers)
    return None


def _make_form(
    name: str, stem: str, modifiers: dict[str, tuple[str, ...]]
) -> InstructionForm | None:
    operation, type_name = modifiers["operation"][0], modifiers["type"][0]
    if type_name not in OPERATION_TYPES[operation]:
        return None
    if stem == "red" and operation in ("exch", "cas"):
        return None
    count = VECTORS[modifiers["vector"][0]] if modifiers["vector"] else 1
    if count > 1 and count > VECTOR_TYPES.get(type_name, 1):
        return None
    space = modifiers["space"][0] if modifiers["space"] else ""
    is_wide = space not in NARROW_SPACES
    width = TYPE_WIDTHS[type_name]
    value = f"{width}*{count}" if modifiers["vector"] else width
    address = "[b64]" if is_wide else "[b32]"
    operands = f"{address} {value}" + (f" {value}" if operation == "cas" else "")
    if stem == "atom":
        operands = f"={value} {operands}"
    if modifiers["hint"]:
        operands += " ?b64"
    attributes = (SPACES.get(space, GENERIC), int(is_wide), count, int(stem == "atom"))
    handler = f"atom.{operation}.{_find_arithmetic(operation, type_name)}"
    return InstructionForm(name, FAMILY, operands, handler, attributes)


def _find_arithmetic(operation: str, type_name: str) -> str:
    """Return the type by which the core's handler is named."""
    if operation in ("exch", "cas"):
        return "b" + type_name[1:]
    if operation == "add":
        return _UNTYPED.get(type_name, type_name)
    return type_name


def _list_names() -> Iterator[str]:
    """Yield one spelling of every combination of operation, type, vector and space."""
    for stem in ("atom", "red"):
        for space in ("", "global", "shared", "shared::cluster"):
            for operation, types in OPERATION_TYPES.items():
                for type_name in types:
                    rounding = "noftz" if type_name in _HALVES else ""
                    for vector in ("", *VECTORS) if space == "global" else ("",):
                        words = (stem, space, operation, rounding, vector, type_name)
                        yield ".".join(word for word in words if word)


FORMS = tuple(form for form in map(resolve, _list_names()) if form is not None)
