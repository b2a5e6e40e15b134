"""The C symbols that compiled host code calls, called as it calls them."""

import ctypes
import struct

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.virtual.driver.launches import LaunchConfig
from halfbyte.virtual.driver.session import cuda
from halfbyte.virtual.driver.stand_in import find_library
from halfbyte.virtual.tensor_map import TensorBox, TensorLayout
from halfbyte.virtual.tensor_map import encode_tensor_map as encode_map
from tests.virtual.driver.fake_core import FakeDevice
from tests.virtual.driver.test_images import make_fat_binary

from halfbyte.virtual.driver.images import add_ptx  # isort: skip

PTX = """.version 8.8
.target sm_100a
.visible .entry scale(
	.param .u64 scale_param_0,
	.param .u32 scale_param_1,
	.param .align 64 .b8 scale_param_2[128]
)
{ ret; }
"""
LAUNCH_FAILURE, INVALID_VALUE, NOT_SUPPORTED = 719, 1, 801


@pytest.fixture
def runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(find_library()))
    library._cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library._cudaFree.argtypes = [ctypes.c_void_p]
    library._cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library._cudaMemset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    return library


def load_kernel(runtime: ctypes.CDLL, name: bytes = b"scale") -> ctypes.c_void_p:
    image = ctypes.create_string_buffer(add_ptx(make_fat_binary(), PTX))
    library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    none, zero = ctypes.c_void_p(), ctypes.c_int32(0)
    load = runtime._cudaLibraryLoadData
    assert load(ctypes.byref(library), image, none, none, zero, none, none, zero) == 0
    assert runtime._cudaLibraryGetKernel(ctypes.byref(kernel), library, name) == 0
    return kernel


def launch(runtime: ctypes.CDLL, kernel: ctypes.c_void_p, shared_bytes: int = 1024) -> int:
    values = [ctypes.c_uint64(0x1234), ctypes.c_uint32(7), (ctypes.c_uint8 * 128)(*range(128))]
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    attributes = ctypes.create_string_buffer(
        struct.pack("<II3I52x", 4, 0, 2, 1, 1) + struct.pack("<II3I52x", 6, 0, 1, 0, 0)
    )
    config = LaunchConfig((4, 2, 1), (128, 1, 1), shared_bytes, None)
    config.attributes, config.attribute_count = ctypes.addressof(attributes), 2
    return int(runtime._cudaLaunchKernelEx(ctypes.byref(config), kernel, pointers))


