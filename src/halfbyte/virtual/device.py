"""A virtual GPU with a plain interface: load PTX, launch its kernels on NumPy or torch buffers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from halfbyte.arch import Gpu, find_gpu
from halfbyte.errors import PtxError, UsageError
from halfbyte.ptx.inline_calls import inline_calls
from halfbyte.ptx.parser import parse
from halfbyte.ptx.syntax import Kernel, Variable
from halfbyte.virtual.arguments import encode_arguments, lend_arrays
from halfbyte.virtual.launch_options import LaunchOptions
from halfbyte.virtual.launch_shape import Triple, check_launch, check_target, make_shape
from halfbyte.virtual.lowering import Program, lower_kernel, make_layout
from halfbyte.virtual.lowering.global_data import make_initial_bytes
from halfbyte.virtual.memory import DeviceMemory, make_aligned_bytes
from halfbyte.virtual.plain_values import show
from halfbyte.virtual.report import LaunchReport
from halfbyte.virtual.running import LoadedProgram, run_launch

__all__ = ["Device", "DeviceModule", "LaunchOptions"]


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
        self.options = check_options(options) or LaunchOptions()
        self.memory = DeviceMemory()
        self._modules: dict[str, DeviceModule] = {}

    def load(self, ptx: str) -> "DeviceModule":
        """Return the module of a PTX text; the same text gives the same module.

        Raises PtxError for text that is no PTX, UsageError for a target this GPU cannot run.
        """
        if not isinstance(ptx, str):
            raise UsageError(f"PTX is text, a str is wanted; {show(ptx)} came")
        module = self._modules.get(ptx)
        if module is None:
            module = self._modules[ptx] = DeviceModule(self, ptx)
        return module


class DeviceModule:
    """The kernels and variables of one PTX text on a device."""

    def __init__(self, device: Device, ptx: str) -> None:
        """Parse `ptx`, check its target, place its variables; kernels are lowered on first use."""
        self.device = device
        self.syntax = parse(ptx.removesuffix("\0"))  # a C string, as the driver takes it
        check_target(self.syntax.target, device.gpu)
        self.addresses = self._place_variables(device.memory)
        self._programs: dict[str, LoadedProgram] = {}

    @property
    def kernels(self) -> dict[str, Program]:
        """Every kernel that has a body, lowered, by name."""
        return {k.name: self.find_program(k.name).program for k in self.syntax.kernels if k.body}

    def find_program(self, name: str) -> LoadedProgram:
        """Return the lowered kernel of that name; UsageError naming the kernels there are."""
        if not isinstance(name, str):
            raise UsageError(f"the name of a kernel is {show(name)}; a str is wanted")
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
        shape = make_shape(name, grid, block, cluster, dynamic_shared)
        check_launch(self._find_kernel(name), loaded.program, shape, device.gpu)
        if parameters is None:
            parameters = encode_arguments(loaded.program, arguments)
        else:
            parameters, arguments = check_parameters(loaded.program, parameters), ()
        options = check_options(options) or device.options
        with device.memory.lock, lend_arrays(device.memory, arguments):
            return run_launch(device, loaded, shape, parameters, options)

    def read_variable(self, name: str, dtype: Any = np.uint8) -> Any:
        """Return a view of a global variable as a one-dimensional NumPy array."""
        if name not in self.addresses:
            raise UsageError(f"no global variable {name!r}; there are {sorted(self.addresses)}")
        try:
            return self._storage[name].view(dtype)
        except (TypeError, ValueError) as error:
            nbytes = self._storage[name].size
            raise UsageError(f"{name} has {nbytes} bytes, no {dtype!r} array: {error}") from None

    def _find_kernel(self, name: str) -> Kernel:
        for kernel in self.syntax.kernels:
            if kernel.name == name and kernel.body is not None:
                return kernel
        names = [kernel.name for kernel in self.syntax.kernels]
        raise UsageError(f"no kernel {name!r} in this module; it has {', '.join(names) or 'none'}")

    def _lower(self, kernel: Kernel) -> Program:
        body = inline_calls(self.syntax, kernel)
        layout = make_layout(self.syntax, body, self.device.gpu.reserved_shared_bytes)
        return lower_kernel(self.syntax, body, layout, self.addresses)

    def _place_variables(self, memory: DeviceMemory) -> dict[str, int]:
        variables = [v for v in self.syntax.globals if v.space in ("global", "const")]
        check_variables(variables, self.device.gpu)
        self._storage = {v.name: make_aligned_bytes(v.size_bytes) for v in variables}
        addresses = {name: int(data.ctypes.data) for name, data in self._storage.items()}
        for variable in variables:
            data = self._storage[variable.name]
            start = np.frombuffer(make_initial_bytes(variable, addresses), np.uint8)
            data[: start.size] = start  # the rest is zero
            memory.register(
                addresses[variable.name],
                data.size,
                f".{variable.space} {variable.name}",
                keep=data,
                read_only=variable.space == "const",
            )
        return addresses


def check_options(options: Any) -> LaunchOptions | None:
    """Return `options`; UsageError unless they are a LaunchOptions or None."""
    if options is not None and not isinstance(options, LaunchOptions):
        raise UsageError(f"options are {show(options)}; a LaunchOptions or None is wanted")
    return options


def check_parameters(program: Program, parameters: Any) -> bytes:
    """Return the parameter block of a launch; UsageError for another type or too few bytes."""
    if not isinstance(parameters, bytes | bytearray | memoryview):
        raise UsageError(f"parameters are {show(parameters)}; bytes are wanted")
    block = bytes(parameters)
    if len(block) < program.parameter_bytes:
        raise UsageError(
            f"{program.name} has {program.parameter_bytes} bytes of parameters, {len(block)} came"
        )
    return block


def check_variables(variables: Sequence[Variable], gpu: Gpu) -> None:
    """Raise PtxError for variables that the GPU has no room for."""
    for space, limit in (("const", gpu.constant_bytes), ("global", gpu.memory_bytes)):
        nbytes = 0
        for variable in variables:
            nbytes += variable.size_bytes if variable.space == space else 0
            if nbytes > limit:
                raise PtxError(
                    f"line {variable.line}: .{space} variables up to {variable.name} take "
                    f"{nbytes} bytes, {gpu.name} has {limit}",
                    variable.line,
                )
