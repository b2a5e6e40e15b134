"""vllm-omni's `svdquant` checkpoints: NVFP4 in plain rows, and those that its first converter made.

    qweight        int8 [N, K/2]    low nibble = even column
    wscales        E4M3 [K/16, N]
    wtscale        [1]              multiplies the 4-bit product
    wcscales       [N]              multiplies its columns, not the low-rank branch
    smooth_factor  [K]              divides x
    proj_down      [K, R]           acts on the raw x
    proj_up        [N, R]
    bias           [N]

    "quantization_config": {"quant_method": "svdquant", "rank", "precision": "nvfp4",
                            "act_unsigned": false, "modules_to_not_convert": [...]}

x is quantized without a global scale. The first converter from nunchaku put matrices into plain
rows and copied smooth_factor, wcscales and bias as they were, in nunchaku's fragment order; later
ones, and other writers, store them plain. Nothing in such a file tells which, so it is two
families: `vllm-omni` and `vllm-omni-converted`. Our own files say `svdquant_vectors` in their
metadata; sizes that fill no 128-row fragment can only be plain.
Source: vllm-omni 0.30.0, quantization/svdquant_config.py; its pull requests 3830 and 6162.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import torch

from halfbyte.checkpoints import nunchaku_fragments as fragments
from halfbyte.checkpoints.family import (
    NO_CLAIM,
    Claim,
    Facts,
    Family,
    Layer,
    LayerPlan,
    Parts,
    SideContent,
)
from halfbyte.checkpoints.layer_keys import KeySet, find_layers
from halfbyte.checkpoints.nunchaku import read_precision, unpack_vector
from halfbyte.checkpoints.nunchaku_lite import METHOD as LITE_METHOD
from halfbyte.checkpoints.rounded_parts import BFLOAT16_ROUNDING, find_other_dtypes, round_parts
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.split_files import SplitFilesSource
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

METHOD: Final = "svdquant"
MARK: Final = "svdquant_vectors"  # our metadata entry: the order of smooth_factor, wcscales, bias
PLAIN, FRAGMENTS = "plain", "fragments"
BLOCK: Final = 16
STORED_DTYPE: Final = torch.bfloat16
_FLOATS: Final = ("F16", "BF16", "F32")
KEYS: Final = KeySet(
    required={
        "qweight": ("I8", "U8"),
        "wscales": ("F8_E4M3",),
        **dict.fromkeys(("wtscale", "smooth_factor", "proj_down", "proj_up"), _FLOATS),
    },
    optional={"wcscales": _FLOATS, "bias": _FLOATS},
    foreign=("smooth_factor_orig", "wzeros"),
)
# x has no global scale here either way; the dividing by stored or unrounded scales is the reader's.
_ACTIVATIONS: Final = ("nvfp4_one_level", "nvfp4_nunchaku")
_CODES, _CHANNELS = "codes", "wcscales"


@dataclass(frozen=True)
class OmniConfig:
    """The checked quantization_config.

    Attributes:
        rank: of every quantized layer.
        skipped: parts of names of layers that are not quantized.
        place: where it stands, for messages.
    """

    rank: int
    skipped: tuple[str, ...]
    place: str


class VllmOmni(Family):
    """Files of vllm-omni's `svdquant` with vectors in plain order."""

    name: ClassVar[str] = "vllm-omni"
    title: ClassVar[str] = "vllm-omni svdquant"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("qweight", "wscales", "wtscale", "wcscales", "smooth_factor"), ()
    )
    rounding: ClassVar[float] = BFLOAT16_ROUNDING
    rank_step: ClassVar[int] = fragments.FRAGMENT  # of the kernels that read it
    has_one_rank: ClassVar[bool] = True
    reads_as: ClassVar[Mapping[str, str]] = {"nvfp4_nunchaku": "nvfp4_one_level"}
    vectors: ClassVar[str] = PLAIN
    activation: ClassVar[str] = "nvfp4_one_level"

    def claim(self, source: TensorSource) -> Claim:
        """Claim layers with the contract's keys; certain by configuration and order of vectors.

        Raises:
            CheckpointError: configuration and tensors contradict; the message names both.
        """
        config = read_omni_config(source)
        plans = find_layers(source, KEYS)
        if config is not None:
            _check_layers(source, config, plans)
        elif _is_of_another_family(source):
            return NO_CLAIM
        mark = source.metadata.get(MARK)
        can_be_fragments = all(fills_fragments(source, plan) for plan in plans.values())
        if not plans or (self.vectors == FRAGMENTS and not can_be_fragments):
            return NO_CLAIM
        layers = {name: _add_facts(source, plan) for name, plan in plans.items()}
        place = "no quantization_config" if config is None else f"{METHOD} in {config.place}"
        is_certain = config is not None and mark in (None, self.vectors)
        order = {PLAIN: "in plain order", FRAGMENTS: "in nunchaku's fragment order"}[self.vectors]
        return Claim(layers, is_certain, f"{place}; smooth_factor, wcscales and bias {order}")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record."""
        codes, scales = parts["qweight"].view(torch.uint8), parts["wscales"]
        if codes.ndim != 2 or scales.ndim != 2:
            raise FormatError("qweight and wscales: wanted matrices [N, K/2] and [K/16, N]")
        for name in ("proj_down", "proj_up"):
            if parts[name].ndim != 2:
                raise FormatError(f"{name}: shape {list(parts[name].shape)}, wanted a matrix")
        has_rank = parts["proj_down"].numel() > 0 or parts["proj_up"].numel() > 0
        channel_scale = self._read_vector(parts, "wcscales")
        return QuantizedLinear(
            weight=BlockScaledTensor(
                get_format("nvfp4"),
                codes,
                scales.view(torch.uint8).t().contiguous().view(scales.dtype),
                as_scalar("wtscale", parts["wtscale"]).float(),
                2 * codes.shape[1],
            ),
            activation=get_activation_format(self.activation),
            channel_scale=None if channel_scale is None else channel_scale.float(),
            smooth=self._read_vector(parts, "smooth_factor"),
            lora_down=parts["proj_down"].t().contiguous() if has_rank else None,
            lora_up=parts["proj_up"] if has_rank else None,
            bias=self._read_vector(parts, "bias"),
        )

    def _read_vector(self, parts: Parts, name: str) -> torch.Tensor | None:
        if name not in parts:
            return None
        return parts[name] if self.vectors == PLAIN else unpack_vector(name, parts[name])

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why vllm-omni cannot hold a layer."""
        weight, activation = linear.weight.format.name, linear.activation
        if weight != "nvfp4":
            return f"{weight} weights: vllm-omni's svdquant has NVFP4 with a global scale alone"
        if activation is None or activation.name not in _ACTIVATIONS:
            name = "none" if activation is None else activation.name
            return (
                f"activation {name}: vllm-omni quantizes x in blocks without a global scale; "
                "quantize with nvfp4_one_level activations"
            )
        if linear.in_features % BLOCK:
            return f"in_features {linear.in_features}: vllm-omni has whole blocks of {BLOCK}"
        if linear.rank == 0:
            return "rank 0: vllm-omni wants a low-rank branch of rank 1 or more in every layer"
        return None

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return the tensors of the contract, floats rounded to bfloat16 once.

        bfloat16 has 8 bits: a float32 global scale changes by up to 2^-9 of its value.
        """
        weight = linear.weight
        assert weight.global_scale is not None  # find_obstacle wants format nvfp4
        assert linear.lora_down is not None  # and a rank
        device = weight.data.device
        scales = weight.scales
        parts: dict[str, torch.Tensor | None] = {
            "qweight": weight.data if facts.get(_CODES) == "U8" else weight.data.view(torch.int8),
            "wscales": scales.view(torch.uint8).t().contiguous().view(scales.dtype),
            "wtscale": weight.global_scale.reshape(1),
            "smooth_factor": linear.smooth,
            "proj_down": linear.lora_down.t().contiguous(),
            "proj_up": linear.lora_up,
            "wcscales": linear.channel_scale,
            "bias": linear.bias,
        }
        if linear.smooth is None:
            parts["smooth_factor"] = torch.ones(linear.in_features, device=device)
        if linear.channel_scale is None and facts.get(_CHANNELS) != "absent":
            parts["wcscales"] = torch.ones(linear.out_features, device=device)
        present = {name: part for name, part in parts.items() if part is not None}
        return round_parts(present, STORED_DTYPE)

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return the parts that the writer stored in another dtype or shape than the contract's."""
        kept = find_other_dtypes(parts, STORED_DTYPE)
        if tuple(parts["wtscale"].shape) != (1,):
            kept["wtscale"] = parts["wtscale"]
        return LayerOrigin(self.name, kept, facts)

    def list_metadata(self, source: TensorSource) -> frozenset[str]:
        """Return the mark of the order of vectors."""
        return frozenset({MARK})

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return config.json with the quantization_config, and the mark of plain vectors."""
        config = dict(source.configs.get("config.json", {})) if source is not None else {}
        config["quantization_config"] = make_omni_config(layers, source)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return SideContent({"format": "pt", MARK: PLAIN}, {"config.json": text.encode()})


class VllmOmniConverted(VllmOmni):
    """Files of vllm-omni's first converter from nunchaku: matrices plain, vectors in fragments.

    They are read, and written as `vllm-omni`. The converter swaps the halves of fused gate and up
    projections in fragment order, which comes to the same where a half is whole fragments.
    """

    name: ClassVar[str] = "vllm-omni-converted"
    title: ClassVar[str] = "vllm-omni svdquant, vectors as nunchaku's"
    can_write: ClassVar[bool] = False
    vectors: ClassVar[str] = FRAGMENTS
    activation: ClassVar[str] = "nvfp4_nunchaku"

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return that it is not written."""
        return "vllm-omni-converted is read alone; write vllm-omni, whose vectors are plain"