def test_a_launch_arrives_with_sizes_cluster_attributes_and_parameter_bytes(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    assert launch(runtime, load_kernel(runtime)) == 0
    ((name, ptx, shape),) = device.launches
    assert (name, ptx) == ("scale", PTX)
    assert shape["grid"] == (4, 2, 1)
    assert shape["block"] == (128, 1, 1)
    assert shape["cluster"] == (2, 1, 1)
    assert shape["dynamic_shared"] == 1024
    # offsets: 8 bytes, 4 bytes, then 128 bytes at the next multiple of 64
    expected = struct.pack("<QI52x", 0x1234, 7) + bytes(range(128))
    assert shape["parameters"] == expected
    assert session.log.records[0].request.attributes == ((4, (2, 1, 1)), (6, (1, 0, 0)))


def test_the_long_form_of_a_launch_passes_stack_arguments(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    values = [ctypes.c_uint64(1), ctypes.c_uint32(2), (ctypes.c_uint8 * 128)()]
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    sizes = [ctypes.c_int32(size) for size in (3, 2, 1, 64, 2, 1)]
    stream, shared = ctypes.c_void_p(), ctypes.c_int64(512)
    assert runtime._cudaLaunchKernel(load_kernel(runtime), *sizes, stream, shared, pointers) == 0
    shape = device.launches[0][2]
    assert (shape["grid"], shape["block"]) == ((3, 2, 1), (64, 2, 1))
    assert shape["dynamic_shared"] == 512
    assert "cluster" not in shape


def test_a_fault_is_an_error_code_in_c_and_waits_as_the_exception_it_was(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    device.fault = HalfbyteError("lane 3 reads past the end")
    assert launch(runtime, load_kernel(runtime)) == LAUNCH_FAILURE
    assert session.runtime.take_fault() is device.fault
    assert session.runtime.take_fault() is None
    assert session.log.records[0].fault is device.fault


def test_more_dynamic_shared_memory_than_the_kernel_allows_fails_the_launch(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    kernel = load_kernel(runtime)
    assert launch(runtime, kernel, 100 * 1024) == LAUNCH_FAILURE
    assert "cudaFuncSetAttribute" in str(session.runtime.take_fault())
    attribute = ctypes.c_int32(8)
    assert runtime._cudaFuncSetAttribute(kernel, attribute, ctypes.c_int32(228 * 1024)) == 1
    assert runtime._cudaFuncSetAttribute(kernel, attribute, ctypes.c_int32(100 * 1024)) == 0
    assert launch(runtime, kernel, 100 * 1024) == 0


def test_a_kernel_that_the_image_lacks_is_named(session: cuda, runtime: ctypes.CDLL) -> None:
    with pytest.raises(AssertionError):
        load_kernel(runtime, b"scal")
    assert "no kernel 'scal'" in str(session.runtime.take_fault())


def test_memory_is_aligned_registered_poisoned_and_freed_once(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    address = ctypes.c_void_p()
    assert runtime._cudaMalloc(ctypes.byref(address), 1000) == 0
    assert address.value is not None
    assert address.value % 256 == 0
    assert device.memory.buffers[address.value].nbytes == 1000
    assert ctypes.string_at(address.value, 1000) == b"\xab" * 1000
    assert runtime._cudaMemcpy(address, b"abcd", 4, 1) == 0
    assert runtime._cudaMemset(address.value + 4, 7, 2) == 0
    assert ctypes.string_at(address.value, 7) == b"abcd\x07\x07\xab"
    assert runtime._cudaFree(address) == 0
    assert device.memory.freed == [address.value]
    assert runtime._cudaFree(address) == LAUNCH_FAILURE
    assert "freed twice" in str(session.runtime.take_fault())


def test_device_attributes_are_those_of_the_gpu(session: cuda, runtime: ctypes.CDLL) -> None:
    value = ctypes.c_int32(-1)
    found = {}
    for attribute in (16, 75, 76, 97):
        assert runtime._cudaDeviceGetAttribute(ctypes.byref(value), attribute, 0) == 0
        found[attribute] = value.value
    assert found == {16: 148, 75: 10, 76: 0, 97: 232448}


def test_a_captured_launch_runs_at_each_replay_only(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    kernel, graph, executable = load_kernel(runtime), ctypes.c_void_p(), ctypes.c_void_p()
    assert runtime._cudaStreamBeginCapture(None, 0) == 0
    assert launch(runtime, kernel) == 0
    assert runtime._cudaStreamEndCapture(None, ctypes.byref(graph)) == 0
    assert device.launches == []
    zero = ctypes.c_uint64(0)
    assert runtime._cudaGraphInstantiate(ctypes.byref(executable), graph, zero) == 0
    assert runtime._cudaGraphLaunch(executable, None) == 0
    assert runtime._cudaGraphLaunch(executable, None) == 0
    assert len(device.launches) == 2


def test_events_measure_the_device_clock(session: cuda, runtime: ctypes.CDLL) -> None:
    start, end, elapsed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float(-1)
    for event in (start, end):
        assert runtime._cudaEventCreate(ctypes.byref(event)) == 0
    assert runtime._cudaEventRecord(start, None) == 0
    assert launch(runtime, load_kernel(runtime)) == 0  # the fake core reports 1 ms
    assert runtime._cudaEventRecord(end, None) == 0
    assert runtime._cudaEventElapsedTime(ctypes.byref(elapsed), start, end) == 0
    assert elapsed.value == pytest.approx(1.0)


def test_after_the_session_every_call_is_not_supported(device: FakeDevice) -> None:
    with cuda(device=device):
        pass
    library = ctypes.CDLL(str(find_library()))
    assert library._cudaGetDeviceCount(ctypes.byref(ctypes.c_int32())) == NOT_SUPPORTED


def test_a_cooperative_launch_that_cannot_be_resident_is_refused_with_cudas_code(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    values = [ctypes.c_uint64(0), ctypes.c_uint32(0), (ctypes.c_uint8 * 128)()]
    pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in values))
    attributes = ctypes.create_string_buffer(struct.pack("<II3I52x", 2, 0, 1, 0, 0))
    kernel = load_kernel(runtime)
    codes = []
    for blocks in (148 * 2, 148 * 2 + 1):  # 2048 threads of each multiprocessor are two blocks
        config = LaunchConfig((blocks, 1, 1), (1024, 1, 1), 0, None)
        config.attributes, config.attribute_count = ctypes.addressof(attributes), 1
        codes.append(runtime._cudaLaunchKernelEx(ctypes.byref(config), kernel, pointers))
    assert codes == [0, 720]
    assert session.runtime.fault is None
    assert len(device.launches) == 1


def encode_tensor_map(runtime: ctypes.CDLL, box: tuple[int, int]) -> tuple[int, bytes]:
    target = (ctypes.c_uint8 * 128)(*([0xEE] * 128))
    sizes, strides = (ctypes.c_uint64 * 2)(1024, 512), (ctypes.c_uint64 * 1)(2048)
    extents, steps = (ctypes.c_uint32 * 2)(*box), (ctypes.c_uint32 * 2)(1, 1)
    numbers = [ctypes.c_int32(value) for value in (0, 3, 2, 0)]  # swizzle 128B
    code = runtime._cuTensorMapEncodeTiled(
        target, 6, 2, ctypes.c_void_p(0x7000), sizes, strides, extents, steps, *numbers
    )
    return int(code), bytes(target)


def test_a_tensor_map_is_encoded_from_the_drivers_numbers(
    session: cuda, runtime: ctypes.CDLL
) -> None:
    code, encoded = encode_tensor_map(runtime, (64, 8))
    layout = TensorLayout("f16", (1024, 512), (2048,))
    assert code == 0
    assert encoded == encode_map(0x7000, layout, TensorBox((64, 8), (1, 1), 128))


def test_a_failed_call_whose_code_nobody_reads_stops_the_next_launch(
    session: cuda, device: FakeDevice, runtime: ctypes.CDLL
) -> None:
    kernel = load_kernel(runtime)
    assert encode_tensor_map(runtime, (65, 8))[0] == LAUNCH_FAILURE  # rows of 130 bytes
    assert launch(runtime, kernel) == LAUNCH_FAILURE
    assert device.launches == []
    assert "130 bytes" in str(session.runtime.take_fault())
    assert launch(runtime, kernel) == 0
