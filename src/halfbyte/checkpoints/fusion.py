"""Several linears over one input as one linear, and one linear as several: rows of the weight.

Models fuse q, k, v or gate, up; files hold them apart, and the other way round. Nothing is
quantized again: codes and block scales are moved as they are.

Where the weights have different global scales, one scale cannot stand for all. The fused weight
then gets a power of two as its global scale, and `channel_scale` the quotient of each row: division
by a power of two is exact, so that code * block_scale * global_scale * channel_scale is the product
that each part had (times the part's own channel_scale: one float32 rounding).
"""

from collections.abc import Sequence

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantized_linear import QuantizedLinear


def fuse_linears(linears: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Return one linear whose output is the outputs of `linears` side by side.

    Low-rank branches with one lora_down keep it; different ones become one branch whose rank is
    the sum, its lora_up zero outside a part's own columns. Parts of different float dtypes take the
    dtype that holds them all.

    Args:
        linears: one or more, of one format, one K, and one way of quantizing x. Tensors without
            values (device "meta") fuse as different scales and different branches do.

    Raises:
        FormatError: linears that see x differently (activation format, activation_global_scale,
            smooth, K) or whose weights have different formats or scale dtypes; the message names
            which and both values.
    """
    if not linears:
        raise FormatError("fuse_linears: got no linear, wanted one or more")
    first = linears[0]
    if len(linears) == 1:
        return first
    for index, linear in enumerate(linears[1:], start=1):
        _check_same_input(first, linear, index)
    weight, channel_scale = _fuse_weights(linears)
    lora_down, lora_up = _fuse_low_rank(linears)
    return QuantizedLinear(
        weight=weight,
        activation=first.activation,
        activation_global_scale=first.activation_global_scale,
        channel_scale=channel_scale,
        smooth=_widest([linear.smooth for linear in linears]),
        lora_down=lora_down,
        lora_up=lora_up,
        bias=_fuse_biases(linears),
    )


def split_linear_rows(linear: QuantizedLinear, sizes: Sequence[int]) -> list[QuantizedLinear]:
    """Return the linears of consecutive rows; the inverse of `fuse_linears` in what they mean.

    Ranks that only reach other rows are left out of a part: their product is zero.

    Args:
        linear: with N the sum of `sizes`.
        sizes: rows of each part.

    Raises:
        FormatError: sizes that are not positive or do not add up to N.
    """
    if any(size <= 0 for size in sizes) or sum(sizes) != linear.out_features:
        raise FormatError(
            f"split into {list(sizes)} rows: wanted positive sizes that add up to "
            f"{linear.out_features} (out_features)"
        )
    parts, start = [], 0
    for size in sizes:
        parts.append(take_linear_rows(linear, start, start + size))
        start += size
    return parts


def take_linear_rows(linear: QuantizedLinear, start: int, stop: int) -> QuantizedLinear:
    """Return output rows [start, stop) of a linear; its tensors share that one's memory."""
    down, up = linear.lora_down, linear.lora_up
    if down is not None and up is not None:
        up = up[start:stop]
        if not up.is_meta:
            is_used = (up != 0).any(0)
            if not bool(is_used.all()):
                down, up = down[is_used], up[:, is_used]
        if up.shape[1] == 0:
            down = up = None
    return QuantizedLinear(
        weight=linear.weight.take_rows(start, stop),
        activation=linear.activation,
        activation_global_scale=linear.activation_global_scale,
        channel_scale=None if linear.channel_scale is None else linear.channel_scale[start:stop],
        smooth=linear.smooth,
        lora_down=down,
        lora_up=up,
        bias=None if linear.bias is None else linear.bias[start:stop],
    )


def _check_same_input(first: QuantizedLinear, other: QuantizedLinear, index: int) -> None:
    """Check that both linears do the same to x, and that their codes mean the same."""
    first_name, other_name = (
        record.activation.name if record.activation else "none" for record in (first, other)
    )
    for what, left, right in (
        ("weight format", first.weight.format.name, other.weight.format.name),
        ("dtype of weight scales", first.weight.scales.dtype, other.weight.scales.dtype),
        ("in_features", first.in_features, other.in_features),
        ("activation", first_name, other_name),
    ):
        if left != right:
            _refuse(what, left, right, index)
    for what in ("activation_global_scale", "smooth"):
        one, two = getattr(first, what), getattr(other, what)
        if one is None or two is None:
            if one is not two:
                _refuse(what, _describe(one), _describe(two), index)
        elif not (one.is_meta or two.is_meta or torch.equal(one.float(), two.float())):
            _refuse(what, _describe(one), _describe(two), index)


def _describe(part: torch.Tensor | None) -> str:
    if part is None:
        return "absent"
    return f"{float(part):.9g}" if part.ndim == 0 else f"up to {float(part.max()):.9g}"


def _refuse(what: str, left: object, right: object, index: int) -> None:
    raise FormatError(
        f"linears 0 and {index} cannot be fused: {what} is {left} and {right}, and x is quantized "
        "once for both; load them into a model that keeps them apart"
    )


def _fuse_weights(
    linears: Sequence[QuantizedLinear],
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    weights = [linear.weight for linear in linears]
    globals_ = [w.global_scale for w in weights if w.global_scale is not None]
    channels: list[torch.Tensor | None] = [linear.channel_scale for linear in linears]
    global_scale = globals_[0] if globals_ else None
    if global_scale is not None and not _are_equal(globals_):
        global_scale = _choose_power_of_two(globals_)
        channels = [
            scale / global_scale * _fill(linear.channel_scale, linear, 1.0)
            for linear, scale in zip(linears, globals_, strict=True)
        ]
    channel_scale = None
    if any(part is not None for part in channels):
        pairs = zip(linears, channels, strict=True)
        channel_scale = torch.cat([_fill(part, linear, 1.0) for linear, part in pairs])
    scale_bytes = [view_as_bytes(w.scales.contiguous()) for w in weights]
    scales = torch.cat(scale_bytes).view(weights[0].scales.dtype)
    data = torch.cat([w.data for w in weights])
    scales = scales.reshape(data.shape[0], weights[0].scales.shape[1])
    fused = BlockScaledTensor(weights[0].format, data, scales, global_scale, weights[0].columns)
    return fused, channel_scale


def _choose_power_of_two(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the power of two at or below the largest scale."""
    largest = torch.stack(list(scales)).max()
    exponent = torch.frexp(largest).exponent - 1
    return torch.ldexp(torch.ones_like(largest), exponent)


def _fuse_low_rank(
    linears: Sequence[QuantizedLinear],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    downs = [linear.lora_down for linear in linears]
    present = [down for down in downs if down is not None]
    if not present:
        return None, None
    dtype = _widest_dtype(present)
    is_shared = len(present) == len(linears) and _are_equal(present)
    down = present[0].to(dtype) if is_shared else torch.cat([part.to(dtype) for part in present])
    ups, column = [], 0
    for linear in linears:
        up = present[0].new_zeros((linear.out_features, down.shape[0]), dtype=dtype)
        if linear.lora_up is not None:
            up[:, column : column + linear.rank] = linear.lora_up.to(dtype)
            column += 0 if is_shared else linear.rank
        ups.append(up)
    return down, torch.cat(ups)


def _fuse_biases(linears: Sequence[QuantizedLinear]) -> torch.Tensor | None:
    present = [linear.bias for linear in linears if linear.bias is not None]
    if not present:
        return None
    dtype = _widest_dtype(present)
    return torch.cat([_fill(linear.bias, linear, 0.0).to(dtype) for linear in linears])


def _fill(part: torch.Tensor | None, linear: QuantizedLinear, value: float) -> torch.Tensor:
    """Return a vector over N, [N] float32 of `value` where there is none."""
    if part is not None:
        return part
    return torch.full((linear.out_features,), value, device=linear.weight.data.device)


def _are_equal(parts: Sequence[torch.Tensor]) -> bool:
    first = parts[0]
    return all(
        part is first
        or (
            not part.is_meta
            and part.dtype == first.dtype
            and part.shape == first.shape
            and torch.equal(part, first)
        )
        for part in parts
    )


def _widest(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return present[0].to(_widest_dtype(present)) if present else None


def _widest_dtype(parts: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype that holds every value of all parts: float32 for fp16 beside bf16."""
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)
    return dtype
