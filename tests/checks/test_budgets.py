"""Budgets: overruns with their arithmetic, declared figures that are not the layouts'."""

import pytest

from halfbyte.arch import Gpu, find_gpu
from halfbyte.checks.finding import CheckFailedError, Severity, require_clean
from halfbyte.checks.kernel_text import read_kernel
from halfbyte.checks.shared_budget import (
    SharedBuffer,
    check_shared_budget,
    place_buffers,
)
from halfbyte.checks.tensor_memory_budget import (
    TensorBuffer,
    check_allocation,
    check_tensor_memory,
    check_tensor_memory_budget,
)
from halfbyte.errors import UsageError
from halfbyte.virtual.device import Device
from tests.checks.ptx_texts import ALWAYS, VARIES, make_kernel, make_products, plain_mma, scaled_mma

RTX5090, B200 = find_gpu("rtx5090"), find_gpu("b200")


@pytest.mark.parametrize(
    ("gpu", "buffers", "over"),
    [
        (RTX5090, [SharedBuffer("ring", 102400)], 1024),
        # what lies in front of a ring of 87040 bytes is rounded up to 1024
        (RTX5090, [SharedBuffer("a", 16), SharedBuffer("b", 87040, 1024)], None),
        (RTX5090, [SharedBuffer("a", 14336), SharedBuffer("b", 87040, 1024)], None),
        (RTX5090, [SharedBuffer("a", 14352), SharedBuffer("b", 87040, 1024)], 1024),
        (B200, [SharedBuffer("raw", 512000000)], 512000000 - 232448),
        (B200, [SharedBuffer("ring", 232448)], None),
        (B200, [SharedBuffer("ring", 232449)], 1),
    ],
)
def test_an_overrun_is_told_to_the_byte(
    gpu: Gpu, buffers: list[SharedBuffer], over: int | None
) -> None:
    report = check_shared_budget(buffers, gpu)
    if over is None:
        assert report.is_clean
        return
    (finding,) = report.findings
    assert finding.rule == "shared-budget/overrun"
    assert f"{gpu.name} has {gpu.shared_bytes_per_cta} ({over} too many)" in finding.message
    assert finding.facts["over"] == over


@pytest.mark.parametrize(
    ("gpu", "num_bytes", "over"),
    [("rtx5090", 102400, 1024), ("b200", 512000000, 511767552), ("rtx5090", 101377, 1)],
)
def test_the_launch_check_of_the_virtual_gpu_tells_the_same(
    gpu: str, num_bytes: int, over: int
) -> None:
    ptx = make_kernel("").replace("sm_100a", find_gpu(gpu).target)
    module = Device(gpu).load(ptx)
    with pytest.raises(UsageError, match=f"\\({over} too many\\)"):
        module.launch("k", (1, 1, 1), (32, 1, 1), dynamic_shared=num_bytes, arguments=[0])


def test_padding_is_counted_and_told() -> None:
    placed = place_buffers([SharedBuffer("barriers", 16), SharedBuffer("ring", 2048, 1024)])
    assert [(one.offset, one.padding_bytes, one.end) for one in placed] == [
        (0, 0, 16),
        (1024, 1008, 3072),
    ]
    buffers = [SharedBuffer("barriers", 16), SharedBuffer("ring", 101376, 1024)]
    (finding,) = check_shared_budget(buffers, RTX5090).findings
    assert "102400 bytes of shared memory per CTA, 1008 of them padding" in finding.message


def test_a_low_rank_budget_twice_too_large_is_named() -> None:
    buffers = [SharedBuffer("lora_act", 16384, 1024), SharedBuffer("lora_up", 16384, 1024)]
    report = check_shared_budget(buffers, B200, {"lora_up": 32768, "lora_act": 16384})
    (finding,) = report.findings
    assert finding.rule == "shared-budget/declared"
    assert finding.message == (
        "declared 32768 bytes for lora_up, its layout takes 16384 (2 times as much)"
    )
    with pytest.raises(CheckFailedError, match="lora_up, its layout takes 16384"):
        require_clean(report)


def test_a_figure_for_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing is called 'lora_down'; there are ring"):
        check_shared_budget([SharedBuffer("ring", 16)], B200, {"lora_down": 16})
    with pytest.raises(UsageError, match="power of two"):
        SharedBuffer("ring", 16, 48)
    with pytest.raises(UsageError, match="-1 bytes"):
        SharedBuffer("ring", -1)


def test_columns_beyond_the_allocation_are_named() -> None:
    buffers = [TensorBuffer("accumulator", 0, 256), TensorBuffer("scales of B", 256, 32)]
    assert check_tensor_memory_budget(buffers, B200, 512).is_clean
    (finding,) = check_tensor_memory_budget(buffers, B200, 256).findings
    assert finding.rule == "tensor-memory/over"
    assert finding.message == (
        "scales of B uses columns 256 to 287; 256 are allocated (32 too few)"
    )


@pytest.mark.parametrize(
    ("columns", "gpu", "message"),
    [
        (1024, B200, "b200 has 512 (512 too many)"),
        (96, B200, "powers of two from 32 on"),
        (16, B200, "powers of two from 32 on"),
        (32, RTX5090, "rtx5090 has 0 (32 too many)"),
    ],
)
def test_allocations_that_do_not_exist(columns: int, gpu: Gpu, message: str) -> None:
    (finding,) = check_allocation(columns, gpu, "k")
    assert message in finding.message


def test_a_kernel_that_uses_more_columns_than_it_allocates_is_found() -> None:
    # N = 64 in the descriptor: columns 0 to 63; scales at 64 and on are not copied here
    ptx = make_products(scaled_mma(VARIES) + plain_mma(ALWAYS))
    assert check_tensor_memory(read_kernel(ptx)).is_clean
    small = read_kernel(ptx.replace("[address], 128", "[address], 32"))
    (finding,) = check_tensor_memory(small).findings
    assert finding.rule == "tensor-memory/over"
    assert "32 are allocated" in finding.message


def test_an_allocation_that_cannot_be_traced_is_undecided() -> None:
    ptx = make_products(plain_mma(ALWAYS)).replace("[address], 128", "[address], %r1")
    (finding,) = check_tensor_memory(read_kernel(ptx)).findings
    assert finding.severity is Severity.UNDECIDED
    assert finding.rule == "tensor-memory/unknown"
