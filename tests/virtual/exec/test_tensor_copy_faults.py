"""What tensor copies refuse, and how the fault says it."""

import numpy as np
import pytest

from halfbyte.virtual.memory import make_aligned_bytes
from halfbyte.virtual.report import KernelFault
from halfbyte.virtual.tensor_map import TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.exec.tensor_programs import (
    HEAD,
    LOAD,
    PARAMETERS,
    WAIT,
    encode,
    make_tensor,
    run_load,
    run_store,
)
from tests.virtual.run_ptx import launch


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("[%r1+64], [%d11, {0, 0}], [%r2]", "misaligned", "128 bytes"),
        ("[%r1+8192], [%d11, {0, 0}], [%r2]", "out-of-bounds", "shared memory ends"),
        ("[%r1], [%d11+32, {0, 0}], [%r2]", "misaligned", "64 bytes"),
        ("[%r1], [%d1, {0, 0}], [%r2]", "bad-tensor-map", "not legal"),
        ("[%r3], [%d11, {0, 0}], [%r2]", "wrong-cta", "executing CTA"),
    ],
)
def test_faults_name_the_operand_and_the_rule(body, kind, words):
    tensor = make_tensor(np.uint8, 8, 128)
    garbage = make_aligned_bytes(256)
    garbage[:] = 0xFF
    opcode = LOAD.format(rank=2, mode="")
    with pytest.raises(KernelFault) as caught:
        launch(
            HEAD + f"xor.b32 %r3, %r1, 0x01000000; @%p0 {opcode} {body};" + WAIT,
            [encode(tensor, TensorBox((128, 8))), tensor, garbage],
            parameters=PARAMETERS,
        )
    fault = caught.value.report.fault
    assert fault.kind == kind
    assert words in fault.message


def test_a_map_of_another_rank_is_a_fault():
    tensor = make_tensor(np.uint8, 8, 128)
    with pytest.raises(KernelFault, match="rank 2 for an instruction of 3 dimensions"):
        run_load(tensor, encode(tensor, TensorBox((128, 8))), (0, 0, 0), nbytes=1024)


def test_a_map_of_the_other_mode_is_a_fault():
    tensor = make_tensor(np.uint8, 2, 8, 128)
    with pytest.raises(KernelFault, match="im2col mode and the map was encoded for tile"):
        run_load(
            tensor, encode(tensor, TensorBox((128, 8, 1))), (0, 0, 0), mode=".im2col", nbytes=1024,
            extra=", {0}",
        )  # fmt: skip


def test_a_box_outside_every_buffer_names_the_tensor():
    tensor = make_tensor(np.uint8, 8, 128)
    layout = TensorLayout("u8", (128, 1 << 20))
    tensor_map = encode_tensor_map(tensor.ctypes.data, layout, TensorBox((128, 8)))
    with pytest.raises(KernelFault) as caught:
        run_load(tensor, tensor_map, (0, 1 << 19), nbytes=1024)
    assert caught.value.report.fault.kind == "out-of-bounds"
    assert "{0, 524288}" in caught.value.report.fault.message
    assert "u8 [128, 1048576]" in caught.value.report.fault.message


def test_a_box_starts_at_a_multiple_of_16_bytes():
    """Seen on an H200: anything else is an illegal instruction."""
    tensor = make_tensor(np.float16, 8, 64)
    with pytest.raises(KernelFault, match="first coordinate 4 of 16-bit elements"):
        run_load(tensor, encode(tensor, TensorBox((64, 8))), (4, 0), nbytes=1024)


def test_a_store_does_not_start_before_the_tensor():
    tensor = make_tensor(np.float16, 8, 64)
    with pytest.raises(KernelFault, match="must not start before the tensor"):
        run_store(
            tensor,
            encode(tensor, TensorBox((64, 8))),
            (0, -1),
            np.zeros(1024, np.uint8),
            opcode="cp.async.bulk.tensor.2d.global.shared::cta.bulk_group",
        )
