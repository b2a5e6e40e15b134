"""A virtual GPU with a plain interface: load PTX, launch its kernels on NumPy or torch buffers."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfbyte.arch import Gpu, find_gpu
from halfbyte.errors import UsageError
from halfbyte.ptx.inline_calls import inline_calls
from halfbyte.ptx.parser import parse
from halfbyte.ptx.syntax import Kernel
from halfbyte.virtual.arguments import encode_arguments, lend_arrays
from halfbyte.virtual.lowering import Program, lower_kernel, make_layout
from halfbyte.virtual.lowering.global_data import make_initial_bytes
from halfbyte.virtual.memory import DeviceMemory, make_aligned_bytes
from halfbyte.virtual.report import LaunchReport
from halfbyte.virtual.running import LoadedProgram, run_launch

Triple = tuple[int, int, int]
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_CLUSTER = 16  # with the opt-in to non-portable sizes


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """How the virtual GPU runs a launch; the defaults suit programs, the rest suits tests.

    Attributes:
        adversarial_try_wait: the first failing `mbarrier.try_wait` of a wait returns false at once,
            as the PTX ISA allows, instead of suspending: code that never tests its result is found.
        latency_seed: 0 for fixed latencies, else asynchronous work takes 0.2x to 2.2x as long.
        reverse_warps: later warps go first where the clock does not decide.
        livelock_instructions: instructions of the launch without any progress (stores, barriers,
            completions, exits) that count as a livelock.
        max_instructions: 0, or the most instructions a launch may take.
        num_threads: host threads for tensor core arithmetic; results do not depend on it.
        shared_poison: byte that fresh shared memory holds.
        print_text: receives what kernels print; None is standard output.
    """

    adversarial_try_wait: bool = False
    latency_seed: int = 0
    reverse_warps: bool = False
    livelock_instructions: int = 50_000_000
    max_instructions: int = 0
    num_threads: int = min(os.cpu_count() or 1, 8)
    shared_poison: int = 0xAB
    print_text: Callable[[str], None] | None = None


class Device:
    """One virtual GPU: its memory and the modules loaded on it."""

    def __init__(self, gpu: str | Gpu = "b200", options: LaunchOptions | None = None) -> None:
        """Make a device.

        Args:
            gpu: a name of `halfbyte.arch.GPUS` or a record.
            options: what launches use that bring no options of their own.

        Raises MissingDependencyError where the compiled core is not built, UsageError for a name
        that is not known.
        """
        self.gpu = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
        self.options = options or LaunchOptions()
        self.memory = DeviceMemory()
        self._modules: dict[str, DeviceModule] = {}

    def load(self, ptx: str) -> "DeviceModule":
        """Return the module of a PTX text; the same text gives the same module.

        Raises PtxError for text that is no PTX, UsageError for a target this GPU cannot run.
        """
        module = self._modules.get(ptx)
        if module is None:
            module = self._modules[ptx] = DeviceModule(self, ptx)
        return module


class DeviceModule:
    """The kernels and variables of one PTX text on a device."""

    def __init__(self, device: Device, ptx: str) -> None:
        """Parse `ptx`, check its target, place its variables; kernels are lowered on first use."""
        self.device = device
        self.syntax = parse(ptx)
        check_target(self.syntax.target, device.gpu)
        self.addresses = self._place_variables(device.memory)
        self._programs: dict[str, LoadedProgram] = {}

    @property
    def kernels(self) -> dict[str, Program]:
        """Every kernel that has a body, lowered, by name."""
        return {k.name: self.find_program(k.name).program for k in self.syntax.kernels if k.body}

    def find_program(self, name: str) -> LoadedProgram:
        """Return the lowered kernel of that name; UsageError naming the kernels there are."""
        loaded = self._programs.get(name)
        if loaded is None:
            loaded = self._programs[name] = LoadedProgram(self._lower(self._find_kernel(name)))
        return loaded

    def launch(
        self,
        name: str,
        grid: Triple,
        block: Triple,
        cluster: Triple = (1, 1, 1),
        dynamic_shared: int = 0,
        arguments: Sequence[Any] = (),
        *,
        parameters: bytes | None = None,
        options: LaunchOptions | None = None,
    ) -> LaunchReport:
        """Return the report of one launch, run to its end.

        Args:
            name: the kernel.
            grid: CTAs along x, y, z.
            block: threads of a CTA along x, y, z.
            cluster: CTAs of a cluster along x, y, z.
            dynamic_shared: bytes of dynamic shared memory per CTA.
            arguments: one value per parameter, see `encode_arguments`.
            parameters: instead of `arguments`, the bytes of the parameter block.
            options: instead of the device's.

        Raises:
            UsageError: sizes that the GPU or the kernel do not allow, arguments that do not fit.
            KernelFault: the kernel did something illegal.
            Deadlock, Livelock: it never ends.
        """
        device = self.device
        loaded = self.find_program(name)
        shape = LaunchShape(grid, block, cluster, dynamic_shared)
        check_launch(self._find_kernel(name), loaded.program, shape, device.gpu)
        if parameters is None:
            parameters = encode_arguments(loaded.program, arguments)
        elif len(parameters) < loaded.program.parameter_bytes:
            raise UsageError(
                f"{name} has {loaded.program.parameter_bytes} bytes of parameters, "
                f"{len(parameters)} came"
            )
        with lend_arrays(device.memory, arguments):
            return run_launch(device, loaded, shape, parameters, options or device.options)

    def read_variable(self, name: str, dtype: Any = np.uint8) -> Any:
        """Return a view of a global variable as a one-dimensional NumPy array."""
        if name not in self.addresses:
            raise UsageError(f"no global variable {name!r}; there are {sorted(self.addresses)}")
        return self._storage[name].view(dtype)

    def _find_kernel(self, name: str) -> Kernel:
        for kernel in self.syntax.kernels:
            if kernel.name == name and kernel.body is not None:
                return kernel
        names = [kernel.name for kernel in self.syntax.kernels]
        raise UsageError(f"no kernel {name!r} in this module; it has {', '.join(names) or 'none'}")

    def _lower(self, kernel: Kernel) -> Program:
        body = inline_calls(self.syntax, kernel)
        return lower_kernel(self.syntax, body, make_layout(self.syntax, body), self.addresses)

    def _place_variables(self, memory: DeviceMemory) -> dict[str, int]:
        variables = [v for v in self.syntax.globals if v.space in ("global", "const")]
        self._storage = {v.name: make_aligned_bytes(v.size_bytes) for v in variables}
        addresses = {name: int(data.ctypes.data) for name, data in self._storage.items()}
        for variable in variables:
            data = self._storage[variable.name]
            data[:] = np.frombuffer(make_initial_bytes(variable, addresses), np.uint8)
            memory.register(
                addresses[variable.name],
                data.size,
                f".{variable.space} {variable.name}",
                keep=data,
                read_only=variable.space == "const",
            )
        return addresses


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes of a launch: CTAs, threads, CTAs per cluster, bytes per CTA."""

    grid: Triple
    block: Triple
    cluster: Triple
    dynamic_shared: int


