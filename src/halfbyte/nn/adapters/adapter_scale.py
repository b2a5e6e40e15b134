"""How strongly an adapter was trained to act: alpha over rank, wherever its tool wrote alpha.

In this order: the `.alpha` tensor beside the factors (kohya, ComfyUI, LyCORIS), the configuration
(`adapter_config.json` of PEFT, `lora_adapter_metadata` of diffusers), the caller's `alpha`,
`ss_network_alpha` of kohya. Without any of them alpha is the rank, which is what diffusers, kohya
and ComfyUI mean by leaving it out; PEFT never does, so its files are refused without it.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from halfbyte.errors import CheckpointError
from halfbyte.nn.adapters.adapter_keys import PEFT_PREFIX

_DIFFUSERS_KEY: Final = "lora_adapter_metadata"
_KOHYA_KEY: Final = "ss_network_alpha"
_MAX_PATTERN: Final = 256
_NESTED: Final = re.compile(r"\)[*+{]")
_LOW_RANK_KINDS: Final = ("LORA", "LOHA", "LOKR")


@dataclass(frozen=True)
class ScaleSource:
    """What a file says about alpha outside its tensors.

    Attributes:
        where: the file, for errors.
        config: PEFT's fields by component ("" for all, or "transformer", "text_encoder" ...).
        alpha: what the caller says. kohya_alpha: of the whole network, by kohya's metadata.
    """

    where: str
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alpha: float | None = None
    kohya_alpha: float | None = None

    def find_config(self, path: str) -> Mapping[str, Any] | None:
        """Return the configuration that speaks of `path`, if any."""
        component = path.partition(".")[0]
        return self.config.get(component, self.config.get(""))

    def find_scale(self, path: str, rank: int, own_alpha: float | None) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA.

        Args:
            path: of the linear, as in the file.
            rank: of its factors.
            own_alpha: value of its `.alpha` tensor.

        Raises CheckpointError for a PEFT file that does not say.
        """
        if own_alpha is not None:
            return own_alpha / rank
        config = self.find_config(path)
        if config is not None:
            alpha = _find_alpha(self.where, config, path)
            if alpha is not None:
                return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if self.alpha is not None:
            return self.alpha / rank
        if self.kohya_alpha is not None:
            return self.kohya_alpha / rank
        if path.startswith(PEFT_PREFIX):
            raise CheckpointError(
                f"{self.where}: a PEFT adapter whose lora_alpha is not known: give its directory "
                "with adapter_config.json, or alpha="
            )
        return 1.0

    def find_peft_scale(self, path: str) -> float | None:
        """Return alpha / r of a PEFT configuration; it scales what has no rank of its own too."""
        config = self.find_config(path)
        if config is None:
            return None
        alpha, rank = _find_alpha(self.where, config, path), config.get("r")
        if alpha is None or rank is None or not _is_positive(rank):
            return None
        return alpha / float(rank)


def read_scale_source(
    where: str,
    metadata: Mapping[str, str],
    peft_config: Mapping[str, Any] | None,
    alpha: float | None,
) -> ScaleSource:
    """Return what configuration and metadata say.

    Args:
        where: the file, for errors.
        metadata: of the safetensors header.
        peft_config: parsed adapter_config.json, None without one.
        alpha: the caller's; None for none.

    Raises CheckpointError for DoRA, other PEFT kinds, and numbers that are none.
    """
    if alpha is not None and not _is_positive(alpha):
        raise CheckpointError(f"{where}: alpha {alpha!r}, wanted a positive number")
    configs: dict[str, Mapping[str, Any]] = {}
    if peft_config is not None:
        configs[""] = peft_config
    elif _DIFFUSERS_KEY in metadata:
        configs = _split_components(where, metadata[_DIFFUSERS_KEY])
    for config in configs.values():
        _check_config(where, config)
    kohya_alpha = None
    if metadata.get(_KOHYA_KEY, "None") != "None":
        try:
            kohya_alpha = float(metadata[_KOHYA_KEY])
        except ValueError:
            kohya_alpha = None
        if not _is_positive(kohya_alpha):
            raise CheckpointError(
                f"{where}: metadata {_KOHYA_KEY!r} is {metadata[_KOHYA_KEY][:40]!r}, "
                "wanted a positive number"
            )
    return ScaleSource(where, configs, alpha, kohya_alpha)


def _check_config(where: str, config: Mapping[str, Any]) -> None:
    if config.get("use_dora"):
        raise CheckpointError(
            f"{where}: use_dora: DoRA rescales every row by the norm of the merged weight, which "
            "no low rank does; merge it into the 16-bit model and quantize that"
        )
    kind = config.get("peft_type")
    if kind is not None and str(kind).upper().rpartition(".")[2] not in _LOW_RANK_KINDS:
        raise CheckpointError(
            f"{where}: peft_type {str(kind)[:40]!r}, wanted one of {', '.join(_LOW_RANK_KINDS)}"
        )


def _split_components(where: str, text: str) -> dict[str, Mapping[str, Any]]:
    """Return {"transformer": {"lora_alpha": ...}} of diffusers' {"transformer.lora_alpha": ...}."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: metadata {_DIFFUSERS_KEY!r} is no JSON object")
    components: dict[str, dict[str, Any]] = {}
    for key, value in table.items():
        component, _, name = str(key).rpartition(".")
        components.setdefault(component, {})[name] = value
    return dict(components)


def _find_alpha(where: str, config: Mapping[str, Any], path: str) -> float | None:
    """Return lora_alpha ("alpha" for LoHa and LoKr) with alpha_pattern, as PEFT matches it."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", config.get("alpha"))
    if not isinstance(patterns, Mapping):
        raise CheckpointError(f"{where}: alpha_pattern is no JSON object")
    for pattern, value in patterns.items():
        if len(pattern) > _MAX_PATTERN or _NESTED.search(pattern):
            raise CheckpointError(
                f"{where}: alpha_pattern {pattern[:40]!r}: long, or a repeated group, which a "
                "hostile file uses to never end; write it as a plain name"
            )
        try:
            if re.match(rf"(.*\.)?({pattern})\Z", path):
                alpha = value
                break
        except re.error as error:
            raise CheckpointError(f"{where}: alpha_pattern {pattern!r}: {error}") from error
    if alpha is not None and not _is_positive(alpha):
        raise CheckpointError(f"{where}: lora_alpha {alpha!r}, wanted a positive number")
    return None if alpha is None else float(alpha)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
