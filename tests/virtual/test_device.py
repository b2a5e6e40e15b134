"""The plain interface: loading PTX, checking launches, passing arguments, module variables."""

import numpy as np
import pytest
import torch

from halfbyte.arch import GPUS
from halfbyte.errors import PtxError, UsageError
from halfbyte.virtual import Device
from halfbyte.virtual.report import KernelFault
from tests.virtual.run_ptx import launch, make_module

STORE = """
    .reg .b32 %r<3>; .reg .b64 %rd<3>;
    ld.param.u64 %rd0, [p0]; ld.param.u32 %r0, [p1]; mov.u32 %r1, %tid.x;
    add.u32 %r0, %r0, %r1; mad.wide.u32 %rd1, %r1, 4, %rd0; st.global.u32 [%rd1], %r0;
"""
PARAMETERS = (".u64 p0", ".u32 p1")


@pytest.mark.parametrize("make", [np.zeros, lambda n, d: torch.zeros(n, dtype=torch.uint32)])
def test_arrays_and_tensors_are_written_in_place(make) -> None:
    values = make(32, np.uint32)
    launch(STORE, [values, 100], parameters=PARAMETERS)
    np.testing.assert_array_equal(np.asarray(values), np.arange(32) + 100)


def test_slices_may_be_passed_and_their_neighbours_stay() -> None:
    values = np.zeros(96, np.uint32)
    launch(STORE, [values[32:64], 5], parameters=PARAMETERS)
    np.testing.assert_array_equal(values[32:64], np.arange(32) + 5)
    assert not values[:32].any()
    assert not values[64:].any()


def test_store_past_the_end_names_lane_address_and_buffer() -> None:
    values = np.zeros(20, np.uint32)
    with pytest.raises(KernelFault) as caught:
        launch(STORE, [values, 0], parameters=PARAMETERS)
    text = str(caught.value)
    for part in ("lane 20", "argument 0 (uint32 20)", "st.global.u32", "0 bytes past the end"):
        assert part in text, text


def test_pointer_kept_from_an_earlier_launch_is_a_use_after_free() -> None:
    device = Device("b200")
    module = device.load(make_module(STORE, PARAMETERS))
    values = np.zeros(32, np.uint32)
    module.launch("test", (1, 1, 1), (32, 1, 1), arguments=[values, 0])
    with pytest.raises(KernelFault, match="freed"):
        module.launch("test", (1, 1, 1), (32, 1, 1), arguments=[values.ctypes.data, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([np.zeros(32, np.uint32)], "takes 2 arguments"),
        ([np.zeros(32, np.uint32), 1.5], "a float came"),
        ([np.zeros(32, np.uint32), 2**40], "does not fit 32 bits"),
        ([np.zeros(32, np.uint32), "x"], "is no array"),
        ([np.zeros(32, np.uint32), b"123"], "3 bytes came"),
        ([np.zeros(32, np.uint32), np.float64(1)], "8 bytes came"),
        ([1, np.zeros(32, np.uint32)], "needs a 64-bit parameter"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message) -> None:
    with pytest.raises(UsageError, match=message):
        launch(STORE, arguments, parameters=PARAMETERS)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"block": (1025, 1, 1)}, "1025 threads"),
        ({"block": (0, 1, 1)}, "at least 1"),
        ({"grid": (1, 1)}, "three integers"),
        ({"grid": (1, 70000, 1)}, "is over"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "no multiple of cluster"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "more than 16"),
        ({"dynamic_shared": 240_000}, "too many"),
        ({"dynamic_shared": -1}, "too many|dynamic"),
    ],
)
def test_launch_that_the_driver_would_refuse_is_refused(sizes, message) -> None:
    with pytest.raises(UsageError, match=message):
        launch("bar.sync 0;", **sizes)


def test_required_block_is_checked() -> None:
    text = make_module("bar.sync 0;").replace("test()", "test()\n.reqntid 64, 1, 1")
    module = Device("b200").load(text)
    module.launch("test", (1, 1, 1), (64, 1, 1))
    with pytest.raises(UsageError, match="reqntid"):
        module.launch("test", (1, 1, 1), (32, 1, 1))


