"""NVIDIA's Python bindings (`cuda.bindings.driver`, `.runtime`) answered by the virtual runtime.

Two tables, one per module, made of the same operations. A function that is not in them stays as it
is and raises the bindings' own error about the missing driver. Work is done when its call returns,
so that waiting is a no-op; errors of the virtual GPU are raised as Python exceptions.
"""

import ctypes
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from halfbyte.virtual.driver.attributes import (
    DRIVER_VERSION,
    count_resident_blocks,
    count_resident_clusters,
)
from halfbyte.virtual.driver.calls import get_kernel_attribute, set_kernel_attribute
from halfbyte.virtual.driver.images import read_image, read_image_file
from halfbyte.virtual.driver.launches import (
    ATTRIBUTE_CLUSTER_DIMENSION,
    LaunchRequest,
    find_cluster,
    read_parameters,
)
from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import Event, Kernel, Library, Recording, VirtualRuntime

Table = dict[str, Callable[..., Any]]


def patch_cuda_bindings(patches: Patches, runtime: VirtualRuntime) -> None:
    """Replace the functions of both modules, where the bindings are installed."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        cuda_runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return
    operations = _Operations(runtime)
    success = driver.CUresult.CUDA_SUCCESS
    driver_table = _make_driver_table(operations, driver)
    patches.set_present(
        driver, {name: _with_status(call, success) for name, call in driver_table.items()}
    )
    success = cuda_runtime.cudaError_t.cudaSuccess
    runtime_table = _make_runtime_table(operations, cuda_runtime)
    patches.set_present(
        cuda_runtime, {name: _with_status(call, success) for name, call in runtime_table.items()}
    )


def _with_status(call: Callable[..., Any], success: Any) -> Callable[..., Any]:
    """Return `call` answering as the bindings do: (status,) or (status, value...)."""

    def answer(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        value = call(*arguments, **keywords)
        if value is None:
            return (success,)
        return (success, *value) if isinstance(value, tuple) else (success, value)

    return answer


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


class _Operations:
    """What both tables are made of; handles go in and out as ints."""

    def __init__(self, runtime: VirtualRuntime) -> None:
        self.runtime = runtime
        self.facts = runtime.facts

    def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def get_zero(self, *_: Any, **__: Any) -> int:
        return 0

    def get_device_attribute(self, attribute: Any, *_: Any) -> int:
        return self.runtime.attributes.get(int(attribute), 1)

    def get_version(self) -> int:
        return DRIVER_VERSION

    def get_memory_info(self, *_: Any) -> tuple[int, int]:
        return self.facts.memory_bytes, self.facts.memory_bytes

    def copy(self, target: Any, source: Any, size: int, *_: Any) -> None:
        if isinstance(source, bytes):  # a recorded copy must find it later, too
            source = ctypes.create_string_buffer(source, len(source))
        target_address, source_address = find_address(target), find_address(source)

        def run(kept: Any = source) -> None:
            ctypes.memmove(target_address, source_address, size)

        self.runtime.submit(run)

    def free(self, address: Any, *_: Any) -> None:
        self.runtime.release(find_address(address))

    def fill_bytes(self, address: Any, value: int, count: int, *_: Any) -> None:
        self.runtime.fill(find_address(address), bytes([value & 0xFF]), count)

    def fill_halves(self, address: Any, value: int, count: int, *_: Any) -> None:
        self.runtime.fill(find_address(address), (value & 0xFFFF).to_bytes(2, "little"), count)

    def fill_words(self, address: Any, value: int, count: int, *_: Any) -> None:
        self.runtime.fill(find_address(address), (value & 0xFFFFFFFF).to_bytes(4, "little"), count)

    def load_library(self, image: Any, *_: Any) -> int:
        if isinstance(image, bytes | bytearray):
            return self.runtime.load_library(bytes(image))
        return self.runtime.load_library(read_image(find_address(image)))

    def load_library_file(self, path: Any, *_: Any) -> int:
        return self.runtime.load_library(read_image_file(_name(path)))

    def unload(self, handle: Any) -> None:
        self.runtime.drop(int(handle))

    def find_kernel(self, library: Any, name: Any) -> int:
        return self.runtime.find_kernel(int(library), _name(name))

    def list_kernels(self, count: int, library: Any) -> list[int]:
        names = self.runtime.list_kernels(int(library))[:count]
        return [self.runtime.find_kernel(int(library), name) for name in names]

    def count_kernels(self, library: Any) -> int:
        return len(self.runtime.list_kernels(int(library)))

    def find_global(self, library: Any, name: Any) -> tuple[int, int]:
        return self.runtime.find_global(int(library), _name(name))

    def find_library(self, library: Any) -> Library:
        found: Library = self.runtime.find(int(library), Library)
        return found

    def get_kernel_attribute(self, attribute: Any, kernel: Any, *_: Any) -> int:
        found: Kernel = self.runtime.find(int(kernel), Kernel)
        return get_kernel_attribute(self.runtime, found, int(attribute))

    def set_kernel_attribute(self, kernel: Any, attribute: Any, value: int, *_: Any) -> None:
        found: Kernel = self.runtime.find(int(kernel), Kernel)
        set_kernel_attribute(self.runtime, found, int(attribute), int(value))

    def count_blocks(self, kernel: Any, threads: int, shared_bytes: int, *_: Any) -> int:
        return count_resident_blocks(self.facts, threads, shared_bytes)

    def count_clusters(self, kernel: Any, config: Any) -> int:
        x, y, z = find_cluster(_read_attributes(config)) or (1, 1, 1)
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        per_sm = count_resident_blocks(self.facts, threads, config.sharedMemBytes)
        return count_resident_clusters(self.facts, x * y * z, per_sm)

    def launch(self, kernel: Any, *arguments: Any) -> None:
        """Launch as cuLaunchKernel does: six dimensions, shared bytes, stream, parameters."""
        grid, block = tuple(arguments[0:3]), tuple(arguments[3:6])
        self._launch(kernel, grid, block, (), int(arguments[6]), arguments[8])

    def launch_ex(self, config: Any, kernel: Any, parameters: Any, *_: Any) -> None:
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
        return self.runtime.keep(Event())

    def record_event(self, event: Any, *_: Any) -> None:
        self.runtime.record_event(self.runtime.find(int(event), Event))

    def measure_elapsed(self, start: Any, end: Any) -> float:
        find = self.runtime.find
        return self.runtime.measure_elapsed_ms(find(int(start), Event), find(int(end), Event))

    def create_stream(self, *_: Any) -> int:
        return self.runtime.keep("stream")

    def begin_capture(self, *_: Any) -> None:
        self.runtime.begin_recording()

    def end_capture(self, *_: Any) -> int:
        return self.runtime.keep(self.runtime.end_recording())

    def instantiate(self, graph: Any, *_: Any) -> int:
        return self.runtime.keep(self.runtime.find(int(graph), Recording))

    def launch_graph(self, executable: Any, *_: Any) -> None:
        recording: Recording = self.runtime.find(int(executable), Recording)
        self.runtime.submit(recording.run)

    def list_nodes(self, graph: Any, count: int = 0) -> tuple[list[Any], int]:
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


def _make_driver_table(operations: _Operations, driver: Any) -> Table:
    facts = operations.facts

    def typed(kind: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: kind(call(*arguments))

    def get_kernels(count: int, library: Any) -> list[Any]:
        return [driver.CUkernel(kernel) for kernel in operations.list_kernels(count, library)]

    def get_pointer_pair(library: Any, name: Any) -> tuple[Any, int]:
        address, size = operations.find_global(library, name)
        return driver.CUdeviceptr(address), size

    table: Table = {
        "cuInit": operations.ignore,
        "cuDriverGetVersion": operations.get_version,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": typed(driver.CUdevice, operations.get_zero),
        "cuCtxGetDevice": typed(driver.CUdevice, operations.get_zero),
        "cuDeviceGetName": lambda length, device: facts.name.encode()[:length],
        "cuDeviceTotalMem": lambda device: facts.memory_bytes,
        "cuDeviceComputeCapability": lambda device: (facts.major, facts.minor),
        "cuDeviceGetAttribute": operations.get_device_attribute,
        "cuDeviceCanAccessPeer": operations.get_zero,
        "cuGetErrorName": lambda error: error.name.encode(),
        "cuGetErrorString": lambda error: error.name.encode(),
        "cuMemGetInfo": operations.get_memory_info,
        "cuMemAlloc": typed(driver.CUdeviceptr, lambda size, *_: operations.runtime.allocate(size)),
        "cuMemFree": operations.free,
        "cuMemcpy": operations.copy,
        "cuMemsetD8": operations.fill_bytes,
        "cuMemsetD16": operations.fill_halves,
        "cuMemsetD32": operations.fill_words,
        "cuLibraryLoadData": typed(driver.CUlibrary, operations.load_library),
        "cuLibraryLoadFromFile": typed(driver.CUlibrary, operations.load_library_file),
        "cuLibraryUnload": operations.unload,
        "cuLibraryGetKernel": typed(driver.CUkernel, operations.find_kernel),
        "cuLibraryGetKernelCount": operations.count_kernels,
        "cuLibraryEnumerateKernels": get_kernels,
        "cuLibraryGetGlobal": get_pointer_pair,
        "cuKernelGetFunction": typed(driver.CUfunction, int),
        "cuKernelGetAttribute": operations.get_kernel_attribute,
        "cuKernelSetAttribute": lambda attribute, value, kernel, *_: (
            operations.set_kernel_attribute(kernel, attribute, value)
        ),
        "cuModuleLoadData": typed(driver.CUmodule, operations.load_library),
        "cuModuleLoad": typed(driver.CUmodule, operations.load_library_file),
        "cuModuleUnload": operations.unload,
        "cuModuleGetFunction": typed(driver.CUfunction, operations.find_kernel),
        "cuModuleGetGlobal": get_pointer_pair,
        "cuFuncSetAttribute": operations.set_kernel_attribute,
        "cuFuncGetAttribute": operations.get_kernel_attribute,
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda *_: facts.shared_bytes_per_block,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": operations.count_blocks,
        "cuOccupancyMaxActiveClusters": operations.count_clusters,
        "cuLaunchKernel": operations.launch,
        "cuLaunchKernelEx": operations.launch_ex,
        "cuStreamCreate": typed(driver.CUstream, operations.create_stream),
        "cuStreamBeginCapture": operations.begin_capture,
        "cuStreamEndCapture": typed(driver.CUgraph, operations.end_capture),
        "cuEventCreate": typed(driver.CUevent, operations.create_event),
        "cuEventRecord": operations.record_event,
        "cuEventElapsedTime": operations.measure_elapsed,
        "cuGraphInstantiate": typed(driver.CUgraphExec, operations.instantiate),
        "cuGraphLaunch": operations.launch_graph,
    }
    for name in ("cuCtxGetCurrent", "cuCtxCreate", "cuDevicePrimaryCtxRetain"):
        table[name] = lambda *_: driver.CUcontext(1)
    for name in _IGNORED_BY_DRIVER:
        table[name] = operations.ignore
    for name, same in _SAME_AS.items():
        table[name] = table[same]
    return table


_IGNORED_BY_DRIVER = (
    "cuCtxSetCurrent",
    "cuCtxDestroy",
    "cuCtxSynchronize",
    "cuCtxPushCurrent",
    "cuDevicePrimaryCtxRelease",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamQuery",
    "cuEventDestroy",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphUpload",
    "cuProfilerStart",
    "cuProfilerStop",
)
_SAME_AS = {
    "cuMemAllocAsync": "cuMemAlloc",
    "cuMemAllocManaged": "cuMemAlloc",
    "cuMemFreeAsync": "cuMemFree",
    "cuMemcpyHtoD": "cuMemcpy",
    "cuMemcpyDtoH": "cuMemcpy",
    "cuMemcpyDtoD": "cuMemcpy",
    "cuMemcpyAsync": "cuMemcpy",
    "cuMemcpyHtoDAsync": "cuMemcpy",
    "cuMemcpyDtoHAsync": "cuMemcpy",
    "cuMemcpyDtoDAsync": "cuMemcpy",
    "cuMemsetD8Async": "cuMemsetD8",
    "cuMemsetD16Async": "cuMemsetD16",
    "cuMemsetD32Async": "cuMemsetD32",
    "cuStreamCreateWithPriority": "cuStreamCreate",
    "cuEventRecordWithFlags": "cuEventRecord",
}


def _make_runtime_table(operations: _Operations, cuda: Any) -> Table:
    def typed(kind: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: kind(call(*arguments))

    def copy(target: Any, source: Any, size: int, kind: Any = None, *_: Any) -> None:
        operations.copy(target, source, size)

    table: Table = {
        "cudaGetDeviceCount": lambda: 1,
        "cudaGetDevice": operations.get_zero,
        "cudaDeviceGetAttribute": operations.get_device_attribute,
        "cudaRuntimeGetVersion": operations.get_version,
        "cudaDriverGetVersion": operations.get_version,
        "cudaGetErrorName": lambda error: error.name.encode(),
        "cudaGetErrorString": lambda error: error.name.encode(),
        "cudaMemGetInfo": operations.get_memory_info,
        "cudaMemset": operations.fill_bytes,
        "cudaMemsetAsync": operations.fill_bytes,
        "cudaLibraryLoadData": typed(cuda.cudaLibrary_t, operations.load_library),
        "cudaLibraryLoadFromFile": typed(cuda.cudaLibrary_t, operations.load_library_file),
        "cudaLibraryUnload": operations.unload,
        "cudaLibraryGetKernel": typed(cuda.cudaKernel_t, operations.find_kernel),
        "cudaLibraryGetGlobal": operations.find_global,
        "cudaStreamBeginCapture": operations.begin_capture,
        "cudaStreamEndCapture": typed(cuda.cudaGraph_t, operations.end_capture),
        "cudaEventRecord": operations.record_event,
        "cudaEventElapsedTime": operations.measure_elapsed,
        "cudaGraphInstantiate": typed(cuda.cudaGraphExec_t, operations.instantiate),
        "cudaGraphLaunch": operations.launch_graph,
        "cudaGraphGetNodes": operations.list_nodes,
        "cudaFuncSetAttribute": operations.set_kernel_attribute,
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor": operations.count_blocks,
    }
    for name in ("cudaMalloc", "cudaMallocAsync", "cudaMallocHost", "cudaMallocManaged"):
        table[name] = lambda size, *_: operations.runtime.allocate(size)
    for name in ("cudaFree", "cudaFreeAsync", "cudaFreeHost"):
        table[name] = operations.free
    for name in ("cudaMemcpy", "cudaMemcpyAsync"):
        table[name] = copy
    for name in ("cudaEventCreate", "cudaEventCreateWithFlags"):
        table[name] = typed(cuda.cudaEvent_t, operations.create_event)
    for name in ("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"):
        table[name] = typed(cuda.cudaStream_t, operations.create_stream)
    for name in _IGNORED_BY_RUNTIME:
        table[name] = operations.ignore
    return table


_IGNORED_BY_RUNTIME = (
    "cudaSetDevice",
    "cudaDeviceSynchronize",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaStreamDestroy",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "cudaStreamQuery",
    "cudaEventDestroy",
    "cudaEventSynchronize",
    "cudaEventQuery",
    "cudaGraphDestroy",
    "cudaGraphExecDestroy",
    "cudaGraphUpload",
    "cudaProfilerStart",
    "cudaProfilerStop",
)
