"""Barriers in shared memory: phases, counts, bytes, tokens, remote arrivals; cluster barriers."""

import numpy as np

from ..program import Buffer, ConformanceProgram, make_program, poison


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the mbarrier programs."""
    return (_phases(), _pending_counts(), _transactions(), _drops(), _between_warps(), _waits())


class _Log:
    """Text that writes one word a step; `lines` is the body of one thread."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: list[str] = []

    def run(self, text: str) -> None:
        self.lines.append(text)

    def write(self, name: str, register: str = "%r1") -> None:
        self.lines.append(f"st.global.u32 [%out+{4 * len(self.names)}], {register};")
        self.names.append(name)

    def parity(self, barrier: str) -> None:
        """Write whether the phases of parity 0 and 1 count as complete."""
        for parity in (0, 1):
            self.run(f"mbarrier.test_wait.parity.shared.b64 %p1, [{barrier}], {parity};")
            self.run("selp.u32 %r1, 1, 0, %p1;")
            self.write(f"{barrier} parity {parity}")

    def pending(self, state: str) -> None:
        self.run(f"mbarrier.pending_count.b64 %r1, {state};")
        self.write(f"pending of {state}")

    def program(self, name: str, module: str) -> ConformanceProgram:
        lines = ["setp.ne.u32 %p9, %thread, 0; @%p9 bra REST;", *self.lines, "REST:"]
        return make_program(
            name,
            "\n".join(lines),
            module=module,
            outputs=[Buffer("out", poison(len(self.names), np.uint32))],
            row_names={"out": tuple(self.names)},
        )


ONE = ".shared .align 8 .b64 bar;"


def _phases() -> ConformanceProgram:
    log = _Log()
    log.run("mbarrier.init.shared.b64 [bar], 3;")
    log.parity("bar")
    for step in range(9):
        log.run(f"mbarrier.arrive.shared.b64 %d{10 + step}, [bar];")
        log.parity("bar")
        log.run(f"mbarrier.test_wait.shared.b64 %p1, [bar], %d{10 + step};")
        log.run("selp.u32 %r1, 1, 0, %p1;")
        log.write(f"test_wait of arrival {step}")
    log.run("mbarrier.arrive.shared.b64 _, [bar], 2;")
    log.parity("bar")
    log.run("mbarrier.arrive.shared::cta.b64 %d1, [bar], 1;")
    log.parity("bar")
    log.run("mbarrier.inval.shared.b64 [bar];\nmbarrier.init.shared.b64 [bar], 1;")
    log.parity("bar")
    return log.program("mbarrier_phases_and_parity", ONE)


def _pending_counts() -> ConformanceProgram:
    log = _Log()
    log.run("mbarrier.init.shared.b64 [bar], 5;")
    for step, count in enumerate((1, 2, 1, 1, 5, 3)):
        log.run(f"mbarrier.arrive.shared.b64 %d{10 + step}, [bar], {count};")
        log.pending(f"%d{10 + step}")
    log.run("mbarrier.arrive.noComplete.shared.b64 %d20, [bar], 1;")
    log.pending("%d20")
    log.parity("bar")
    log.run(
        "mbarrier.init.shared.b64 [bar], 1048575;\nmbarrier.arrive.shared.b64 %d21, [bar], 4096;"
    )
    log.pending("%d21")
    return log.program("mbarrier_pending_count", ONE)


def _transactions() -> ConformanceProgram:
    log = _Log()
    log.run("mbarrier.init.shared.b64 [bar], 1;")
    log.run("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 64;")
    log.parity("bar")
    log.run("mbarrier.arrive.shared.b64 %d10, [bar];")
    log.parity("bar")  # bytes are missing
    log.pending("%d10")
    log.run("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 24;")
    log.parity("bar")
    log.run("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 40;")
    log.parity("bar")  # complete: phase 1 begins
    # Bytes before the expectation: the count goes below zero.
    log.run("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 16;")
    log.parity("bar")
    log.run("mbarrier.arrive.expect_tx.shared.b64 %d11, [bar], 48;")
    log.parity("bar")
    log.pending("%d11")
    log.run("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 32;")
    log.parity("bar")
    log.run("mbarrier.init.shared.b64 [bar], 2;")
    log.run("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bar], 1048575;")
    log.parity("bar")
    log.run("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 1048575;")
    log.parity("bar")
    log.run("mbarrier.arrive.shared.b64 _, [bar];")
    log.parity("bar")
    return log.program("mbarrier_transaction_bytes", ONE)


