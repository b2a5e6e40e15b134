"""mma.sync (PTX ISA, "Multiply-and-accumulate instruction: mma", "Block scaling for mma.sync").

Attributes: rows, K, formats of A and B (machine/number_tables.h), result type, saturation, bit
operation, scale factors per row along K, scale format. Types stand in the order D, A, B, C; the
other words come in more than one order, so names are resolved by their set.
"""

from halfbyte.ptx.instruction_form import InstructionForm

FAMILY = "mma_sync"
RESOLVED_WORDS = ("mma",)

# Positions in machine/number_tables.h's ElementFormat, and bits of an element in a register.
FORMATS = {
    "f16": (0, 16), "bf16": (1, 16), "tf32": (2, 32), "e4m3": (3, 8), "e5m2": (4, 8),
    "e2m3": (5, 8), "e3m2": (6, 8), "e2m1": (7, 8), "s8": (12, 8), "u8": (13, 8),
    "s4": (14, 4), "u4": (15, 4), "b1": (16, 1), "f64": (0, 64),
}  # fmt: skip
PACKED_E2M1 = (11, 4)
RESULTS = {"f16": 0, "f32": 1, "s32": 2, "f64": 3}
SCALE_FORMATS = {"ue4m3": 0, "ue8m0": 1}
BIT_OPERATIONS = {"xor": 1, "and": 2}
FP8 = ("e4m3", "e5m2")
F8F6F4 = (*FP8, "e2m3", "e3m2", "e2m1")

