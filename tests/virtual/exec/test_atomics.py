"""atom and red: every operation and type against NumPy applied lane by lane."""

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import Livelock
from tests.virtual.run_ptx import launch

RNG = np.random.default_rng(11)
LANES = 32
HEAD = """
.reg .b16 %h<16>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .pred %p<4>; .reg .b128 %q<16>;
mov.u32 %r0, %tid.x;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2];
"""
DTYPES = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32,
    "b64": np.uint64, "f32": np.float32, "f64": np.float64, "f16": np.float16, "b16": np.uint16,
}  # fmt: skip


def increment(old, value):
    return np.where(old >= value, 0, old + 1).astype(old.dtype)


def decrement(old, value):
    return np.where((old == 0) | (old > value), value, old - 1).astype(old.dtype)


OPERATIONS = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "inc": increment,
    "dec": decrement,
    "exch": lambda old, value: value,
}
CASES = [
    *(("add", t) for t in ("u32", "s32", "u64", "f32", "f64", "f16")),
    *((o, t) for o in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16")),
    *((o, t) for o in ("and", "or", "xor") for t in ("b32", "b64")),
    *((o, "u32") for o in ("inc", "dec")),
    *(("exch", t) for t in ("b32", "b64")),
]


def make_values(dtype, shape, *, is_small=False):
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return RNG.normal(0, 8, shape).astype(dtype)
    if is_small:
        return RNG.integers(0, 12, shape).astype(dtype)
    return RNG.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


def apply_in_lane_order(operation, memory, cells, values):
    """Return (memory after, old value of each lane)."""
    memory = memory.copy()
    old = np.empty_like(values)
    with np.errstate(over="ignore"):
        for lane, cell in enumerate(cells):
            old[lane] = memory[cell]
            memory[cell] = OPERATIONS[operation](memory[cell : cell + 1], values[lane : lane + 1])[
                0
            ]
    return memory, old


@pytest.mark.parametrize(("operation", "type_name"), CASES)
@pytest.mark.parametrize("space", ["global", ""])
def test_lanes_take_their_turns_in_order(operation, type_name, space):
    dtype = DTYPES[type_name]
    size = np.dtype(dtype).itemsize
    memory = make_values(dtype, (4,), is_small=operation in ("inc", "dec"))
    values = make_values(dtype, (LANES,), is_small=operation in ("inc", "dec"))
    old = np.zeros(LANES, dtype)
    expected, expected_old = apply_in_lane_order(operation, memory, np.arange(LANES) % 4, values)
    prefix = {2: "%h", 4: "%r", 8: "%d"}[size]
    rounding = ".noftz" if type_name == "f16" else ""
    opcode = f"atom{'.' + space if space else ''}.{operation}{rounding}.{type_name}"
    launch(
        HEAD
        + f"""
        and.b32 %r1, %r0, 3; mad.wide.u32 %d3, %r1, {size}, %d0;
        mad.wide.u32 %d4, %r0, {size}, %d1; mad.wide.u32 %d5, %r0, {size}, %d2;
        ld.global.b{8 * size} {prefix}10, [%d4];
        {opcode} {prefix}11, [%d3], {prefix}10;
        st.global.b{8 * size} [%d5], {prefix}11;
        """,
        [memory, values, old],
    )
    assert (memory == expected).all()
    assert (old == expected_old).all()


@pytest.mark.parametrize(("operation", "type_name"), [c for c in CASES if c[0] != "exch"])
def test_red_changes_memory_alike(operation, type_name):
    dtype = DTYPES[type_name]
    size = np.dtype(dtype).itemsize
    memory = make_values(dtype, (1,), is_small=operation in ("inc", "dec"))
    values = make_values(dtype, (LANES,), is_small=operation in ("inc", "dec"))
    expected, _ = apply_in_lane_order(operation, memory, [0] * LANES, values)
    prefix = {2: "%h", 4: "%r", 8: "%d"}[size]
    rounding = ".noftz" if type_name == "f16" else ""
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d4, %r0, {size}, %d1; ld.global.b{8 * size} {prefix}10, [%d4];
        red.relaxed.gpu.global.{operation}{rounding}.{type_name} [%d0], {prefix}10;
        """,
        [memory, values, np.zeros(1, np.uint8)],
    )
    assert (memory == expected).all()


@pytest.mark.parametrize("type_name", ["b16", "b32", "b64", "b128"])
def test_compare_and_swap_lets_one_lane_win(type_name):
    size = int(type_name[1:]) // 8
    memory = make_aligned_bytes(16)
    memory[:size] = 7
    wanted = make_aligned_bytes(LANES * 16).reshape(LANES, 16)
    wanted[:] = RNG.integers(0, 256, (LANES, 16))
    before = make_aligned_bytes(LANES * 16).reshape(LANES, 16)
    prefix = {2: "%h", 4: "%r", 8: "%d", 16: "%q"}[size]
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d4, %r0, 16, %d1; mad.wide.u32 %d5, %r0, 16, %d2;
        ld.global.{type_name} {prefix}11, [%d4]; ld.global.{type_name} {prefix}12, [%d0];
        atom.global.cas.{type_name} {prefix}13, [%d0], {prefix}12, {prefix}11;
        st.global.{type_name} [%d5], {prefix}13;
        """,
        [memory, wanted, before],
    )
    assert (memory[:size] == wanted[0, :size]).all()
    assert (before[0, :size] == 7).all()
    assert (before[1:, :size] == wanted[0, :size]).all()


