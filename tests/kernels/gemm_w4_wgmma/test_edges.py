"""What does not fit is refused; NaN and infinity stay in their row; full production shapes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4_wgmma.config import (
    SHARED_BYTES,
    WgmmaGemmConfig,
    check_legal,
    plan_storage,
)
from halfbyte.reference.gemm_w4_wgmma import gemm_w4_wgmma
from tests.kernels.gemm_w4_wgmma.gemm_runs import (
    GemmShape,
    check_gemm,
    compile_gemm,
    draw_operands,
    run_gemm,
)

pytestmark = pytest.mark.usefixtures("one_thread")
LARGEST = WgmmaGemmConfig("fp8", "e2m1", "bfloat16", "bfloat16", 256, 4, cluster=2, has_bias=True)
WRONG = (
    ({"mode": "int4"}, "mode 'int4'"),
    ({"mode": "int8"}, "mode 'int8' multiplies integers"),
    ({"weight": "nvfp4"}, "weight 'nvfp4'"),
    ({"out_dtype": "float32"}, "out_dtype 'float32'"),
    ({"lora_dtype": "float32"}, "lora_dtype 'float32'"),
    ({"tokens": 264}, "tokens 264"),
    ({"tokens": 200}, "multiple of 16"),
    ({"cluster": 3}, "cluster 3"),
    ({"stages": 1}, "stages 1"),
    ({"stages": 9}, "take fewer stages"),
)


@pytest.mark.parametrize(("change", "message"), WRONG, ids=lambda one: str(one)[:30])
def test_what_cannot_be_compiled_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        check_legal(replace(LARGEST, **change))


@pytest.mark.parametrize("tokens", range(40, 257, 8))
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_every_plan_fits(mode: Any, tokens: int) -> None:
    for stages in (3, 4, 5):
        config = replace(LARGEST, mode=mode, tokens=tokens, cluster=1, stages=stages)
        try:
            storage = plan_storage(config)
        except FormatError:
            assert tokens > 200
            continue
        assert storage.used_bytes <= SHARED_BYTES
        assert tokens % storage.chunk_tokens == 0


def test_a_staging_buffer_waits_for_its_own_last_store() -> None:
    pytest.importorskip("cutlass", reason="device code; the kernel itself may run from artifacts")
    from halfbyte.kernels.gemm_w4_wgmma.epilogue import count_pending

    for num_buffers in (1, 2):
        for num_chunks in range(num_buffers, 7):
            buffers = [chunk % num_buffers for chunk in range(num_chunks)] * 2
            for chunk in range(num_chunks):
                now = num_chunks + chunk
                last = max(one for one in range(now) if buffers[one] == buffers[now])
                assert count_pending(chunk, num_chunks, num_buffers) == now - last - 1


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_a_special_value_stays_in_its_row(h200: Any, mode: Any, special: float) -> None:
    config = replace(LARGEST, mode=mode)
    shape, row = GemmShape(140, 200, 200, 40), 77
    operands = draw_operands(config, shape)
    if mode == "fp8":
        assert operands.token_scale is not None
        operands.token_scale[row] = special
    else:
        operands.act[row, 3] = special
    y = run_gemm(h200, compile_gemm(config), config, shape, operands)
    assert not y[row].isfinite().any()
    others = torch.arange(shape.m) != row
    assert y[others].isfinite().all()
    truth = torch.from_numpy(gemm_w4_wgmma(operands)[:, : shape.n])
    assert torch.allclose(y[others].double(), truth[others], rtol=2**-7, atol=1.0)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fp8", "exact"])
def test_a_production_shape(h200: Any, mode: Any) -> None:
    config = replace(LARGEST, mode=mode)
    check_gemm(h200, compile_gemm(config), config, GemmShape(4352, 3072, 3840, 128), False)
