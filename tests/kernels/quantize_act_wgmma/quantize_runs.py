"""One call of the kernel on poisoned outputs, and its comparison with the reference."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.input_rule import InputRule
from halfbyte.kernels.quantize_act_lora.config import count_amax_ctas
from halfbyte.kernels.quantize_act_wgmma.config import (
    BLOCK_K,
    GPU,
    TARGET,
    WgmmaQuantizeConfig,
    WgmmaQuantizeRequest,
    choose_config,
    padded_k,
    padded_rank,
)
from halfbyte.kernels.quantize_act_wgmma.source import make_source
from halfbyte.reference.decode import Float64Array, read_floats
from halfbyte.reference.gemm_w4_wgmma import decode_act
from halfbyte.reference.quantize_act_wgmma import (
    ReferenceTokens,
    quantize_exactly,
    quantize_tokens,
)
from tests.kernels.quantize_act_lora.quantize_runs import (
    DTYPES,
    LORA_ACT_SCALE,
    POISON_BYTE,
    STATIC_SCALE,
    WEIGHT_SCALE,
    Operands,
)
from tests.tolerance import measure_error

CompileSource = Callable[..., Any]
ACT_DTYPES = {
    "float16": torch.float16,
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class Result:
    """What came out, on the CPU."""

    act: torch.Tensor
    token_scale: torch.Tensor | None
    group_scale: torch.Tensor | None
    lora_act: torch.Tensor | None
    alpha: float | None


def make_request(operands: Operands, mode: str, shift: float = 0.0) -> WgmmaQuantizeRequest:
    """Return the request that these operands are."""
    x = operands.x
    return WgmmaQuantizeRequest(
        mode=mode,
        dtype=str(x.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        m=x.shape[0],
        k=x.shape[1],
        rank=0 if operands.lora_down is None else operands.lora_down.shape[0],
        has_smooth=operands.smooth is not None,
        shift=shift,
        x_is_aligned=x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0,
    )


def read_smooth(operands: Operands, config: WgmmaQuantizeConfig) -> torch.Tensor | None:
    """Return what the kernel gets: factors in modes with a scale a row, divisors in others."""
    if operands.smooth is None or not config.has_token_scale:
        return operands.smooth
    return 1.0 / operands.smooth


def run(compile_source: CompileSource, config: WgmmaQuantizeConfig, operands: Operands) -> Result:
    """Compile (once) and call the kernel with poisoned outputs."""
    call = compile_source(make_source(config))
    m, k = operands.x.shape
    rank = 0 if operands.lora_down is None else operands.lora_down.shape[0]

    def poison(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device="cuda")

    act_dtype = ACT_DTYPES[config.act_dtype]
    size = padded_k(k) * config.act_bytes
    act = torch.full((m, size), POISON_BYTE, dtype=torch.uint8, device="cuda").view(act_dtype)
    token_scale = poison((m,), torch.float32) if config.has_token_scale else None
    groups = (m, padded_k(k) // BLOCK_K)
    group_scale = poison(groups, torch.float16) if config.has_group_scales else None
    lora_act = poison((m, padded_rank(rank)), operands.x.dtype) if rank else None
    rule = "none" if config.has_token_scale else config.activation.global_scale
    scale = {"none": None, "static": torch.tensor([STATIC_SCALE]).cuda()}.get(rule)
    alpha = partial = None
    if rule == "dynamic":
        scale, alpha = poison((1,), torch.float32), poison((1,), torch.float32)
        partial = poison((count_amax_ctas(m, k, TARGET),), torch.float32)
    lora_down = None
    if operands.lora_down is not None:
        lora_down = pad_lora_down(operands.lora_down).cuda()
    tensors = (
        move_whole(operands.x),
        to_cuda(read_smooth(operands, config)),
        lora_down,
        act,
        token_scale,
        group_scale,
        lora_act,
    )
    scales = (scale, alpha, partial, WEIGHT_SCALE, LORA_ACT_SCALE)
    call(tensors, scales, GPU.count_resident_clusters(config.cluster_k))
    return Result(
        act=act.cpu(),
        token_scale=to_cpu(token_scale),
        group_scale=to_cpu(group_scale),
        lora_act=to_cpu(lora_act),
        alpha=None if alpha is None else alpha.item(),
    )


def pad_lora_down(lora_down: torch.Tensor) -> torch.Tensor:
    """Return lora_down [R, K] as placement makes it: [R_pad, K_pad], zeros in the padding."""
    rank, k = lora_down.shape
    padded = lora_down.new_zeros((padded_rank(rank), padded_k(k)))
    padded[:rank, :k] = lora_down
    return padded


def move_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view on the GPU with the same strides and offset, over the whole storage."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor, (length,), (1,), 0).cuda()
    return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


def to_cuda(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cuda()


def to_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


def find_wanted(operands: Operands, config: WgmmaQuantizeConfig) -> ReferenceTokens:
    """Return what the reference makes of the operands."""
    x = read_floats(operands.x)
    with np.errstate(all="ignore"):  # extreme smooth factors overflow on purpose
        if config.has_token_scale:
            smooth = read_smooth(operands, config)
            factors = None if smooth is None else smooth.numpy()
            return quantize_tokens(x, config.mode, factors, config.shift)
        activation = get_activation_format(config.mode)
        scale = torch.tensor(STATIC_SCALE) if activation.global_scale == "static" else None
        return quantize_exactly(x, InputRule(activation, operands.smooth, scale))


def assert_equals_reference(
    result: Result, operands: Operands, config: WgmmaQuantizeConfig
) -> None:
    """Assert the same bits as the reference, and lora_act within twice torch's error."""
    wanted = find_wanted(operands, config)
    m, k = operands.x.shape
    padded = np.zeros((m, padded_k(k)))
    padded[:, :k] = wanted.act
    act = decode_act(result.act)
    divisor: Float64Array | float = 1.0
    if wanted.token_scale is not None:
        assert result.token_scale is not None
        np.testing.assert_array_equal(result.token_scale.numpy(), wanted.token_scale)
        finite = np.isfinite(wanted.token_scale)  # nothing is said about act of other rows
        act, padded = act[finite], padded[finite]
        divisor = wanted.token_scale.astype(np.float64)[:, None]
    elif config.act_bytes == 2:
        with np.errstate(over="ignore"):  # MXFP4's scales have more range than float16
            padded = padded.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(act, padded)
    if wanted.group_scale is not None:
        assert result.group_scale is not None
        groups = wanted.group_scale.shape[1]
        written = result.group_scale.double().numpy()
        np.testing.assert_array_equal(written[:, :groups], wanted.group_scale)
        assert np.isfinite(written[:, groups:]).all()
    if result.alpha is not None:
        assert result.alpha == float(np.float32(wanted.global_scale) * np.float32(WEIGHT_SCALE))
        divisor = wanted.global_scale
    if result.lora_act is not None:
        assert_close_lora_act(result.lora_act, operands, divisor)


