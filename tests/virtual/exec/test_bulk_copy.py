"""Bulk copies without a tensor map: directions, masks, reductions, groups, faults."""

import numpy as np
import pytest

from halfbyte.virtual.device import LaunchOptions
from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.run_ptx import launch

RNG = np.random.default_rng(23)
POISON = 0xAB
SIZE = 512  # of the buffer in shared memory, 16 bytes per lane
HEAD = """
.reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .pred %p<4>;
.shared .align 128 .b8 buffer[512]; .shared .align 128 .b8 other[512];
.shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
mov.u32 %r1, buffer; mov.u32 %r2, bar; mov.u32 %r3, other; mov.u32 %r4, %cluster_ctarank;
mad.lo.u32 %r5, %r0, 16, %r1; mad.lo.u32 %r6, %r0, 16, %r3;
mad.wide.u32 %d2, %r0, 16, %d0; mad.lo.u32 %r7, %r4, 32, %r0; mad.wide.u32 %d3, %r7, 16, %d1;
setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bar], 1;
fence.mbarrier_init.release.cluster; bar.sync 0;
"""
LOAD = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
SEND = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra W;\n"
EXPECT = "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d6, [bar], "
SAVE = """
ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5];
st.global.v4.u32 [%d3], {%r10, %r11, %r12, %r13};
"""
FILL = """
ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d2];
st.shared.v4.u32 [%r5], {%r10, %r11, %r12, %r13}; bar.sync 0;
"""
DRAIN = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\n"


def make_bytes(nbytes=SIZE, value=None):
    data = make_aligned_bytes(nbytes)
    data[:] = RNG.integers(0, 256, nbytes) if value is None else value
    return data


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("nbytes", [16, 208, 512])
def test_a_load_lands_and_counts_on_the_mbarrier(hint, nbytes):
    source, target = make_bytes(), make_bytes()
    policy = ", %d7" if hint else ""
    report = launch(
        HEAD
        + f"{EXPECT}{nbytes}; mov.u64 %d7, 0;"
        + f"@%p0 {LOAD}{hint} [%r1], [%d0], {nbytes}, [%r2]{policy};\n"
        + WAIT
        + SAVE,
        [source, target],
    )
    assert report.findings == ()
    assert (target[:nbytes] == source[:nbytes]).all()
    assert (target[nbytes:] == POISON).all()


def test_a_load_that_nobody_expects_leaves_negative_bytes_and_a_deadlock():
    with pytest.raises(Deadlock, match="mbarrier"):
        launch(
            HEAD + f"{EXPECT}256;\n@%p0 {LOAD} [%r1], [%d0], 512, [%r2];\n" + WAIT,
            [make_bytes(), make_bytes()],
        )


def test_multicast_reaches_both_ctas():
    source, target = make_bytes(), make_bytes(2 * SIZE)
    launch(
        HEAD + EXPECT + "512;\n" + MEET + "setp.eq.and.u32 %p2, %r4, 0, %p0; mov.u16 %h1, 3;\n"
        "@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%r1], [%d0], 512, [%r2], %h1;\n" + WAIT + SAVE + MEET,
        [source, target],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )
    assert (target == np.concatenate([source, source])).all()


@pytest.mark.parametrize("seed", [0, 5])
def test_a_copy_to_the_other_cta_counts_there(seed):
    source, target = make_bytes(), make_bytes(2 * SIZE)
    launch(
        HEAD
        + FILL
        + EXPECT
        + "512;\n"
        + MEET
        + f"""
        xor.b32 %r8, %r4, 1; mapa.shared::cluster.u32 %r9, %r3, %r8;
        mapa.shared::cluster.u32 %r14, %r2, %r8; fence.proxy.async.shared::cta;
        @%p0 cp.async.bulk.{SEND} [%r9], [%r1], 512, [%r14];
        """
        + WAIT
        + SAVE.replace("%r5", "%r6")
        + MEET,
        [source, target],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        options=LaunchOptions(latency_seed=seed),
    )
    assert (target == np.concatenate([source, source])).all()


@pytest.mark.parametrize(
    ("operation", "dtype", "combine"),
    [
        ("add.u32", np.uint32, np.add),
        ("add.u64", np.uint64, np.add),
        ("min.s32", np.int32, np.minimum),
        ("max.u32", np.uint32, np.maximum),
        ("xor.b32", np.uint32, np.bitwise_xor),
    ],
)
def test_a_reduction_into_the_other_cta(operation, dtype, combine):
    source, target = make_bytes(), make_bytes(2 * SIZE)
    launch(
        HEAD
        + FILL
        + FILL.replace("%r5", "%r6")
        + EXPECT
        + "512;\n"
        + MEET
        + f"""
        xor.b32 %r8, %r4, 1; mapa.shared::cluster.u32 %r9, %r3, %r8;
        mapa.shared::cluster.u32 %r14, %r2, %r8; fence.proxy.async.shared::cta;
        @%p0 cp.reduce.async.bulk.{SEND}.{operation} [%r9], [%r1], 512, [%r14];
        """
        + WAIT
        + SAVE.replace("%r5", "%r6")
        + MEET,
        [source, target],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
    )
    expected = combine(source.view(dtype), source.view(dtype)).view(np.uint8)
    assert (target == np.concatenate([expected, expected])).all()


