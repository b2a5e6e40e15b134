"""Floating-point arithmetic: roundings, denormals, NaN, saturation, approximate functions."""

import numpy as np

from ..elementwise import Column, columns, cross, elementwise
from ..program import ConformanceProgram
from ..values import (
    BFLOAT16_EDGES,
    FLOAT16_EDGES,
    FLOAT32_EDGES,
    FLOAT64_EDGES,
    make_random,
    near_floats,
    pairs,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")
APPROXIMATE = "documented difference: approximate by definition; the largest error is recorded"


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the floating-point programs."""
    return (
        _add_multiply(),
        _fused(),
        _divide_root(),
        _minimum_maximum(),
        _compare(),
        _approximate(),
        _sine_cosine(),
        _double(),
        _double_divide(),
        _half(),
        _bfloat(),
        _half_out_of_bounds(),
        _half_compare(),
        _half_approximate(),
    )


def _table(salt: int, count: int = 1280) -> dict[str, np.ndarray]:
    random = make_random(32, 100 + salt)
    table = pairs(FLOAT32_EDGES, count, random)
    # Random words are mostly far apart in magnitude: make the last 256 rows comparable.
    for name in table:
        table[name][-256:] = near_floats(256, random)
    return table


def _add_multiply() -> ConformanceProgram:
    forms = [f"{op}.{mode}.f32" for op in ("add", "sub", "mul") for mode in ROUNDINGS]
    forms += [f"{op}.rn.ftz.f32" for op in ("add", "sub", "mul")]
    forms += [f"{op}.rp.ftz.sat.f32" for op in ("add", "sub", "mul")]
    forms += [f"{op}.sat.f32" for op in ("add", "sub", "mul")]
    forms += ["add.f32", "sub.f32", "mul.f32", "mul.rz.ftz.f32"]
    return elementwise("float_add_multiply", _table(1), cross(forms, "%a, %b", 32))


def _fused() -> ConformanceProgram:
    forms = [f"fma.{mode}{ftz}.f32" for mode in ROUNDINGS for ftz in ("", ".ftz")]
    forms += ["fma.rn.sat.f32", "fma.rz.ftz.sat.f32", "mad.rn.f32", "mad.rz.f32"]
    return elementwise("float_fused_multiply_add", _table(2), cross(forms, "%a, %b, %c", 32))


def _divide_root() -> ConformanceProgram:
    table = cross([f"div.{mode}.f32" for mode in ROUNDINGS], "%a, %b", 32)
    table += cross(["div.rn.ftz.f32"], "%a, %b", 32)
    for operation in ("rcp", "sqrt"):
        table += cross([f"{operation}.{mode}.f32" for mode in ROUNDINGS], "%a", 32)
        table += cross([f"{operation}.rn.ftz.f32"], "%a", 32)
    return elementwise("float_divide_and_root", _table(3), table)


def _minimum_maximum() -> ConformanceProgram:
    forms = [
        f"{op}{flags}.f32"
        for op in ("min", "max")
        for flags in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")
    ]
    table = cross(forms, "%a, %b", 32)
    table += cross(["neg.f32", "neg.ftz.f32", "abs.f32", "abs.ftz.f32"], "%a", 32)
    table += cross(["copysign.f32"], "%a, %b", 32)
    return elementwise("float_minimum_maximum_nan", _table(4), table)


def _compare() -> ConformanceProgram:
    names = [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    ]
    table = cross([f"setp.{name}.f32" for name in names], "%a, %b", 1)
    table += cross([f"setp.{name}.ftz.f32" for name in ("eq", "lt", "neu")], "%a, %b", 1)
    table += cross(["set.lt.u32.f32", "set.geu.f32.f32", "set.eq.ftz.s32.f32"], "%a, %b", 32)
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    table += cross([f"testp.{name}.f32" for name in tests], "%a", 1)
    return elementwise("float_comparisons_nan", _table(5), table)


def _approximate() -> ConformanceProgram:
    random = make_random(32, 106)
    values = np.concatenate([FLOAT32_EDGES, near_floats(1280 - len(FLOAT32_EDGES), random)])
    others = np.concatenate([FLOAT32_EDGES[::-1], near_floats(1280 - len(FLOAT32_EDGES), random)])
    forms = [
        f"{name}.approx{ftz}.f32"
        for name in ("rcp", "sqrt", "rsqrt", "lg2", "ex2")
        for ftz in ("", ".ftz")
    ]
    table = cross([*forms, "tanh.approx.f32"], "%a", 32)
    table += cross(["div.approx.f32", "div.full.f32", "div.approx.ftz.f32"], "%a, %b", 32)
    return elementwise("float_approximate", {"a": values, "b": others}, table, APPROXIMATE)


def _sine_cosine() -> ConformanceProgram:
    """Return sin and cos between -pi and pi, where PTX bounds their error."""
    random = make_random(32, 107)
    values = random.uniform(-np.pi, np.pi, 1280).astype(np.float32).view(np.uint32)
    values[:8] = [0, 0x80000000, 1, 0x40490FDA, 0xC0490FDA, 0x3FC90FDB, 0x7F800000, 0x7FC00000]
    forms = [f"{name}.approx{ftz}.f32" for name in ("sin", "cos") for ftz in ("", ".ftz")]
    return elementwise("float_sine_cosine", {"a": values}, cross(forms, "%a", 32), APPROXIMATE)


def _double_table(salt: int) -> dict[str, np.ndarray]:
    random = make_random(64, salt)
    table = pairs(FLOAT64_EDGES, 768, random)
    for name in table:
        scale = np.exp2(random.randint(-9, 9, 192))
        table[name][-192:] = (random.standard_normal(192) * scale).view(np.uint64)
    return table


def _double() -> ConformanceProgram:
    forms = [f"{op}.{mode}.f64" for op in ("add", "sub", "mul") for mode in ROUNDINGS]
    table = cross([*forms, "min.f64", "max.f64", "copysign.f64"], "%a, %b", 64)
    table += cross([f"fma.{mode}.f64" for mode in ROUNDINGS], "%a, %b, %c", 64)
    table += cross(["neg.f64", "abs.f64"], "%a", 64)
    names = [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    ]
    table += cross([f"setp.{name}.f64" for name in names], "%a, %b", 1)
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    table += cross([f"testp.{name}.f64" for name in tests], "%a", 1)
    return elementwise("float_double_arithmetic", _double_table(1), table)


def _double_divide() -> ConformanceProgram:
    table = cross([f"div.{mode}.f64" for mode in ROUNDINGS], "%a, %b", 64)
    for operation in ("rcp", "sqrt"):
        table += cross([f"{operation}.{mode}.f64" for mode in ROUNDINGS], "%a", 64)
    return elementwise("float_double_divide_and_root", _double_table(2), table)


def _half_table(edges: np.ndarray, salt: int) -> dict[str, np.ndarray]:
    random = make_random(16, salt)
    table = pairs(edges, 1280, random)
    # Words of two halves: neighbouring rows.
    words = {
        f"{name}{name}": values | (np.roll(values, 1).astype(np.uint32) << 16)
        for name, values in table.items()
    }
    return {**table, **{name: value.astype(np.uint32) for name, value in words.items()}}


def _half_columns(kind: str, flags: tuple[str, ...], fused: tuple[str, ...]) -> list[Column]:
    table = []
    for suffix, width, registers in (
        (kind, 16, ("%a", "%b", "%c")),
        (f"{kind}x2", 32, ("%aa", "%bb", "%cc")),
    ):
        two, three = ", ".join(registers[:2]), ", ".join(registers)
        table += cross([f"{name}.{suffix}" for name in flags], two, width)
        table += cross([f"fma.{name}.{suffix}" for name in fused], three, width)
        table += cross([f"neg.{suffix}", f"abs.{suffix}"], registers[0], width)
    return table


def _half() -> ConformanceProgram:
    flags = (
        *("add.rn", "sub.rn", "mul.rn", "add", "add.ftz", "mul.ftz", "add.sat", "mul.ftz.sat"),
        *("min", "max", "min.NaN", "max.ftz.NaN", "min.ftz", "max.xorsign.abs"),
        "min.NaN.xorsign.abs",
    )
    fused = ("rn", "rn.ftz", "rn.sat", "rn.relu", "rn.ftz.sat", "rn.ftz.relu")
    table = _half_columns("f16", flags, fused)
    return elementwise("float_half_arithmetic", _half_table(FLOAT16_EDGES, 1), table)


def _bfloat() -> ConformanceProgram:
    flags = (
        *("add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN", "max.NaN"),
        *("max.xorsign.abs", "min.NaN.xorsign.abs"),
    )
    table = _half_columns("bf16", flags, ("rn", "rn.relu"))
    return elementwise("float_bfloat_arithmetic", _half_table(BFLOAT16_EDGES, 2), table)


def _half_out_of_bounds() -> ConformanceProgram:
    """Return fma.oob, which takes the NaN that tensor copies fill with for a zero product."""
    edges = np.array([0x7FF7, 0xFFF7, 0x7FFF, 0xFFFF, 0x7E00, 0x7C00, 0x3C00, 0x0000], np.uint16)
    table = cross(
        [f"fma.rn.oob{relu}.{kind}" for relu in ("", ".relu") for kind in ("f16", "bf16")],
        "%a, %b, %c",
        16,
    )
    return elementwise("float_half_out_of_bounds", _half_table(edges, 4), table)


def _half_compare() -> ConformanceProgram:
    names = [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "equ",
        "neu",
        "ltu",
        "leu",
        "gtu",
        "geu",
        "num",
        "nan",
    ]
    table = cross([f"setp.{name}.f16" for name in names], "%a, %b", 1)
    table += cross([f"setp.{name}.bf16" for name in names], "%a, %b", 1)
    table += cross(["setp.lt.ftz.f16"], "%a, %b", 1)
    for name in ("lt", "neu", "geu"):
        for kind in ("f16x2", "bf16x2"):
            text = f"setp.{name}.{kind} %p1|%p2, %aa, %bb;\n"
            text += "selp.u32 %r1, 1, 0, %p1;\nselp.u32 %r2, 2, 0, %p2;\nor.b32 {d}, %r1, %r2;"
            table.append(Column(32, text, f"setp.{name}.{kind}"))
    table += cross(["set.lt.f16x2.f16x2", "set.geu.bf16x2.bf16x2"], "%aa, %bb", 32)
    table += cross(["set.lt.f16.f16", "set.geu.bf16.bf16"], "%a, %b", 16)
    table += columns(32, "set.lt.u32.f16 %a, %b", "set.neu.s32.bf16 %a, %b")
    return elementwise("float_half_comparisons", _half_table(FLOAT16_EDGES, 3), table)


def _half_approximate() -> ConformanceProgram:
    table = cross(
        ["ex2.approx.f16", "tanh.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.bf16"],
        "%a",
        16,
    )
    values = np.arange(0, 65536, 24, np.uint16)
    return elementwise("float_half_approximate", {"a": values}, table, APPROXIMATE)
