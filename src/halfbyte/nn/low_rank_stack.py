"""Any number of low-rank deltas beside a linear: stacked, rescaled and removed, weights untouched.

A delta adds `strength * scale * (x @ down.T) @ up.T`, of the raw x: what the low-rank branch of a
4-bit linear computes. The branch that runs is therefore the module's own one with the ranks of all
deltas behind it, in two buffers that are no part of the state:

    adapted_down [R + sum R_i, K]    own lora_down above the rows of every delta
    adapted_up   [N, R + sum R_i]    own lora_up left of strength_i * scale_i * up_i

Another strength rewrites R_i columns of `adapted_up` and nothing else. A float `nn.Linear` gets the
same two buffers and a forward hook that adds the branch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from halfbyte.errors import FormatError, UsageError
from halfbyte.formats.dtypes import FLOAT_DTYPES

_ADAPTERS: Final = "low_rank_adapters"  # a dict of the module: name -> StackedDelta
_BUFFERS: Final = ("adapted_down", "adapted_up")
_SERIAL_ELEMENTS: Final = 16384  # torch works alone below 32768


@dataclass(frozen=True, eq=False)
class LowRankDelta:
    """W' = W + scale * up @ down.

    Attributes:
        down: [R, K] float. up: [N, R] float. scale: alpha / rank of the source.
        error: relative Frobenius error of `up @ down` against the source; 0.0 where it is exact.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0
    error: float = 0.0

    def __post_init__(self) -> None:
        """Check that the factors fit each other."""
        down, up = tuple(self.down.shape), tuple(self.up.shape)
        if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise FormatError(f"down {list(down)}, up {list(up)}: wanted [R, K] and [N, R]")

    @property
    def rank(self) -> int:
        """R."""
        return int(self.down.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight that it is added to."""
        return int(self.up.shape[0]), int(self.down.shape[1])


@dataclass(frozen=True, eq=False)
class StackedDelta:
    """A delta on a module.

    Attributes:
        delta: as given. strength: what it is multiplied by now.
        exponent: 2^exponent went from `up` to `down`, for the range of float16.
        up_max: largest |up| as stacked at scale * strength = 1.
    """

    delta: LowRankDelta
    strength: float
    exponent: int
    up_max: float

    @property
    def factor(self) -> float:
        """What `delta.up` is multiplied by."""
        return float(self.delta.scale * self.strength * 2.0**-self.exponent)


def get_stacked(module: nn.Module) -> Mapping[str, StackedDelta]:
    """Return the deltas on a linear, in the order of their ranks."""
    found: Mapping[str, StackedDelta] = module.__dict__.get(_ADAPTERS, {})
    return found


def stack_delta(module: nn.Module, name: str, delta: LowRankDelta, strength: float = 1.0) -> None:
    """Add `delta` to a linear as `name`.

    Args:
        module: W4A4Linear or nn.Linear.
        name: not on the module yet.
        delta: [N, K] of the module.
        strength: finite; 0 keeps its ranks and adds nothing.

    Raises FormatError for another shape or numbers that the dtype of the branch cannot hold,
    UsageError for a name that is taken.
    """
    wanted: Any = (module.out_features, module.in_features)
    if delta.shape != wanted:
        raise FormatError(f"adapter {name!r}: delta of {delta.shape}, the linear is {wanted}")
    if name in get_stacked(module):
        raise UsageError(f"adapter {name!r} is on this linear already; remove it first")
    stacked = _make_stacked(name, delta, strength, choose_stack_dtype(module, delta))
    _write_stack(module, {**get_stacked(module), name: stacked})


def remove_delta(module: nn.Module, name: str) -> None:
    """Take `name` off a linear; without any delta it is what it was before the first."""
    _find(module, name)
    _write_stack(module, {key: one for key, one in get_stacked(module).items() if key != name})


def set_delta_strength(module: nn.Module, name: str, strength: float) -> None:
    """Rewrite the columns of one delta; no other tensor changes."""
    stacked = replace(_find(module, name), strength=strength)
    up: Any = module.adapted_up
    _check_strength(name, stacked, up.dtype)
    start = _own_rank(module)
    for key, one in get_stacked(module).items():
        if key == name:
            break
        start += one.delta.rank
    if stacked.delta.up.device != up.device and not up.is_meta:
        moved = replace(stacked.delta, up=stacked.delta.up.to(up.device))
        stacked = replace(stacked, delta=moved)
    with torch.inference_mode(False), torch.no_grad():
        _write_columns(up[:, start : start + stacked.delta.rank], stacked)
    module.__dict__[_ADAPTERS][name] = stacked


def restack(module: nn.Module) -> None:
    """Make the buffers again after the module's own low-rank branch was written."""
    if get_stacked(module):
        _write_stack(module, get_stacked(module))


def bake_deltas(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Make deltas part of the module: of a 4-bit linear's low-rank branch, of a float weight.

    A 4-bit linear computes the same bits as before where all deltas are baked: its rank grows, the
    weight is not quantized again. A float weight is rounded once more.

    Args:
        module: W4A4Linear or nn.Linear.
        names: of deltas on the module; None for all.
    """
    wanted = list(get_stacked(module) if names is None else names)
    chosen = {name: _find(module, name) for name in wanted}
    chosen = {name: one for name, one in chosen.items() if one.strength != 0}
    left = {name: one for name, one in get_stacked(module).items() if name not in wanted}
    with torch.inference_mode(False), torch.no_grad():
        if isinstance(module, nn.Linear):
            for one in chosen.values():
                weight = module.weight
                wide = torch.promote_types(weight.dtype, torch.float32)
                up, down = (part.to(weight.device, wide) for part in (one.delta.up, one.delta.down))
                product = (up @ down) * (one.delta.scale * one.strength)
                weight.copy_(weight.to(wide) + product)  # rounded once
        elif chosen:
            grown_down, grown_up = _join(module, chosen)
            setattr(module, "lora_down", grown_down)  # noqa: B010  # nn.Module knows no such buffer
            setattr(module, "lora_up", grown_up)  # noqa: B010
            setattr(module, "rank", int(grown_down.shape[0]))  # noqa: B010
    _write_stack(module, left)


def add_low_rank(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: Mapping[str, Any], y: torch.Tensor
) -> torch.Tensor:
    """Return y plus the stacked branch: the forward hook of a float linear."""
    x = inputs[0] if inputs else kwargs["input"]
    down, up = (getattr(module, name) for name in _BUFFERS)
    branch = functional.linear(functional.linear(x.to(down.dtype), down), up)
    return y + branch.to(y.dtype)


def choose_stack_dtype(module: nn.Module, delta: LowRankDelta) -> torch.dtype:
    """Return the dtype of the branch: the module's own, else of its other 16/32-bit parts."""
    is_float = isinstance(module, nn.Linear)
    for name in ("weight",) if is_float else ("adapted_down", "lora_down", "bias", "smooth"):
        part = getattr(module, name, None)
        if isinstance(part, torch.Tensor) and part.is_floating_point():
            return part.dtype
    return delta.down.dtype if delta.down.dtype in FLOAT_DTYPES else torch.float32


def _find(module: nn.Module, name: str) -> StackedDelta:
    stacked = get_stacked(module)
    if name not in stacked:
        there = ", ".join(map(repr, stacked)) or "none"
        raise UsageError(f"adapter {name!r} is not on this linear; on it: {there}")
    return stacked[name]


def _make_stacked(
    name: str, delta: LowRankDelta, strength: float, dtype: torch.dtype
) -> StackedDelta:
    down_max, up_max = (
        float(part.abs().max()) if part.numel() else 0.0
        for part in (delta.down.float(), delta.up.float())
    )
    if not (math.isfinite(down_max) and math.isfinite(up_max) and math.isfinite(delta.scale)):
        raise FormatError(f"adapter {name!r}: NaN or infinity in its factors or scale")
    exponent = 0
    scaled_max = up_max * abs(delta.scale)
    if dtype == torch.float16 and down_max and scaled_max:
        # float16 has few exponents, and trained `up` are small: both factors get the same size.
        exponent = round(math.log2(scaled_max / down_max) / 2)
    if down_max * 2.0**exponent > torch.finfo(dtype).max:
        raise FormatError(f"adapter {name!r}: down up to {down_max:g} does not fit {dtype}")
    stacked = StackedDelta(delta, strength, exponent, scaled_max * 2.0**-exponent)
    _check_strength(name, stacked, dtype)
    return stacked


def _check_strength(name: str, stacked: StackedDelta, dtype: torch.dtype) -> None:
    strength = stacked.strength
    is_number = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not is_number or not math.isfinite(strength):
        raise UsageError(f"adapter {name!r}: strength {strength!r}, wanted a finite number")
    if abs(strength) * stacked.up_max > torch.finfo(dtype).max:
        raise FormatError(
            f"adapter {name!r}: strength {strength:g} times up of {stacked.up_max:g} does not fit "
            f"{dtype}"
        )


def _write_columns(columns: torch.Tensor, stacked: StackedDelta) -> None:
    """Write scaled `up` into `columns` [N, R].

    On a CPU in pieces that torch does not share among threads: starting and joining them takes
    longer than the work, and many times longer beside other processes.
    """
    if columns.is_meta:
        return
    n, rank = columns.shape
    step = n if columns.is_cuda else max(_SERIAL_ELEMENTS // max(rank, 1), 1)
    for start in range(0, n, step):
        rows = stacked.delta.up[start : start + step]
        columns[start : start + step].copy_(rows.float() * stacked.factor)


def _own_rank(module: nn.Module) -> int:
    own = getattr(module, "lora_down", None)
    return 0 if own is None else int(own.shape[0])


def _join(
    module: nn.Module, stacked: Mapping[str, StackedDelta]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (down, up) of the module's own branch and the deltas, new tensors."""
    own_down, own_up = getattr(module, "lora_down", None), getattr(module, "lora_up", None)
    like = module.weight if isinstance(module, nn.Linear) else module.weight_data
    assert isinstance(like, torch.Tensor)
    first = next(iter(stacked.values())).delta
    dtype, device = choose_stack_dtype(module, first), like.device
    downs = [] if own_down is None else [own_down]
    ups = [] if own_up is None else [own_up]
    for one in stacked.values():
        downs.append((one.delta.down.float() * 2.0**one.exponent).to(device, dtype))
        ups.append((one.delta.up.float() * one.factor).to(device, dtype))
    return torch.cat(downs).contiguous(), torch.cat(ups, dim=1).contiguous()


def _write_stack(module: nn.Module, stacked: Mapping[str, StackedDelta]) -> None:
    """Put the deltas on the module, all or none."""
    is_float = isinstance(module, nn.Linear)
    if not stacked:
        module.__dict__.pop(_ADAPTERS, None)
        for name in _BUFFERS:
            if is_float:
                module._buffers.pop(name, None)
                module._non_persistent_buffers_set.discard(name)
            else:
                setattr(module, name, None)
        for key, hook in list(module._forward_hooks.items()):
            if hook is add_low_rank:
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
        return
    # Normal tensors even under inference_mode: their version tells placements of a new strength.
    with torch.inference_mode(False), torch.no_grad():
        joined = _join(module, stacked)
    for name, tensor in zip(_BUFFERS, joined, strict=True):
        module.register_buffer(name, tensor, persistent=False)
    if is_float and add_low_rank not in module._forward_hooks.values():
        module.register_forward_hook(add_low_rank, with_kwargs=True)
    module.__dict__[_ADAPTERS] = dict(stacked)