@pytest.mark.parametrize(
    ("target", "gpu", "fits"),
    [
        ("sm_100a", "b200", True),
        ("sm_100a", "b300", False),
        ("sm_100f", "b300", True),
        ("sm_100f", "h200", False),
        ("sm_90", "b200", True),
        ("sm_90a", "b200", False),
        ("sm_90a", "h200", True),
        ("sm_120a", "rtx5090", True),
        ("sm_100", "h200", False),
    ],
)
def test_targets_run_where_the_isa_says(target, gpu, fits) -> None:
    text = make_module("bar.sync 0;").replace("sm_100a", target)
    if fits:
        Device(gpu).load(text)
    else:
        with pytest.raises(UsageError, match=target):
            Device(gpu).load(text)


def test_text_that_is_no_ptx_is_an_error_of_its_own() -> None:
    with pytest.raises(PtxError):
        Device("b200").load("int main() {}")


def test_unknown_kernel_names_those_there_are() -> None:
    module = Device("b200").load(make_module("bar.sync 0;"))
    with pytest.raises(UsageError, match="it has test"):
        module.launch("other", (1, 1, 1), (32, 1, 1))


def test_unknown_gpu_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="b200, b300, h200, rtx5090"):
        Device("b100")


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_runs_a_kernel(gpu) -> None:
    values = np.zeros(32, np.uint32)
    launch(STORE, [values, 1], parameters=PARAMETERS, gpu=gpu)
    assert values[31] == 32


def test_module_variables_keep_their_values_between_launches() -> None:
    head = ".global .align 4 .u32 counter = 40; .const .align 4 .u32 step = 2;"
    body = """
        .reg .b32 %r<3>; .reg .b64 %rd<2>;
        ld.const.u32 %r0, [step]; mov.u64 %rd0, counter;
        ld.global.u32 %r1, [%rd0]; add.u32 %r1, %r1, %r0; st.global.u32 [counter], %r1;
    """
    device = Device("b200")
    module = device.load(make_module(body, head=head))
    for _ in range(3):
        module.launch("test", (1, 1, 1), (1, 1, 1))
    assert module.read_variable("counter", np.uint32)[0] == 46


def test_store_to_a_constant_is_a_fault() -> None:
    head = ".const .align 4 .u32 step = 2;"
    body = ".reg .b64 %rd<2>; mov.u64 %rd0, step; cvta.const.u64 %rd1, %rd0; st.u32 [%rd1], 1;"
    with pytest.raises(KernelFault, match=r"read.only"):
        launch(body, head=head)


def test_same_launch_twice_is_the_same_run() -> None:
    reports = [launch(STORE, [np.zeros(32, np.uint32), 1], parameters=PARAMETERS) for _ in range(2)]
    assert reports[0].instructions == reports[1].instructions
    assert reports[0].cycles == reports[1].cycles


def test_stale_memory_can_be_read_and_is_noted() -> None:
    """What torch's allocator leaves mapped behind a tensor: undefined to read, and no fault."""
    device = Device("b200")
    block = device.memory.allocate(512, "a block")
    device.memory.unregister(block.ctypes.data)
    values = np.zeros(32, np.uint32)
    device.memory.register(block.ctypes.data, 512, "the rounding behind x", stale=True)
    body = """
        .reg .b32 %r<3>; .reg .b64 %rd<4>;
        ld.param.u64 %rd0, [p0]; ld.param.u64 %rd1, [p1]; mov.u32 %r1, %tid.x;
        mad.wide.u32 %rd2, %r1, 4, %rd1; ld.global.u32 %r0, [%rd2];
        mad.wide.u32 %rd3, %r1, 4, %rd0; st.global.u32 [%rd3], %r0;
    """
    module = device.load(make_module(body, (".u64 p0", ".u64 p1")))
    arguments = [values, block.ctypes.data]
    report = module.launch("test", (1, 1, 1), (32, 1, 1), arguments=arguments)
    assert (values == 0xABABABAB).all()
    (finding,) = report.findings
    assert finding.kind == "stale-memory"
    assert finding.is_note
    assert finding.count == 32
    assert "the rounding behind x" in finding.message


def test_text_with_the_nul_of_a_c_string_is_loaded() -> None:
    values = np.zeros(32, np.uint32)
    module = Device("b200").load(make_module(STORE, PARAMETERS) + "\0")
    module.launch("test", (1, 1, 1), (32, 1, 1), arguments=[values, 3])
    assert values[31] == 34
