"""diffusers' `nunchaku_lite`: nunchaku's tensors in a diffusers model, listed by its config.json.

    "quantization_config": {
        "quant_method": "nunchaku_lite", "compute_dtype": "bfloat16",
        "svdq_w4a4": {"precision": "nvfp4" | "int4", "group_size": 16 | 64, "rank", "targets"},
        "awq_w4a16": {"precision": "int4", "group_size": 64, "targets"}}

A W4A4 layer has exactly qweight, wscales, smooth_factor, proj_down, proj_up, with NVFP4 wcscales
and wtscale [1], and bias where the model's layer has one; all in nunchaku's fragment order, floats
in the compute dtype. Unlike nunchaku itself it never takes unsigned activations, and AWQ layers
have their rows in the model's order, whatever their names. The reader wants every target to have
its tensors and every such layer to be a target; so does `claim`.
Source: diffusers 0.42.1, quantizers/nunchaku, quantizers/quantization_config.py.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import torch

from halfbyte.checkpoints import nunchaku_awq as awq
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
from halfbyte.checkpoints.nunchaku import (
    AWQ,
    UNSIGNED_LAYERS,
    Nunchaku,
    find_bad_zeros,
    make_w4a4_facts,
    read_precision,
)
from halfbyte.checkpoints.rounded_parts import BFLOAT16_ROUNDING, find_other_dtypes, round_parts
from halfbyte.checkpoints.split_files import SplitFilesSource
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.errors import CheckpointError
from halfbyte.formats.block_format import get_format
from halfbyte.formats.layer_origin import LayerOrigin
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import quoted

METHOD: Final = "nunchaku_lite"
_NUNCHAKU: Final = Nunchaku()
_FLOATS: Final = ("F16", "BF16", "F32")
_DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPE = "compute_dtype"
_ACTIVATIONS: Final = {"nvfp4": "nvfp4_nunchaku", "int4": "int4"}
_PARTS: Final = ("smooth_factor", "proj_down", "proj_up")


@dataclass(frozen=True)
class LiteConfig:
    """The checked quantization_config.

    Attributes:
        compute_dtype: of every float tensor, as the configuration names it.
        precision: of the W4A4 layers, "nvfp4" or "int4".
        rank: of the W4A4 layers.
        svdq_targets: names of the W4A4 layers.
        awq_targets: names of the AWQ layers.
    """

    compute_dtype: str
    precision: str
    rank: int
    svdq_targets: tuple[str, ...]
    awq_targets: tuple[str, ...]


class NunchakuLite(Family):
    """diffusers checkpoints with quant_method `nunchaku_lite`."""

    name: ClassVar[str] = METHOD
    title: ClassVar[str] = "diffusers nunchaku_lite"
    marks: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("qweight", "wscales", "wtscale", "wcscales", "smooth_factor"), ()
    )
    rounding: ClassVar[float] = BFLOAT16_ROUNDING
    rank_step: ClassVar[int] = fragments.FRAGMENT
    has_one_rank: ClassVar[bool] = True
    reads_as: ClassVar[Mapping[str, str]] = _NUNCHAKU.reads_as

    def claim(self, source: TensorSource) -> Claim:
        """Claim the targets of the configuration; every one must be there and fit it.

        Without a configuration, claim only files in which nunchaku would read a layer otherwise.

        Raises:
            CheckpointError: configuration and tensors contradict; the message names both.
        """
        config = read_lite_config(source)
        if config is None:
            return _claim_bare(source)
        both = sorted(set(config.svdq_targets) & set(config.awq_targets))
        if both:
            _fail(source, f"{quoted(both)} in svdq_w4a4 and awq_w4a16", "a layer in one of them")
        layers = _find_targets(source, config.svdq_targets, make_lite_keys(config.precision))
        layers |= _find_targets(source, config.awq_targets, awq.AWQ_KEYS)
        _check_targets(source, layers)
        for target in config.svdq_targets:
            _check_shapes(source, layers[target], config)
        facts = {
            **dict.fromkeys(config.svdq_targets, _make_facts(config.precision)),
            **dict.fromkeys(config.awq_targets, _make_facts(AWQ)),
        }
        plans = {
            name: LayerPlan(name, plan.tensors, {**facts[name], _DTYPE: config.compute_dtype})
            for name, plan in layers.items()
        }
        return Claim(plans, True, f"quant_method {METHOD} in config.json")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record, as nunchaku's."""
        return _NUNCHAKU.decode(parts, facts)

    def find_obstacle(self, linear: QuantizedLinear) -> str | None:
        """Return why diffusers' modules cannot hold a layer."""
        if linear.activation is not None and linear.activation.name == "uint4_shifted":
            return (
                f"activation uint4_shifted: {METHOD} has signed activations alone; quantize the "
                "layer with int4 activations"
            )
        return _NUNCHAKU.find_obstacle(linear)

    def make_facts(self, layer: str, linear: QuantizedLinear) -> Facts:
        """Return the facts of a layer in bfloat16, the configuration's default."""
        precision = linear.weight.format.name
        return {**_make_facts(AWQ if precision == awq.FORMAT else precision), _DTYPE: "bfloat16"}

    def encode(self, linear: QuantizedLinear, facts: Facts) -> Parts:
        """Return exactly the parameters of diffusers' module, floats rounded once.

        bfloat16 and float16 are 8 and 11 bits: a float32 global scale, say, changes by up to 2^-9
        and 2^-12 of its value.
        """
        dtype = _DTYPES[facts[_DTYPE]]
        parts = _NUNCHAKU.encode(linear, facts)
        if linear.weight.format.name == awq.FORMAT:
            return round_parts(parts, dtype)
        n, k = linear.weight.shape
        device = linear.weight.data.device
        if linear.smooth is None:
            parts["smooth_factor"] = torch.ones(k, dtype=dtype, device=device)
        if linear.weight.format.name == "nvfp4" and linear.channel_scale is None:
            parts["wcscales"] = torch.ones(n, dtype=dtype, device=device)
        for name, rows in (("proj_down", k), ("proj_up", n)):
            parts.setdefault(name, torch.empty((rows, 0), dtype=dtype, device=device))
        return round_parts(parts, dtype)

    def find_origin(self, parts: Parts, facts: Facts) -> LayerOrigin | None:
        """Return the parts that the writer stored in another dtype or shape than its own."""
        kept = find_other_dtypes(parts, _DTYPES[facts[_DTYPE]])
        if "wtscale" in parts and tuple(parts["wtscale"].shape) != (1,):
            kept["wtscale"] = parts["wtscale"]
        return LayerOrigin(self.name, kept, facts)

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return a zero point that is no number."""
        return find_bad_zeros(parts)

    def make_side_content(
        self, layers: Mapping[str, Layer], source: TensorSource | None
    ) -> SideContent:
        """Return config.json; what a source's has beside the quantization is kept."""
        config = dict(source.configs.get("config.json", {})) if source is not None else {}
        config["quantization_config"] = make_lite_config(layers)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        return SideContent({"format": "pt"}, {"config.json": text.encode()})


