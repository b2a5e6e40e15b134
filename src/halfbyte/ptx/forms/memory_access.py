"""Loads and stores (PTX ISA, "ld", "ldu", "st", "st.async", "st.bulk", "red.async").

Attributes of ld and st: state space, 1 for a 64-bit address. Lowering widens what is loaded into a
wider register. Memory order, scope and cache operators change nothing that a sequential machine
shows, so the grammar accepts and drops them.
"""

from collections.abc import Iterator

from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import (
    CACHE,
    CACHE_HINT,
    MEMORY_ORDER,
    SCOPE,
    group,
    parse_modifiers,
)

FAMILY = "memory_access"
RESOLVED_WORDS = ("ld", "ldu", "st", "red")

# State spaces as machine/access.h numbers them.
SPACES = {
    "global": 1,
    "shared": 2,
    "shared::cta": 2,
    "shared::cluster": 2,
    "local": 3,
    "param": 4,
    "param::entry": 4,
    "param::func": 4,
    "const": 5,
}
GENERIC = 0
NARROW_SPACES = {"shared", "shared::cta", "shared::cluster"}

BITS = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "b128": 128},
}
VECTORS = {"v2": 2, "v4": 4, "v8": 8}

SPACE_GROUP = group("space", " ".join(SPACES))
VECTOR_GROUP = group("vector", " ".join(VECTORS))
TYPE_GROUP = group("type", " ".join(BITS), least=1)
TEXTURE_PATH = group("texture", "nc unified", most=2)
ACCESS_GROUPS = (
    MEMORY_ORDER, SCOPE, SPACE_GROUP, CACHE, CACHE_HINT, TEXTURE_PATH, VECTOR_GROUP, TYPE_GROUP,
)  # fmt: skip
ASYNC_GROUPS = (
    group("order", "weak mmio release relaxed", most=2),
    SCOPE,
    group("space", "shared::cluster global"),
    group("completion", "mbarrier::complete_tx::bytes"),
    VECTOR_GROUP,
    TYPE_GROUP,
)
# Reductions and element types as machine/reduction.h numbers them.
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
ELEMENTS = {"u32": 0, "s32": 1, "u64": 2, "b32": 0, "b64": 2}


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a load or store, or None when the name is no legal one."""
    if name.startswith("st.async"):
        return _resolve_store_async(name)
    if name.startswith("red.async"):
        return _resolve_reduce_async(name)
    for stem in ("ld", "ldu", "st"):
        modifiers = parse_modifiers(name, stem, ACCESS_GROUPS)
        if modifiers is not None:
            return _make_access(name, stem, modifiers)
    return None


def _make_access(
    name: str, stem: str, modifiers: dict[str, tuple[str, ...]]
) -> InstructionForm | None:
    type_name = modifiers["type"][0]
    bits = BITS[type_name]
    count = VECTORS[modifiers["vector"][0]] if modifiers["vector"] else 1
    if bits * count > 256 or (bits == 128 and count > 1):
        return None
    space = modifiers["space"][0] if modifiers["space"] else ""
    if space == "const" and stem == "st":
        return None
    is_wide = space not in NARROW_SPACES
    value = f"b{bits}*{count}" if modifiers["vector"] else f"b{bits}"
    address = "[b64]" if is_wide else "[b32]"
    hint = " ?b64" if modifiers["hint"] else ""
    is_load = stem != "st"
    operands = f"={value} {address}{hint}" if is_load else f"{address} {value}{hint}"
    attributes = (SPACES.get(space, GENERIC), int(is_wide))
    handler = f"{'ld' if is_load else 'st'}.{bits // 8}x{count}"
    return InstructionForm(name, FAMILY, operands, handler, attributes)


def _resolve_store_async(name: str) -> InstructionForm | None:
    modifiers = parse_modifiers(name, "st.async", ASYNC_GROUPS)
    if modifiers is None:
        return None
    bits = BITS[modifiers["type"][0]]
    count = VECTORS[modifiers["vector"][0]] if modifiers["vector"] else 1
    value = f"b{bits}*{count}" if modifiers["vector"] else f"b{bits}"
    if not modifiers["completion"]:  # .mmio.release to global memory: a plain store
        attributes = (SPACES["global"], 1)
        if modifiers["space"] == ("shared::cluster",):
            return None
        return InstructionForm(
            name, FAMILY, f"[b64] {value}", f"st.{bits // 8}x{count}", attributes
        )
    if bits not in (32, 64) or bits * count > 128:
        return None
    handler = f"st.async.{bits // 8}x{count}"
    return InstructionForm(name, FAMILY, f"[b32] {value} [b32]", handler)


def _resolve_reduce_async(name: str) -> InstructionForm | None:
    groups = (*ASYNC_GROUPS, group("operation", " ".join(REDUCTIONS), least=1))
    modifiers = parse_modifiers(name, "red.async", groups)
    if modifiers is None or modifiers["vector"] or not modifiers["completion"]:
        return None
    type_name = modifiers["type"][0]
    if type_name not in ELEMENTS:
        return None
    attributes = (REDUCTIONS.index(modifiers["operation"][0]), ELEMENTS[type_name])
    operands = f"[b32] b{BITS[type_name]} [b32]"
    return InstructionForm(name, FAMILY, operands, "red.async", attributes)


def _list_names() -> Iterator[str]:
    """Yield one spelling of every combination of space, vector and type."""
    for stem, spaces in (
        ("ld", (*SPACES, "")),
        ("st", (*(space for space in SPACES if space != "const"), "")),
        ("ldu", ("global", "")),
    ):
        for space in spaces:
            for vector in ("", *VECTORS):
                for type_name in BITS:
                    yield ".".join(word for word in (stem, space, vector, type_name) if word)
    for vector in ("", "v2", "v4"):
        for type_name in ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64"):
            words = (
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes",
                vector,
                type_name,
            )
            yield ".".join(word for word in words if word)
    for operation in REDUCTIONS:
        for type_name in ("u32", "s32", "u64"):
            yield (
                "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes."
                f"{operation}.{type_name}"
            )


_ZERO_FILL = tuple(
    InstructionForm(f"st.bulk{weak}{space}", FAMILY, f"{address} b64 ?b64", "st.bulk", attributes)
    for weak in ("", ".weak")
    for space, address, attributes in (
        ("", "[b64]", (GENERIC, 1)),
        (".shared::cta", "[b32]", (SPACES["shared"], 0)),
    )
)

FORMS = (
    *(form for form in map(resolve, _list_names()) if form is not None),
    *_ZERO_FILL,
)
