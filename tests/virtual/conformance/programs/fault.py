"""Programs that must fail: silicon ends them with an error, the virtual GPU with a fault.

What they share with the rest of the suite is that both machines agree; no output is compared.
"""

import numpy as np

from ..program import Buffer, ConformanceProgram, TensorMap, make_program, poison
from .tile import THREADS, loads_body, stores_body

FAULT = "fault"

BODIES = {
    "fault_misaligned_load": "ld.global.u32 %r1, [%out+2]; st.global.u32 [%out], %r1;",
    "fault_misaligned_vector": "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%out+8];\n"
    "st.global.v4.u32 [%out+32], {%r4, %r3, %r2, %r1};",
    "fault_misaligned_atomic": "atom.global.add.u32 %r1, [%out+1], 1; st.global.u32 [%out], %r1;",
    "fault_null_store": "mov.u64 %d1, 64; st.global.u32 [%d1], 5;",
    "fault_trap": "trap;",
}


def make_programs() -> tuple[ConformanceProgram, ...]:
    """Return the programs that must fail."""
    plain = (
        make_program(name, body, outputs=[Buffer("out", poison(64, np.uint32))], compares=FAULT)
        for name, body in BODIES.items()
    )
    return (*plain, _load_coordinate(), *_store_coordinates(), _destination(), _corner())


def _map(buffer: str) -> TensorMap:
    return TensorMap("t", buffer, "uint16", (64, 16), (128,), (16, 8))


def _load(name: str, coordinates: str, offset: int) -> ConformanceProgram:
    return make_program(
        name,
        loads_body([("t", offset, coordinates, 256)], 1024),
        threads=THREADS,
        inputs=[Buffer("source", np.arange(1024, dtype=np.uint16))],
        outputs=[Buffer("out", poison(256, np.uint32))],
        tensor_maps=[_map("source")],
        compares=FAULT,
    )


def _load_coordinate() -> ConformanceProgram:
    """Return a load whose innermost coordinate is 2 bytes, no multiple of 16."""
    return _load("fault_tile_load_coordinate", "{1, 0}", 0)


def _destination() -> ConformanceProgram:
    """Return a load to a shared address that is no multiple of 128."""
    return _load("fault_tile_load_destination", "{0, 0}", 64)


def _corner() -> ConformanceProgram:
    """Return an im2col store whose bounding box begins before the tensor."""
    opcode = "cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs"
    corners = {"pixel_lower": (-1, -1), "pixel_upper": (-1, -1)}
    tensor_map = TensorMap("t", "out", "uint16", (16, 6, 5, 2), (32, 192, 960), (8, 16), **corners)
    return make_program(
        "fault_im2col_store_lower_corner",
        stores_body([("t", "{0, 1, 1, 0}", opcode, 0)], 256),
        threads=THREADS,
        inputs=[Buffer("source", np.arange(256, dtype=np.uint32))],
        outputs=[Buffer("out", poison((2, 5, 6, 16), np.uint16))],
        tensor_maps=[tensor_map],
        compares=FAULT,
    )


def _store_coordinates() -> list[ConformanceProgram]:
    """Return stores that start off a multiple of 16 bytes, or before the tensor."""
    opcode = "cp.async.bulk.tensor.2d.global.shared::cta.tile"
    return [
        make_program(
            f"fault_tile_store_{name}",
            stores_body([("t", place, opcode, 0)], 256),
            threads=THREADS,
            inputs=[Buffer("source", np.arange(256, dtype=np.uint32))],
            outputs=[Buffer("out", poison((16, 64), np.uint16))],
            tensor_maps=[_map("out")],
            compares=FAULT,
        )
        for name, place in (
            ("coordinate", "{4, 0}"),
            ("before_row", "{0, -1}"),
            ("before_column", "{-8, 0}"),
        )
    ]
