"""Adapters on a model: added, weighed, removed and merged while it is in use."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from halfbyte.errors import CheckpointError, FormatError, UsageError
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.adapters.adapter_targets import Rename, resolve_targets
from halfbyte.nn.adapters.low_rank_forms import RankLimits
from halfbyte.nn.adapters.read_adapter import (
    DEFAULT_LIMITS,
    PEFT_WEIGHTS,
    Adapter,
    read_adapter,
)
from halfbyte.nn.low_rank_stack import (
    LowRankDelta,
    bake_deltas,
    get_stacked,
    remove_delta,
    set_delta_strength,
    stack_delta,
)
from halfbyte.nn.w4a4_linear import W4A4Linear

# Their forward is never called: the attention around them reads the weight.
_NEVER_CALLED: Final = (NonDynamicallyQuantizableLinear,)


@dataclass(frozen=True)
class AdaptedLayer:
    """What one linear got.

    Attributes:
        name: in the model. rank: ranks added. scale: alpha / rank. error: relative Frobenius error
        of the low-rank form; 0.0 where it is exact.
    """

    name: str
    rank: int
    scale: float
    error: float


@dataclass(frozen=True)
class AdapterReport:
    """What `add_adapter` did.

    Attributes:
        name: of the adapter. layers: in the file's order. ignored: tensors left out on demand.
    """

    name: str
    layers: tuple[AdaptedLayer, ...]
    ignored: tuple[str, ...]

    @property
    def max_error(self) -> float:
        """The largest error of a layer."""
        return max((layer.error for layer in self.layers), default=0.0)


def add_adapter(
    model: nn.Module,
    source: str | os.PathLike[str] | Adapter,
    name: str | None = None,
    *,
    strength: float = 1.0,
    alpha: float | None = None,
    ignore: Sequence[str] = (),
    limits: RankLimits = DEFAULT_LIMITS,
    rename: Rename = None,
) -> AdapterReport:
    """Put an adapter on the linears of `model`, all of them or none; weights are not touched.

    Args:
        model: its W4A4Linear and nn.Linear modules may be targets.
        source: a safetensors file, a PEFT directory, or what `read_adapter` returned.
        name: to speak of it later; by default the file's name without
            ending, of a PEFT directory its own.
        strength: finite; any sign.
        alpha, ignore, limits: as in `read_adapter`; only for a path.
        rename: path of the file -> name in the model.

    Raises:
        CheckpointError: what `read_adapter` and `resolve_targets` raise.
        UsageError: a name that is taken, a strength that is no number.
        FormatError: numbers that the dtype of a layer's low-rank branch cannot hold.
    """
    if isinstance(source, Adapter):
        adapter = source
    else:
        adapter = read_adapter(source, alpha=alpha, ignore=ignore, limits=limits)
    chosen = _choose_name(adapter, name)
    if chosen in list_adapters(model):
        raise UsageError(f"adapter {chosen!r} is on the model already; remove it, or give a name=")
    linears = find_linears(model)
    shapes = {place: _get_shape(module) for place, module in linears.items()}
    others = {
        place: type(module).__name__
        for place, module in model.named_modules(remove_duplicate=False)
        if place not in linears
    }
    deltas = resolve_targets(adapter, shapes, others, rename)
    _check_shared(adapter, {place: linears[place] for place in deltas})
    done: list[nn.Module] = []
    try:
        for place, delta in deltas.items():
            try:
                stack_delta(linears[place], chosen, delta, strength)
            except FormatError as error:
                raise FormatError(f"{adapter.where}: {place}: {error}") from error
            done.append(linears[place])
    except BaseException:
        for module in done:
            remove_delta(module, chosen)
        raise
    layers = tuple(
        AdaptedLayer(place, delta.rank, delta.scale, delta.error) for place, delta in deltas.items()
    )
    return AdapterReport(chosen, layers, adapter.ignored)


def remove_adapter(model: nn.Module, name: str) -> int:
    """Take an adapter off; return how many linears had it. UsageError where none has."""
    modules = _find_adapted(model, name)
    for module in modules:
        remove_delta(module, name)
    return len(modules)


def set_adapter_strength(model: nn.Module, name: str, strength: float) -> int:
    """Weigh an adapter anew; return how many linears have it.

    Costs a write of its columns in `adapted_up`; a CUDA graph that was captured before must be
    captured again. Raises UsageError for an unknown name or a strength that is no number; all
    linears keep the old one then.
    """
    modules = _find_adapted(model, name)
    before = [get_stacked(module)[name].strength for module in modules]
    for index, module in enumerate(modules):
        try:
            set_delta_strength(module, name, strength)
        except (UsageError, FormatError):
            for changed, old in zip(modules[:index], before, strict=False):
                set_delta_strength(changed, name, old)
            raise
    return len(modules)


def list_adapters(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the linears that each adapter is on."""
    found: dict[str, list[str]] = {}
    for place, module in model.named_modules():
        for name in get_stacked(module):
            found.setdefault(name, []).append(place)
    return found


