"""Small PTX programs on the virtual GPU, for tests.

`run_lanes` wraps a few instructions: inputs arrive in %i0, %i1, ... (one element per thread),
results leave in %o0, %o1, .... `make_module` wraps the body of a kernel.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.virtual.device import Device, LaunchOptions

WIDTHS = {1: "b8", 2: "b16", 4: "b32", 8: "b64", 16: "b128"}
TARGETS = {"b200": "sm_100a", "b300": "sm_103a", "h200": "sm_90a", "rtx5090": "sm_120a"}


def make_module(
    body: str, parameters: Sequence[str] = (), *, gpu: str = "b200", head: str = ""
) -> str:
    """Return a module with one kernel, `test`; `parameters` are like ".u64 p0"."""
    listed = ", ".join(f".param {parameter}" for parameter in parameters)
    return (
        f".version 9.0\n.target {TARGETS[gpu]}\n.address_size 64\n{head}\n"
        f".visible .entry test({listed})\n{{\n{body}\nret;\n}}\n"
    )


def launch(
    body: str,
    arguments: Sequence[Any] = (),
    *,
    parameters: Sequence[str] | None = None,
    gpu: str = "b200",
    head: str = "",
    grid: Any = (1, 1, 1),
    block: Any = (32, 1, 1),
    cluster: Any = (1, 1, 1),
    dynamic_shared: int = 0,
    options: LaunchOptions | None = None,
) -> Any:
    """Return the report of a one-kernel module; arrays are parameters `.u64 p0, .u64 p1, ...`."""
    if parameters is None:
        parameters = [f".u64 p{i}" for i in range(len(arguments))]
    device = Device(gpu)
    module = device.load(make_module(body, parameters, gpu=gpu, head=head))
    return module.launch("test", grid, block, cluster, dynamic_shared, arguments, options=options)


def run_lanes(
    body: str,
    inputs: Sequence[np.ndarray] = (),
    outputs: Sequence[Any] = (),
    *,
    registers: str = "",
    gpu: str = "b200",
    before: Sequence[np.ndarray] | None = None,
    options: LaunchOptions | None = None,
) -> list[np.ndarray]:
    """Return what the lanes leave in %o0, %o1, ...: one array per dtype of `outputs`.

    Args:
        body: instructions; %i<n> and %o<n> have the width of their arrays, %p<8> are predicates,
            %t<16> 32-bit and %d<16> 64-bit temporaries, %lane the lane, %thread the thread.
        inputs: arrays of one length, any number of threads (blocks of up to 128 are launched).
        outputs: dtypes; a `bool` output is the predicate %q<n>, returned as 0/1 bytes.
        registers: further declarations.
        before: what the %o registers hold before the body (poison: a counter pattern if None).
    """
    threads = len(inputs[0]) if inputs else 32
    dtypes = [np.dtype(np.uint32 if d is bool else d) for d in outputs]
    results = [np.full(threads, 0xEE, np.uint8).repeat(d.itemsize).view(d) for d in dtypes]
    start = before or [
        (np.arange(threads * d.itemsize, dtype=np.uint64) * 37 % 251).astype(np.uint8).view(d)
        for d in dtypes
    ]
    arrays = [*inputs, *start, *results]
    lines = [
        f".reg .pred %p<8>; .reg .pred %q<{len(outputs) + 1}>; .reg .b32 %t<16>; .reg .b64 %d<16>;",
        ".reg .b32 %lane, %thread, %w<3>; .reg .b64 %a<2>;",
        registers,
        *(f".reg .{WIDTHS[a.dtype.itemsize]} %i{n};" for n, a in enumerate(inputs)),
        *(f".reg .{WIDTHS[d.itemsize]} %o{n};" for n, d in enumerate(dtypes)),
        "mov.u32 %lane, %laneid; mov.u32 %w0, %tid.x; mov.u32 %w1, %ctaid.x; mov.u32 %w2, %ntid.x;",
        "mad.lo.u32 %thread, %w1, %w2, %w0;",
    ]
    for number, array in enumerate(inputs):
        lines += _move("ld", f"%i{number}", number, array.dtype.itemsize)
    for number, dtype in enumerate(dtypes):
        lines += _move("ld", f"%o{number}", len(inputs) + number, dtype.itemsize)
    lines.append(body)
    for number, (dtype, kind) in enumerate(zip(dtypes, outputs, strict=True)):
        if kind is bool:
            lines.append(f"selp.u32 %o{number}, 1, 0, %q{number};")
        lines += _move("st", f"%o{number}", len(inputs) + len(outputs) + number, dtype.itemsize)
    block = next(size for size in (128, 96, 64, 32) if threads % size == 0)
    launch(
        "\n".join(lines),
        arrays,
        gpu=gpu,
        grid=(threads // block, 1, 1),
        block=(block, 1, 1),
        options=options,
    )
    return [r.astype(np.uint8) if k is bool else r for r, k in zip(results, outputs, strict=True)]


def _move(opcode: str, register: str, parameter: int, nbytes: int) -> list[str]:
    address = f"ld.param.u64 %a0, [p{parameter}]; mad.wide.u32 %a1, %thread, {nbytes}, %a0;"
    if opcode == "ld":
        return [address, f"ld.global.{WIDTHS[nbytes]} {register}, [%a1];"]
    return [address, f"st.global.{WIDTHS[nbytes]} [%a1], {register};"]
