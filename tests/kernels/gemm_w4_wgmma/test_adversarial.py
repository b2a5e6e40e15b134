"""Many tiles per CTA while waits fail, latencies vary and warps take turns the other way.

The virtual GPU has two SMs here: rings wrap many times, staging buffers are used again, and the two
warpgroups are apart. A wrong phase, a missing arrival or a slot that is reused early hangs, is
found, or changes bits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import halfbyte.virtual
from halfbyte.arch import find_gpu
from halfbyte.device.ring_position import Ring
from halfbyte.kernels.gemm_w4_wgmma import epilogue
from halfbyte.kernels.gemm_w4_wgmma.config import WgmmaGemmConfig
from halfbyte.virtual.device import Device, LaunchOptions
from tests.kernels.gemm_w4_wgmma.gemm_runs import (
    GemmShape,
    check_gemm,
    compile_gemm,
    draw_operands,
    run_gemm,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LARGEST = WgmmaGemmConfig("fp8", "e2m1", "float16", "bfloat16", 256, 4, cluster=2, has_bias=True)
CONFIGS = (
    LARGEST,
    replace(LARGEST, stages=2),
    replace(LARGEST, tokens=208, cluster=1),
    replace(LARGEST, tokens=16, stages=2, use_pdl=True),
    replace(LARGEST, mode="exact", stages=5),
    replace(LARGEST, mode="exact", tokens=64, stages=3, cluster=1),
)


@contextmanager
def open_small_gpu() -> Iterator[Any]:
    """Open the session of an H200 with two SMs."""
    with halfbyte.virtual.cuda(device=Device(replace(find_gpu("h200"), num_sms=2))) as gpu:
        yield gpu


@pytest.fixture(scope="module")
def small_gpu() -> Iterator[Any]:
    """Return the session of an H200 with two SMs."""
    with open_small_gpu() as gpu:
        yield gpu


def check_seeds(gpu: Any, config: WgmmaGemmConfig, tiles: tuple[int, int]) -> None:
    """Assert under obstacles the bits of a run without; `tiles` are (by tokens, by channels)."""
    clusters = 2 // config.cluster
    shape = GemmShape(tiles[0] * config.tokens - 5, tiles[1] * 128 - 27, 390, 72, clusters)
    launch = compile_gemm(config)
    wanted = check_gemm(gpu, launch, config, shape, is_integer=True)
    operands = draw_operands(config, shape, is_integer=True)
    for seed in (1, 2):
        for reverse_warps in (False, True):
            gpu.runtime.options = LaunchOptions(
                adversarial_try_wait=True, latency_seed=seed, reverse_warps=reverse_warps
            )
            try:
                y = run_gemm(gpu, launch, config, shape, operands)
            finally:
                gpu.runtime.options = None
            assert torch.equal(y, wanted), f"other bits with seed {seed}, {reverse_warps}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.mode}-{one.tokens}-{one.stages}")
def test_many_tiles_give_the_same_bits(small_gpu: Any, config: WgmmaGemmConfig) -> None:
    check_seeds(small_gpu, config, (3, 5))


def test_a_slot_that_is_not_waited_for_is_found(
    small_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ring, "wait_empty", lambda *_: None)
    with pytest.raises(Exception, match=r"over-arrival|in-flight|bits"):
        check_seeds(small_gpu, LARGEST, (3, 4))


def test_a_staging_buffer_that_is_not_waited_for_is_found(
    small_gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epilogue, "count_pending", lambda *_: 63)
    with pytest.raises(AssertionError, match=r"write-in-flight|bits|wrong"):
        check_seeds(small_gpu, LARGEST, (3, 4))
