"""One call of the kernel on poisoned outputs, and its comparison with the reference."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.scale_layout import pack_scales
from halfbyte.kernels.quantize_act_lora.config import (
    QuantizeConfig,
    QuantizeRequest,
    act_scale_shape,
    choose_config,
    count_amax_ctas,
    padded_k,
    padded_rank,
)
from halfbyte.kernels.quantize_act_lora.source import make_source
from halfbyte.reference import quantize_act_lora
from halfbyte.reference.quantize_act_lora import ReferenceActivation
from tests.random_linears import LinearShape, make_linear
from tests.tolerance import measure_error

POISON_BYTE = 0x7F
STATIC_SCALE = 0.0021
WEIGHT_SCALE = 0.37
# A power of two, and not 1: lora_act must be multiplied by it.
LORA_ACT_SCALE = 0.25
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

CompileSource = Callable[..., Any]


@dataclass(frozen=True)
class Shape:
    """Rows, columns and rank of one call."""

    m: int
    k: int
    rank: int

    def __str__(self) -> str:
        """Return a readable test id."""
        return f"{self.m}x{self.k}r{self.rank}"


@dataclass(frozen=True)
class Operands:
    """What goes in: x [M, K] of any row pitch, smooth [K] float32 or None, lora_down or None."""

    x: torch.Tensor
    smooth: torch.Tensor | None
    lora_down: torch.Tensor | None


@dataclass(frozen=True)
class Result:
    """What came out, on the CPU; `guards` is what lay around the outputs."""

    act_codes: torch.Tensor
    act_sf: torch.Tensor
    lora_act: torch.Tensor | None
    global_scale: float | None
    alpha: float | None


def pad_rows(matrix: torch.Tensor, step: int = 8) -> torch.Tensor:
    """Return the matrix as a view whose rows start at multiples of `step` elements."""
    rows, columns = matrix.shape
    padded = torch.full((rows, -(-columns // step) * step), float("nan"), dtype=matrix.dtype)
    padded[:, :columns] = matrix
    return padded[:, :columns]


def make_operands(shape: Shape, dtype: str, seed: int = 0) -> Operands:
    """Return random operands with outliers, a zero block and negative zeros where there is room."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn((shape.m, shape.k), generator=draw)
    x[:, shape.k // 2] *= 30.0
    x[shape.m // 2, : shape.k // 3] = -0.0
    x[0, -1] = 0.0
    smooth = torch.rand(shape.k, generator=draw) + 0.5
    lora_down = None
    if shape.rank:
        lora_down = torch.randn((shape.rank, shape.k), generator=draw) / shape.k**0.5
        lora_down = pad_rows(lora_down.to(DTYPES[dtype]))
    return Operands(pad_rows(x.to(DTYPES[dtype])), smooth, lora_down)


def make_request(
    operands: Operands, mode: str, target: str, lora_dtype: str | None = None
) -> QuantizeRequest:
    """Return the request that these operands are."""
    x = operands.x
    dtype = str(x.dtype).removeprefix("torch.")
    return QuantizeRequest(
        mode=mode,
        dtype=dtype,  # type: ignore[arg-type]
        m=x.shape[0],
        k=x.shape[1],
        rank=0 if operands.lora_down is None else operands.lora_down.shape[0],
        target=target,
        lora_dtype=lora_dtype or dtype,  # type: ignore[arg-type]
        has_smooth=operands.smooth is not None,
        x_is_aligned=x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0,
    )


def run(compile_source: CompileSource, config: QuantizeConfig, operands: Operands) -> Result:
    """Compile (once) and call the kernel with poisoned outputs; shape-dependent sizes from x."""
    call = compile_source(make_source(config))
    m, k = operands.x.shape
    rank = 0 if operands.lora_down is None else operands.lora_down.shape[0]

    def to_cuda(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        whole = torch.as_strided(
            tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0
        )
        return torch.as_strided(
            whole.cuda(), tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    codes = torch.full((m, padded_k(k) // 2), POISON_BYTE, dtype=torch.uint8, device="cuda")
    sf_shape = act_scale_shape(config.mode, m, k)
    if config.is_swizzled:
        sf = torch.full(sf_shape, POISON_BYTE, dtype=torch.uint8, device="cuda")
    else:
        sf = torch.full(sf_shape, float("nan"), dtype=torch.float16, device="cuda")
    lora_act = None
    if rank:
        lora_act = make_poisoned((m, padded_rank(rank)), DTYPES[config.lora_dtype])
    rule = config.activation.global_scale
    scale = {
        "none": None,
        "static": torch.tensor([STATIC_SCALE]).cuda(),
        "dynamic": make_poisoned((1,), torch.float32),
    }[rule]
    alpha = partial = None
    if rule == "dynamic":
        alpha = make_poisoned((1,), torch.float32)
        partial = make_poisoned((count_amax_ctas(m, k, config.target),), torch.float32)
    call(
        to_cuda(operands.x),
        to_cuda(operands.smooth),
        to_cuda(operands.lora_down),
        codes,
        sf,
        lora_act,
        (scale, alpha, partial, WEIGHT_SCALE, LORA_ACT_SCALE),
    )
    return Result(
        codes.cpu(),
        sf.cpu(),
        None if lora_act is None else lora_act.cpu(),
        None if scale is None else scale.item(),
        None if alpha is None else alpha.item(),
    )


def make_poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of NaN on the virtual GPU."""
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def make_layer(operands: Operands, mode: str) -> QuantizedLinear:
    """Return the record that makes the reference quantize for these operands."""
    weight = "nvfp4"
    linear = make_linear(
        LinearShape(n=1, k=operands.x.shape[1], rank=0, parts=False), (weight, None)
    )
    activation = get_activation_format(mode)
    is_static = activation.global_scale == "static"
    lora_down = operands.lora_down
    return dataclasses.replace(
        linear,
        activation=activation,
        activation_global_scale=torch.tensor(STATIC_SCALE) if is_static else None,
        smooth=operands.smooth,
        lora_down=lora_down,
        lora_up=None
        if lora_down is None
        else torch.zeros((1, lora_down.shape[0]), dtype=lora_down.dtype),
    )


def assert_equals_reference(result: Result, operands: Operands, config: QuantizeConfig) -> None:
    """Assert the same bytes as the reference, and lora_act within twice torch's error."""
    with np.errstate(all="ignore"):  # quotients of extreme smooth factors overflow on purpose
        wanted = quantize_act_lora(operands.x, make_layer(operands, config.mode))
    assert_same_codes(result, wanted, operands.x.shape[1])
    assert_same_scales(result, wanted, config)
    if config.activation.global_scale == "dynamic":
        assert result.global_scale == wanted.global_scale
        assert result.alpha == float(np.float32(wanted.global_scale) * np.float32(WEIGHT_SCALE))
    if wanted.lora_act is not None:
        assert_close_lora_act(result, operands, wanted, config)


def assert_same_codes(result: Result, wanted: ReferenceActivation, k: int) -> None:
    codes = np.zeros((len(wanted.codes), padded_k(k)), dtype=np.uint8)
    columns = min(padded_k(k), wanted.codes.shape[1])
    codes[:, :columns] = wanted.codes[:, :columns]
    np.testing.assert_array_equal(result.act_codes.numpy(), codes[:, 0::2] | (codes[:, 1::2] << 4))


def assert_same_scales(result: Result, wanted: ReferenceActivation, config: QuantizeConfig) -> None:
    if config.is_swizzled:
        assert wanted.scale_bytes is not None
        packed = pack_scales(torch.from_numpy(wanted.scale_bytes), "swizzled_128x4")
        np.testing.assert_array_equal(result.act_sf.numpy(), packed.numpy())
    else:
        np.testing.assert_array_equal(result.act_sf.double().numpy(), wanted.scales)


def assert_close_lora_act(
    result: Result, operands: Operands, wanted: ReferenceActivation, config: QuantizeConfig
) -> None:
    assert result.lora_act is not None
    assert operands.lora_down is not None
    assert wanted.lora_act is not None
    rank = operands.lora_down.shape[0]
    assert not result.lora_act[:, rank:].any()
    factor = LORA_ACT_SCALE
    if config.activation.global_scale == "dynamic":
        factor = factor / wanted.global_scale
    finite = np.isfinite(wanted.lora_act).all(axis=1)
    dtype = DTYPES[config.lora_dtype]
    by_torch = (operands.x.to(dtype) @ operands.lora_down.to(dtype).T).double() * factor
    exact = wanted.lora_act[finite] * factor
    limit = 2.0 * measure_error(by_torch.to(dtype)[torch.from_numpy(finite)], exact)
    assert measure_error(result.lora_act[torch.from_numpy(finite), :rank], exact) <= limit
    assert not torch.isfinite(result.lora_act[torch.from_numpy(~finite), :rank]).any()


def check_call(
    compile_source: CompileSource,
    operands: Operands,
    request: QuantizeRequest,
    **choices: Any,
) -> Result:
    """Run a request, with `choices` in place of the chosen configuration's, and compare it."""
    config = dataclasses.replace(choose_config(request), **choices)
    result = run(compile_source, config, operands)
    assert_equals_reference(result, operands, config)
    return result