def check_target(target: Sequence[str], gpu: Gpu) -> None:
    """Raise UsageError unless PTX for `target` runs on `gpu`.

    PTX for sm_90 runs on every later GPU, for sm_100f on its family, for sm_100a on that one alone
    (PTX ISA, ".target").
    """
    arch = next((t for t in target if t.startswith("sm_")), "")
    digits = arch.removeprefix("sm_").rstrip("af")
    if not digits.isdigit():
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
    for what, sizes in (("grid", shape.grid), ("block", shape.block), ("cluster", shape.cluster)):
        if len(sizes) != 3 or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise UsageError(f"{name}: {what} {sizes} must be three integers of at least 1")
    if any(size > limit for size, limit in zip(shape.grid, _MAX_GRID, strict=True)):
        raise UsageError(f"{name}: grid {shape.grid} is over {_MAX_GRID}")
    threads = int(np.prod(shape.block))
    if threads > gpu.max_threads_per_cta:
        raise UsageError(
            f"{name}: {threads} threads per CTA, {gpu.max_threads_per_cta} are allowed"
        )
    for directive, is_exact in (("reqntid", True), ("maxntid", False)):
        wanted = kernel.find_directive(directive)
        if wanted:
            full = tuple(wanted) + (1,) * (3 - len(wanted))
            fits = shape.block == full if is_exact else threads <= int(np.prod(full))
            if not fits:
                raise UsageError(f"{name}: block {shape.block}, but .{directive} says {full}")
    if any(g % c for g, c in zip(shape.grid, shape.cluster, strict=True)):
        raise UsageError(f"{name}: grid {shape.grid} is no multiple of cluster {shape.cluster}")
    if int(np.prod(shape.cluster)) > _MAX_CLUSTER:
        raise UsageError(f"{name}: cluster {shape.cluster} has more than {_MAX_CLUSTER} CTAs")
    required = kernel.find_directive("reqnctapercluster")
    if required and shape.cluster != tuple(required) + (1,) * (3 - len(required)):
        raise UsageError(f"{name}: cluster {shape.cluster}, but .reqnctapercluster says {required}")
    static = program.static_shared_end - gpu.reserved_shared_bytes
    if shape.dynamic_shared < 0 or static + shape.dynamic_shared > gpu.shared_bytes_per_cta:
        over = static + shape.dynamic_shared - gpu.shared_bytes_per_cta
        raise UsageError(
            f"{name}: {static} bytes of static and {shape.dynamic_shared} of dynamic shared "
            f"memory: {gpu.name} has {gpu.shared_bytes_per_cta} per CTA ({over} too many)"
        )
