"""What callers can get wrong in Python: every case is an error that says so, never a crash."""

import copy
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
import torch

from halfbyte.errors import HalfbyteError, PtxError, TensorMapError, UsageError
from halfbyte.virtual import Device, LaunchOptions
from halfbyte.virtual.memory import DeviceMemory
from halfbyte.virtual.report import KernelFault
from halfbyte.virtual.tensor_map import Im2colBox, TensorBox, TensorLayout, encode_tensor_map
from tests.virtual.run_ptx import launch, make_module

STORE = """
    .reg .b32 %r<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [p0]; mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd1, %r1, 4, %rd0; st.global.u32 [%rd1], %r1;
"""
LOAD = STORE.replace("st.global.u32 [%rd1], %r1", "ld.global.u32 %r0, [%rd1]")
ENDLESS = ".shared .b32 s; .reg .b32 %r; L: atom.shared.add.u32 %r, [s], 1; bra L;"
PRINT = (
    ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n"
    ".global .align 1 .b8 text[4] = {104, 105, 10, 0};",
    """
    .reg .b64 %rd<3>; mov.u64 %rd0, text; cvta.global.u64 %rd1, %rd0;
    { .param .b64 a; st.param.b64 [a], %rd1; .param .b64 b; st.param.b64 [b], 0;
      .param .b32 r; call.uni (r), vprintf, (a, b); }
    """,
)


def store(value) -> None:
    launch(STORE, [value])


@pytest.mark.parametrize("gpu", [None, 5, b"b200", [], object()])
def test_a_gpu_that_is_no_name_is_named(gpu) -> None:
    with pytest.raises(UsageError, match="unknown GPU"):
        Device(gpu)


@pytest.mark.parametrize("ptx", [None, 5, b".version 9.0", []])
def test_ptx_that_is_no_text_is_refused(ptx) -> None:
    with pytest.raises(UsageError, match="PTX is text"):
        Device("b200").load(ptx)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"grid": 1}, "sequence of integers"),
        ({"grid": None}, "sequence of integers"),
        ({"grid": "111"}, "sequence of integers"),
        ({"grid": (1.0, 1, 1)}, "an integer is wanted"),
        ({"grid": (10**30, 1, 1)}, "is over"),
        ({"block": (2**32, 2**32, 1)}, "threads per CTA"),
        ({"block": (1, 1, 65)}, "along z"),
        ({"cluster": None}, "sequence of integers"),
        ({"dynamic_shared": "x"}, "an integer is wanted"),
        ({"dynamic_shared": 1.5}, "an integer is wanted"),
        ({"dynamic_shared": -1}, "-1 bytes of dynamic"),
        ({"arguments": None}, "a list is wanted"),
        ({"arguments": {"p0": 1}}, "a list is wanted"),
        ({"arguments": 5}, "a list is wanted"),
        ({"parameters": 5}, "bytes are wanted"),
        ({"parameters": "12345678"}, "bytes are wanted"),
        ({"parameters": b"123"}, "3 came"),
        ({"options": 5}, "LaunchOptions"),
        ({"options": {}}, "LaunchOptions"),
        ({"name": None}, "name of a kernel"),
        ({"name": []}, "name of a kernel"),
    ],
)
def test_launch_arguments_of_wrong_types_are_named(sizes, message) -> None:
    module = Device("b200").load(make_module(STORE, [".u64 p0"]))
    given = {"name": "test", "grid": (1, 1, 1), "block": (32, 1, 1), "arguments": [0], **sizes}
    with pytest.raises(UsageError, match=message):
        module.launch(**given)


def test_sizes_may_be_lists_and_numpy_integers() -> None:
    values = np.zeros(32, np.uint32)
    module = Device("b200").load(make_module(STORE, [".u64 p0"]))
    block = np.array([32, 1, 1])
    report = module.launch("test", [1, np.int64(1), 1], block, arguments=[values])
    assert report.block == (32, 1, 1)
    assert values[31] == 31


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_threads", 10**9),
        ("num_threads", 0),
        ("num_threads", "x"),
        ("latency_seed", -1),
        ("latency_seed", 2**40),
        ("shared_poison", 256),
        ("shared_poison", None),
        ("livelock_instructions", 0),
        ("max_instructions", -1),
        ("max_instructions", 1.5),
        ("print_text", 5),
        ("reverse_warps", "yes"),
        ("adversarial_try_wait", None),
    ],
)
def test_an_option_out_of_range_is_named(name, value) -> None:
    with pytest.raises(UsageError, match=f"LaunchOptions.{name}"):
        LaunchOptions(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.array([object()] * 32), "Python objects"),
        (lambda: np.zeros(32, ">u4"), "byte order"),
        (lambda: np.zeros(32, [("a", ">u4")]), "byte order"),
        (lambda: torch.zeros(32, device="meta"), "a dense tensor is wanted"),
        (lambda: torch.zeros(4, 8).to_sparse(), "a dense tensor is wanted"),
        (lambda: torch.zeros(32, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(32, dtype=torch.complex64).conj().imag, "resolve_neg"),
    ],
)
def test_arrays_whose_memory_holds_something_else_are_refused(make, message) -> None:
    with pytest.raises(UsageError, match=message):
        store(make())