def test_a_store_writes_global_memory():
    source, target = make_bytes(), make_bytes(value=0xEE)
    report = launch(
        HEAD + FILL + f"@%p0 {STORE} [%d1+32], [%r1+16], 256;\n" + DRAIN, [source, target]
    )
    assert (target[32:288] == source[16:272]).all()
    assert (target[288:] == 0xEE).all()
    assert report.findings == ()


def test_a_byte_mask_picks_bytes_of_every_sixteen():
    source, target = make_bytes(), make_bytes(value=0xEE)
    launch(
        HEAD
        + FILL
        + f"mov.u16 %h1, 0x8421; @%p0 {STORE}.cp_mask [%d1], [%r1], 512, %h1;\n"
        + DRAIN,
        [source, target],
    )
    kept = np.array([0x8421 >> (i % 16) & 1 for i in range(SIZE)], bool)
    assert (target == np.where(kept, source, 0xEE)).all()


@pytest.mark.parametrize(
    ("operation", "dtype", "combine"),
    [
        ("add.u32", np.uint32, np.add),
        ("add.noftz.f16", np.float16, np.add),
        ("add.f32", np.float32, np.add),
        ("add.f64", np.float64, np.add),
        ("max.f16", np.float16, np.maximum),
        ("min.s64", np.int64, np.minimum),
        ("and.b64", np.uint64, np.bitwise_and),
    ],
)
def test_a_reduction_into_global_memory(operation, dtype, combine):
    source, target = make_bytes(), make_bytes()
    if np.dtype(dtype).kind == "f":
        for array in (source, target):
            array.view(dtype)[:] = RNG.normal(size=SIZE // np.dtype(dtype).itemsize)
    expected = combine(target.view(dtype), source.view(dtype))
    launch(
        HEAD + FILL + f"@%p0 {REDUCE}.{operation} [%d1], [%r1], 512;\n" + DRAIN,
        [source, target],
    )
    assert (target.view(dtype) == expected).all()


def test_every_lane_with_its_own_operands_copies_its_own_bytes():
    source, target = make_bytes(), make_bytes(value=0xEE)
    launch(HEAD + FILL + f"{STORE} [%d3], [%r5], 16;\n" + DRAIN, [source, target])
    assert (target == source).all()


def test_stores_that_are_only_waited_for_reading_still_complete():
    source, target = make_bytes(), make_bytes(value=0xEE)
    report = launch(
        HEAD
        + FILL
        + f"@%p0 {STORE} [%d1], [%r1], 512; cp.async.bulk.commit_group;"
        + "cp.async.bulk.wait_group.read 0;",
        [source, target],
    )
    assert (target == source).all()
    assert report.findings == ()


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (f"{LOAD} [%r1], [%d0], 24, [%r2];", "bad-size", "multiple of 16"),
        (f"{LOAD} [%r1+8], [%d0], 16, [%r2];", "misaligned", "destination"),
        (f"{LOAD} [%r1], [%d0+4], 16, [%r2];", "misaligned", "source"),
        (f"{LOAD} [%r1], [%d0], 1048576, [%r2];", "out-of-bounds", "argument"),
        (f"{LOAD} [%r1+65536], [%d0], 16, [%r2];", "out-of-bounds", "shared memory ends"),
        (f"{STORE} [%d1+8], [%r1], 16;", "misaligned", "destination"),
        (
            "mov.u16 %h1, 4; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%r1], [%d0], 16, [%r2], %h1;",
            "bad-multicast",
            "outside of a cluster of 1",
        ),
    ],
)
def test_faults_name_the_operand_and_the_rule(body, kind, words):
    with pytest.raises(KernelFault) as caught:
        launch(HEAD + body, [make_bytes(), make_bytes()])
    assert caught.value.report.fault.kind == kind
    assert words in caught.value.report.fault.message


def test_a_load_over_a_live_mbarrier_is_reported():
    report = launch(
        HEAD + f"{EXPECT}512;\n@%p0 {LOAD} [%r2+-512], [%d0], 512, [%r2]; {WAIT}"
        f"@%p0 {LOAD} [%r3+16], [%d0], 512, [%r2];",
        [make_bytes(), make_bytes()],
    )
    assert "mbarrier-overwritten" in [finding.kind for finding in report.findings]