@pytest.mark.parametrize(("vector", "count"), [("", 1), (".v2", 2), (".v4", 4)])
@pytest.mark.parametrize("stem", ["red", "atom"])
def test_vectors_of_floats_add_each_component(vector, count, stem):
    memory = make_aligned_floats((count,))
    values = make_aligned_floats((LANES, count))
    old = np.zeros((LANES, count), np.float32)
    expected = memory.copy()
    for lane in range(LANES):
        expected += values[lane]
    items = ", ".join(f"%r{10 + i}" for i in range(count))
    results = ", ".join(f"%r{20 + i}" for i in range(count))
    value, result = (f"{{{items}}}", f"{{{results}}}") if count > 1 else (items, results)
    operands = f"{result}, [%d0], {value}" if stem == "atom" else f"[%d0], {value}"
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d4, %r0, {4 * count}, %d1; ld.global{vector}.f32 {value}, [%d4];
        {stem}.global.add{vector}.f32 {operands};
        """,
        [memory, values, old],
    )
    assert (memory == expected).all()


def make_aligned_floats(shape):
    view = make_aligned_bytes(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
    view[:] = RNG.normal(size=shape)
    return view


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed_halves_round_each_element_once(kind):
    memory = RNG.normal(0, 4, 2).astype(np.float32)
    values = RNG.normal(0, 4, (LANES, 2)).astype(np.float32)
    encode, decode = (to_half, from_half) if kind == "f16x2" else (to_bfloat, from_bfloat)
    cell, packed = encode(memory), encode(values)
    expected = cell.copy()
    for lane in range(LANES):
        expected = encode(decode(expected) + decode(packed[lane]))
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d4, %r0, 4, %d1; ld.global.u32 %r10, [%d4];
        red.global.add.noftz.{kind} [%d0], %r10;
        """,
        [cell, packed, np.zeros(1, np.uint8)],
    )
    assert (cell == expected).all()


def to_half(values):
    return values.astype(np.float16).view(np.uint16)


def from_half(bits):
    return bits.view(np.float16).astype(np.float32)


def to_bfloat(values):
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_adding_floats_flushes_subnormals_in_global_memory_only():
    tiny = np.array([2.0**-130], np.float32)
    memory, out = tiny.copy(), np.zeros(1, np.float32)
    launch(
        HEAD
        + """
        setp.eq.u32 %p0, %r0, 0; mov.u32 %r5, buffer; ld.global.u32 %r6, [%d1];
        @%p0 st.shared.u32 [%r5], %r6;
        @%p0 red.global.add.f32 [%d0], %r6;
        @%p0 red.shared.add.f32 [%r5], %r6;
        ld.shared.u32 %r7, [%r5]; @%p0 st.global.u32 [%d2], %r7;
        """,
        [memory, tiny, out],
        head=".shared .align 4 .b8 buffer[4];",
    )
    assert memory[0] == 0
    assert out[0] == 2.0**-129


def test_shared_counters_are_atomic_across_warps():
    out = np.zeros(1, np.uint32)
    launch(
        HEAD
        + """
        setp.eq.u32 %p0, %r0, 0; mov.u32 %r5, buffer; mov.u32 %r6, 0;
        @%p0 st.shared.u32 [%r5], %r6; bar.sync 0;
        atom.shared::cta.add.u32 %r7, [%r5], %r0; bar.sync 0;
        ld.shared.u32 %r8, [%r5]; @%p0 st.global.u32 [%d2], %r8;
        """,
        [out.copy(), out.copy(), out],
        block=(100, 1, 1),
        head=".shared .align 4 .b8 buffer[4];",
    )
    assert out[0] == 99 * 100 // 2


def test_a_lock_that_nobody_frees_is_no_progress():
    lock = np.ones(1, np.uint32)
    with pytest.raises(Livelock):
        launch(
            HEAD
            + "SPIN: atom.global.cas.b32 %r1, [%d0], 0, 1; setp.ne.u32 %p0, %r1, 0; @%p0 bra SPIN;",
            [lock, lock.copy(), lock.copy()],
            options=LaunchOptions(livelock_instructions=20_000),
        )
