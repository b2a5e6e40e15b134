"""What is known of registers in the first pass through the loops, and in every pass."""

import struct

from halfbyte.checks.kernel_text import KernelText, read_kernel
from halfbyte.checks.register_values import (
    RegisterValues,
    find_first_pass,
    find_lasting,
    find_reached_blocks,
)
from halfbyte.ptx.syntax import Register
from tests.checks.ptx_texts import make_kernel


def read(values: RegisterValues, opcode: str, operand: int = 1) -> int | None:
    """Return the constant that a source of the only instruction `opcode` has, or None."""
    ((index, instruction),) = values.kernel.list_instructions(opcode)
    return values.read(index, instruction.operands[operand]).constant


LOOP = make_kernel("""
ld.param.u32 %r1, [n];
mov.u32 %r2, 0;
mov.u32 %r3, 1;
LOOP:
cvt.u16.u32 %rs1, %r2;
xor.b32 %r3, %r3, 1;
add.u32 %r2, %r2, 1;
setp.lt.u32 %p1, %r2, %r1;
@%p1 bra LOOP;
""")


def test_a_loop_counter_is_its_start_in_the_first_pass_and_unknown_for_ever() -> None:
    kernel = read_kernel(LOOP)
    assert read(find_first_pass(kernel), "cvt.u16") == 0
    assert read(find_lasting(kernel), "cvt.u16") is None
    assert read(find_first_pass(kernel), "xor.b32") == 1
    # 0 and 1 in turn: the upper bits stay
    ((index, instruction),) = kernel.list_instructions("xor.b32")
    lasting = find_lasting(kernel).read(index, instruction.operands[1])
    assert (lasting.mask, lasting.value) == (0xFFFFFFFE, 0)


def test_parameters_are_known_in_a_launch() -> None:
    kernel = read_kernel(LOOP)
    assert read(find_first_pass(kernel), "setp.lt", 2) is None
    assert read(find_first_pass(kernel, [struct.pack("<I", 7)]), "setp.lt", 2) == 7


def test_branches_keep_what_both_sides_have() -> None:
    kernel = read_kernel(
        make_kernel("""
mov.u32 %r0, %tid.x;
setp.eq.u32 %p1, %r0, 0;
mov.u32 %r2, 5;
@%p1 bra ELSE;
mov.u32 %r1, 12;
mov.u32 %r2, 9;
bra JOIN;
ELSE:
mov.u32 %r1, 12;
JOIN:
add.u32 %r3, %r1, %r2;
@%p1 mov.u32 %r1, 13;
sub.u32 %r4, %r1, %r2;
""")
    )
    values = find_first_pass(kernel)
    assert read(values, "add.u32", 1) == 12
    ((index, instruction),) = kernel.list_instructions("add.u32")
    joined = values.read(index, instruction.operands[2])
    assert (joined.mask, joined.value) == (0xFFFFFFF3, 1)  # 5 = 0101, 9 = 1001
    assert read(values, "sub.u32", 1) is None


def test_addresses_are_those_of_the_virtual_gpu() -> None:
    kernel = read_kernel(
        make_kernel(
            """
mov.u32 %r1, buffer;
add.u32 %r2, %r1, 16;
mov.u64 %rd1, map;
cvta.param.u64 %rd2, %rd1;
prefetch.tensormap [%rd2];
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2], 64;
ld.shared.u32 %r3, [%r1+16];
add.u32 %r4, %r3, 48;
shl.b32 %r5, %r4, 1;
""",
            parameters=".param .u32 n, .param .align 64 .b8 map[128]",
            shared=".shared .align 1024 .b8 buffer[64];",
        )
    )
    values = find_first_pass(kernel)
    assert read(values, "tcgen05.alloc", 1) == 64
    ((index, instruction),) = kernel.list_instructions("tcgen05.alloc")
    reserved = kernel.gpu.reserved_shared_bytes
    assert values.read_shared_offset(index, instruction.operands[0]) == reserved + 16
    ((index, instruction),) = kernel.list_instructions("prefetch")
    assert values.find_parameter(index, instruction.operands[0]) == (1, 0)
    assert read(values, "shl.b32", 1) == 48  # tensor memory starts at column 0


def test_what_is_not_followed_is_unknown_and_not_what_it_was() -> None:
    kernel: KernelText = read_kernel(
        make_kernel("""
mov.u32 %r1, 3;
popc.b32 %r1, %r1;
add.u32 %r2, %r1, 1;
""")
    )
    assert read(find_first_pass(kernel), "add.u32") is None
    ((index, _),) = kernel.list_instructions("add.u32")
    assert find_first_pass(kernel).read(index, Register("%r9")).mask == 0


def test_a_warp_comes_to_the_blocks_of_its_role_alone() -> None:
    kernel = read_kernel(
        make_kernel("""
mov.u32 %r0, %tid.x;
shr.u32 %r1, %r0, 5;
setp.ne.u32 %p1, %r1, 1;
@%p1 bra OTHERS;
add.u32 %r2, %r1, 1;
bra END;
OTHERS:
setp.eq.u32 %p2, %r1, 0;
@!%p2 bra END;
sub.u32 %r3, %r1, 1;
END:
""")
    )

    def list_roles(opcode: str) -> list[int]:
        ((index, _),) = kernel.list_instructions(opcode)
        block = kernel.blocks[index]
        return [warp for warp in range(4) if block in find_reached_blocks(kernel, warp)]

    assert list_roles("add.u32") == [1]
    assert list_roles("sub.u32") == [0]
    assert list_roles("ret") == [0, 1, 2, 3]
