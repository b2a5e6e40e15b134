"""What each C call of the compiled host code means: a table from the call's name to a function.

The names are CUDA's without their `cuda` or `cu` (both spell the same call). Every function takes
the runtime and the call's arguments as unsigned 64-bit words and returns a CUDA error code or None
for success.
"""

import ctypes
from collections.abc import Callable, Sequence

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.driver.attributes import (
    KERNEL_MAX_DYNAMIC_SHARED_BYTES,
    KERNEL_MAX_THREADS,
    KERNEL_STATIC_SHARED_BYTES,
)
from halfbyte.virtual.driver.images import read_image, read_image_file
from halfbyte.virtual.driver.launches import (
    Dimensions,
    LaunchConfig,
    LaunchRequest,
    find_cluster,
    read_attributes,
    read_parameters,
)
from halfbyte.virtual.driver.runtime import CudaError, Event, Kernel, Recording, VirtualRuntime
from halfbyte.virtual.driver.tensor_maps import encode_tiled
from halfbyte.virtual.occupancy import count_ctas_per_sm, count_resident_clusters

SUCCESS = 0
INVALID_VALUE = 1
LAUNCH_FAILURE = 719
NOT_SUPPORTED = 801

Call = Callable[[VirtualRuntime, Sequence[int]], int | None]


