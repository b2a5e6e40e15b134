"""The record of one conformance program, and the text around its body.

A program is data: PTX text, launch shape, input and output buffers, tensor maps. The entry is
called `kernel`; its parameters are the addresses of the inputs, then of the outputs, in order,
then the tensor maps, 128 bytes each.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PTX_VERSION = "8.6"
TARGET = "sm_90a"
POISON = 0xCD  # what fills an output that has no initial content of its own

HEADER = f".version {PTX_VERSION}\n.target {TARGET}\n.address_size 64\n"

# Registers every body may use, beside one `%<buffer>` and one `%<map>_map` of 64 bits.
REGISTERS = (
    ".reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<320>; .reg .b64 %d<128>; .reg .b128 %q<8>;"
)


@dataclass(frozen=True)
class Buffer:
    """One array in global memory; `data` is its content at the start."""

    name: str
    data: np.ndarray


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map is encoded from; dimensions innermost first, strides in bytes.

    `dtype`, `interleave`, `swizzle` and `oob_fill` use the names of CUDA's driver enumerations in
    lower case (`float16`, `none`, `128b`, `nan`). With `pixel_lower` the map is an im2col one:
    then `box` is (channels per pixel, pixels per column).
    """

    name: str
    buffer: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of dimensions 1.., bytes
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    interleave: str = "none"
    swizzle: str = "none"
    oob_fill: str = "none"
    pixel_lower: tuple[int, ...] | None = None
    pixel_upper: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """The element strides, ones where none were given."""
        return self.element_strides or (1,) * len(self.shape)


@dataclass(frozen=True)
class ConformanceProgram:
    """One program; `compares` is "bits" or "documented difference: <why>"."""

    name: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_shared: int = 0
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    tensor_maps: tuple[TensorMap, ...] = ()
    compares: str = "bits"
    row_names: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The first word of the name."""
        return self.name.split("_")[0]

    def describe(self) -> dict[str, Any]:
        """Return what a runner needs beside the arrays, ready for JSON."""
        return {
            "name": self.name,
            "grid": self.grid,
            "block": self.block,
            "cluster": self.cluster,
            "dynamic_shared": self.dynamic_shared,
            "inputs": [buffer.name for buffer in self.inputs],
            "outputs": [buffer.name for buffer in self.outputs],
            "tensor_maps": [vars(tensor_map) for tensor_map in self.tensor_maps],
        }

    def digest(self) -> str:
        """Return a hash of all that decides the outputs: text, launch, inputs, maps."""
        state = hashlib.sha256(self.ptx.encode())
        state.update(json.dumps(self.describe(), sort_keys=True).encode())
        for buffer in (*self.inputs, *self.outputs):
            state.update(f"{buffer.name}{buffer.data.dtype.str}{buffer.data.shape}".encode())
            state.update(np.ascontiguousarray(buffer.data).tobytes())
        return state.hexdigest()[:32]


def poison(shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an array of `shape` whose bytes are all 0xCD: an output not yet written."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).reshape(-1)[...] = POISON
    return array


def make_ptx(
    body: str,
    buffers: Sequence[str],
    tensor_maps: Sequence[str] = (),
    *,
    module: str = "",
    directives: str = "",
) -> str:
    """Return the text of a module whose entry `kernel` has `body`.

    Every buffer is in `%<name>` as a global address, every tensor map in `%<name>_map` as a
    generic one; `%tid` is the thread of the CTA (x), `%index` that of the grid.
    """
    parameters = [f".param .u64 {name}_param" for name in buffers]
    parameters += [f".param .align 64 .b8 {name}_param[128]" for name in tensor_maps]
    lines = [HEADER, module, ".visible .entry kernel("]
    lines += [",\n".join(parameters), f") {directives}\n{{", REGISTERS]
    lines.append(".reg .b32 %thread, %index;")
    for name in buffers:
        lines.append(f".reg .b64 %{name};\nld.param.u64 %{name}, [{name}_param];")
        lines.append(f"cvta.to.global.u64 %{name}, %{name};")
    for name in tensor_maps:
        lines.append(f".reg .b64 %{name}_map;\nmov.b64 %{name}_map, {name}_param;")
        lines.append(f"cvta.param.u64 %{name}_map, %{name}_map;")
    lines.append("mov.u32 %thread, %tid.x;\nmov.u32 %index, %ctaid.x;\nmov.u32 %r0, %ntid.x;")
    lines.append("mad.lo.u32 %index, %index, %r0, %thread;")
    lines += [body, "ret;\n}\n"]
    return "\n".join(line for line in lines if line)


def make_program(
    name: str,
    body: str,
    *,
    outputs: Sequence[Buffer],
    inputs: Sequence[Buffer] = (),
    tensor_maps: Sequence[TensorMap] = (),
    threads: int = 32,
    ctas: int = 1,
    module: str = "",
    directives: str = "",
    **fields: Any,
) -> ConformanceProgram:
    """Return a program of one-dimensional launch whose entry has `body` (see `make_ptx`)."""
    names = [buffer.name for buffer in (*inputs, *outputs)]
    maps = [tensor_map.name for tensor_map in tensor_maps]
    return ConformanceProgram(
        name=name,
        ptx=make_ptx(body, names, maps, module=module, directives=directives),
        grid=(ctas, 1, 1),
        block=(threads, 1, 1),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        tensor_maps=tuple(tensor_maps),
        **fields,
    )
