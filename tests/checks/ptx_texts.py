"""PTX kernels for the checks: small, and with one thing in them that a check is about."""

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = """
.reg .pred %p<16>;
.reg .b16 %rs<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<32>;
"""


def make_kernel(body: str, parameters: str = ".param .u32 n", shared: str = "") -> str:
    """Return a module with one kernel `k` of a body, registers declared."""
    return f"{HEADER}.visible .entry k({parameters})\n{{\n{REGISTERS}{shared}\n{body}\nret;\n}}\n"


def make_ring(producer: int = 1, consumer: int = 0, arrival: str = "", num_bytes: int = 0) -> str:
    """Return a warp that fills one slot and one that empties it, by parities of their first waits.

    `arrival` stands where one arrives at the empty barrier before anybody waits. `num_bytes` are
    expected and never come.
    """
    return make_kernel(
        f"""
mov.u32 %r0, %tid.x;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [full], 1;
mbarrier.init.shared.b64 [empty], 1;
READY:
bar.sync 0;
{arrival}
ld.param.u32 %r1, [n];
mov.u32 %r2, 0;
mov.u32 %r3, {producer};
mov.u32 %r4, {consumer};
and.b32 %r6, %r0, 31;
setp.ne.u32 %p6, %r6, 0;
@%p6 bra END;
shr.u32 %r5, %r0, 5;
setp.ne.u32 %p1, %r5, 0;
@%p1 bra CONSUMER;
PRODUCER:
WAIT_EMPTY:
mbarrier.try_wait.parity.shared.b64 %p2, [empty], %r3;
@!%p2 bra WAIT_EMPTY;
mbarrier.arrive.expect_tx.shared.b64 %rd0, [full], {num_bytes};
xor.b32 %r3, %r3, 1;
add.u32 %r2, %r2, 1;
setp.lt.u32 %p3, %r2, %r1;
@%p3 bra PRODUCER;
bra END;
CONSUMER:
WAIT_FULL:
mbarrier.try_wait.parity.shared.b64 %p4, [full], %r4;
@!%p4 bra WAIT_FULL;
mbarrier.arrive.shared.b64 %rd1, [empty];
xor.b32 %r4, %r4, 1;
add.u32 %r2, %r2, 1;
setp.lt.u32 %p5, %r2, %r1;
@%p5 bra CONSUMER;
END:
""",
        shared=".shared .align 8 .b64 full;\n.shared .align 8 .b64 empty;",
    )


def make_products(
    inside: str, first: str = "", between: str = "", behind: str = "tcgen05.commit"
) -> str:
    """Return a loop over k-blocks with MMAs.

    Args:
        inside: statements of the loop's body; `mma(flag)` texts of `plain_mma` and `scaled_mma`.
        first: statements before the loop.
        between: statements behind the loop, before the accumulator is handed over.
        behind: "tcgen05.commit" hands the accumulator over behind the loop, "" does not.
    """
    commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];"
    return make_kernel(
        f"""
ld.param.u32 %r1, [n];
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [address], 128;
bar.sync 0;
ld.shared.u32 %r2, [address];
add.u32 %r3, %r2, 64;
mov.u32 %r4, 0;
mov.b32 %r5, 136315920;
mov.pred %p8, -1;
mov.pred %p9, 0;
{first}
LOOP:
setp.ne.u32 %p7, %r4, 0;
{inside}
add.u32 %r4, %r4, 1;
setp.lt.u32 %p0, %r4, %r1;
@%p0 bra LOOP;
{between}
{commit if behind else ""}
""",
        shared=".shared .align 8 .b64 done;\n.shared .align 4 .b32 address;",
    )


def plain_mma(flag: str, target: str = "%r2") -> str:
    """Return a float16 MMA into tensor memory at `target`."""
    return f"tcgen05.mma.cta_group::1.kind::f16 [{target}], %rd2, %rd3, %r5, {flag};"


def scaled_mma(flag: str, descriptor: str = "%r5") -> str:
    """Return a block-scaled MMA whose scales are at columns 64 and 68."""
    return (
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 "
        f"[%r2], %rd2, %rd3, {descriptor}, [%r3], [%r3], {flag};"
    )


ALWAYS, NEVER, VARIES = "%p8", "%p9", "%p7"
