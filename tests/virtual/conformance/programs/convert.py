"""Conversions: every rounding of every pair of types that PTX has on sm_90a."""

import numpy as np

from ..elementwise import Column, columns, cross, elementwise
from ..program import ConformanceProgram
from ..values import FLOAT32_EDGES, FLOAT64_EDGES, integer_edges, make_random, near_floats

INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGERS = tuple(f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "us")
HALVES = "mov.b32 %r1, %a;\nmov.b32 {%h1, %h2}, %r1;\n"


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the conversion programs."""
    return (
        _float_to_half(),
        _float_to_eight_bits(),
        _half_to_eight_bits(),
        _eight_bits_to_half(),
        _half_to_others(),
        _float_to_integers(),
        _float_to_float(),
        _double_to_others(),
        _integers_to_floats(),
        _integers_to_integers(),
        _half_and_integers(),
        _packs(),
    )


def _midpoints(mantissa_bits: int, exponents: range) -> np.ndarray:
    """Return binary32 patterns at, and one below and above, midpoints of a narrow mantissa."""
    patterns = []
    for exponent in exponents:
        for mantissa in range(1 << mantissa_bits):
            midpoint = (exponent + 127) << 23 | (2 * mantissa + 1) << (22 - mantissa_bits)
            patterns += [midpoint - 1, midpoint, midpoint + 1]
    return np.array(patterns, np.uint32)


def _float_values() -> np.ndarray:
    """Return edges, midpoints of the 8-bit, half and bfloat formats, and random patterns."""
    random = make_random(32, 200)
    half = np.array(
        [
            (e + 127) << 23 | (m << 13) | 0x1000
            for e in range(-16, 17, 2)
            for m in (0, 1, 1022, 1023)
        ]
    )
    # Denormal halves: multiples of 2^-25 around 2^-24.
    tiny = (np.arange(1, 80) * 2.0**-25).astype(np.float32).view(np.uint32)
    brain = np.array(
        [(e << 23) | (m << 16) | 0x8000 for e in (0, 1, 100, 254) for m in (0, 1, 127)]
    )
    tf32 = np.array(
        [(e << 23) | (m << 13) | 0x1000 for e in (0, 1, 120, 254) for m in (0, 1, 1023)]
    )
    neighbours = [a + step for a in (half, brain, tf32) for step in (-1, 0, 1)]
    narrow = [_midpoints(3, range(-10, 10)), _midpoints(2, range(-18, 17))]
    limits = np.array([448, 464, 480, 57344, 61440, 65504, 65519, 65520, 65536], np.float32)
    values = [FLOAT32_EDGES, limits.view(np.uint32), tiny, *neighbours, *narrow]
    values.append(near_floats(300, random))
    flat = np.concatenate([array.astype(np.uint32) for array in values])
    return np.unique(np.concatenate([flat, flat | np.uint32(0x80000000)]))


def _float_to_half() -> ConformanceProgram:
    values = _float_values()
    table = cross(
        [f"cvt.{mode}{flags}.f16.f32" for mode in ("rn", "rz") for flags in ("", ".ftz", ".sat")],
        "%a",
        16,
    )
    table += cross(
        [f"cvt.{mode}{flags}.bf16.f32" for mode in ("rn", "rz") for flags in ("", ".relu")],
        "%a",
        16,
    )
    table += cross(["cvt.rn.relu.f16.f32", "cvt.rz.relu.f16.f32"], "%a", 16)
    pair = "%a, %b"
    table += cross(
        [
            f"cvt.{mode}{flags}.{kind}.f32"
            for kind in ("f16x2", "bf16x2")
            for mode in ("rn", "rz")
            for flags in ("", ".relu")
        ],
        pair,
        32,
    )
    table += cross(
        ["cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rn.relu.tf32.f32"],
        "%a",
        32,
    )
    return elementwise(
        "convert_f32_to_f16_bf16_tf32", {"a": values, "b": np.roll(values, 7)}, table
    )


def _float_to_eight_bits() -> ConformanceProgram:
    values = _float_values()
    forms = [
        f"cvt.rn.satfinite{relu}.{kind}x2.f32"
        for kind in ("e4m3", "e5m2")
        for relu in ("", ".relu")
    ]
    inputs = {"a": values, "b": np.roll(values, 7)}
    return elementwise("convert_f32_to_e4m3_e5m2", inputs, cross(forms, "%a, %b", 16))


def _half_to_eight_bits() -> ConformanceProgram:
    table = cross(
        [
            f"cvt.rn.satfinite{relu}.{kind}x2.f16x2"
            for kind in ("e4m3", "e5m2")
            for relu in ("", ".relu")
        ],
        "%a",
        16,
    )
    patterns = np.arange(0, 65536, 5, np.uint32)
    values = patterns | np.roll(patterns, 1) << 16
    return elementwise("convert_f16_to_e4m3_e5m2", {"a": values.astype(np.uint32)}, table)


def _eight_bits_to_half() -> ConformanceProgram:
    forms = [f"cvt.rn{relu}.f16x2.{kind}x2" for kind in ("e4m3", "e5m2") for relu in ("", ".relu")]
    low = np.arange(256, dtype=np.uint16)
    return elementwise(
        "convert_e4m3_e5m2_to_f16", {"a": low | (255 - low) << 8}, cross(forms, "%a", 32)
    )


def _half_to_others() -> ConformanceProgram:
    values = np.arange(0, 65536, 16, np.uint32)
    values = np.unique(np.concatenate([values, values + 1, values + 15])).astype(np.uint16)
    table = cross(
        [
            *("cvt.f32.f16", "cvt.ftz.f32.f16", "cvt.sat.f32.f16", "cvt.f32.bf16"),
            *("cvt.ftz.f32.bf16", "cvt.rz.f32.bf16"),
        ],
        "%a",
        32,
    )
    table += cross(["cvt.rni.f16.f16", "cvt.rmi.f16.f16", "cvt.sat.f16.f16"], "%a", 16)
    return elementwise("convert_f16_bf16_to_f32", {"a": values}, table)


def _to_integer(kind: str, source: str, flags: str = "") -> Column:
    width = int(kind[1:])
    opcode = f"cvt.{flags}.{kind}.{source}"
    # An 8-bit result goes to a wider register; its type decides how it is extended.
    return Column(max(width, 16), f"{opcode} {{d}}, %a;", opcode)


def _float_to_integers() -> ConformanceProgram:
    random = make_random(32, 201)
    steps = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.5, 126.5, 127.0, 127.5, 128.0, 128.5, 255.0, 255.5]
    steps += [256.0, 32766.5, 32767.5, 32768.0, 65535.0, 65535.5, 65536.0, 8388607.5, 8388608.0]
    steps += [2147483520.0, 2147483648.0, 4294967040.0, 4294967296.0, 9.2233714e18, 2.0**63]
    steps += [1.8446742e19, 2.0**64, 1e20, 1e30]
    exact = np.array(steps, np.float32)
    values = [FLOAT32_EDGES, exact.view(np.uint32), (-exact).view(np.uint32)]
    values.append(near_floats(120, random))
    flat = np.unique(np.concatenate(values))
    table = [_to_integer(k, "f32", mode) for k in INTEGERS for mode in INTEGER_ROUNDINGS]
    table += [_to_integer(k, "f32", "rni.ftz") for k in ("s32", "u32", "s64")]
    table += [_to_integer(k, "f32", "rzi.sat") for k in INTEGERS]
    return elementwise("convert_f32_to_integers", {"a": flat}, table)


def _float_to_float() -> ConformanceProgram:
    values = np.concatenate([FLOAT32_EDGES, near_floats(500, make_random(32, 202))])
    forms = [f"cvt.{mode}{flags}.f32.f32" for mode in INTEGER_ROUNDINGS for flags in ("", ".ftz")]
    forms += ["cvt.rni.sat.f32.f32", "cvt.sat.f32.f32", "cvt.ftz.f32.f32", "cvt.ftz.sat.f32.f32"]
    table = cross(forms, "%a", 32)
    table += cross(["cvt.f64.f32", "cvt.ftz.f64.f32", "cvt.sat.f64.f32"], "%a", 64)
    return elementwise("convert_f32_to_f32_f64", {"a": values}, table)


def _double_to_others() -> ConformanceProgram:
    random = make_random(64, 203)
    more = (random.standard_normal(300) * np.exp2(random.randint(-160, 160, 300))).view(np.uint64)
    small = (random.standard_normal(100) * 300).round(1).view(np.uint64)
    values = np.concatenate([FLOAT64_EDGES, more, small])
    table = cross([f"cvt.{mode}.f32.f64" for mode in ROUNDINGS], "%a", 32)
    table += cross(["cvt.rn.ftz.f32.f64", "cvt.rz.sat.f32.f64"], "%a", 32)
    table += cross(["cvt.rn.f16.f64", "cvt.rz.f16.f64"], "%a", 16)
    table += cross([f"cvt.{mode}.f64.f64" for mode in INTEGER_ROUNDINGS], "%a", 64)
    table += [_to_integer(k, "f64", mode) for k in INTEGERS for mode in ("rni", "rzi")]
    table += [_to_integer(k, "f64", mode) for k in ("s32", "u64") for mode in ("rmi", "rpi")]
    return elementwise("convert_f64_to_others", {"a": values}, table)


def _integers_to_floats() -> ConformanceProgram:
    random = make_random(64, 204)
    shift = random.randint(0, 60, 200).astype(np.uint64)
    more = np.frombuffer(random.bytes(1600), np.uint64) >> shift
    bits = [25, 26, 31, 32, 33, 48, 54, 55, 62, 63, 64]
    near = [(1 << bit) - (1 << max(bit - 25, 0)) + step for bit in bits for step in (-1, 0, 1)]
    near += [(1 << bit) - (1 << max(bit - 54, 0)) + step for bit in bits for step in (-1, 0, 1)]
    edges = np.array([value & 0xFFFFFFFFFFFFFFFF for value in near], np.uint64)
    values = np.concatenate([integer_edges(64), edges, more])
    load = "cvt.u32.u64 %r1, %a;\ncvt.u16.u64 %h1, %a;\n"
    register = {"8": "%h1", "16": "%h1", "32": "%r1", "64": "%a"}
    table = []
    for kind in INTEGERS:
        source = register[kind[1:]]
        for mode in ROUNDINGS:
            opcode = f"cvt.{mode}.f32.{kind}"
            table.append(Column(32, f"{load}{opcode} {{d}}, {source};", opcode))
        if kind[1:] == "64":
            for mode in ROUNDINGS:
                opcode = f"cvt.{mode}.f64.{kind}"
                table.append(Column(64, f"{load}{opcode} {{d}}, {source};", opcode))
        else:
            opcode = f"cvt.rn.f64.{kind}"
            table.append(Column(64, f"{load}{opcode} {{d}}, {source};", opcode))
        for mode in ("rn", "rz"):
            opcode = f"cvt.{mode}.f16.{kind}"
            table.append(Column(16, f"{load}{opcode} {{d}}, {source};", opcode))
    return elementwise("convert_integers_to_floats", {"a": values}, table)


def _may_clip(source: str, target: str) -> bool:
    """Return whether a value of `source` can lie outside `target`: what `.sat` asks for."""
    narrower = int(target[1:]) < int(source[1:])
    if source[0] == target[0]:
        return narrower
    return source[0] == "s" or int(target[1:]) <= int(source[1:])


def _integers_to_integers() -> ConformanceProgram:
    load = "cvt.u32.u64 %r1, %a;\ncvt.u16.u64 %h1, %a;\n"
    register = {"8": "%h1", "16": "%h1", "32": "%r1", "64": "%a"}
    table = []
    for source in INTEGERS:
        for target in INTEGERS:
            for saturate in ("", ".sat") if _may_clip(source, target) else ("",):
                opcode = f"cvt{saturate}.{target}.{source}"
                text = f"{load}{opcode} {{d}}, {register[source[1:]]};"
                table.append(Column(max(int(target[1:]), 16), text, opcode))
    # A signed 8-bit result in a 32-bit register is extended by its type.
    for opcode in ("cvt.s8.s32", "cvt.u8.u32", "cvt.s16.s32", "cvt.sat.s8.s32", "cvt.s8.u16"):
        source = "%h1" if opcode.endswith("16") else "%r1"
        table.append(Column(32, f"{load}{opcode} {{d}}, {source};", f"{opcode} to b32"))
    values = np.concatenate(
        [integer_edges(64), integer_edges(32).astype(np.uint64) << np.uint64(31)]
    )
    return elementwise("convert_integers_to_integers", {"a": values}, table)


def _half_and_integers() -> ConformanceProgram:
    values = np.arange(0, 65536, 61, np.uint32).astype(np.uint16)
    table = [
        _to_integer(kind, source, mode)
        for kind in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64")
        for source in ("f16", "bf16")
        for mode in ("rni", "rzi")
        if not (source == "bf16" and kind.endswith("8"))
    ]
    table += [_to_integer(kind, "f16", mode) for kind in ("s32", "u8") for mode in ("rmi", "rpi")]
    table += columns(16, "cvt.rn.bf16.s16 %a", "cvt.rz.bf16.u16 %a", "cvt.rn.f16.s16 %a")
    table += columns(16, "cvt.rn.bf16.f16 %a", "cvt.rn.f16.bf16 %a", "cvt.rz.bf16.f16 %a")
    return elementwise("convert_half_and_integers", {"a": values}, table)


def _packs() -> ConformanceProgram:
    random = make_random(32, 205)
    edges = integer_edges(32)
    first, second = (grid.reshape(-1) for grid in np.meshgrid(edges, edges, indexing="ij"))
    chosen = random.permutation(len(first))[:512]
    table = cross(["cvt.pack.sat.s16.s32", "cvt.pack.sat.u16.s32"], "%a, %b", 32)
    table += cross(
        ["cvt.pack.sat.s8.s32.b32", "cvt.pack.sat.u8.s32.b32", "cvt.pack.sat.s4.s32.b32"],
        "%a, %b, %c",
        32,
    )
    table += cross(["cvt.pack.sat.u2.s32.b32"], "%a, %b, %c", 32)
    inputs = {"a": first[chosen], "b": second[chosen], "c": np.roll(first[chosen], 3)}
    return elementwise("convert_pack_saturated", inputs, table)