def assert_close_lora_act(
    lora_act: torch.Tensor, operands: Operands, divisor: Float64Array | float
) -> None:
    assert operands.lora_down is not None
    rank = operands.lora_down.shape[0]
    with np.errstate(all="ignore"):
        exact = read_floats(operands.x) @ read_floats(operands.lora_down).T
        exact = exact * LORA_ACT_SCALE / divisor
    finite = np.isfinite(exact).all(axis=1)
    rows = torch.from_numpy(finite)
    by_torch = (operands.x @ operands.lora_down.T).double() * LORA_ACT_SCALE
    by_torch = (by_torch / torch.as_tensor(divisor)).to(lora_act.dtype)
    limit = 2.0 * measure_error(by_torch[rows], exact[finite])
    assert measure_error(lora_act[rows, :rank], exact[finite]) <= limit
    assert not lora_act[rows, rank:].any()
    assert not torch.isfinite(lora_act[~rows, :rank]).all(dim=1).any()


def check_call(
    compile_source: CompileSource,
    operands: Operands,
    mode: str,
    shift: float = 0.0,
    **choices: Any,
) -> Result:
    """Run a mode, with `choices` in place of the chosen configuration's, and compare it."""
    config = dataclasses.replace(choose_config(make_request(operands, mode, shift)), **choices)
    result = run(compile_source, config, operands)
    assert_equals_reference(result, operands, config)
    return result


def make_noise(m: int, k: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Return [m, k] random numbers in rows of very different size."""
    draw = torch.Generator().manual_seed(seed)
    exponents = torch.linspace(-12, 12, m).round()
    return (torch.randn((m, k), generator=draw) * torch.exp2(exponents)[:, None]).to(DTYPES[dtype])
