"""Conformance programs on the virtual GPU, and the comparison with what silicon gave."""

from dataclasses import dataclass, field

import numpy as np

from halfbyte.virtual.device import Device
from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map

from .program import ConformanceProgram, TensorMap
from .silicon_results import SiliconRun

DTYPES = {
    **{f"uint{bits}": f"u{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"s{bits}" for bits in (32, 64)},
    **{f"float{bits}": f"f{bits}" for bits in (16, 32, 64)},
    "bfloat16": "bf16",
    "float32_ftz": "f32.ftz",
    "tfloat32": "tf32",
    "tfloat32_ftz": "tf32.ftz",
}
BYTES = {"none": 0, "16b": 16, "32b": 32, "64b": 64, "128b": 128}


@dataclass(frozen=True)
class Difference:
    """One output that differs: how many of its elements, the first of them, in which rows."""

    output: str
    wrong: int
    total: int
    first: tuple[int, ...]
    virtual: str
    silicon: str
    rows: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = "".join(f"\n    {name}: {count}" for name, count in list(self.rows.items())[:40])
        return (
            f"{self.output}: {self.wrong} of {self.total} differ, first at {self.first}: virtual "
            f"{self.virtual}, silicon {self.silicon}{rows}"
        )


def encode_map(tensor_map: TensorMap, address: int) -> bytes:
    """Return the 128 bytes of a tensor map from the package's own encoder."""
    is_im2col = tensor_map.pixel_lower is not None
    steps = tensor_map.steps
    if tensor_map.interleave == "none":
        steps = (1, *steps[1:])  # the driver ignores the first one, our encoder wants it said
    return encode_tensor_map(
        address,
        TensorLayout(DTYPES[tensor_map.dtype], tensor_map.shape, tensor_map.strides),
        TensorBox(
            shape=() if is_im2col else tensor_map.box,
            element_strides=steps,
            swizzle=BYTES[tensor_map.swizzle],
            interleave=BYTES[tensor_map.interleave],
            fill="nan" if tensor_map.oob_fill == "nan" else "zero",
            im2col=Im2colBox(tensor_map.pixel_lower, tensor_map.pixel_upper, *tensor_map.box)
            if tensor_map.pixel_lower is not None
            else None,
        ),
    )


def run_on_virtual_gpu(program: ConformanceProgram) -> dict[str, np.ndarray]:
    """Return the outputs by name. Raises KernelFault or a hang error where the program fails."""
    arrays = {}
    for buffer in (*program.inputs, *program.outputs):
        arrays[buffer.name] = _make_aligned_copy(buffer.data)
    maps = [encode_map(m, arrays[m.buffer].ctypes.data) for m in program.tensor_maps]
    Device("h200").load(program.ptx).launch(
        "kernel",
        program.grid,
        program.block,
        program.cluster,
        program.dynamic_shared,
        [*arrays.values(), *maps],
    )
    return {buffer.name: arrays[buffer.name] for buffer in program.outputs}


def _make_aligned_copy(data: np.ndarray) -> np.ndarray:
    """Return a copy at a multiple of 256 bytes, as the driver's allocations are."""
    raw = np.empty(data.nbytes + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + data.nbytes].view(data.dtype).reshape(data.shape)
    copy[...] = data
    return copy


def find_differences(
    program: ConformanceProgram, outputs: dict[str, np.ndarray], silicon: SiliconRun
) -> list[Difference]:
    """Return every output that is not equal bit by bit."""
    differences = []
    for name, virtual in outputs.items():
        got = np.ascontiguousarray(virtual).view(np.uint8).reshape(*virtual.shape, -1)
        other = np.ascontiguousarray(silicon.outputs[name])
        wanted = other.view(np.uint8).reshape(got.shape)
        wrong = (got != wanted).any(-1)
        if not wrong.any():
            continue
        first = tuple(int(index) for index in np.argwhere(wrong)[0])
        rows = program.row_names.get(name, ())
        counts: dict[str, int] = {}
        for row, label in enumerate(rows):
            if wrong[row].any():
                counts[label] = counts.get(label, 0) + int(wrong[row].sum())
        differences.append(
            Difference(
                name,
                int(wrong.sum()),
                wrong.size,
                first,
                hex(int.from_bytes(got[first].tobytes(), "little")),
                hex(int.from_bytes(wanted[first].tobytes(), "little")),
                counts,
            )
        )
    return differences