def make_omni_config(layers: Mapping[str, Layer], source: TensorSource | None) -> dict[str, Any]:
    """Return the quantization_config of a file with `layers`.

    Raises:
        CheckpointError: two ranks, or an unquantized layer whose name is part of a quantized one's
            (the reader skips by parts of names); the message names the layers.
    """
    of_rank = {layer.linear.rank: name for name, layer in layers.items()}
    if len(of_rank) > 1:
        found = " and ".join(f"{name} has {rank}" for rank, name in sorted(of_rank.items()))
        raise CheckpointError(
            f"vllm-omni has one rank for all layers, but {found}; quantize them alike"
        )
    known = read_omni_config(source) if source is not None else None
    skipped = list(known.skipped) if known is not None else list_unquantized(layers, source)
    for name in skipped:
        layer = next((layer for layer in layers if name in layer), None)
        if layer is not None:
            raise CheckpointError(
                f"{quoted(name)} is not quantized, and its name is part of quantized layer "
                f"{quoted(layer)}'s: vllm-omni would skip both; rename one, or quantize both"
            )
    return {
        "quant_method": METHOD,
        "precision": "nvfp4",
        "rank": next(iter(of_rank), 0),
        "act_unsigned": False,
        "modules_to_not_convert": skipped,
    }


def list_unquantized(layers: Mapping[str, Layer], source: TensorSource | None) -> list[str]:
    """Return the modules of `source` with a weight matrix that are not in `layers`."""
    if source is None:
        return []
    names = [name.removesuffix(".weight") for name in source.specs if name.endswith(".weight")]
    return [
        name
        for name in names
        if name not in layers and len(source.specs[f"{name}.weight"].shape) == 2
    ]


