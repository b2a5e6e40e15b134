"""An adapter file as low-rank deltas by the path of their linear.

Safetensors alone: a pickle is never read. Tensors are read one by one after the header was checked,
and every tensor of the file is used, ignored on demand, or named in an error.
"""

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from halfbyte.errors import CheckpointError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.safetensors_header import quoted, read_strict_json
from halfbyte.formats.safetensors_reader import SafetensorsFile
from halfbyte.nn.adapters.adapter_keys import PEFT_PREFIX, AdapterKey, parse_keys
from halfbyte.nn.adapters.adapter_scale import ScaleSource, read_scale_source
from halfbyte.nn.adapters.low_rank_forms import (
    RankLimits,
    find_lokr_rank,
    make_loha,
    make_lokr,
    make_lora,
)
from halfbyte.nn.low_rank_stack import LowRankDelta

PEFT_WEIGHTS: Final = "adapter_model.safetensors"  # PEFT's names in a directory
_CONFIG: Final = "adapter_config.json"
_PICKLE: Final = "adapter_model.bin"
_MAX_CONFIG_BYTES: Final = 2**20
# Exact in float32; fp8 files hold plain casts.
_READ_AS_FLOAT32: Final = (torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
DEFAULT_LIMITS: Final = RankLimits()


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter file holds.

    Attributes:
        where: the file, for errors.
        deltas: by path of the linear, as the file spells it.
        keys: the tensors that each delta was made of, by path.
        ignored: tensors that the caller left out.
    """

    where: str
    deltas: Mapping[str, LowRankDelta]
    keys: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()


class _Reader(Protocol):
    def __call__(self, name: str) -> torch.Tensor:
        """Return one tensor of the file."""


def read_adapter(
    path: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    ignore: Sequence[str] = (),
    limits: RankLimits = DEFAULT_LIMITS,
) -> Adapter:
    """Return the deltas of an adapter file.

    Args:
        path: a safetensors file, or a directory that PEFT saved.
        alpha: of the network, where the file does not say.
        ignore: patterns (`lora_te*`) of tensor names to leave out.
        limits: how long a LoKr or LoHa may get, and what shortening it may cost.

    Raises:
        CheckpointError: damaged files, pickles, tensors of no known kind, DoRA, factors that do not
            fit each other, values that are not finite, an unknown alpha. Names the tensor.
    """
    file_path, config = _find_files(Path(path))
    with SafetensorsFile(file_path) as file:
        scales = read_scale_source(str(file_path), file.metadata, config, alpha)
        return make_adapter(scales, list(file.tensors), file.read_tensor, ignore, limits)


def list_adapter_files(path: Path) -> tuple[Path, ...]:
    """Return the files that `read_adapter` reads."""
    file_path, _ = _find_files(path)
    config_path = file_path.parent / _CONFIG
    is_peft = file_path.name == PEFT_WEIGHTS and config_path.exists()
    return (file_path, config_path) if is_peft else (file_path,)


def make_adapter(
    scales: ScaleSource,
    names: Sequence[str],
    read: _Reader,
    ignore: Sequence[str] = (),
    limits: RankLimits = DEFAULT_LIMITS,
) -> Adapter:
    """Return the deltas of tensors called `names`, read one after the other."""
    where = scales.where
    ignored = [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in ignore)]
    left_out = set(ignored)
    groups = parse_keys(where, [name for name in names if name not in left_out])
    if not groups:
        raise CheckpointError(f"{where}: holds no adapter tensor ({len(ignored)} ignored)")
    deltas: dict[str, LowRankDelta] = {}
    keys: dict[str, tuple[str, ...]] = {}
    for path, roles in groups.items():
        factors = {role: _read_factor(where, key, read) for role, key in roles.items()}
        deltas[path] = _make_delta(path, roles, factors, scales, limits)
        keys[path] = tuple(key.key for key in roles.values())
    return Adapter(where, deltas, keys, tuple(ignored))


def _find_files(path: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """Return the safetensors file and PEFT's configuration beside it."""
    if path.is_dir():
        if not (path / PEFT_WEIGHTS).exists() and (path / _PICKLE).exists():
            raise CheckpointError(
                f"{path}: holds {_PICKLE}, a pickle, which runs whatever code is in it; wanted "
                f"{PEFT_WEIGHTS}: save it with safe_serialization=True"
            )
        path = path / PEFT_WEIGHTS
    config_path = path.parent / _CONFIG
    if path.name != PEFT_WEIGHTS or not config_path.exists():
        return path, None
    try:
        with config_path.open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{config_path}: cannot be read ({error})") from error
    if len(text) > _MAX_CONFIG_BYTES:
        raise CheckpointError(f"{config_path}: above {_MAX_CONFIG_BYTES} bytes; no configuration")
    config = read_strict_json(config_path, text)
    if not isinstance(config, dict):
        raise CheckpointError(f"{config_path}: {type(config).__name__}, wanted a JSON object")
    return path, config


def _read_factor(where: str, key: AdapterKey, read: _Reader) -> torch.Tensor:
    """Return a factor as a 2-D float tensor, alpha as it is; checked to be finite."""
    tensor = read(key.key)
    if tensor.dtype in _READ_AS_FLOAT32:
        tensor = tensor.float()
    place = f"{where}: tensor {quoted(key.key)}"
    if key.role == "alpha":
        if tensor.numel() != 1 or tensor.dtype == torch.bool:
            raise CheckpointError(f"{place}: shape {list(tensor.shape)}, wanted one number")
        return tensor.reshape(())
    if tensor.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{place}: {tensor.dtype}, wanted a float dtype")
    if tensor.ndim == 4 and tuple(tensor.shape[2:]) == (1, 1):  # a linear saved as 1x1 convolution
        tensor = tensor.flatten(1)
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise CheckpointError(
            f"{place}: shape {list(tensor.shape)}, wanted a matrix: only linears take an adapter"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{place}: holds NaN or infinity; the file is damaged or overflowed")
    return tensor


def _make_delta(
    path: str,
    roles: Mapping[str, AdapterKey],
    factors: dict[str, torch.Tensor],
    scales: ScaleSource,
    limits: RankLimits,
) -> LowRankDelta:
    where = f"{scales.where}: {path!r}"
    own_alpha = _read_alpha(scales.where, roles, factors.pop("alpha", None))
    kinds = {"lora" if role in ("down", "up") else role.partition("_")[0] for role in factors}
    if len(kinds) != 1:
        found = ", ".join(sorted(factors)) or "alpha alone"
        raise CheckpointError(f"{where}: {found}; wanted the factors of one LoRA, LoKr or LoHa")
    kind = kinds.pop()
    if kind == "hada":
        rank = int(factors[min(factors)].shape[1 if min(factors).endswith("a") else 0])
        scale = scales.find_scale(path, rank, own_alpha)
        return make_loha(where, factors, scale, limits)
    if kind == "lokr":
        return make_lokr(where, factors, _find_lokr_scale(path, factors, scales, own_alpha), limits)
    if len(factors) != 2:
        missing = "up (lora_B)" if "down" in factors else "down (lora_A)"
        present = next(key.key for role, key in roles.items() if role != "alpha")
        raise CheckpointError(f"{where}: {present!r} without its {missing} factor")
    down, up = factors["down"], factors["up"]
    if down.shape[0] != up.shape[1]:
        raise CheckpointError(
            f"{scales.where}: {roles['down'].key!r} {list(down.shape)} and {roles['up'].key!r} "
            f"{list(up.shape)}: wanted [R, K] and [N, R] of one rank"
        )
    return make_lora(down, up, scales.find_scale(path, down.shape[0], own_alpha))


def _read_alpha(
    where: str, roles: Mapping[str, AdapterKey], alpha: torch.Tensor | None
) -> float | None:
    if alpha is None:
        return None
    value = float(alpha)
    if not 0 < value < float("inf"):
        raise CheckpointError(
            f"{where}: tensor {roles['alpha'].key!r} is {value:g}, wanted a positive number"
        )
    return value


def _find_lokr_scale(
    path: str,
    factors: Mapping[str, torch.Tensor],
    scales: ScaleSource,
    own_alpha: float | None,
) -> float:
    """Return alpha / rank; LyCORIS gives a LoKr of two whole matrices the scale 1, PEFT alpha/r."""
    peft_scale = scales.find_peft_scale(path)
    if own_alpha is None and peft_scale is not None:
        return peft_scale
    rank = find_lokr_rank(factors)
    if rank is None:
        if path.startswith(PEFT_PREFIX):  # raises where PEFT's configuration is missing
            return scales.find_scale(path, 1, None)
        return 1.0
    return scales.find_scale(path, rank, own_alpha)
