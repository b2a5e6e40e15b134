"""Loads and stores of every state space: values, widening, divergence, and what faults say."""

import numpy as np
import pytest

from halfbyte.virtual.device import Device, LaunchOptions
from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import KernelFault
from tests.virtual.run_ptx import launch, make_module, run_lanes

RNG = np.random.default_rng(3)
HEAD = """
.reg .b8 %c<8>; .reg .b16 %h<16>; .reg .b32 %r<48>; .reg .b64 %d<48>; .reg .pred %p<4>;
.reg .b128 %q<4>;
mov.u32 %r0, %tid.x;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
"""


def find_fault(body, arguments, **kwargs):
    with pytest.raises(KernelFault) as caught:
        launch(HEAD + body, arguments, **kwargs)
    return caught.value.report.fault


def make_aligned(data):
    """Return a copy of `data` at an address that suits every access."""
    copy = make_aligned_bytes(data.nbytes)
    copy[:] = data.reshape(-1).view(np.uint8)
    return copy.view(data.dtype).reshape(data.shape)


@pytest.mark.parametrize(
    ("bits", "count"),
    [(b, c) for b in (8, 16, 32, 64) for c in (1, 2, 4, 8) if b * c <= 256],
)
@pytest.mark.parametrize("threads", [32, 45])
def test_vectors_move_every_component(bits, count, threads):
    size = bits // 8
    source = make_aligned(RNG.integers(0, 256, threads * count * size, dtype=np.uint8))
    target = make_aligned(np.full_like(source, 0xEE))
    prefix = {8: "c", 16: "h", 32: "r", 64: "d"}[bits]
    first = 20 if bits > 16 else 0
    items = [f"%{prefix}{first + i}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    value = "{" + ", ".join(items) + "}" if count > 1 else items[0]
    flipped = "{" + ", ".join(items[::-1]) + "}" if count > 1 else items[0]
    report = launch(
        HEAD
        + f"""
        mad.wide.u32 %d2, %r0, {size * count}, %d0; mad.wide.u32 %d3, %r0, {size * count}, %d1;
        ld.global{vector}.b{bits} {value}, [%d2];
        st.global{vector}.b{bits} [%d3], {flipped};
        """,
        [source, target],
        block=(threads, 1, 1),
    )
    expected = source.reshape(threads, count, size)[:, ::-1].reshape(-1)
    assert (target == expected).all()
    assert report.findings == ()


@pytest.mark.parametrize("pattern", ["reversed", "same", "scattered"])
@pytest.mark.parametrize("count", [1, 4])
def test_addresses_in_any_order_gather_and_scatter(pattern, count):
    order = {
        "reversed": np.arange(32)[::-1],
        "same": np.full(32, 5),
        "scattered": RNG.permutation(64)[:32],
    }[pattern].astype(np.uint32)
    source = RNG.integers(0, 2**32, (64, count), dtype=np.uint32)
    target = np.zeros((64, count), np.uint32)
    value = "{%r4, %r5, %r6, %r7}" if count == 4 else "%r4"
    vector = ".v4" if count == 4 else ""
    launch(
        HEAD
        + f"""
        ld.param.u64 %d2, [p2]; mad.wide.u32 %d3, %r0, 4, %d2; ld.global.u32 %r1, [%d3];
        mad.wide.u32 %d4, %r1, {4 * count}, %d0; mad.wide.u32 %d5, %r1, {4 * count}, %d1;
        ld.global{vector}.b32 {value}, [%d4]; st.global{vector}.b32 [%d5], {value};
        """,
        [source, target, order],
    )
    expected = np.zeros_like(target)
    expected[order] = source[order]
    assert (target == expected).all()


def test_lanes_outside_the_mask_keep_their_registers_and_memory():
    source = RNG.integers(0, 2**32, 32, dtype=np.uint32)
    target = np.full(32, 7, np.uint32)
    launch(
        HEAD
        + """
        mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1;
        mov.u32 %r1, 99; and.b32 %r2, %r0, 3; setp.eq.u32 %p0, %r2, 1;
        @%p0 ld.global.u32 %r1, [%d2];
        setp.ne.u32 %p1, %r2, 2;
        @%p1 st.global.u32 [%d3], %r1;
        """,
        [source, target],
    )
    lane = np.arange(32) % 4
    expected = np.where(lane == 1, source, np.where(lane == 2, 7, 99))
    assert (target == expected).all()


@pytest.mark.parametrize(
    ("kind", "width"),
    [(f"{k}{b}", w) for k in "su" for b in (8, 16, 32) for w in (16, 32, 64) if b <= w],
)
def test_narrow_loads_extend_to_the_width_of_the_register(kind, width):
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    source = RNG.integers(0, 256, 32 * dtype.itemsize, dtype=np.uint8).view(dtype)
    source[:4] = [0, 1, np.iinfo(dtype).min, np.iinfo(dtype).max]
    out = np.zeros(32, f"u{width // 8}")
    register = {16: "%h1", 32: "%r1", 64: "%d4"}[width]
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d2, %r0, {dtype.itemsize}, %d0; mad.wide.u32 %d3, %r0, {width // 8}, %d1;
        ld.global.{kind} {register}, [%d2]; st.global.b{width} [%d3], {register};
        """,
        [source, out],
    )
    assert (out == source.astype(f"i{width // 8}").astype(out.dtype)).all()


def test_stores_take_the_low_bits_of_wider_registers():
    out = np.zeros((32, 8), np.uint8)
    launch(
        HEAD
        + """
        mad.wide.u32 %d3, %r0, 8, %d1; mov.b64 %d4, 0x1122334455667788; mov.b32 %r4, 0xAABBCCDD;
        st.global.u8 [%d3], %r4; st.global.u8 [%d3+1], %d4; st.global.u16 [%d3+2], %r4;
        st.global.u32 [%d3+4], %d4;
        """,
        [np.zeros(1, np.uint8), out],
    )
    assert (out == [0xDD, 0x88, 0xDD, 0xCC, 0x88, 0x77, 0x66, 0x55]).all()


def test_128_bit_registers_move_whole():
    source = RNG.integers(0, 256, 32 * 16, dtype=np.uint8)
    target = np.zeros_like(source)
    launch(
        HEAD
        + """
        mad.wide.u32 %d2, %r0, 16, %d0; mad.wide.u32 %d3, %r0, 16, %d1;
        ld.global.b128 %q0, [%d2]; st.global.b128 [%d3], %q0;
        """,
        [source, target],
    )
    assert (target == source).all()


@pytest.mark.parametrize(
    "modifiers",
    [
        "relaxed.gpu.global",
        "acquire.sys.global",
        "volatile.global",
        "weak.global",
        "mmio.relaxed.sys.global",
        "global.nc.L1::no_allocate.L2::128B",
        "global.L1::evict_last.L2::evict_first",
        "global.cv",
        "relaxed.cta",
    ],
)
def test_order_scope_and_cache_operators_do_not_change_the_value(modifiers):
    source = np.arange(100, 132, dtype=np.uint32)
    target = np.zeros(32, np.uint32)
    launch(
        HEAD
        + f"""
        mad.wide.u32 %d2, %r0, 4, %d0; mad.wide.u32 %d3, %r0, 4, %d1;
        ld.{modifiers}.b32 %r1, [%d2]; st.global.L1::no_allocate.b32 [%d3], %r1;
        """,
        [source, target],
    )
    assert (target == source).all()


def test_shared_memory_is_reached_by_window_and_by_generic_address():
    target = np.zeros(32, np.uint32)
    launch(
        HEAD
        + """
        mov.u32 %r2, buffer; mad.lo.u32 %r3, %r0, 4, %r2; mul.lo.u32 %r4, %r0, 3;
        st.shared.u32 [%r3], %r4; bar.sync 0;
        xor.b32 %r5, %r0, 31; mul.wide.u32 %d4, %r5, 4;
        mov.u64 %d5, buffer; cvta.shared.u64 %d6, %d5; add.u64 %d7, %d6, %d4;
        ld.u32 %r6, [%d7]; mad.wide.u32 %d3, %r0, 4, %d1; st.u32 [%d3], %r6;
        """,
        [np.zeros(1, np.uint8), target],
        head=".shared .align 16 .b8 buffer[128];",
    )
    assert (target == (31 - np.arange(32)) * 3).all()


def test_local_memory_belongs_to_each_lane():
    target = np.zeros((32, 4), np.uint32)
    launch(
        """.local .align 16 .b8 stack[64];
        """
        + HEAD
        + """
        mov.u64 %d4, stack; add.u32 %r1, %r0, 100; add.u32 %r2, %r0, 200;
        st.local.v2.u32 [%d4+8], {%r1, %r2};
        and.b32 %r3, %r0, 7; mul.wide.u32 %d5, %r3, 4; add.u64 %d6, %d4, %d5;
        st.local.u32 [%d6+24], %r0;
        cvta.local.u64 %d7, %d4; add.u64 %d8, %d7, %d5;
        ld.u32 %r4, [%d8+24]; ld.local.u32 %r5, [%d4+12]; ld.u32 %r6, [%d7+8];
        mad.wide.u32 %d3, %r0, 16, %d1; st.global.v4.u32 [%d3], {%r4, %r5, %r6, %r0};
        """,
        [np.zeros(1, np.uint8), target],
    )
    lane = np.arange(32)
    assert (target == np.stack([lane, lane + 200, lane + 100, lane], 1)).all()


def test_distributed_shared_memory_reads_the_other_cta():
    target = np.zeros((2, 32), np.uint32)
    launch(
        HEAD
        + """
        mov.u32 %r2, buffer; mad.lo.u32 %r3, %r0, 4, %r2; mov.u32 %r4, %cluster_ctarank;
        mad.lo.u32 %r5, %r4, 1000, %r0; st.shared.u32 [%r3], %r5;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        xor.b32 %r6, %r4, 1; mapa.shared::cluster.u32 %r7, %r3, %r6;
        ld.shared::cluster.u32 %r8, [%r7];
        mad.lo.u32 %r9, %r4, 32, %r0; mad.wide.u32 %d3, %r9, 4, %d1; st.global.u32 [%d3], %r8;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        """,
        [np.zeros(1, np.uint8), target],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        head=".shared .align 16 .b8 buffer[128];",
    )
    assert (target == [np.arange(32) + 1000, np.arange(32)]).all()


def test_constant_memory_is_read_by_index():
    target = np.zeros(32, np.uint32)
    launch(
        HEAD
        + """
        and.b32 %r1, %r0, 3; mul.wide.u32 %d4, %r1, 4; mov.u64 %d5, table; add.u64 %d6, %d5, %d4;
        ld.const.u32 %r2, [%d6]; mad.wide.u32 %d3, %r0, 4, %d1; st.global.u32 [%d3], %r2;
        """,
        [np.zeros(1, np.uint8), target],
        head=".const .align 4 .u32 table[4] = {11, 22, 33, 44};",
    )
    assert (target == np.array([11, 22, 33, 44])[np.arange(32) % 4]).all()


def test_parameters_are_read_at_any_offset():
    block = np.arange(40, dtype=np.uint8)
    (low, high) = run_parameter_block(block)
    assert low == int.from_bytes(block[12:16].tobytes(), "little")
    assert high == block[39]


def run_parameter_block(block):
    out = np.zeros(2, np.uint32)
    launch(
        """.reg .b32 %r<8>; .reg .b64 %d<8>;
        ld.param.u64 %d0, [p1]; ld.param.v2.b32 {%r1, %r2}, [p0+8]; ld.param.u8 %r3, [p0+39];
        mov.b64 %d1, p0; cvta.param.u64 %d2, %d1; ld.param.b32 %r4, [%d2+12];
        st.global.v2.b32 [%d0], {%r4, %r3};
        """,
        [block.tobytes(), out],
        parameters=[".align 8 .b8 p0[40]", ".u64 p1"],
    )
    return out


def test_a_stray_load_names_lane_address_size_and_nearest_buffer():
    source = np.zeros(32, np.uint32)
    fault = find_fault(
        "mad.wide.u32 %d2, %r0, 4, %d0; ld.global.u32 %r1, [%d2+16];", [source, source.copy()]
    )
    assert fault.kind == "out-of-bounds"
    assert fault.lane == 28
    assert "4 bytes at 0x" in fault.message
    assert "argument" in fault.message
    assert "0 bytes past the end of" in fault.message
    assert "ld.global.u32" in fault.place.text


def test_a_vector_that_crosses_the_end_of_a_buffer_is_a_fault():
    data = np.zeros(36, np.uint8)
    fault = find_fault("ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0+32];", [data, data.copy()])
    assert fault.kind in ("out-of-bounds", "misaligned")
    assert fault.lane == 0


def test_a_misaligned_address_says_the_alignment():
    data = np.zeros(64, np.uint32)
    fault = find_fault("ld.global.v2.u32 {%r1, %r2}, [%d0+4];", [data, data.copy()])
    assert fault.kind == "misaligned"
    assert "not aligned to 8 bytes" in fault.message


def test_a_store_to_constant_memory_is_a_fault():
    data = np.zeros(64, np.uint32)
    fault = find_fault(
        "mov.u64 %d5, table; st.global.u32 [%d5], %r0;",
        [data, data.copy()],
        head=".const .align 4 .u32 table[4] = {1, 2, 3, 4};",
    )
    assert fault.kind == "read-only"
    assert "table" in fault.message


def test_a_freed_buffer_is_told_from_a_stray_address():
    device = Device("b200")
    data = np.zeros(64, np.uint32)
    address = int(data.ctypes.data)
    device.memory.register(address, data.nbytes, "activations", keep=data)
    device.memory.unregister(address)
    module = device.load(
        make_module(".reg .b64 %d<2>; .reg .b32 %r1;\nld.param.u64 %d0, [p0];"
                    "ld.global.u32 %r1, [%d0+8];", [".u64 p0"])
    )  # fmt: skip
    with pytest.raises(KernelFault) as caught:
        module.launch("test", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, [address])
    assert caught.value.report.fault.kind == "use-after-free"
    assert "activations" in caught.value.report.fault.message


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("mov.u32 %r1, buffer; ld.shared.u32 %r2, [%r1+4096];", "out-of-bounds", "ends at 0x"),
        ("mov.u32 %r1, 64; st.shared.u32 [%r1], %r0;", "out-of-bounds", "reserved"),
        ("mov.u32 %r1, buffer; ld.shared.u32 %r2, [%r1+2];", "misaligned", "4 bytes"),
        ("mov.u32 %r1, 0x05000400; ld.shared::cluster.u32 %r2, [%r1];", "out-of-bounds", "rank 5"),
        ("mov.u64 %d4, p0; st.u32 [%d4], %r0;", "read-only", "parameters"),
    ],
)
def test_each_window_has_its_own_limits(body, kind, words):
    data = np.zeros(64, np.uint32)
    if "p0;" in body:
        body = "mov.b64 %d5, p0; cvta.param.u64 %d4, %d5; st.u32 [%d4], %r0;"
    fault = find_fault(body, [data, data.copy()], head=".shared .align 16 .b8 buffer[128];")
    assert fault.kind == kind
    assert words in fault.message


def test_asynchronous_remote_stores_count_on_the_mbarrier():
    target = np.zeros(32, np.uint64)
    report = launch(
        HEAD
        + """
        mov.u32 %r1, %cluster_ctarank; setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [bar], 1;
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        setp.eq.u32 %p1, %r1, 0; @%p1 bra SEND;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 %d9, [bar], 256;
        W: mbarrier.try_wait.parity.shared.b64 %p2, [bar], 0; @!%p2 bra W;
        mov.u32 %r4, buffer; mad.lo.u32 %r4, %r0, 8, %r4; ld.shared.b64 %d5, [%r4];
        mad.wide.u32 %d3, %r0, 8, %d1; st.global.b64 [%d3], %d5; bra END;
        SEND: mov.u32 %r2, buffer; mad.lo.u32 %r2, %r0, 8, %r2; mov.u32 %r3, bar; mov.u32 %r5, 1;
        mapa.shared::cluster.u32 %r6, %r2, %r5; mapa.shared::cluster.u32 %r7, %r3, %r5;
        mul.wide.u32 %d4, %r0, 7;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r6], %d4, [%r7];
        END: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        """,
        [np.zeros(1, np.uint8), target],
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        head=".shared .align 16 .b8 buffer[256]; .shared .align 8 .b64 bar;",
    )
    assert (target == np.arange(32) * 7).all()
    assert report.findings == ()


def test_bulk_stores_zero_shared_memory():
    target = np.zeros(32, np.uint32)
    launch(
        HEAD
        + """
        mov.u32 %r2, buffer; mad.lo.u32 %r3, %r0, 4, %r2; mov.u32 %r4, 5; st.shared.u32 [%r3], %r4;
        bar.sync 0; setp.eq.u32 %p0, %r0, 0; mov.u64 %d4, 64;
        @%p0 st.bulk.weak.shared::cta [%r2], %d4, 0;
        bar.sync 0; ld.shared.u32 %r5, [%r3]; mad.wide.u32 %d3, %r0, 4, %d1;
        st.global.u32 [%d3], %r5;
        """,
        [np.zeros(1, np.uint8), target],
        head=".shared .align 16 .b8 buffer[128];",
    )
    assert (target == np.where(np.arange(32) < 16, 0, 5)).all()


def test_fresh_shared_memory_holds_the_poison():
    (out,) = run_lanes(
        "mov.u32 %t0, buffer; mad.lo.u32 %t0, %lane, 4, %t0; ld.shared.u32 %o0, [%t0];",
        outputs=[np.uint32],
        registers=".shared .align 16 .b8 buffer[128];",
        options=LaunchOptions(shared_poison=0x5C),
    )
    assert (out == 0x5C5C5C5C).all()