def _drops() -> ConformanceProgram:
    log = _Log()
    log.run("mbarrier.init.shared.b64 [bar], 4;")
    log.run("mbarrier.arrive_drop.shared.b64 %d10, [bar];")
    log.pending("%d10")
    log.run("mbarrier.arrive.shared.b64 %d11, [bar], 3;")
    log.parity("bar")
    for step in range(4):  # three arrivals a phase from now on
        log.run(f"mbarrier.arrive.shared.b64 %d{12 + step}, [bar];")
        log.pending(f"%d{12 + step}")
        log.parity("bar")
    log.run("mbarrier.arrive_drop.shared.b64 %d20, [bar], 2;")
    log.pending("%d20")
    log.parity("bar")
    log.run("mbarrier.arrive.shared.b64 %d21, [bar];")  # one arrival a phase
    log.pending("%d21")
    log.parity("bar")
    log.run("mbarrier.init.shared.b64 [bar], 3;")
    log.run("mbarrier.arrive_drop.noComplete.shared.b64 %d22, [bar], 1;")
    log.pending("%d22")
    log.run("mbarrier.arrive_drop.expect_tx.shared.b64 %d23, [bar], 8;")
    log.pending("%d23")
    log.parity("bar")
    return log.program("mbarrier_arrive_drop", ONE)


def _between_warps() -> ConformanceProgram:
    """Return a ring of two stages between a producer warp and a consumer warp, five rounds."""
    body = """
    .shared .align 8 .b64 full[2]; .shared .align 8 .b64 empty[2]; .shared .align 4 .b8 ring[256];
    mov.u32 %r1, full; mov.u32 %r2, empty; mov.u32 %r3, ring;
    setp.eq.u32 %p1, %thread, 0; @!%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 32; mbarrier.init.shared.b64 [%r1+8], 32;
    mbarrier.init.shared.b64 [%r2], 32; mbarrier.init.shared.b64 [%r2+8], 32;
    fence.mbarrier_init.release.cluster;
    READY: bar.sync 0;
    mov.u32 %r9, 0; mov.u32 %r8, %laneid; setp.ge.u32 %p2, %thread, 32; @%p2 bra CONSUMER;
    PRODUCER:
    and.b32 %r4, %r9, 1; mad.lo.u32 %r5, %r4, 8, %r2; mad.lo.u32 %r6, %r4, 8, %r1;
    shr.u32 %r7, %r9, 1; and.b32 %r7, %r7, 1; xor.b32 %r7, %r7, 1;
    P_WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r5], %r7; @!%p3 bra P_WAIT;
    mad.lo.u32 %r10, %r4, 32, %r8; mad.lo.u32 %r10, %r10, 4, %r3;
    mad.lo.u32 %r11, %r9, 100, %r8; st.shared.u32 [%r10], %r11;
    mbarrier.arrive.shared.b64 _, [%r6];
    add.u32 %r9, %r9, 1; setp.lt.u32 %p4, %r9, 5; @%p4 bra PRODUCER;
    bra FINISH;
    CONSUMER:
    and.b32 %r4, %r9, 1; mad.lo.u32 %r5, %r4, 8, %r2; mad.lo.u32 %r6, %r4, 8, %r1;
    shr.u32 %r7, %r9, 1; and.b32 %r7, %r7, 1;
    C_WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p3, [%r6], %r7, 0x989680;
    @!%p3 bra C_WAIT;
    xor.b32 %r10, %r8, 31; mad.lo.u32 %r10, %r4, 32, %r10; mad.lo.u32 %r10, %r10, 4, %r3;
    ld.shared.u32 %r11, [%r10]; mbarrier.arrive.shared.b64 %d1, [%r5];
    mad.lo.u32 %r12, %r9, 32, %r8; mad.wide.u32 %d2, %r12, 4, %out; st.global.u32 [%d2], %r11;
    add.u32 %r9, %r9, 1; setp.lt.u32 %p4, %r9, 5; @%p4 bra CONSUMER;
    FINISH:
    """
    return make_program(
        "mbarrier_ring_of_two_stages",
        body,
        outputs=[Buffer("out", poison((5, 32), np.uint32))],
        threads=64,
    )


def _waits() -> ConformanceProgram:
    """Return a warp that waits by token for a warp that sleeps before it arrives."""
    body = """
    .shared .align 8 .b64 bar; .shared .align 4 .u32 word;
    setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared.b64 [bar], 64; bar.sync 0;
    setp.lt.u32 %p2, %thread, 32; @%p2 bra SLEEPER;
    mbarrier.arrive.shared.b64 %d1, [bar];
    WAIT: mbarrier.try_wait.shared.b64 %p3, [bar], %d1; @!%p3 bra WAIT;
    ld.shared.u32 %r1, [word]; bra END;
    SLEEPER:
    nanosleep.u32 20000; st.shared.u32 [word], 321; mbarrier.arrive.shared.b64 %d1, [bar];
    mov.u32 %r1, 5;
    END: mad.wide.u32 %d2, %thread, 4, %out; st.global.u32 [%d2], %r1;
    """
    return make_program(
        "mbarrier_wait_for_sleeper",
        body,
        outputs=[Buffer("out", poison(64, np.uint32))],
        threads=64,
    )