def make_lite_keys(precision: str) -> KeySet:
    """Return the keys of a W4A4 layer: what its module has, no more and no less."""
    required = {
        "qweight": ("I8",),
        "wscales": ("F8_E4M3",) if precision == "nvfp4" else ("F16", "BF16"),
        **dict.fromkeys(_PARTS, _FLOATS),
    }
    if precision == "nvfp4":
        required |= {"wcscales": _FLOATS, "wtscale": _FLOATS}
    return KeySet(required, {"bias": _FLOATS})


def make_lite_config(layers: Mapping[str, Layer]) -> dict[str, Any]:
    """Return the quantization_config of a file with `layers`.

    Raises:
        CheckpointError: two precisions or two ranks among the W4A4 layers; the message names one
            layer of each.
    """
    formats: dict[tuple[str, int], str] = {}
    targets: dict[str, list[str]] = {"svdq": [], "awq": []}
    for name, layer in sorted(layers.items()):
        is_awq = layer.linear.weight.format.name == awq.FORMAT
        targets["awq" if is_awq else "svdq"].append(name)
        if not is_awq:
            formats.setdefault((layer.linear.weight.format.name, layer.linear.rank), name)
    if len(formats) > 1:
        found = [f"{name} has {form} and rank {rank}" for (form, rank), name in formats.items()]
        raise CheckpointError(
            f"{METHOD} has one precision and one rank for all W4A4 layers, but "
            f"{' and '.join(found)}; quantize them alike"
        )
    origins = [layer.origin.facts if layer.origin else {} for layer in layers.values()]
    stored = {facts.get(_DTYPE, "bfloat16") for facts in origins}
    config: dict[str, Any] = {
        "quant_method": METHOD,
        _DTYPE: stored.pop() if len(stored) == 1 else "bfloat16",
    }
    for precision, rank in formats:
        group = get_format(precision).block_size
        config["svdq_w4a4"] = {
            "precision": precision,
            "group_size": group,
            "rank": rank,
            "targets": targets["svdq"],
        }
    if targets["awq"]:
        config["awq_w4a16"] = {
            "precision": "int4",
            "group_size": awq.GROUP,
            "targets": targets["awq"],
        }
    return config


def read_lite_config(source: TensorSource) -> LiteConfig | None:
    """Return the checked configuration, None without one.

    Raises:
        CheckpointError: a configuration that diffusers would refuse; the message names the key.
    """
    raw = source.configs.get("config.json", {}).get("quantization_config")
    if not isinstance(raw, dict) or raw.get("quant_method") != METHOD:
        return None
    dtype = raw.get(_DTYPE, "bfloat16")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        _fail(source, f"{_DTYPE} {quoted(dtype)}", f"one of {list(_DTYPES)}")
    svdq, awq_section = raw.get("svdq_w4a4"), raw.get("awq_w4a16")
    if svdq is None and awq_section is None:
        _fail(source, "neither svdq_w4a4 nor awq_w4a16", "at least one of them")
    precision, rank = "nvfp4", 0
    if svdq is not None:
        svdq = _check_section(source, "svdq_w4a4", svdq)
        precision, rank = svdq["precision"], svdq.get("rank", -1)
        if type(rank) is not int or rank < 0:
            _fail(source, f"svdq_w4a4.rank {quoted(svdq.get('rank'))}", "a whole number")
    if awq_section is not None:
        awq_section = _check_section(source, "awq_w4a16", awq_section)
    return LiteConfig(
        dtype,
        precision,
        rank,
        tuple(svdq["targets"]) if svdq else (),
        tuple(awq_section["targets"]) if awq_section else (),
    )