def test_a_read_only_array_may_be_read_and_not_written(tmp_path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(bytes(4096))
    arrays = [np.zeros(32, np.uint32), np.memmap(file, np.uint32, "r"), np.frombuffer(bytes(128))]
    arrays[0].flags.writeable = False
    for array in arrays:
        launch(LOAD, [array])
        with pytest.raises(KernelFault, match="read-only"):
            store(array)
        assert not array.any()


def test_a_view_of_another_buffer_leaves_that_buffer_alone() -> None:
    device = Device("b200")
    module = device.load(make_module(STORE, [".u64 p0"]))
    whole = np.zeros(64, np.uint32)
    part = np.frombuffer(memoryview(whole)[32:], np.uint32)
    address = int(whole.ctypes.data)
    for start, nbytes in ((address, 256), (address + 128, 64)):  # around it, and inside of it
        device.memory.register(start, nbytes, "mine")
        module.launch("test", (1, 1, 1), (32, 1, 1), arguments=[part])
        module.launch("test", (1, 1, 1), (16, 1, 1), arguments=[start])
        device.memory.unregister(start)


def test_threads_that_share_a_device_and_an_array_do_not_disturb_each_other() -> None:
    module = Device("b200").load(make_module(STORE, [".u64 p0"]))
    shared, errors = np.zeros(32, np.uint32), []

    def work() -> None:
        try:
            for _ in range(50):
                module.launch("test", (1, 1, 1), (32, 1, 1), arguments=[shared])
        except HalfbyteError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    np.testing.assert_array_equal(shared, np.arange(32))


@pytest.mark.parametrize(
    ("body", "block"), [("trap;", 32), ("bar.sync 0, 64;", 32), ("L: bra L;", 32)]
)
def test_errors_of_launches_survive_pickling_and_copying(body, block) -> None:
    with pytest.raises(HalfbyteError) as caught:
        launch(body, block=(block, 1, 1), options=LaunchOptions(livelock_instructions=1000))
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(caught.value)):
        assert type(again) is type(caught.value)
        assert str(again) == str(caught.value)
        assert again.report.kernel == "test"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_ends_an_endless_launch(number) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(number, stop)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(ENDLESS, options=LaunchOptions(max_instructions=2_000_000_000))
    finally:
        timer.join()
        signal.signal(number, before)
    assert time.monotonic() - start < 10  # an endless launch would take minutes
    store(np.zeros(32, np.uint32))  # and the next one runs


def test_what_print_text_raises_ends_the_launch_and_is_raised() -> None:
    head, body = PRINT
    texts = []
    launch(body, head=head, block=(1, 1, 1), options=LaunchOptions(print_text=texts.append))
    assert texts == ["hi\n"]

    def fail(text: str) -> None:
        raise ZeroDivisionError(text)

    with pytest.raises(ZeroDivisionError, match="hi"):
        launch(f"L: {body} bra L;", head=head, options=LaunchOptions(print_text=fail))


@pytest.mark.parametrize(
    "record",
    [
        {"address": None, "nbytes": 4, "name": "x"},
        {"address": 4096, "nbytes": 1.5, "name": "x"},
        {"address": 4096, "nbytes": 4, "name": None},
        {"address": 4096, "nbytes": 2**60, "name": "x"},
    ],
)
def test_a_buffer_of_wrong_types_is_refused(record) -> None:
    with pytest.raises(UsageError, match="buffer"):
        DeviceMemory().register(**record)


@pytest.mark.parametrize("nbytes", [-1, 1.5, "x", None, 2**60, 2**70])
def test_an_allocation_of_no_size_is_refused(nbytes) -> None:
    with pytest.raises(UsageError, match="buffer 'x'"):
        DeviceMemory().allocate(nbytes, "x")


