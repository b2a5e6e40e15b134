"""f16 and bf16 arithmetic: every result is the exact one, rounded once."""

from collections.abc import Callable

import numpy as np
import pytest

from . import exact_rounding as exact
from .exact_rounding import BF16, F16, Format
from .lane_cases import Case, check_cases, map_values, pad_to_warps

FORMATS = {"f16": F16, "bf16": BF16}


def make_columns(form: Format, randoms: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three columns of 16-bit codes: pairs of edges, then random ones near and far."""
    rng = np.random.default_rng(form.exponent_bits)
    one = form.bias << form.mantissa_bits
    positive = [0, 1, (1 << form.mantissa_bits) - 1, 1 << form.mantissa_bits, one, one + 1]
    positive += [one - 1, form.infinity - 1, form.infinity, form.infinity + 1, 0x7FFF]
    edges = np.array(positive + [code | 0x8000 for code in positive], np.uint16)
    a, b = (each.ravel() for each in np.meshgrid(edges, edges))
    c = np.resize(np.roll(edges, 7), len(a))
    wild = rng.integers(0, 1 << 16, (3, randoms), np.uint16)
    span = 6 << form.mantissa_bits
    near = rng.integers(one - span, one + span, (3, randoms)).astype(np.uint16)
    near ^= rng.integers(0, 2, (3, randoms)).astype(np.uint16) << np.uint16(15)
    # Products of small numbers beside small addends: everything is subnormal.
    half = (form.bias // 2) << form.mantissa_bits
    small = rng.integers(half - span // 2, half + span // 2, (3, randoms)).astype(np.uint16)
    small[2] = rng.integers(0, 4 << form.mantissa_bits, randoms)
    columns = [np.concatenate(parts) for parts in zip((a, b, c), wild, near, small, strict=True)]
    length = len(columns[0]) // 64 * 64
    first, second, third = pad_to_warps(*(column[:length] for column in columns))
    return first, second, third


def finish(code: int, truncated: int, form: Format, modifiers: str) -> int:
    """Return a result after .ftz, .sat and .relu.

    `truncated`, rounded toward zero, tells whether the value is subnormal before rounding.
    """
    if "ftz" in modifiers and exact.flush_code(truncated, form) & 0x7FFF == 0:
        code &= 0x8000
    if "sat" in modifiers:
        code = exact.saturate_code(code, form)
    if "relu" in modifiers and code & 0x8000 and exact.decode(code, form) != exact.NAN:
        code = 0
    return code


def _read(form: Format, modifiers: str) -> Callable[[int], int]:
    return (lambda x: exact.flush_code(x, form)) if "ftz" in modifiers else (lambda x: x)


@pytest.mark.parametrize(
    ("kind", "modifiers"),
    [("f16", ""), ("f16", ".ftz"), ("f16", ".sat"), ("f16", ".ftz.sat"), ("bf16", "")],
)
def test_arithmetic_rounds_once(kind: str, modifiers: str) -> None:
    form = FORMATS[kind]
    a, b, c = make_columns(form, 200)
    read = _read(form, modifiers)
    operations: dict[str, Callable[..., int]] = {
        "add": lambda x, y, mode: exact.add_code(x, y, form, mode),
        "sub": lambda x, y, mode: exact.add_code(x, y ^ 0x8000, form, mode),
        "mul": lambda x, y, mode: exact.mul_code(x, y, form, mode),
        "fma": lambda x, y, z, mode: exact.fma_code(x, y, z, form, mode),
    }

    def run(name: str, *columns: np.ndarray) -> np.ndarray:
        def one(*codes: int) -> int:
            operands = [read(code) for code in codes]
            result, truncated = (operations[name](*operands, mode) for mode in ("rn", "rz"))
            return finish(result, truncated, form, modifiers)

        return map_values(one, np.uint16, *columns)

    results = {name: run(name, a, b) for name in ("add", "sub", "mul")}
    fused = run("fma", a, b, c)
    scalar = [
        Case(f"{name}{modifiers}.{kind} {{o}}, %i0, %i1", each) for name, each in results.items()
    ]
    scalar.append(Case(f"fma.rn{modifiers}.{kind} {{o}}, %i0, %i1, %i2", fused))
    packed = [
        Case(f"{name}.rn{modifiers}.{kind}x2 {{o}}, %i0, %i1", each.view(np.uint32))
        for name, each in results.items()
    ]
    packed.append(Case(f"fma.rn{modifiers}.{kind}x2 {{o}}, %i0, %i1, %i2", fused.view(np.uint32)))
    check_cases([a, b, c], scalar)
    check_cases([each.view(np.uint32) for each in (a, b, c)], packed)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_relu_and_out_of_bounds_forms_of_fma(kind: str) -> None:
    form = FORMATS[kind]
    a, b, c = make_columns(form, 100)
    outside = 0x7FF7  # what tensor copies fill elements out of bounds with (seen on an H200)
    a[::17] = outside
    b[::13] = outside | 0x8000  # either sign

    def fma(x: int, y: int, z: int, modifiers: str) -> int:
        if "oob" in modifiers and outside in (x & 0x7FFF, y & 0x7FFF):
            return 0
        return finish(exact.fma_code(x, y, z, form, "rn"), 0, form, modifiers)

    cases = [
        Case(
            f"fma.rn{modifiers}.{kind} {{o}}, %i0, %i1, %i2",
            map_values(lambda *v, m=modifiers: fma(*v, m), np.uint16, a, b, c),
        )
        for modifiers in (".relu", ".oob", ".oob.relu")
    ]
    check_cases([a, b, c], cases)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_fused_sum_just_beside_a_tie_is_not_rounded_twice(kind: str) -> None:
    form = FORMATS[kind]
    one = form.bias << form.mantissa_bits
    # (1 + 2^-m)^2 = 1 + 2^(1-m) + 2^-2m, and the like: halfway points that a tiny c tips.
    rng = np.random.default_rng(1)
    a = (one + rng.integers(0, 1 << form.mantissa_bits, 4096)).astype(np.uint16)
    b = (one + rng.integers(0, 1 << form.mantissa_bits, 4096)).astype(np.uint16)
    c = rng.integers(0, 8, 4096).astype(np.uint16) ^ (
        rng.integers(0, 2, 4096).astype(np.uint16) << np.uint16(15)
    )
    expected = map_values(lambda x, y, z: exact.fma_code(x, y, z, form, "rn"), np.uint16, a, b, c)
    check_cases([a, b, c], [Case(f"fma.rn.{kind} {{o}}, %i0, %i1, %i2", expected)])


@pytest.mark.parametrize(("kind", "flush"), [("f16", ""), ("f16", ".ftz"), ("bf16", "")])
def test_extremes_and_signs(kind: str, flush: str) -> None:
    form = FORMATS[kind]
    a, b, _ = make_columns(form, 300)
    read = _read(form, flush)

    def change_sign(code: int, changed: int) -> int:
        return 0x7FFF if code & 0x7FFF > form.infinity else changed

    def order(code: int) -> int:
        return -(code & 0x7FFF) - 1 if code & 0x8000 else code

    def choose(x: int, y: int, is_max: bool, keeps_nan: bool) -> int:
        numbers = [code for code in (x, y) if code & 0x7FFF <= form.infinity]
        if not numbers or (keeps_nan and len(numbers) < 2):
            return 0x7FFF
        return max(numbers, key=order) if is_max else min(numbers, key=order)

    def with_sign(x: int, y: int, is_max: bool, keeps_nan: bool) -> int:
        result = choose(x & 0x7FFF, y & 0x7FFF, is_max, keeps_nan)
        return result if result == 0x7FFF else result | ((x ^ y) & 0x8000)

    expected = {
        f"abs{flush}": map_values(lambda x: change_sign(x, read(x) & 0x7FFF), np.uint16, a),
        f"neg{flush}": map_values(lambda x: change_sign(x, read(x) ^ 0x8000), np.uint16, a),
    }
    for name, is_max in (("min", False), ("max", True)):
        for nan in ("", ".NaN"):
            for sign, function in (("", choose), (".xorsign.abs", with_sign)):
                expected[f"{name}{flush}{nan}{sign}"] = map_values(
                    lambda x, y, f=function, m=is_max, n=bool(nan): f(read(x), read(y), m, n),
                    np.uint16,
                    a,
                    b,
                )
    scalar, packed = [], []
    for name, values in expected.items():
        sources = "%i0" if name.startswith(("abs", "neg")) else "%i0, %i1"
        scalar.append(Case(f"{name}.{kind} {{o}}, {sources}", values))
        packed.append(Case(f"{name}.{kind}x2 {{o}}, {sources}", values.view(np.uint32)))
    check_cases([a, b], scalar)
    check_cases([a.view(np.uint32), b.view(np.uint32)], packed)
