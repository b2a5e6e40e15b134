"""mov and its vectors, cvta, isspacep, mapa, getctarank, special registers."""

from typing import Any

import numpy as np
import pytest

from ..run_ptx import launch, run_lanes
from .lane_cases import Case, check_cases, make_pairs
from .test_integer import make_edges


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_copies(bits: int) -> None:
    a, b = make_pairs(make_edges(bits), 50, 1)
    kinds = [f"b{bits}", f"u{bits}", f"s{bits}"] + ([f"f{bits}"] if bits > 16 else [])
    check_cases([a, b], [Case(f"mov.{kind} {{o}}, %i0", a) for kind in kinds])


def test_vectors_pack_with_the_first_part_lowest() -> None:
    rng = np.random.default_rng(1)
    h = [rng.integers(0, 1 << 16, 64).astype(np.uint16) for _ in range(4)]
    w = [rng.integers(0, 1 << 32, 64, np.uint32) for _ in range(2)]
    wide = [each.astype(np.uint64) for each in (*h, *w)]
    check_cases(
        [*h, *w],
        [
            Case("mov.b32 {o}, {{%i0, %i1}}", h[0] | h[1].astype(np.uint32) << 16),
            Case(
                "mov.b64 {o}, {{%i0, %i1, %i2, %i3}}",
                wide[0] | wide[1] << 16 | wide[2] << 32 | wide[3] << 48,
            ),
            Case("mov.b64 {o}, {{%i4, %i5}}", wide[4] | wide[5] << 32),
            Case("mov.b64 {o}, {{%i5, 7}}", wide[5] | np.uint64(7 << 32)),
            Case(
                "mov.b16 {o}, {{%i0, %i1}}",
                (h[0] & np.uint16(0xFF)) | h[1] << np.uint16(8),
            ),
            Case(
                "mov.b32 {o}, {{%i0, %i1, %i2, %i3}}",
                sum((part.astype(np.uint32) & 0xFF) << 8 * i for i, part in enumerate(h)),
            ),
        ],
    )


def test_vectors_unpack_into_parts_and_sinks() -> None:
    rng = np.random.default_rng(2)
    d = rng.integers(0, 1 << 64, 64, np.uint64)
    w = rng.integers(0, 1 << 32, 64, np.uint32)
    q = d.view(np.uint16).reshape(-1, 4)
    check_cases(
        [d, w],
        [
            Case("mov.b64 {{{o}, %t0}}, %i0", d.astype(np.uint32)),
            Case("mov.b64 {{_, {o}}}, %i0", (d >> np.uint64(32)).astype(np.uint32)),
            Case("mov.b64 {{_, _, {o}, _}}, %i0", q[:, 2].copy()),
            Case("mov.b32 {{{o}, _}}, %i1", w.astype(np.uint16)),
            Case("mov.b32 {{_, {o}}}, %i1", (w >> np.uint32(16)).astype(np.uint16)),
            Case("mov.b32 {{_, _, _, {o}}}, %i1", (w >> np.uint32(24)).astype(np.uint16)),
        ],
    )


def test_128_bits_keep_both_halves() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 1 << 64, (2, 64), np.uint64)
    low, high = run_lanes(
        "mov.b128 %x, {%i0, %i1}; mov.b128 %y, %x; mov.b128 {%o0, %o1}, %y;",
        [a, b],
        [np.uint64, np.uint64],
        registers=".reg .b128 %x, %y;",
    )
    np.testing.assert_array_equal(low, a)
    np.testing.assert_array_equal(high, b)


def test_generic_addresses_know_their_space() -> None:
    a = np.arange(32, dtype=np.uint32)
    body = """
    mov.b32 %t0, buffer; cvt.u64.u32 %d0, %t0; cvta.shared.u64 %d1, %d0;
    cvta.to.shared.u64 %d2, %d1; cvt.u32.u64 %o0, %d2; sub.u32 %o0, %o0, %t0;
    isspacep.shared %q1, %d1; isspacep.global %q2, %d1; isspacep.local %q3, %d1;
    mov.b64 %d3, stack; cvta.local.u64 %d4, %d3; isspacep.local %q4, %d4;
    isspacep.shared::cluster %q5, %d1; isspacep.global %q6, %a1;
    """
    results = run_lanes(
        body,
        [a],
        [np.uint32, bool, bool, bool, bool, bool, bool],
        registers=".shared .b32 buffer[32]; .local .b32 stack[4];",
    )
    np.testing.assert_array_equal(results[0], 0)
    assert [bool(r.all()) for r in results[1:]] == [True, False, False, True, True, True]


def run_cluster(
    body: str, grid: Any, cluster: Any, words: int, block: Any = (32, 1, 1)
) -> np.ndarray:
    """Return what every thread of a grid stores: `words` values from %o<n>, by linear thread."""
    threads = int(np.prod(grid)) * int(np.prod(block))
    out = np.zeros((threads, words), np.uint64)
    lines = [
        f".reg .b64 %o<{words}>, %d<9>; .reg .b32 %t<9>, %c<9>; .reg .pred %p<4>;",
        ".shared .b32 buffer[32];",
        "mov.u32 %c0, %ctaid.x; mov.u32 %c1, %ctaid.y; mov.u32 %c2, %nctaid.x;",
        "mad.lo.u32 %c0, %c1, %c2, %c0; mov.u32 %c3, %ntid.x; mov.u32 %c4, %ntid.y;",
        "mul.lo.u32 %c4, %c3, %c4; mov.u32 %c5, %tid.y; mov.u32 %c6, %tid.x;",
        "mad.lo.u32 %c5, %c5, %c3, %c6; mad.lo.u32 %c0, %c0, %c4, %c5;",
        body,
        f"ld.param.u64 %d8, [p0]; mad.wide.u32 %d8, %c0, {8 * words}, %d8;",
        *(f"st.global.b64 [%d8+{8 * n}], %o{n};" for n in range(words)),
    ]
    launch("\n".join(lines), [out], grid=grid, block=block, cluster=cluster)
    return out


