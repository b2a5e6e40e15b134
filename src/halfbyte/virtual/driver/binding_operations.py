"""What CUDA's Python bindings can do on the virtual GPU; handles go in and out as ints."""

import ctypes
from collections.abc import Sequence
from typing import Any

from halfbyte.virtual.driver.attributes import (
    DRIVER_VERSION,
)
from halfbyte.virtual.driver.calls import get_kernel_attribute, set_kernel_attribute
from halfbyte.virtual.driver.images import read_image, read_image_file
from halfbyte.virtual.driver.launches import (
    ATTRIBUTE_CLUSTER_DIMENSION,
    LaunchRequest,
    find_cluster,
    read_parameters,
)
from halfbyte.virtual.driver.runtime import Event, Kernel, Recording, VirtualRuntime
from halfbyte.virtual.occupancy import count_ctas_per_sm, count_resident_clusters


def find_address(value: Any) -> int:
    """Return the address in an int, a handle object, or that of a buffer's first byte."""
    if value is None:
        return 0
    if hasattr(value, "__index__") or hasattr(value, "__int__"):
        return int(value)
    if hasattr(value, "getPtr"):
        return int(value.getPtr())
    view = memoryview(value)
    if view.readonly:
        return ctypes.cast(ctypes.c_char_p(bytes(view)), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _name(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class Operations:
    """What both tables are made of; handles go in and out as ints."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        """Act on `runtime`."""
        self.runtime = runtime
        self.gpu = runtime.gpu

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def get_zero(self, *_: Any, **__: Any) -> int:
        """Return 0: the only device, or a flag that is not set."""
        return 0

    def get_device_attribute(self, attribute: Any, *_: Any) -> int:
        """Return the value of a CUdevice_attribute."""
        return self.runtime.attributes.get(int(attribute), 1)

    def get_version(self) -> int:
        """Return the driver's version, e.g. 13020."""
        return DRIVER_VERSION

    def get_memory_info(self, *_: Any) -> tuple[int, int]:
        """Return free and total bytes; the host's memory is the true limit."""
        return self.gpu.memory_bytes, self.gpu.memory_bytes

    def copy(self, target: Any, source: Any, size: int, *_: Any) -> None:
        """Copy bytes between any two addresses or buffers."""
        if isinstance(source, bytes):  # a recorded copy must find it later, too
            source = ctypes.create_string_buffer(source, len(source))
        target_address, source_address = find_address(target), find_address(source)

        def run(kept: Any = source) -> None:
            ctypes.memmove(target_address, source_address, size)

        self.runtime.submit(run)

    def free(self, address: Any, *_: Any) -> None:
        """Free what `allocate` gave."""
        self.runtime.release(find_address(address))

    def fill_bytes(self, address: Any, value: int, count: int, *_: Any) -> None:
        """Write a byte `count` times."""
        self.runtime.fill(find_address(address), bytes([value & 0xFF]), count)

    def fill_halves(self, address: Any, value: int, count: int, *_: Any) -> None:
        """Write 16 bits `count` times."""
        self.runtime.fill(find_address(address), (value & 0xFFFF).to_bytes(2, "little"), count)

    def fill_words(self, address: Any, value: int, count: int, *_: Any) -> None:
        """Write 32 bits `count` times."""
        self.runtime.fill(find_address(address), (value & 0xFFFFFFFF).to_bytes(4, "little"), count)

    def load_library(self, image: Any, *_: Any) -> int:
        """Return the handle of an image in bytes or at an address."""
        if isinstance(image, bytes | bytearray):
            return self.runtime.load_library(bytes(image))
        return self.runtime.load_library(read_image(find_address(image)))

    def load_library_file(self, path: Any, *_: Any) -> int:
        """Return the handle of an image in a file."""
        return self.runtime.load_library(read_image_file(_name(path)))

    def unload(self, handle: Any) -> None:
        """Forget a handle."""
        self.runtime.drop(int(handle))

    def find_kernel(self, library: Any, name: Any) -> int:
        """Return the handle of a kernel."""
        return self.runtime.find_kernel(int(library), _name(name))

    def list_kernels(self, count: int, library: Any) -> list[int]:
        """Return handles of the first `count` kernels."""
        names = self.runtime.list_kernels(int(library))[:count]
        return [self.runtime.find_kernel(int(library), name) for name in names]

    def count_kernels(self, library: Any) -> int:
        """Return the number of kernels of a library."""
        return len(self.runtime.list_kernels(int(library)))

    def find_global(self, library: Any, name: Any) -> tuple[int, int]:
        """Return address and bytes of a global variable."""
        return self.runtime.find_global(int(library), _name(name))

    def get_kernel_attribute(self, attribute: Any, kernel: Any, *_: Any) -> int:
        """Return a CUfunction_attribute of a kernel."""
        found: Kernel = self.runtime.find(int(kernel), Kernel)
        return get_kernel_attribute(self.runtime, found, int(attribute))

    def set_kernel_attribute(self, kernel: Any, attribute: Any, value: int, *_: Any) -> None:
        """Set a CUfunction_attribute of a kernel."""
        found: Kernel = self.runtime.find(int(kernel), Kernel)
        set_kernel_attribute(self.runtime, found, int(attribute), int(value))

    def count_blocks(self, kernel: Any, threads: int, shared_bytes: int, *_: Any) -> int:
        """Return the blocks resident on one multiprocessor."""
        return count_ctas_per_sm(self.gpu, threads, shared_bytes)

    def count_clusters(self, kernel: Any, config: Any) -> int:
        """Return the clusters resident on the device."""
        x, y, z = find_cluster(_read_attributes(config)) or (1, 1, 1)
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        per_sm = count_ctas_per_sm(self.gpu, threads, config.sharedMemBytes)
        return count_resident_clusters(self.gpu, x * y * z, per_sm)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Launch as cuLaunchKernel does: six dimensions, shared bytes, stream, parameters."""
        grid, block = tuple(arguments[0:3]), tuple(arguments[3:6])
        self._launch(kernel, grid, block, (), int(arguments[6]), arguments[8])

    def launch_ex(self, config: Any, kernel: Any, parameters: Any, *_: Any) -> None:
        """Launch as cuLaunchKernelEx does: a configuration with attributes."""
        grid = (config.gridDimX, config.gridDimY, config.gridDimZ)
        block = (config.blockDimX, config.blockDimY, config.blockDimZ)
        attributes = _read_attributes(config)
        self._launch(kernel, grid, block, attributes, config.sharedMemBytes, parameters)

    def _launch(
        self,
        kernel: Any,
        grid: Any,
        block: Any,
        attributes: Any,
        shared_bytes: int,
        parameters: Any,
    ) -> None:
        found: Kernel = self.runtime.find(int(kernel), Kernel)
        values = _list_parameters(parameters, self.runtime.list_parameter_bytes(found))
        request = LaunchRequest(
            kernel=found.name,
            grid=grid,
            block=block,
            cluster=find_cluster(attributes),
            dynamic_shared=shared_bytes,
            attributes=tuple(attributes),
            parameters=values,
        )
        self.runtime.launch(found, request)

    def create_event(self, *_: Any) -> int:
        """Return the handle of an event."""
        return self.runtime.keep(Event())

    def record_event(self, event: Any, *_: Any) -> None:
        """Record the device's clock in an event."""
        self.runtime.record_event(self.runtime.find(int(event), Event))

    def measure_elapsed(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two events."""
        find = self.runtime.find
        return self.runtime.measure_elapsed_ms(find(int(start), Event), find(int(end), Event))

    def create_stream(self, *_: Any) -> int:
        """Return the handle of a stream."""
        return self.runtime.keep("stream")

    def begin_capture(self, *_: Any) -> None:
        """Record work from here on."""
        self.runtime.begin_recording()

    def end_capture(self, *_: Any) -> int:
        """Return the handle of what was recorded."""
        return self.runtime.keep(self.runtime.end_recording())

    def instantiate(self, graph: Any, *_: Any) -> int:
        """Return the handle of a graph that can be launched."""
        return self.runtime.keep(self.runtime.find(int(graph), Recording))

    def launch_graph(self, executable: Any, *_: Any) -> None:
        """Run the recorded work once."""
        recording: Recording = self.runtime.find(int(executable), Recording)
        self.runtime.submit(recording.run)

    def list_nodes(self, graph: Any, count: int = 0) -> tuple[list[Any], int]:
        """Return no nodes and how many there are."""
        recording: Recording = self.runtime.find(int(graph), Recording)
        return [], len(recording.actions)


def _read_attributes(config: Any) -> list[tuple[int, tuple[int, int, int]]]:
    found = []
    for attribute in config.attrs or []:
        kind = int(attribute.id)
        value = (1, 1, 1)
        if kind == ATTRIBUTE_CLUSTER_DIMENSION:
            cluster = attribute.value.clusterDim
            value = (cluster.x, cluster.y, cluster.z)
        found.append((kind, value))
    return found


def _list_parameters(parameters: Any, sizes: Sequence[int]) -> tuple[bytes, ...]:
    """Return each parameter's bytes from an array of pointers or from (values, ctypes types)."""
    if not isinstance(parameters, tuple):
        return read_parameters(find_address(parameters), sizes)
    values, kinds = parameters
    found = []
    for value, kind, size in zip(values, kinds, sizes, strict=True):
        if kind is None:  # a ctypes object or a handle: its own bytes
            is_data = isinstance(value, ctypes.Structure | ctypes.Array | ctypes._SimpleCData)
            found.append(bytes(value) if is_data else find_address(value).to_bytes(size, "little"))
        else:
            found.append(bytes(kind(value)))
    return tuple(found)