# By kind: the shapes, element types and results that exist. Kind "" is the plain form.
SHAPES: dict[str, dict[tuple[str, ...], tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "": {
        ("f16",): (("m16n8k8", "m16n8k16"), ("f16", "f32")),
        ("bf16",): (("m16n8k8", "m16n8k16"), ("f32",)),
        ("tf32",): (("m16n8k4", "m16n8k8"), ("f32",)),
        FP8: (("m16n8k16", "m16n8k32"), ("f16", "f32")),
        ("s8", "u8"): (("m8n8k16", "m16n8k16", "m16n8k32"), ("s32",)),
        ("s4", "u4"): (("m8n8k32", "m16n8k32", "m16n8k64"), ("s32",)),
        ("b1",): (("m8n8k128", "m16n8k128", "m16n8k256"), ("s32",)),
        ("f64",): (("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"), ("f64",)),
    },
    "kind::f8f6f4": {F8F6F4: (("m16n8k32",), ("f16", "f32"))},
    "kind::mxf8f6f4": {F8F6F4: (("m16n8k32",), ("f32",))},
    "kind::mxf4": {("e2m1",): (("m16n8k64",), ("f32",))},
    "kind::mxf4nvf4": {("e2m1",): (("m16n8k64",), ("f32",))},
}
# By kind: scale factors per row along K, and their format. The first of a kind is its default.
SCALES = {
    "kind::mxf8f6f4": (("scale_vec::1X", "ue8m0"),),
    "kind::mxf4": (("scale_vec::2X", "ue8m0"),),
    "kind::mxf4nvf4": (
        ("scale_vec::2X", "ue8m0"), ("scale_vec::4X", "ue8m0"), ("scale_vec::4X", "ue4m3"),
    ),
}  # fmt: skip
WORDS = frozenset(
    ("sync", "aligned", "row", "col", "satfinite", "xor", "and", "popc", "block_scale")
)
SCALE_OPERANDS = " b32*1 b16*2 b32*1 b16*2"


def resolve(name: str) -> InstructionForm | None:
    """Return the form of an mma.sync in any order of its qualifiers, None if it is not legal."""
    words = name.split(".")[1:]
    shapes = [word for word in words if word.startswith("m") and word[1:2].isdigit()]
    kinds = [word for word in words if word.startswith("kind::")]
    scales = [word for word in words if word.startswith("scale_vec::")]
    types = [word for word in words if word in FORMATS or word in RESULTS or word in SCALE_FORMATS]
    flags = {word for word in words if word in WORDS}
    majors = [word for word in words if word in ("row", "col")]
    rest = len(words) - len(shapes) - len(kinds) - len(scales) - len(types)
    rest -= sum(word in WORDS for word in words)
    if rest or len(shapes) != 1 or len(kinds) > 1 or not {"sync", "aligned"} <= flags:
        return None
    if len(types) == 4 and shapes == ["m8n8k4"] and types[1] == "f16":
        return _make_oldest(name, types, majors)
    if majors != ["row", "col"]:
        return None
    kind = kinds[0] if kinds else ""
    scale = _find_scale(kind, scales, types[4:], flags) if kind in SCALES else (0, 0)
    if scale is None or not _is_legal(kind, shapes[0], types, flags, scaled=kind in SCALES):
        return None
    return _make_form(name, kind, shapes[0], types, flags, scale)


def _find_scale(
    kind: str, scales: list[str], formats: list[str], flags: set[str]
) -> tuple[int, int] | None:
    if "block_scale" not in flags or len(formats) != 1 or len(scales) > 1:
        return None
    vector = scales[0] if scales else SCALES[kind][0][0]
    if (vector, formats[0]) not in SCALES[kind]:
        return None
    return int(vector[-2]), SCALE_FORMATS[formats[0]]


def _is_legal(kind: str, shape: str, types: list[str], flags: set[str], *, scaled: bool) -> bool:
    if len(types) != (5 if scaled else 4) or types[0] != types[3]:
        return False
    for elements, (shapes, results) in SHAPES.get(kind, {}).items():
        if types[1] in elements and types[2] in elements:
            is_bits = types[1] == "b1"
            if is_bits != ("popc" in flags) or is_bits != bool(flags & set(BIT_OPERATIONS)):
                return False
            if "satfinite" in flags and elements[0] not in ("s8", "s4"):
                return False
            return shape in shapes and types[0] in results
    return False


def _make_form(
    name: str, kind: str, shape: str, types: list[str], flags: set[str], scale: tuple[int, int]
) -> InstructionForm:
    rows, depth = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    is_packed = kind in ("kind::mxf4", "kind::mxf4nvf4")
    left, right = (PACKED_E2M1 if is_packed else FORMATS[types[i]] for i in (1, 2))
    result, _, _, _ = types[:4]
    width = "b64" if result == "f64" else "b32"
    register = 64 if result == "f64" else 32
    a = rows * depth * left[1] // (32 * register)
    b = 8 * depth * right[1] // (32 * register)
    d = rows // (8 if result == "f16" else 4)
    operands = f"={width}*{d} {width}*{a} {width}*{b} {width}*{d}"
    bits = next((BIT_OPERATIONS[word] for word in BIT_OPERATIONS if word in flags), 0)
    attributes = (
        rows, depth, left[0], right[0], RESULTS[result], int("satfinite" in flags), bits, *scale,
    )  # fmt: skip
    return InstructionForm(
        name,
        FAMILY,
        operands + (SCALE_OPERANDS if scale[0] else ""),
        "mma.sync.f64" if result == "f64" else "mma.sync",
        attributes,
        "aligned",
    )


def _make_oldest(name: str, types: list[str], majors: list[str]) -> InstructionForm | None:
    if types[1:3] != ["f16", "f16"] or types[0] != types[3] or len(majors) != 2:
        return None
    if types[0] not in ("f16", "f32"):
        return None
    d = 4 if types[0] == "f16" else 8
    attributes = (RESULTS[types[0]], int(majors[0] == "row"), int(majors[1] == "col"))
    operands = f"=b32*{d} b32*2 b32*2 b32*{d}"
    return InstructionForm(name, FAMILY, operands, "mma.sync.m8n8k4", attributes, "aligned")


def _list_names() -> list[str]:
    names = [
        f"mma.sync.aligned.m8n8k4.{a}.{b}.{d}.f16.f16.{d}"
        for a in ("row", "col") for b in ("row", "col") for d in ("f16", "f32")
    ]  # fmt: skip
    for kind, families in SHAPES.items():
        for elements, (shapes, results) in families.items():
            for shape in shapes:
                for left in elements:
                    for right in elements:
                        for result in results:
                            types = f"{result}.{left}.{right}.{result}"
                            names += _spell(kind, shape, types, left)
    return names


def _spell(kind: str, shape: str, types: str, element: str) -> list[str]:
    if kind in SCALES:
        return [
            f"mma.sync.aligned.{kind}.block_scale.{vector}.{shape}.row.col.{types}.{scale}"
            for vector, scale in SCALES[kind]
        ]
    if kind:
        return [f"mma.sync.aligned.{kind}.{shape}.row.col.{types}"]
    plain = f"mma.sync.aligned.{shape}.row.col.{types}"
    if element == "b1":
        return [f"{plain}.{operation}.popc" for operation in BIT_OPERATIONS]
    if element in ("s8", "u8", "s4", "u4"):
        return [plain, f"mma.sync.aligned.{shape}.row.col.satfinite.{types}"]
    return [plain]


FORMS: tuple[InstructionForm, ...] = tuple(
    form for form in map(resolve, _list_names()) if form is not None
)
