"""Faults injected into NVIDIA's NVFP4 GEMM (2-CTA, 256x256, persistent): each one is found.

The kernel is compiled from a CUTLASS checkout and launched once unchanged; then its PTX is edited
and launched again with the same parameters. Edits find their registers by what the instructions
do, so that another compiler's register numbers do not matter.
"""

import importlib.util
import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from halfbyte.virtual.device import Device, LaunchOptions
from halfbyte.virtual.report import Deadlock, KernelFault
from tests.peers.virtual.program_runs import CHECKOUT_VARIABLE, find_checkout

pytestmark = pytest.mark.peers
PROGRAM = "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
M = N = 512
K = 3840  # 15 steps of 256 in a ring of 5 stages
EXPECTED_BYTES = 77824  # 2 x (16384 A + 16384 B + 2048 SFA) + 4 x 2048 SFB
WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 \S+ \[(%r\d+)\], (%r\d+), 10000000;"


def load_example(folder):
    spec = importlib.util.spec_from_file_location("nvfp4_example", folder / PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nvfp4_example"] = module
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@dataclass
class Gemm:
    """The compiled kernel, what it was launched with, and its right result."""

    device: Device
    ptx: str
    request: object
    c: np.ndarray
    right: np.ndarray

    def run(self, ptx, **options):
        """Return (report, wrong elements) of an edited text."""
        self.c.fill(0x7E00)  # NaN
        module = self.device.load(ptx)
        name = self.request.kernel
        program = module.find_program(name).program
        block = bytearray(program.parameter_bytes)
        for parameter, data in zip(program.parameters, self.request.parameters, strict=True):
            block[parameter.offset : parameter.offset + parameter.size] = data
        report = module.launch(
            name,
            self.request.grid,
            self.request.block,
            self.request.cluster,
            self.request.dynamic_shared,
            parameters=bytes(block),
            options=LaunchOptions(**options),
        )
        return report, int((self.c != self.right).sum())


class RecordingDevice(Device):
    """A device that keeps the text of the last module."""

    ptx = ""

    def load(self, ptx):
        self.ptx = ptx
        return super().load(ptx)


def launch_intact(example, device, session):
    import cuda.bindings.driver as driver
    import cutlass
    import torch
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    fp4, fp8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
    kernel = example.Sm100BlockScaledPersistentDenseGemmKernel(16, (256, 256), (2, 1))
    stream = driver.CUstream(0)
    compiled = example.scaled_mm(kernel, fp4, fp4, cutlass.Float16, fp8, "k", "k", "n", 2, stream)
    random = np.random.default_rng(0)
    arrays = [
        random.integers(0, 256, (M, K // 2), np.uint8),
        random.integers(0, 256, (N, K // 2), np.uint8),
        random.integers(0x28, 0x48, M * K // 16, np.uint8),
        random.integers(0x28, 0x48, N * K // 16, np.uint8),
        np.zeros((M, N), np.int16),
    ]
    tensors = [torch.from_numpy(array).cuda() for array in arrays]
    types = ((fp4, 16), (fp4, 16), (fp8, 32), (fp8, 32), (cutlass.Float16, 16))
    pointers = [
        make_ptr(kind, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align)
        for (kind, align), tensor in zip(types, tensors, strict=True)
    ]
    compiled(*pointers, (M, N, K, 1), stream)
    torch.cuda.synchronize()
    c = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint16 * (M * N)).from_address(tensors[4].data_ptr())
    )
    record = session.log.records[-1]
    return tensors, Gemm(device, device.ptx, record.request, c, c.copy())


@pytest.fixture(scope="module")
def gemm():
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("CuTe DSL is not installed: pip install 'halfbyte[peers]'")
    folder = find_checkout()
    if folder is None:
        pytest.skip(f"set {CHECKOUT_VARIABLE} to a CUTLASS checkout")
    from halfbyte.virtual import cuda

    device = RecordingDevice("b200")
    with cuda(device=device) as session:
        tensors, made = launch_intact(load_example(folder), device, session)
        yield made
        del tensors


def find(pattern, text):
    match = re.search(pattern, text)
    if match is None:
        pytest.skip(f"this compiler's text has nothing like {pattern!r}")
    return match


def replace(text, old, replacement):
    assert old in text, old
    return text.replace(old, replacement)


class Registers:
    """Registers of the kernel's barriers and parities, by what they are used for."""

    def __init__(self, text):
        self.count = find(r"mov\.b32 \t(%r\d+), 256;", text)[1]
        self.acc_empty = find(rf"mbarrier\.init\.shared\.b64 \t\[(%r\d+)\], {self.count};", text)[1]
        commits = re.findall(r"tcgen05\.commit\.[^\n]*\t\[(%r\d+)\], %rs\d+;", text)
        self.acc_full = commits[-1]
        before_tma = text[: text.index("mbarrier.arrive.expect_tx")]
        self.producer_parity = re.findall(WAIT, before_tma)[-1][1]
        waits = re.findall(WAIT, text)
        position = next(i for i, wait in enumerate(waits) if wait[0] == self.acc_empty)
        self.acc_empty_parity = waits[position][1]
        self.full_parity = waits[position + 1][1]
        self.acc_full_parity = next(wait[1] for wait in waits if wait[0] == self.acc_full)


def find_deadlock(gemm, text):
    """Return the waits on mbarriers of a text that hangs, by the operand text of the wait."""
    with pytest.raises(Deadlock) as caught:
        gemm.run(text)
    stops = [stop for stop in caught.value.report.hang.waits if stop.wait == "mbarrier"]
    assert all(stop.place.line > 0 for stop in stops)
    return stops


def find_waits_on(stops, register):
    return [stop for stop in stops if f"[{register}]" in stop.place.text]


@pytest.mark.parametrize("seed", range(4))
def test_the_intact_kernel_is_right_and_clean_in_every_schedule(gemm, seed):
    report, wrong = gemm.run(gemm.ptx, latency_seed=seed, adversarial_try_wait=seed % 2 == 1)
    assert wrong == 0
    assert report.findings == ()


def test_a_producer_at_parity_zero_deadlocks(gemm):
    parity = Registers(gemm.ptx).producer_parity
    text = replace(gemm.ptx, f"mov.b32 \t{parity}, 1;", f"mov.b32 \t{parity}, 0;")
    stops = find_deadlock(gemm, text)
    assert all(stop.facts["phases"] == 0 for stop in stops)
    assert len({stop.warp for stop in stops}) >= 6  # producer, products and epilogue of both CTAs


def test_products_that_wait_for_the_first_accumulator_deadlock(gemm):
    registers = Registers(gemm.ptx)
    source = find(rf"mov\.b32 \t{registers.acc_empty_parity}, (%r\d+);", gemm.ptx)[1]
    start = f"mov.b32 \t{registers.full_parity}, 0;"
    stops = find_deadlock(gemm, replace(gemm.ptx, start, f"{start}\n\tmov.b32 \t{source}, 0;"))
    facts = find_waits_on(stops, registers.acc_empty)[0].facts
    assert (facts["pending"], facts["expected"], facts["phases"]) == (256, 256, 0)


def test_stages_read_before_their_data_came_are_found(gemm):
    parity = Registers(gemm.ptx).full_parity
    text = replace(gemm.ptx, f"mov.b32 \t{parity}, 0;", f"mov.b32 \t{parity}, 1;")
    report, wrong = gemm.run(text)
    assert wrong > M * N // 2
    assert "read-in-flight" in {finding.kind for finding in report.findings}


@pytest.mark.parametrize("seed", range(4))
def test_an_accumulator_read_before_it_is_finished_is_found(gemm, seed):
    # Where the reads come before the first product, the accumulators end out of step: a deadlock.
    parity = Registers(gemm.ptx).acc_full_parity
    text = replace(gemm.ptx, f"mov.b32 \t{parity}, 0;", f"mov.b32 \t{parity}, 1;")
    try:
        report, wrong = gemm.run(text, latency_seed=seed)
    except Deadlock:
        return
    assert wrong > M * N // 2
    assert any("in-flight" in finding.kind for finding in report.findings)


@pytest.mark.parametrize("change", [16, -8192])
def test_wrong_expected_bytes_deadlock_and_show_the_difference(gemm, change):
    text = replace(gemm.ptx, str(EXPECTED_BYTES), str(EXPECTED_BYTES + change))
    missing = {stop.facts["pending_bytes"] for stop in find_deadlock(gemm, text)}
    assert change in missing


def test_an_arrival_that_never_comes_deadlocks_and_shows_its_count(gemm):
    registers = Registers(gemm.ptx)
    count = registers.count
    text = replace(gemm.ptx, f"mov.b32 \t{count}, 256;", f"mov.b32 \t{count}, 257;")
    facts = find_waits_on(find_deadlock(gemm, text), registers.acc_empty)[0].facts
    assert (facts["pending"], facts["expected"]) == (1, 257)


def test_a_multicast_that_leaves_out_a_cta_deadlocks_and_shows_its_bytes(gemm):
    mask = find(r"cp\.async\.bulk\.tensor\.4d[^\n]*multicast[^\n]*, (%rs\d+), %rd\d+;", gemm.ptx)[1]
    text = replace(gemm.ptx, f"mov.b16 \t{mask}, 3;", f"mov.b16 \t{mask}, 1;")
    missing = {stop.facts["pending_bytes"] for stop in find_deadlock(gemm, text)}
    assert missing & {2048, 4096}


def test_a_commit_that_is_missing_deadlocks(gemm):
    registers = Registers(gemm.ptx)
    line = find(rf"tcgen05\.commit\.[^\n]*\[{registers.acc_full}\][^\n]*", gemm.ptx)[0]
    facts = find_waits_on(find_deadlock(gemm, replace(gemm.ptx, line, "")), registers.acc_full)
    assert facts[0].facts["pending"] == 1


def test_a_producer_that_never_waits_is_found(gemm):
    wait = re.search(
        r"(try_wait\.parity\.acquire[^\n]*?(%p\d+), \[[^\n]*\n(?:[^\n]*\n){1,40}?)\t@\2 bra",
        gemm.ptx,
    )
    if wait is None:
        pytest.skip("this compiler's text tests the first try_wait of a step otherwise")
    text = replace(gemm.ptx, wait[0], f"{wait[1]}\tbra.uni")
    with pytest.raises(KernelFault) as caught:
        gemm.run(text, adversarial_try_wait=True)
    assert caught.value.report.fault.kind == "over-arrival"


def test_different_counts_at_one_barrier_fault_and_name_both(gemm):
    text = replace(gemm.ptx, "bar.sync \t2, 160;", "bar.sync \t2, 192;").replace(
        "bar.sync \t2, 192;", "bar.sync \t2, 160;", 1
    )
    with pytest.raises(KernelFault) as caught:
        gemm.run(text)
    fault = caught.value.report.fault
    assert fault.kind == "barrier-count-mismatch"
    assert "160" in fault.message
    assert "192" in fault.message
