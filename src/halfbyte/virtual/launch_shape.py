"""The sizes of a launch, and whether a GPU and a kernel allow them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.arch import Gpu
from halfbyte.errors import UsageError
from halfbyte.ptx.syntax import Kernel
from halfbyte.virtual.lowering import Program
from halfbyte.virtual.plain_values import read_integer, read_integers

Triple = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes of a launch: CTAs, threads, CTAs per cluster, bytes per CTA."""

    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_shared: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return math.prod(self.block)


def make_shape(name: str, grid: Any, block: Any, cluster: Any, dynamic_shared: Any) -> LaunchShape:
    """Return the sizes of a launch of the kernel `name`, as plain integers.

    Raises UsageError for anything but three integers of at least 1, and an integer of bytes.
    """
    triples = []
    for what, sizes in (("grid", grid), ("block", block), ("cluster", cluster)):
        numbers = read_integers(sizes, f"{name}: {what}")
        if len(numbers) != 3 or min(numbers) < 1:
            raise UsageError(f"{name}: {what} {sizes} must be three integers of at least 1")
        triples.append((numbers[0], numbers[1], numbers[2]))
    nbytes = read_integer(dynamic_shared, f"{name}: dynamic_shared")
    return LaunchShape(triples[0], triples[1], triples[2], nbytes)


def check_target(target: Sequence[str], gpu: Gpu) -> None:
    """Raise UsageError unless PTX for `target` runs on `gpu`.

    PTX for sm_90 runs on every later GPU, for sm_100f on its family, for sm_100a on that one alone
    (PTX ISA, ".target").
    """
    arch = next((t for t in target if t.startswith("sm_")), "")
    digits = arch.removeprefix("sm_").rstrip("af")
    if not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"the PTX names no GPU in its .target ({', '.join(target) or 'nothing'})")
    number, suffix = int(digits), arch[len("sm_") + len(digits) :]
    if suffix == "a":
        fits = arch == gpu.target
    elif suffix == "f":
        fits = number // 10 == gpu.number // 10 and number <= gpu.number
    else:
        fits = number <= gpu.number
    if not fits:
        raise UsageError(
            f"this PTX is for {arch}, and {gpu.name} is {gpu.target}: compile for {gpu.target} or "
            "choose the GPU it was compiled for"
        )


def check_launch(kernel: Kernel, program: Program, shape: LaunchShape, gpu: Gpu) -> None:
    """Raise UsageError for a launch that the CUDA driver would refuse; the message says why."""
    name = program.name
    _check_limits(name, shape, gpu)
    for directive, is_exact in (("reqntid", True), ("maxntid", False)):
        wanted = kernel.find_directive(directive)
        if wanted:
            full = tuple(wanted) + (1,) * (3 - len(wanted))
            fits = shape.block == full if is_exact else shape.threads <= math.prod(full)
            if not fits:
                raise UsageError(f"{name}: block {shape.block}, but .{directive} says {full}")
    if any(g % c for g, c in zip(shape.grid, shape.cluster, strict=True)):
        raise UsageError(f"{name}: grid {shape.grid} is no multiple of cluster {shape.cluster}")
    if math.prod(shape.cluster) > gpu.max_cluster_opted_in:
        most = gpu.max_cluster_opted_in
        raise UsageError(f"{name}: cluster {shape.cluster} has more than {most} CTAs")
    required = kernel.find_directive("reqnctapercluster")
    if required and shape.cluster != tuple(required) + (1,) * (3 - len(required)):
        raise UsageError(f"{name}: cluster {shape.cluster}, but .reqnctapercluster says {required}")
    if shape.dynamic_shared < 0:
        raise UsageError(f"{name}: {shape.dynamic_shared} bytes of dynamic shared memory")
    static = program.static_shared_end - gpu.reserved_shared_bytes
    if static + shape.dynamic_shared > gpu.shared_bytes_per_cta:
        over = static + shape.dynamic_shared - gpu.shared_bytes_per_cta
        raise UsageError(
            f"{name}: {static} bytes of static and {shape.dynamic_shared} of dynamic shared "
            f"memory: {gpu.name} has {gpu.shared_bytes_per_cta} per CTA ({over} too many)"
        )
    if program.local_bytes > gpu.local_bytes_per_thread:
        raise UsageError(
            f"{name}: {program.local_bytes} bytes of local memory per thread, "
            f"{gpu.local_bytes_per_thread} are allowed"
        )


def _check_limits(name: str, shape: LaunchShape, gpu: Gpu) -> None:
    if shape.threads > gpu.max_threads_per_cta:
        raise UsageError(
            f"{name}: {shape.threads} threads per CTA, {gpu.max_threads_per_cta} are allowed"
        )
    limits = (("grid", shape.grid, gpu.max_grid), ("block", shape.block, gpu.max_block))
    for what, sizes, most in limits:
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if size > limit:
                raise UsageError(f"{name}: {what} {sizes} is over {limit} along {axis}")
