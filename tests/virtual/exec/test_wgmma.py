"""wgmma.mma_async against float64 NumPy, with the fragments and layouts of the PTX ISA."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.device import LaunchOptions
from tests.virtual.exec.number_codes import encode_float, pack_words, pick_codes
from tests.virtual.exec.tensor_machine import SharedMatrix, lay_out_k_major, lay_out_mn_major
from tests.virtual.run_ptx import launch

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "b1": 1}
MODES = {"none": 0, "128": 1, "64": 2, "32": 3}
THREADS = np.arange(128)
LANE, WARP = THREADS % 32, THREADS // 32


@dataclass(frozen=True)
class Case:
    """One product of shape 64 x columns x 32 bytes of K."""

    left: str
    right: str
    result: str
    columns: int
    swizzle: str = "128"
    memory: str = "shared"
    transpose: tuple[int, int] = (0, 0)
    scales: tuple[int, int] = (1, 1)
    accumulate: bool = True
    saturate: bool = False

    @property
    def k(self):
        return 256 // BITS.get(self.left, 8)

    @property
    def opcode(self):
        tail = f"{self.result}.{self.left}.{self.right}" + (
            ".and.popc" if self.left == "b1" else ""
        )
        sat = ".satfinite" if self.saturate else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.columns}k{self.k}{sat}.{tail}"

    @property
    def immediates(self):
        if self.left in ("f16", "bf16"):
            trans = self.transpose if self.memory == "shared" else self.transpose[1:]
            return [*self.scales, *trans]
        return list(self.scales) if self.left in ("tf32", "e4m3", "e5m2") else []

    def __str__(self):
        words = [
            self.left,
            self.right,
            self.result,
            f"n{self.columns}",
            f"sw{self.swizzle}",
            self.memory,
        ]
        words += [f"t{self.transpose[0]}{self.transpose[1]}"] if any(self.transpose) else []
        return "-".join(words)


def _descriptor(matrix: SharedMatrix, offset: int) -> int:
    bits = offset >> 4 | matrix.leading >> 4 << 16 | matrix.stride >> 4 << 32
    return bits | MODES[matrix.swizzle] << 62


def _bytes(element, codes):
    if element == "b1":
        return np.packbits(codes, axis=1, bitorder="little")
    return np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1)


def _lay_out(element, codes, is_transposed, swizzle):
    if is_transposed:
        return lay_out_mn_major(_bytes(element, np.ascontiguousarray(codes.T)), swizzle)
    return lay_out_k_major(_bytes(element, codes), swizzle)


def _left_fragment(case, codes):
    """A in registers: PTX ISA, "Multiplicand A in registers"."""
    bits = BITS.get(case.left, 8)
    per = 32 // bits
    i = np.arange(4 * per)
    row = 16 * WARP[:, None] + LANE[:, None] // 4 + 8 * (i // per % 2)
    k = LANE[:, None] % 4 * per + i % per + i // (2 * per) * 4 * per
    return pack_words(codes[row, k], bits)


def _result_places(columns):
    """PTX ISA, "Accumulator D" of wgmma.mma_async.m64nNk16."""
    i = np.arange(columns // 2)
    row = 16 * WARP[:, None] + LANE[:, None] // 4 + 8 * (i // 2 % 2)
    return row, LANE[:, None] % 4 * 2 + i % 2 + 8 * (i // 4)


def _encode_accumulators(case, values):
    fragment = values[_result_places(case.columns)]
    if case.result == "f16":
        return pack_words(encode_float("f16", fragment), 16)
    if case.result == "s32":
        return fragment.astype(np.int64).astype(np.uint32)
    return encode_float("tf32", fragment)


def _decode_accumulators(case, words):
    kind = {"f16": np.float16, "s32": np.int32, "f32": np.float32}[case.result]
    found = np.zeros((64, case.columns))
    found[_result_places(case.columns)] = np.ascontiguousarray(words).view(kind)
    return found


def _body(
    case, descriptors, used, *, before_wait="", after="", groups="wgmma.wait_group.sync.aligned 0;"
):
    count = case.columns // (4 if case.result == "f16" else 2)
    registers = [f"%f{i}" for i in range(count)]
    left = "%da" if case.memory == "shared" else "{%g0, %g1, %g2, %g3}"
    immediates = "".join(f", {value}" for value in case.immediates)
    return "\n".join(
        [
            f".reg .b32 %f<{count}>, %g<4>, %r<16>; .reg .b64 %a<4>, %da, %db, %base;",
            ".reg .pred %p<4>;",
            "mov.u32 %r0, %tid.x; mov.u32 %r1, buffer; shl.b32 %r2, %r0, 4;",
            "ld.param.u64 %a0, [p0];",
            "cvt.u64.u32 %a1, %r2; add.u64 %a0, %a0, %a1; add.u32 %r3, %r1, %r2;",
            f"fill: setp.ge.u32 %p0, %r2, {used}; @%p0 bra full;",
            "ld.global.v4.u32 {%r4, %r5, %r6, %r7}, [%a0];",
            "st.shared.v4.b32 [%r3], {%r4, %r5, %r6, %r7};",
            "add.u64 %a0, %a0, 2048; add.u32 %r3, %r3, 2048; add.u32 %r2, %r2, 2048; bra fill;",
            "full: and.b32 %r1, %r1, 0x3FFFF; shr.u32 %r1, %r1, 4; cvt.u64.u32 %base, %r1;",
            f"add.u64 %da, %base, {descriptors[0]:#x}; add.u64 %db, %base, {descriptors[1]:#x};",
            f"ld.param.u64 %a0, [p1]; mad.wide.u32 %a1, %r0, {4 * count}, %a0;",
            *(f"ld.global.b32 {name}, [%a1+{4 * i}];" for i, name in enumerate(registers)),
            "ld.param.u64 %a0, [p2]; mad.wide.u32 %a2, %r0, 16, %a0;",
            "ld.global.v4.b32 {%g0, %g1, %g2, %g3}, [%a2];",
            "fence.proxy.async.shared::cta; bar.sync 0;",
            f"setp.{'eq' if case.accumulate else 'ne'}.u32 %p1, %r0, %r0;",
            "wgmma.fence.sync.aligned;",
            f"{case.opcode} {{{', '.join(registers)}}}, {left}, %db, %p1{immediates};",
            "wgmma.commit_group.sync.aligned;",
            before_wait,
            groups,
            *(f"st.global.b32 [%a1+{4 * i}], {name};" for i, name in enumerate(registers)),
            after,
        ]
    )


def _prepare(case, seed=0):
    rng = np.random.default_rng(seed)
    a_codes, a = pick_codes(rng, case.left, (64, case.k), 2.0)
    b_codes, b = pick_codes(rng, case.right, (case.columns, case.k), 2.0)
    old = rng.integers(-20, 21, (64, case.columns)).astype(np.float64)
    right = _lay_out(case.right, b_codes, case.transpose[1], case.swizzle)
    left = _lay_out(case.left, a_codes, case.transpose[0], case.swizzle)
    image = np.concatenate([left.image, right.image])
    descriptors = (_descriptor(left, 0), _descriptor(right, len(left.image)))
    sign = case.scales[0] * case.scales[1]
    values = sign * (a @ b.T) + (old if case.accumulate else 0)
    if case.result == "f16":
        values = values.astype(np.float16).astype(np.float64)
    return (
        image,
        descriptors,
        _encode_accumulators(case, old),
        _left_fragment(case, a_codes),
        values,
    )


def _run(case, **options):
    image, descriptors, words, fragment, values = _prepare(case)
    body = _body(case, descriptors, len(image), **options)
    report = launch(
        body,
        [image, words, fragment],
        gpu="h200",
        block=(128, 1, 1),
        dynamic_shared=len(image),
        head=".extern .shared .align 1024 .b8 buffer[];",
    )
    assert not report.findings
    return _decode_accumulators(case, words), values


TYPES = [
    ("f16", "f16", "f16"), ("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
    ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("s8", "u8", "s32"), ("u8", "s8", "s32"),
    ("b1", "b1", "s32"),
]  # fmt: skip


def _list_cases():
    modes = list(itertools.product(("none", "32", "64", "128"), ("shared", "registers")))
    for (left, right, result), (i, (swizzle, memory)) in itertools.product(TYPES, enumerate(modes)):
        columns = (8, 24, 64, 128, 192, 256)[(i + len(left)) % 6]
        yield Case(left, right, result, columns, swizzle, memory, accumulate=i % 3 != 0)
    for element, swizzle in itertools.product(("f16", "bf16"), ("none", "32", "64", "128")):
        for transpose in ((1, 0), (0, 1), (1, 1)):
            yield Case(element, element, "f32", 64, swizzle, transpose=transpose)
        yield Case(element, element, "f32", 128, swizzle, "registers", (0, 1))


@pytest.mark.parametrize("case", list(_list_cases()), ids=str)
def test_products_of_every_type_layout_and_source(case):
    found, values = _run(case)
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("scales", [(1, -1), (-1, 1), (-1, -1)])
def test_scales_negate_the_operands(scales):
    found, values = _run(Case("f16", "f16", "f32", 16, scales=scales))
    np.testing.assert_array_equal(found, values)


def test_accumulators_are_written_when_the_wait_returns_and_not_before():
    case = Case("f16", "f16", "f32", 8)
    image, descriptors, words, fragment, values = _prepare(case)
    before = words.copy()
    early = np.zeros((128, 4), np.uint32)
    peek = (
        "ld.param.u64 %a0, [p3]; mad.wide.u32 %a3, %r0, 16, %a0;"
        "st.global.v4.b32 [%a3], {%f0, %f1, %f2, %f3};"
    )
    launch(
        _body(case, descriptors, len(image), before_wait=peek),
        [image, words, fragment, early],
        gpu="h200",
        block=(128, 1, 1),
        dynamic_shared=len(image),
        head=".extern .shared .align 1024 .b8 buffer[];",
    )
    np.testing.assert_array_equal(early, before)
    np.testing.assert_array_equal(_decode_accumulators(case, words), values)


def test_a_wait_for_all_but_one_group_leaves_the_last_pending():
    case = Case("f16", "f16", "f32", 8)
    image, descriptors, words, fragment, _ = _prepare(case)
    wide = [f"%e{i}" for i in range(128)]
    second = "\n".join(
        [
            ".reg .b32 %e<128>;",
            *(f"mov.b32 {name}, 0x7FC00000;" for name in wide),
            "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
            f"{{{', '.join(wide)}}}, %da, %da, 0, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;",
            "wgmma.wait_group.sync.aligned 1; ld.param.u64 %a0, [p3];",
            "mad.wide.u32 %a3, %r0, 32, %a0; st.global.v4.b32 [%a3], {%f0, %f1, %f2, %f3};",
            "st.global.v4.b32 [%a3+16], {%e0, %e1, %e2, %e3};",
        ]
    )
    early = np.zeros((128, 8), np.uint32)
    launch(
        _body(case, descriptors, len(image), before_wait=second),
        [image, words, fragment, early],
        gpu="h200",
        block=(128, 1, 1),
        dynamic_shared=40 * 1024,
        head=".extern .shared .align 1024 .b8 buffer[];",
    )
    np.testing.assert_array_equal(early[:, :4], words)
    assert (early[:, 4:] == 0x7FC00000).all()


def _launch_body(body, threads):
    return launch(
        ".reg .b32 %r<8>, %f<4>; .reg .b64 %da; .reg .pred %p<2>;"
        "mov.u64 %da, 0x40; mov.u32 %r0, %tid.x;\n" + body,
        gpu="h200",
        block=(threads, 1, 1),
        dynamic_shared=4096,
        options=LaunchOptions(),
    )


PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %da, %da,"
    "1, 1, 1, 0, 0;"
)


def test_two_warps_are_no_warpgroup():
    with pytest.raises(HalfbyteError, match="warpgroup of 2 warps"):
        _launch_body(PRODUCT, 64)


def test_warps_that_disagree_are_a_fault():
    body = "shr.u32 %r1, %r0, 5; shl.b32 %r1, %r1, 4; cvt.u64.u32 %da, %r1;" + PRODUCT
    with pytest.raises(HalfbyteError, match="different descriptors"):
        _launch_body(body, 128)


def test_a_warpgroup_whose_fourth_warp_stays_away_hangs_with_a_report():
    body = (
        "setp.ge.u32 %p0, %r0, 96; @%p0 bra out;"
        + PRODUCT
        + "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; out:"
    )
    with pytest.raises(HalfbyteError, match=r"[dD]eadlock"):
        _launch_body(body, 128)