def test_mapa_replaces_the_rank_and_getctarank_reads_it() -> None:
    body = """
    mov.u32 %t0, %cluster_ctarank; xor.b32 %t1, %t0, 1; mov.b32 %t2, buffer;
    mapa.shared::cluster.u32 %t3, %t2, %t1; getctarank.shared::cluster.u32 %t4, %t3;
    cvt.u64.u32 %o0, %t4; xor.b32 %t5, %t3, %t2; cvt.u64.u32 %o1, %t5;
    cvt.u64.u32 %d0, %t2; cvta.shared.u64 %d1, %d0; mapa.u64 %d2, %d1, %t1;
    getctarank.u64 %t6, %d2; cvt.u64.u32 %o2, %t6;
    isspacep.shared::cta %p1, %d2; selp.b64 %o3, 1, 0, %p1;
    isspacep.shared::cluster %p2, %d2; selp.b64 %o4, 1, 0, %p2;
    """
    out = run_cluster(body, (4, 1, 1), (2, 1, 1), 5)
    rank = np.repeat(np.arange(4) % 2, 32)
    np.testing.assert_array_equal(out[:, 0], 1 - rank)
    np.testing.assert_array_equal(out[:, 1], 1 << 24)
    np.testing.assert_array_equal(out[:, 2], 1 - rank)
    np.testing.assert_array_equal(out[:, 3], 0)
    np.testing.assert_array_equal(out[:, 4], 1)


def test_special_registers_number_threads_ctas_and_clusters() -> None:
    names = [
        *("%tid.x", "%tid.y", "%ntid.x", "%ntid.y", "%ctaid.x", "%ctaid.y", "%nctaid.x"),
        *("%nctaid.y", "%clusterid.x", "%clusterid.y", "%nclusterid.x", "%nclusterid.y"),
        *("%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x", "%cluster_nctaid.y"),
        *("%cluster_ctarank", "%cluster_nctarank", "%laneid", "%warpid", "%tid.w", "%ntid.w"),
        *("%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"),
    ]
    body = "\n".join(
        f"mov.u32 %t0, {name}; cvt.u64.u32 %o{i}, %t0;" for i, name in enumerate(names)
    )
    out = run_cluster(body, (4, 6, 1), (2, 3, 1), len(names), (16, 4, 1))
    thread = np.arange(24 * 64)
    cta, inner = thread // 64, thread % 64
    x, y = cta % 4, cta // 4
    lane = inner % 32
    expected = {
        **{"%tid.x": inner % 16, "%tid.y": inner // 16, "%ntid.x": 16, "%ntid.y": 4},
        **{"%ctaid.x": x, "%ctaid.y": y, "%nctaid.x": 4, "%nctaid.y": 6},
        **{"%clusterid.x": x // 2, "%clusterid.y": y // 3, "%nclusterid.x": 2},
        **{"%nclusterid.y": 2, "%cluster_ctaid.x": x % 2, "%cluster_ctaid.y": y % 3},
        **{"%cluster_nctaid.x": 2, "%cluster_nctaid.y": 3, "%cluster_nctarank": 6},
        **{"%cluster_ctarank": x % 2 + y % 3 * 2, "%laneid": lane, "%warpid": inner // 32},
        **{"%tid.w": 0, "%ntid.w": 0, "%lanemask_eq": 1 << lane},
        **{"%lanemask_lt": (1 << lane) - 1, "%lanemask_le": (2 << lane) - 1},
        **{"%lanemask_gt": (1 << 32) - (2 << lane), "%lanemask_ge": (1 << 32) - (1 << lane)},
    }
    for position, name in enumerate(names):
        np.testing.assert_array_equal(out[:, position], expected[name], err_msg=name)


def test_clocks_do_not_run_backwards() -> None:
    body = """
    mov.u64 %o0, %clock64; mov.u64 %o1, %clock64; mov.u64 %o2, %globaltimer;
    mov.u32 %t0, %clock; cvt.u64.u32 %o3, %t0; mov.u32 %t1, %dynamic_smem_size;
    cvt.u64.u32 %o4, %t1; mov.u32 %t2, %nsmid; cvt.u64.u32 %o5, %t2;
    mov.u32 %t3, %smid; cvt.u64.u32 %o6, %t3; mov.u32 %t4, %total_smem_size;
    cvt.u64.u32 %o7, %t4;
    """
    out = run_cluster(body, (2, 1, 1), (1, 1, 1), 8)
    assert (out[:, 0] <= out[:, 1]).all()
    assert (out[:, 1] <= out[:, 3]).all()
    assert (out[:, 4] == 0).all()
    assert (out[:, 6] < out[:, 5]).all()
    assert (out[:, 7] == 128).all()  # `buffer`


def test_registers_of_8_bits_hold_one_byte() -> None:
    a = np.arange(64, dtype=np.uint32) * np.uint32(0x01030507)
    (result,) = run_lanes(
        "mov.b32 {%n0, %n1, %n2, %n3}, %i0; mov.b32 %o0, {%n3, %n2, %n1, %n0};",
        [a],
        [np.uint32],
        registers=".reg .b8 %n<4>;",
    )
    np.testing.assert_array_equal(result, a.byteswap())