def read_omni_config(source: TensorSource) -> OmniConfig | None:
    """Return the checked configuration: of config.json, quantization_config.json or metadata.

    Raises:
        CheckpointError: one that vllm-omni would refuse; the message names the key.
    """
    found = _find_config(source)
    if found is None:
        return None
    place, raw = found
    rank, skipped = raw.get("rank", 32), raw.get("modules_to_not_convert") or []
    if type(rank) is not int or rank <= 0:
        _fail(source, place, f"rank {quoted(rank)}", "a whole number above 0")
    if raw.get("precision", "nvfp4") != "nvfp4":
        _fail(source, place, f"precision {quoted(raw['precision'])}", "nvfp4, the only one it has")
    if raw.get("act_unsigned", False):
        _fail(source, place, f"act_unsigned {quoted(raw['act_unsigned'])}", "false")
    if not isinstance(skipped, list) or not all(isinstance(name, str) for name in skipped):
        _fail(source, place, f"modules_to_not_convert {quoted(skipped)}", "a list of names")
    return OmniConfig(rank, tuple(skipped), place)


def fills_fragments(source: TensorSource, plan: LayerPlan) -> bool:
    """Return whether a layer's sizes are those of nunchaku's fragments."""
    shape = source.specs[plan.tensors["qweight"]].shape
    if len(shape) != 2 or shape[0] % fragments.TILE_ROWS or 2 * shape[1] % fragments.TILE_ROWS:
        return False
    rank = source.specs[plan.tensors["proj_up"]].shape[-1:]
    return all(size % fragments.FRAGMENT == 0 for size in rank)