def _store_pointer(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _store_int(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _signed(word: int) -> int:
    return ctypes.c_int32(word).value


def _text(address: int) -> str:
    return ctypes.string_at(address).decode()


def _library_load_data(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.load_library(read_image(words[1])))


def _library_load_from_file(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.load_library(read_image_file(_text(words[1]))))


def _library_get_kernel(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.find_kernel(words[1], _text(words[2])))


def _library_get_kernel_count(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_int(words[0], len(runtime.list_kernels(words[1])))


def _library_enumerate_kernels(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    for index, name in enumerate(runtime.list_kernels(words[2])[: words[1]]):
        _store_pointer(words[0] + 8 * index, runtime.find_kernel(words[2], name))


def _library_get_global(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    address, size = runtime.find_global(words[2], _text(words[3]))
    if words[0]:
        _store_pointer(words[0], address)
    if words[1]:
        _store_pointer(words[1], size)


def _launch(
    runtime: VirtualRuntime,
    kernel: Kernel,
    config: LaunchConfig,
    arguments: int,
) -> None:
    attributes = read_attributes(config)
    request = LaunchRequest(
        kernel=kernel.name,
        grid=_dimensions(config.grid),
        block=_dimensions(config.block),
        cluster=find_cluster(attributes),
        dynamic_shared=config.shared_bytes,
        attributes=attributes,
        parameters=read_parameters(arguments, runtime.list_parameter_bytes(kernel)),
    )
    runtime.launch(kernel, request)


def _dimensions(values: Sequence[int]) -> Dimensions:
    return values[0], values[1], values[2]


def _launch_kernel_ex(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    kernel: Kernel = runtime.find(words[1], Kernel)
    _launch(runtime, kernel, LaunchConfig.from_address(words[0]), words[2])


def _launch_kernel(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    kernel: Kernel = runtime.find(words[0], Kernel)
    config = LaunchConfig()
    config.grid[:] = [_signed(word) for word in words[1:4]]
    config.block[:] = [_signed(word) for word in words[4:7]]
    config.stream = words[7]
    config.shared_bytes = words[8]
    _launch(runtime, kernel, config, words[9])


def _kernel_get_attribute(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    kernel: Kernel = runtime.find(words[2], Kernel)
    _store_int(words[0], get_kernel_attribute(runtime, kernel, _signed(words[1])))


def get_kernel_attribute(runtime: VirtualRuntime, kernel: Kernel, attribute: int) -> int:
    """Return an attribute of a kernel: what the program set, else what the PTX says, else 0."""
    if attribute in kernel.attributes:
        return kernel.attributes[attribute]
    if attribute == KERNEL_MAX_THREADS:
        return runtime.attributes[1]
    if attribute == KERNEL_STATIC_SHARED_BYTES:
        program = runtime.load_module(kernel.library).find_program(kernel.name).program
        return max(0, int(program.static_shared_end) - runtime.gpu.reserved_shared_bytes)
    return 0


def _kernel_set_attribute(runtime: VirtualRuntime, words: Sequence[int]) -> int | None:
    return set_kernel_attribute(
        runtime, runtime.find(words[0], Kernel), _signed(words[1]), _signed(words[2])
    )


def set_kernel_attribute(
    runtime: VirtualRuntime, kernel: Kernel, attribute: int, value: int
) -> int | None:
    """Set an attribute; more shared memory than the GPU has is refused with an error code."""
    limit = runtime.gpu.shared_bytes_per_cta
    if attribute == KERNEL_MAX_DYNAMIC_SHARED_BYTES and value > limit:
        return INVALID_VALUE
    kernel.attributes[attribute] = value
    return None


def _occupancy_max_active_blocks(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    blocks = count_ctas_per_sm(runtime.gpu, _signed(words[2]), words[3])
    _store_int(words[0], blocks)


def _occupancy_max_active_clusters(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    config = LaunchConfig.from_address(words[2])
    x, y, z = find_cluster(read_attributes(config)) or (1, 1, 1)
    block_x, block_y, block_z = config.block
    per_sm = count_ctas_per_sm(runtime.gpu, block_x * block_y * block_z, config.shared_bytes)
    _store_int(words[0], count_resident_clusters(runtime.gpu, x * y * z, per_sm))


def _device_get_attribute(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_int(words[0], runtime.attributes.get(_signed(words[1]), 1))


def _store_zero(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_int(words[0], 0)


def _store_one(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_int(words[0], 1)


def _set_device(runtime: VirtualRuntime, words: Sequence[int]) -> int | None:
    return INVALID_VALUE if _signed(words[0]) else None


def _succeed(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    """Answer a call that has nothing to do: work is done when its call returns."""


def _malloc(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.allocate(words[1]))


def _free(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.release(words[0])


def _memcpy(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.copy(words[0], words[1], words[2])


def _memset(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.fill(words[0], bytes([words[1] & 0xFF]), words[2])


def _drop(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.drop(words[0])


def _tensor_map_encode_tiled(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    encode_tiled(words)


def _stream_create(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.keep("stream"))


def _stream_add_callback(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    callback = prototype(words[1])
    runtime.submit(lambda: callback(words[0], SUCCESS, words[2]))


def _stream_begin_capture(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.begin_recording()


def _stream_end_capture(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[1], runtime.keep(runtime.end_recording()))


def _event_create(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.keep(Event()))


def _event_record(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    runtime.record_event(runtime.find(words[0], Event))


def _event_elapsed_time(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    start, end = (runtime.find(word, Event) for word in words[1:3])
    ctypes.c_float.from_address(words[0]).value = runtime.measure_elapsed_ms(start, end)


def _graph_instantiate(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    _store_pointer(words[0], runtime.keep(runtime.find(words[1], Recording)))


def _graph_launch(runtime: VirtualRuntime, words: Sequence[int]) -> None:
    recording: Recording = runtime.find(words[0], Recording)
    runtime.submit(recording.run)


CALLS: dict[str, Call] = {
    "LibraryLoadData": _library_load_data,
    "LibraryLoadFromFile": _library_load_from_file,
    "LibraryUnload": _drop,
    "LibraryGetKernel": _library_get_kernel,
    "LibraryGetKernelCount": _library_get_kernel_count,
    "LibraryEnumerateKernels": _library_enumerate_kernels,
    "LibraryGetGlobal": _library_get_global,
    "LaunchKernelEx": _launch_kernel_ex,
    "LaunchKernel": _launch_kernel,
    "KernelGetAttribute": _kernel_get_attribute,
    "KernelSetAttribute": _kernel_set_attribute,
    "OccupancyMaxActiveBlocks": _occupancy_max_active_blocks,
    "OccupancyMaxActiveClusters": _occupancy_max_active_clusters,
    "DeviceGet": _store_zero,
    "GetDevice": _store_zero,
    "SetDevice": _set_device,
    "GetDeviceCount": _store_one,
    "DeviceGetAttribute": _device_get_attribute,
    "DeviceSynchronize": _succeed,
    "TensorMapEncodeTiled": _tensor_map_encode_tiled,
    "Malloc": _malloc,
    "Free": _free,
    "Memcpy": _memcpy,
    "Memset": _memset,
    "StreamCreate": _stream_create,
    "StreamDestroy": _drop,
    "StreamSynchronize": _succeed,
    "StreamWaitEvent": _succeed,
    "StreamAddCallback": _stream_add_callback,
    "StreamBeginCapture": _stream_begin_capture,
    "StreamEndCapture": _stream_end_capture,
    "EventCreate": _event_create,
    "EventDestroy": _drop,
    "EventRecord": _event_record,
    "EventSynchronize": _succeed,
    "EventElapsedTime": _event_elapsed_time,
    "GraphInstantiate": _graph_instantiate,
    "GraphLaunch": _graph_launch,
    "GraphDestroy": _drop,
    "GraphExecDestroy": _drop,
}


def answer_call(runtime: VirtualRuntime, name: str, words: Sequence[int]) -> int:
    """Return the CUDA error code of one C call; an exception waits in `runtime.fault`."""
    call = CALLS.get(name)
    try:
        if call is None:
            raise HalfbyteError(
                f"the compiled host code calls CUDA's {name}, which the virtual GPU does not have"
            )
        return call(runtime, words) or SUCCESS
    except CudaError as error:
        return error.code
    except BaseException as fault:
        runtime.fault = fault
        return LAUNCH_FAILURE
