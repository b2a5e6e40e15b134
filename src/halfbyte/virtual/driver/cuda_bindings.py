"""NVIDIA's Python bindings (`cuda.bindings.driver`, `.runtime`) answered by the virtual runtime.

Two tables, one per module, made of the same operations. A function that is not in them stays as it
is and raises the bindings' own error about the missing driver. Work is done when its call returns,
so that waiting is a no-op; errors of the virtual GPU are raised as Python exceptions.
"""

import importlib
from collections.abc import Callable
from typing import Any

from halfbyte.virtual.driver.binding_operations import Operations
from halfbyte.virtual.driver.patching import Patches
from halfbyte.virtual.driver.runtime import CudaError, VirtualRuntime

Table = dict[str, Callable[..., Any]]


def patch_cuda_bindings(patches: Patches, runtime: VirtualRuntime) -> None:
    """Replace the functions of both modules, where the bindings are installed."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        cuda_runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return
    operations = Operations(runtime)
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
        try:
            value = call(*arguments, **keywords)
        except CudaError as error:
            return (type(success)(error.code),)
        if value is None:
            return (success,)
        return (success, *value) if isinstance(value, tuple) else (success, value)

    return answer


def _typed(kind: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return `call` with its int turned into a handle of the bindings."""
    return lambda *arguments: kind(call(*arguments))


def _make_driver_table(operations: Operations, driver: Any) -> Table:
    gpu = operations.gpu

    table: Table = {
        "cuInit": operations.ignore,
        "cuDriverGetVersion": operations.get_version,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": _typed(driver.CUdevice, operations.get_zero),
        "cuCtxGetDevice": _typed(driver.CUdevice, operations.get_zero),
        "cuDeviceGetName": lambda length, device: gpu.device_name.encode()[:length],
        "cuDeviceTotalMem": lambda device: gpu.memory_bytes,
        "cuDeviceComputeCapability": lambda device: (gpu.capability[0], gpu.capability[1]),
        "cuDeviceGetAttribute": operations.get_device_attribute,
        "cuDeviceCanAccessPeer": operations.get_zero,
        "cuGetErrorName": lambda error: error.name.encode(),
        "cuGetErrorString": lambda error: error.name.encode(),
        "cuMemGetInfo": operations.get_memory_info,
        "cuMemAlloc": _typed(
            driver.CUdeviceptr, lambda size, *_: operations.runtime.allocate(size)
        ),
        "cuMemFree": operations.free,
        "cuMemcpy": operations.copy,
        "cuMemsetD8": operations.fill_bytes,
        "cuMemsetD16": operations.fill_halves,
        "cuMemsetD32": operations.fill_words,
    }
    for name in ("cuCtxGetCurrent", "cuCtxCreate", "cuDevicePrimaryCtxRetain"):
        table[name] = lambda *_: driver.CUcontext(1)
    for name in _IGNORED_BY_DRIVER:
        table[name] = operations.ignore
    table |= _make_kernel_table(operations, driver)
    for name, same in _SAME_AS.items():
        table[name] = table[same]
    return table


def _make_kernel_table(operations: Operations, driver: Any) -> Table:
    """Return the driver's functions for images, kernels, streams, events and graphs."""

    def get_kernels(count: int, library: Any) -> list[Any]:
        return [driver.CUkernel(kernel) for kernel in operations.list_kernels(count, library)]

    def get_pointer_pair(library: Any, name: Any) -> tuple[Any, int]:
        address, size = operations.find_global(library, name)
        return driver.CUdeviceptr(address), size

    return {
        "cuLibraryLoadData": _typed(driver.CUlibrary, operations.load_library),
        "cuLibraryLoadFromFile": _typed(driver.CUlibrary, operations.load_library_file),
        "cuLibraryUnload": operations.unload,
        "cuLibraryGetKernel": _typed(driver.CUkernel, operations.find_kernel),
        "cuLibraryGetKernelCount": operations.count_kernels,
        "cuLibraryEnumerateKernels": get_kernels,
        "cuLibraryGetGlobal": get_pointer_pair,
        "cuKernelGetFunction": _typed(driver.CUfunction, int),
        "cuKernelGetAttribute": operations.get_kernel_attribute,
        "cuKernelSetAttribute": lambda attribute, value, kernel, *_: (
            operations.set_kernel_attribute(kernel, attribute, value)
        ),
        "cuModuleLoadData": _typed(driver.CUmodule, operations.load_library),
        "cuModuleLoad": _typed(driver.CUmodule, operations.load_library_file),
        "cuModuleUnload": operations.unload,
        "cuModuleGetFunction": _typed(driver.CUfunction, operations.find_kernel),
        "cuModuleGetGlobal": get_pointer_pair,
        "cuFuncSetAttribute": operations.set_kernel_attribute,
        "cuFuncGetAttribute": operations.get_kernel_attribute,
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda *_: operations.gpu.shared_bytes_per_cta,
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": operations.count_blocks,
        "cuOccupancyMaxActiveClusters": operations.count_clusters,
        "cuLaunchKernel": operations.launch,
        "cuLaunchKernelEx": operations.launch_ex,
        "cuStreamCreate": _typed(driver.CUstream, operations.create_stream),
        "cuStreamBeginCapture": operations.begin_capture,
        "cuStreamEndCapture": _typed(driver.CUgraph, operations.end_capture),
        "cuEventCreate": _typed(driver.CUevent, operations.create_event),
        "cuEventRecord": operations.record_event,
        "cuEventElapsedTime": operations.measure_elapsed,
        "cuGraphInstantiate": _typed(driver.CUgraphExec, operations.instantiate),
        "cuGraphLaunch": operations.launch_graph,
    }


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


def _make_runtime_table(operations: Operations, cuda: Any) -> Table:
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
        "cudaLibraryLoadData": _typed(cuda.cudaLibrary_t, operations.load_library),
        "cudaLibraryLoadFromFile": _typed(cuda.cudaLibrary_t, operations.load_library_file),
        "cudaLibraryUnload": operations.unload,
        "cudaLibraryGetKernel": _typed(cuda.cudaKernel_t, operations.find_kernel),
        "cudaLibraryGetGlobal": operations.find_global,
        "cudaStreamBeginCapture": operations.begin_capture,
        "cudaStreamEndCapture": _typed(cuda.cudaGraph_t, operations.end_capture),
        "cudaEventRecord": operations.record_event,
        "cudaEventElapsedTime": operations.measure_elapsed,
        "cudaGraphInstantiate": _typed(cuda.cudaGraphExec_t, operations.instantiate),
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
        table[name] = _typed(cuda.cudaEvent_t, operations.create_event)
    for name in ("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"):
        table[name] = _typed(cuda.cudaStream_t, operations.create_stream)
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