def _find_config(source: TensorSource) -> tuple[str, dict[str, Any]] | None:
    places = {
        "config.json": source.configs.get("config.json", {}).get("quantization_config"),
        "quantization_config.json": source.configs.get("quantization_config.json"),
        "metadata": _read_metadata_config(source),
    }
    for place, config in places.items():
        if isinstance(config, dict) and config.get("quant_method") == METHOD:
            return place, config
    return None


def _read_metadata_config(source: TensorSource) -> Any:
    try:
        return json.loads(source.metadata.get("quantization_config", "null"))
    except (ValueError, RecursionError):
        return None


def _is_of_another_family(source: TensorSource) -> bool:
    """Return whether a configuration names a reader, so that keys alone say nothing."""
    section = source.configs.get("config.json", {}).get("quantization_config")
    is_lite = isinstance(section, dict) and section.get("quant_method") == LITE_METHOD
    is_merged = read_precision(source) is not None
    return is_lite or is_merged or isinstance(source, SplitFilesSource)


def _add_facts(source: TensorSource, plan: LayerPlan) -> LayerPlan:
    facts = {
        _CODES: source.specs[plan.tensors["qweight"]].dtype.name,
        _CHANNELS: "present" if "wcscales" in plan.tensors else "absent",
    }
    return LayerPlan(plan.name, plan.tensors, facts)


def _check_layers(source: TensorSource, config: OmniConfig, plans: Mapping[str, LayerPlan]) -> None:
    """Check that configuration and tensors say the same."""
    for name, spec in source.specs.items():
        layer, _, part = name.rpartition(".")
        if part == "qweight" and layer not in plans:
            held = {
                other: source.specs[f"{layer}.{other}"].dtype.name
                for other in (*KEYS.required, *KEYS.optional, *KEYS.foreign)
                if f"{layer}.{other}" in source.specs
            }
            wanted = {part: " or ".join(words) for part, words in KEYS.required.items()}
            missing = {k: words for k, words in wanted.items() if held.get(k, "none") not in words}
            came = f"{quoted(name)} ({spec.dtype.name}) beside {quoted(held)}"
            _fail(source, config.place, came, quoted(missing) if missing else "no further parts")
    for name, plan in plans.items():
        skipped = next((word for word in config.skipped if word in name), None)
        if skipped is not None:
            came = f"quantized layer {quoted(name)}"
            _fail(source, config.place, came, f"none, by modules_to_not_convert {quoted(skipped)}")
        for part in ("proj_down", "proj_up"):
            shape = list(source.specs[plan.tensors[part]].shape)
            if len(shape) != 2 or shape[1] != config.rank:
                came = f"{quoted(plan.tensors[part])} of shape {shape}"
                _fail(source, config.place, came, f"{config.rank} columns by its rank")


def _fail(source: TensorSource, place: str, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(
        f"{source.path}: {METHOD} in {place}: got {came}, wanted {wanted}; one of file and "
        "configuration is of another export"
    )