def test_variables_are_read_as_types_that_fit() -> None:
    module = Device("b200").load(make_module("", head=".global .align 4 .b8 g[6];"))
    for dtype in (np.uint32, "zzz"):
        with pytest.raises(UsageError, match="g has 6 bytes"):
            module.read_variable("g", dtype)


FULL = TensorLayout("f16", (64, 64))
IMAGE = TensorLayout("f16", (64, 8, 8, 8))
BOX = TensorBox((64, 8))


@pytest.mark.parametrize(
    ("address", "layout", "box"),
    [
        (None, FULL, BOX),
        ("x", FULL, BOX),
        (1.5, FULL, BOX),
        (2**20, None, BOX),
        (2**20, FULL, None),
        (2**20, TensorLayout([], (64,)), TensorBox((64,))),
        (2**20, TensorLayout("f16", None), BOX),
        (2**20, TensorLayout("f16", 64), BOX),
        (2**20, TensorLayout("f16", (64.5, 64)), BOX),
        (2**20, TensorLayout("f16", (64, 64), (128.0,)), BOX),
        (2**20, FULL, TensorBox(64)),
        (2**20, FULL, TensorBox((64, "x"))),
        (2**20, FULL, TensorBox((64, 8), element_strides=(1, None))),
        (2**20, FULL, TensorBox((64, 8), swizzle=[1])),
        (2**20, FULL, TensorBox((64, 8), im2col=5)),
        (2**20, IMAGE, TensorBox(im2col=Im2colBox(0, (0, 0), 64, 4))),
        (2**20, IMAGE, TensorBox(im2col=Im2colBox((0, 0), (0, 0), None, 4))),
    ],
)
def test_fields_of_a_tensor_map_that_are_no_numbers_are_named(address, layout, box) -> None:
    with pytest.raises(TensorMapError, match=r"wanted|multiple"):
        encode_tensor_map(address, layout, box)


def test_fields_of_a_tensor_map_may_be_numpy_numbers() -> None:
    layout = TensorLayout("f16", np.array([64, 64]), np.array([128]))
    box = TensorBox(np.array([64, 8]), np.array([1, 1]))
    plain = encode_tensor_map(2**20, TensorLayout("f16", (64, 64), (128,)), BOX)
    assert encode_tensor_map(np.uint64(2**20), layout, box) == plain


@pytest.mark.parametrize(
    ("head", "body", "parameters", "message"),
    [
        (".global .align 8 .b8 g[1000000000000];", "", (), "b200 has 180000000000"),
        (".const .align 8 .b8 c[65537];", "", (), "b200 has 65536"),
        ("", "", (".align 8 .b8 p[40000]",), "32764 are allowed"),
        ("", ".reg .b64 %rd; .reg .b32 %r; ld.global.u32 %r, [%rd+2147483648];", (), "32 bits"),
        ("", ".reg .b32 %r; ld.shared.u32 %r, [%r+99999999999];", (), "does not fit 32 bits"),
    ],
)
def test_ptx_beyond_the_limits_is_refused_before_memory_is_taken(
    head, body, parameters, message
) -> None:
    with pytest.raises(PtxError, match=message):
        launch(body, [b""] * len(parameters), parameters=parameters, head=head)


@pytest.mark.parametrize(
    "instruction",
    [
        "add.u32 %r0, %d0, %r1;",
        "add.u32 %d0, %r0, %r1;",
        "add.u32 %r0, %h0, %r1;",
        "mov.b64 %d0, %r0;",
        "mul.wide.u32 %r0, %r1, %r1;",
        "shl.b64 %d0, %d0, %d1;",
        "setp.eq.u32 %p0, %h0, %h0;",
        "fma.rn.f16 %h0, %h0, %h0, %r0;",
        "shfl.sync.idx.b32 %d0, %r0, 0, 31, 0xffffffff;",
    ],
)
def test_registers_of_another_width_than_the_instruction_are_refused(instruction) -> None:
    registers = ".reg .b16 %h<2>; .reg .b32 %r<2>; .reg .b64 %d<2>; .reg .pred %p<1>;"
    with pytest.raises(PtxError, match=r"a b\d+ register %\w+ where b\d+ is wanted"):
        launch(registers + instruction)


@pytest.mark.parametrize("space", ["shared", "local"])
def test_variables_of_a_hundred_gigabytes_are_refused(space) -> None:
    body = f".{space} .align 4 .b8 s[100000000000]; .reg .b64 %rd; mov.u64 %rd, s;"
    with pytest.raises(UsageError, match=rf"100000000000 bytes of (static|{space})"):
        launch(body)
