"""Which family a checkpoint is of: decided by what names it, refused where that is not enough."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from halfbyte.checkpoints.comfyui import ComfyUI
from halfbyte.checkpoints.compressed_tensors import CompressedTensors
from halfbyte.checkpoints.deepcompressor import DeepCompressor
from halfbyte.checkpoints.family import Claim, Family, LayerPlan
from halfbyte.checkpoints.flashinfer import FlashInfer
from halfbyte.checkpoints.gguf import Gguf
from halfbyte.checkpoints.halfbyte import Halfbyte
from halfbyte.checkpoints.modelopt import ModelOpt
from halfbyte.checkpoints.nunchaku import Nunchaku
from halfbyte.checkpoints.nunchaku_lite import NunchakuLite
from halfbyte.checkpoints.svdquant_kernels import SvdquantKernels, SvdquantKernelsProduct
from halfbyte.checkpoints.tensor_source import TensorSource
from halfbyte.checkpoints.torchao import TorchAO
from halfbyte.checkpoints.trial import choose_by_original
from halfbyte.checkpoints.vllm_omni import VllmOmni, VllmOmniConverted
from halfbyte.errors import CheckpointError, UsageError
from halfbyte.formats.halfbyte_file import is_halfbyte_metadata
from halfbyte.formats.safetensors_header import quoted
from halfbyte.wording import counted

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Halfbyte(),
        Nunchaku(),
        NunchakuLite(),
        VllmOmni(),
        VllmOmniConverted(),
        SvdquantKernels(),
        SvdquantKernelsProduct(),
        ModelOpt(),
        CompressedTensors(),
        ComfyUI(),
        TorchAO(),
        Gguf(),
        FlashInfer(),
        DeepCompressor(),
    )
}
FROM_FLAG = "--from"


@dataclass(frozen=True)
class Recognised:
    """A checkpoint whose every tensor is accounted for.

    Attributes:
        family: how its layers are read.
        layers: the quantized layers by name.
        passthrough: names of the tensors that belong to no layer.
        evidence: what decided.
    """

    family: Family
    layers: Mapping[str, LayerPlan]
    passthrough: tuple[str, ...]
    evidence: str


def get_family(name: str) -> Family:
    """Return the family called `name`; UsageError lists those there are."""
    try:
        return FAMILIES[name]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise UsageError(f"family {name!r} is unknown; use one of: {known}") from None


def list_reading_metadata(source: TensorSource) -> frozenset[str]:
    """Return the metadata entries that say how the tensors of any family are read."""
    return frozenset().union(*(family.list_metadata(source) for family in FAMILIES.values()))


def list_claims(source: TensorSource) -> dict[str, Claim]:
    """Return what every family says of `source` that has layers in it.

    Our own format says so itself and is then the only one: configurations beside it may still be
    those of the file that it was converted from.
    """
    own = FAMILIES.get("halfbyte")
    if own is not None and is_halfbyte_metadata(source.metadata):
        return {own.name: own.claim(source)}
    claims = {family.name: family.claim(source) for family in FAMILIES.values()}
    return {name: claim for name, claim in claims.items() if claim.layers}


def recognise(
    source: TensorSource, name: str | None = None, original: TensorSource | None = None
) -> Recognised:
    """Return the family of `source` and its layers.

    Args:
        source: an open checkpoint.
        name: the family that the user names; None to decide by the file.
        original: the unquantized model, which decides between possible readings by trial.

    Raises:
        CheckpointError: no family reads it, several could, the named one cannot, or a tensor of a
            quantized layer is left over; the message lists candidates and what would decide.
    """
    claims = list_claims(source)
    evidence = ""
    if name is not None:
        chosen = get_family(name)
        if name not in claims:
            raise CheckpointError(
                f"{source.path}: has no layer of family {name}; {describe_claims(claims)}"
            )
    else:
        candidates = list_candidates(claims)
        if len(candidates) > 1 and original is not None:
            trials = {name: (FAMILIES[name], claims[name]) for name in candidates}
            winner, evidence = choose_by_original(source, original, trials)
            chosen = FAMILIES[winner]
        else:
            chosen = _choose(source.path, claims)
    claim = claims[chosen.name]
    passthrough = list_passthrough(source, claim.layers, chosen)
    return Recognised(chosen, claim.layers, passthrough, evidence or claim.evidence)


def list_candidates(claims: Mapping[str, Claim]) -> list[str]:
    """Return the families that may be meant: the certain ones, or else all that are possible."""
    return [name for name, claim in claims.items() if claim.is_certain] or list(claims)


def _choose(path: Path, claims: Mapping[str, Claim]) -> Family:
    candidates = list_candidates(claims)
    if len(candidates) == 1:
        return FAMILIES[candidates[0]]
    if not candidates:
        raise CheckpointError(
            f"{path}: no quantized layer of a known family; `halfbyte inspect` says what it holds"
        )
    raise CheckpointError(
        f"{path}: could be read as {' or '.join(candidates)}, with different weights: "
        f"{describe_claims({name: claims[name] for name in candidates})}. Name the family with "
        f"{FROM_FLAG}, or give the unquantized model with --original: it decides by trial"
    )


def describe_claims(claims: Mapping[str, Claim]) -> str:
    """Return what speaks for each candidate, for an error message."""
    if not claims:
        return "no known family has layers in it"
    return "; ".join(
        f"{name} ({counted(len(claim.layers), 'layer')}: {claim.evidence})"
        for name, claim in claims.items()
    )


def list_passthrough(
    source: TensorSource, layers: Mapping[str, LayerPlan], family: Family
) -> tuple[str, ...]:
    """Return the tensors of no layer.

    Raises:
        CheckpointError: a left-over tensor of a layer, or what is left of a layer of `family` that
            lacks a tensor or has one of another dtype.
    """
    used = {tensor for plan in layers.values() for tensor in plan.tensors.values()}
    others = [name for name in source.specs if name not in used]
    for name in others:
        layer = find_owner(name, layers)
        if layer is not None:
            spec = source.specs[name]
            raise CheckpointError(
                f"{source.path}: tensor {quoted(name)} ({spec.dtype.name} {list(spec.shape)}) of "
                f"quantized layer {quoted(layer)} is not understood, and might change its values; "
                "remove it, or name another family with " + FROM_FLAG
            )
    _check_marks(source, others, family)
    return tuple(others)


def _check_marks(source: TensorSource, others: list[str], family: Family) -> None:
    for name in others:
        layer, _, part = name.rpartition(".")
        spec = source.specs[name]
        words = family.marks.get(part.lower())
        if words is not None and (not words or spec.dtype.name in words):
            beside = {
                other.rpartition(".")[2]: source.specs[other].dtype.name
                for other in others
                if other.rpartition(".")[0] == layer
            }
            raise CheckpointError(
                f"{source.path}: tensor {quoted(name)} ({spec.dtype.name} {list(spec.shape)}) is "
                f"part of a quantized layer, but {quoted(beside)} is no whole layer of "
                f"{family.name}: a tensor is missing, or has another name or dtype; export the "
                "layer again"
            )


def find_owner(name: str, layers: Mapping[str, LayerPlan]) -> str | None:
    """Return the quantized layer under whose name a tensor lies, or None."""
    parent = name
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent in layers:
            return parent
    return None