def merge_adapters(model: nn.Module, names: Iterable[str] | None = None) -> int:
    """Make adapters part of the model, at their present strength; return how many linears changed.

    A 4-bit linear's own low-rank branch grows by their ranks: outputs stay, bit for bit where all
    are merged, and `save_model` writes them. A float weight is rewritten.

    Args:
        model: with adapters.
        names: which; None for all.

    Raises UsageError for an unknown name, or a float weight that another module shares.
    """
    on_model = list_adapters(model)
    wanted = list(on_model) if names is None else list(names)
    for name in wanted:
        _find_adapted(model, name)
    chosen = [
        (module, [name for name in get_stacked(module) if name in wanted])
        for module in model.modules()
        if any(name in wanted for name in get_stacked(module))
    ]
    for module, _ in chosen:
        _check_own_weight(model, module)
    for module, stacked in chosen:
        bake_deltas(module, stacked)
    return len(chosen)


def merge_into_records(
    records: Mapping[str, QuantizedLinear],
    adapter: Adapter,
    *,
    strength: float = 1.0,
    rename: Rename = None,
) -> dict[str, QuantizedLinear]:
    """Return the records, those that `adapter` targets with a longer low-rank branch.

    Weights, scales and all other parts are the same tensors. Raises what `add_adapter` raises;
    targets outside `records` are errors.
    """
    shapes = {name: (one.out_features, one.in_features) for name, one in records.items()}
    merged = dict(records)
    for name, delta in resolve_targets(adapter, shapes, {}, rename).items():
        merged[name] = merge_delta(records[name], delta, strength)
    return merged


def merge_delta(record: QuantizedLinear, delta: LowRankDelta, strength: float) -> QuantizedLinear:
    """Return `record` with a delta as more ranks; on a record without values too.

    Raises FormatError for another shape or numbers that the dtype of the branch cannot hold,
    UsageError for a strength that is no number.
    """
    module = W4A4Linear.from_record(record)
    stack_delta(module, "merged", delta, strength)
    bake_deltas(module)
    grown = module.to_record()
    return replace(record, lora_down=grown.lora_down, lora_up=grown.lora_up)


def find_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take an adapter, under each of their names."""
    return {
        place: module
        for place, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.Linear | W4A4Linear) and not isinstance(module, _NEVER_CALLED)
    }


def _get_shape(module: nn.Module) -> tuple[int, int]:
    assert isinstance(module, nn.Linear | W4A4Linear)
    return module.out_features, module.in_features


def _choose_name(adapter: Adapter, name: str | None) -> str:
    path = Path(adapter.where)
    default = path.parent.name if path.name == PEFT_WEIGHTS else path.stem
    chosen = default if name is None else name
    if not isinstance(chosen, str) or not chosen:
        raise UsageError(f"name {name!r}: wanted a text that is not empty")
    return chosen


def _check_shared(adapter: Adapter, chosen: Mapping[str, nn.Module]) -> None:
    seen: dict[int, str] = {}
    for place, module in chosen.items():
        if id(module) in seen:
            raise CheckpointError(
                f"{adapter.where}: {seen[id(module)]!r} and {place!r} are one module of the model, "
                "which would get both deltas; leave one out with ignore="
            )
        seen[id(module)] = place


def _find_adapted(model: nn.Module, name: str) -> list[nn.Module]:
    modules = [module for module in model.modules() if name in get_stacked(module)]
    if not modules:
        there = ", ".join(map(repr, list_adapters(model))) or "none"
        raise UsageError(f"adapter {name!r} is not on the model; on it: {there}")
    return modules


def _check_own_weight(model: nn.Module, module: nn.Module) -> None:
    if not isinstance(module, nn.Linear):
        return
    for place, other in model.named_modules():
        if other is not module and any(one is module.weight for one in other._parameters.values()):
            raise UsageError(
                f"the weight of a merged linear is shared with {place!r}, which would change too; "
                "untie them first, or leave the adapter live"
            )