def _check_section(source: TensorSource, name: str, section: Any) -> dict[str, Any]:
    if not isinstance(section, dict):
        _fail(source, f"{name} {quoted(section)}", "an object")
    precision, group, targets = (section.get(k) for k in ("precision", "group_size", "targets"))
    precisions = ("int4", "nvfp4") if name == "svdq_w4a4" else ("int4",)
    if precision not in precisions:
        _fail(source, f"{name}.precision {quoted(precision)}", f"one of {list(precisions)}")
    wanted = 16 if precision == "nvfp4" else 64
    if group != wanted:
        _fail(source, f"{name}.group_size {quoted(group)} with {precision}", str(wanted))
    if not isinstance(targets, list) or not all(isinstance(item, str) for item in targets):
        _fail(source, f"{name}.targets {quoted(targets)}", "a list of layer names")
    if not targets:
        _fail(source, f"{name}.targets []", "at least one layer")
    return section


def _claim_bare(source: TensorSource) -> Claim:
    """Claim a file without configuration where its layers have two readings."""
    if read_precision(source) is not None or isinstance(source, SplitFilesSource):
        return NO_CLAIM
    plans: dict[str, LayerPlan] = {}
    for precision, keys in (
        ("int4", make_lite_keys("int4")),
        ("nvfp4", make_lite_keys("nvfp4")),
        (AWQ, awq.AWQ_KEYS),
    ):
        facts = {**_make_facts(precision), _DTYPE: "bfloat16"}
        plans |= find_layers(source, keys, facts)
    reasons = [f"{name} would be unsigned" for name in plans if _is_unsigned(plans[name])]
    reasons += [f"{name} interleaved" for name in plans if _is_interleaved(plans[name])]
    if not reasons:
        return NO_CLAIM
    return Claim(plans, False, f"no quantization_config; as nunchaku {reasons[0]}, not here")


def _is_unsigned(plan: LayerPlan) -> bool:
    is_int4 = plan.facts["precision"] == "int4"
    return is_int4 and UNSIGNED_LAYERS.search(plan.name) is not None


def _is_interleaved(plan: LayerPlan) -> bool:
    return plan.facts["precision"] == AWQ and awq.find_splits(plan.name) > 1


def _make_facts(precision: str) -> Facts:
    if precision == AWQ:
        return {"precision": AWQ, "splits": "1"}
    return make_w4a4_facts("proj", precision, _ACTIVATIONS.get(precision, "none"))


def _find_targets(
    source: TensorSource, targets: Iterable[str], keys: KeySet
) -> dict[str, LayerPlan]:
    """Return the plans of all targets; CheckpointError for one whose tensors do not fit."""
    found = find_layers(source, keys)
    for target in targets:
        if target not in found:
            held = {
                name[len(target) + 1 :]: source.specs[name].dtype.name
                for name in source.specs
                if name.rpartition(".")[0] == target
            }
            wanted = {
                part: " or ".join(words)
                for part, words in keys.required.items()
                if held.get(part) not in words
            }
            _fail(source, f"target {quoted(target)} with tensors {quoted(held)}", quoted(wanted))
    return {target: found[target] for target in targets}


def _check_targets(source: TensorSource, layers: Mapping[str, LayerPlan]) -> None:
    for name in source.specs:
        layer, _, part = name.rpartition(".")
        if part == "qweight" and layer not in layers:
            _fail(source, f"tensor {quoted(name)} of no target", f"{quoted(layer)} in targets")


def _check_shapes(source: TensorSource, plan: LayerPlan, config: LiteConfig) -> None:
    """Check rank and group size of a W4A4 layer against the configuration."""
    shapes = {part: tuple(source.specs[name].shape) for part, name in plan.tensors.items()}
    group = get_format(config.precision).block_size
    columns = 2 * shapes["qweight"][-1] if shapes["qweight"] else 0
    if len(shapes["wscales"]) != 2 or shapes["wscales"][0] * group != columns:
        _fail(
            source,
            f"{quoted(plan.tensors['wscales'])} of shape {list(shapes['wscales'])}",
            f"K/{group} = {columns // group} rows by svdq_w4a4.group_size {group}",
        )
    for part in ("proj_down", "proj_up"):
        if len(shapes[part]) != 2 or shapes[part][1] != config.rank:
            _fail(
                source,
                f"{quoted(plan.tensors[part])} of shape {list(shapes[part])}",
                f"{config.rank} columns by svdq_w4a4.rank {config.rank}",
            )


def _fail(source: TensorSource, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(
        f"{source.path}: {METHOD} in config.json: got {came}, wanted {wanted}; one of file and "
        "configuration is of another export"
    )
