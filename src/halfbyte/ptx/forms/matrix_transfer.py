"""ldmatrix, stmatrix and movmatrix (PTX ISA, sections of these names).

Attributes of ldmatrix and stmatrix: state space (see machine/access.h), registers per thread,
whether the matrices are transposed, rows of one matrix, bits of an element in memory.
"""

from halfbyte.ptx.instruction_form import InstructionForm
from halfbyte.ptx.modifiers import group, parse_modifiers

FAMILY = "matrix_transfer"
RESOLVED_WORDS = ("ldmatrix", "stmatrix")

SPACES = {"shared": 2, "shared::cta": 2}
GENERIC = 0
COUNTS = {"x1": 1, "x2": 2, "x4": 4}
SHAPES = {"m8n8": 8, "m8n16": 8, "m16n16": 16, "m16n8": 8}  # rows that have an address
# (shape, element words): bits in memory; the others do not exist.
LOADS: dict[tuple[str, tuple[str, ...]], int] = {
    ("m8n8", ("b16",)): 16,
    ("m16n16", ("b8",)): 8,
    **{
        (shape, ("b8x16", source)): bits
        for shape in ("m8n16", "m16n16")
        for source, bits in (("b6x16_p32", 6), ("b4x16_p64", 4))
    },
}
STORES: dict[tuple[str, tuple[str, ...]], int] = {("m8n8", ("b16",)): 16, ("m16n8", ("b8",)): 8}
GROUPS = (
    group("sync", "sync", least=1),
    group("aligned", "aligned", least=1),
    group("shape", " ".join(SHAPES), least=1),
    group("count", " ".join(COUNTS), least=1),
    group("trans", "trans"),
    group("space", " ".join(SPACES)),
    group("element", "b16 b8 b8x16 b6x16_p32 b4x16_p64", least=1, most=2),
)


def resolve(name: str) -> InstructionForm | None:
    """Return the form of a matrix load or store in any order of its modifiers, None if illegal."""
    stem = name.split(".", 1)[0]
    modifiers = parse_modifiers(name, stem, GROUPS)
    if modifiers is None:
        return None
    return _make_transfer(name, stem, {key: words[:1] for key, words in modifiers.items()}
                          | {"element": modifiers["element"]})  # fmt: skip


def _make_transfer(
    name: str, stem: str, modifiers: dict[str, tuple[str, ...]]
) -> InstructionForm | None:
    (shape,) = modifiers["shape"]
    (count_word,) = modifiers["count"]
    is_transposed = bool(modifiers["trans"])
    is_load = stem == "ldmatrix"
    bits = (LOADS if is_load else STORES).get((shape, modifiers["element"]))
    # The shapes of 16 rows exist transposed alone, m8n16 as it stands alone, and two matrices of
    # m16n16 fill all four registers.
    must_transpose = {"m16n16": True, "m16n8": True, "m8n16": False}.get(shape, is_transposed)
    if bits is None or must_transpose != is_transposed:
        return None
    registers = COUNTS[count_word] * (2 if shape == "m16n16" else 1)
    if registers > 4:
        return None
    space = SPACES[modifiers["space"][0]] if modifiers["space"] else GENERIC
    address = "[b64]" if space == GENERIC else "[b32]"
    element = "b16" if bits == 16 else "b8"
    return InstructionForm(
        name,
        FAMILY,
        f"=b32*{registers} {address}" if is_load else f"{address} b32*{registers}",
        f"{stem}.{element}",
        (space, registers, int(is_transposed), SHAPES[shape], bits),
        "aligned",
    )


def _list_names() -> list[str]:
    names = []
    for stem, shapes in (("ldmatrix", LOADS), ("stmatrix", STORES)):
        for shape, elements in shapes:
            for count in COUNTS:
                for trans in ("", ".trans"):
                    for space in (".shared", ".shared::cta", ""):
                        tail = f"{trans}{space}.{'.'.join(elements)}"
                        names.append(f"{stem}.sync.aligned.{shape}.{count}{tail}")
    return names


FORMS: tuple[InstructionForm, ...] = (
    *(form for form in map(resolve, _list_names()) if form is not None),
    InstructionForm(
        "movmatrix.sync.aligned.m8n8.trans.b16", FAMILY, "=b32 b32", "movmatrix.b16", (), "aligned"
    ),
)
