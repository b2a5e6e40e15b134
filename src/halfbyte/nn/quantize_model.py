"""Model surgery: every linear of a model, block by block, replaced by its 4-bit form.

Inside a block the groups of linears that share an input are quantized in the order in which they
run, each on inputs that already went through the quantized ones before it.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from halfbyte.errors import FormatError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.block_walk import (
    BlockWalk,
    Calibration,
    Call,
    find_blocks,
    make_calls,
    read_version,
    stop,
)
from halfbyte.nn.module_places import replace_module
from halfbyte.nn.progress import OnProgress, ProgressClock, showing
from halfbyte.nn.report import LinearReport, QuantizationReport, measure_linear
from halfbyte.nn.resume import ResumeState
from halfbyte.nn.w4a4_linear import W4A4Linear, choose_part_dtype
from halfbyte.peak_memory import read_peak_memory_bytes
from halfbyte.svdquant.linear_rules import LinearRules
from halfbyte.svdquant.presets import SVDQuantPreset, get_preset
from halfbyte.svdquant.quantize_layer import quantize_linear_group
from halfbyte.svdquant.statistics import InputStatistics

Group = tuple[str, ...]


def quantize_model(
    model: nn.Module,
    preset: str | SVDQuantPreset = "nvfp4_svdquant_r32",
    *,
    calibration: Calibration = None,
    rules: LinearRules | None = None,
    state_dir: str | os.PathLike[str] | None = None,
    progress: bool | OnProgress = True,
) -> QuantizationReport:
    """Replace the model's linears by `W4A4Linear`, in place; return a report on each.

    Memory beside the model: the inputs of one block for all of `calibration`, a sample of the
    inputs of one group of linears, and a few copies of its weights. Deterministic: the same model,
    calibration and preset give the same bytes on the same machine.

    Args:
        model: on the CPU, weights fp16, bf16 or fp32.
        preset: what to do; a name in `svdquant.presets.PRESETS` or a record.
        calibration: one tensor, or a sequence of tensors, argument tuples or keyword mappings,
            with each of which the model is called; None quantizes without data.
        rules: which linears are left out by name and size; the default leaves out embeddings,
            output heads, routers and linears narrower than 64.
        state_dir: a directory that keeps each finished block, so that the same call after a kill
            goes on where it stopped; made where absent, left in place at the end.
        progress: True shows a bar with time left and peak memory; or a callback; or False.

    Raises:
        FormatError: an unknown preset, a calibration that the model is not called with, NaN or
            Inf in a weight or input, nothing to quantize, or a weight on another device or of
            another dtype. Linears before the one named are quantized by then.
        CheckpointError: `state_dir` belongs to another model, calibration, preset or version.
    """
    record = preset if isinstance(preset, SVDQuantPreset) else get_preset(preset)
    rules = LinearRules() if rules is None else rules
    blocks = _list_blocks(model, rules)
    calls = None if calibration is None else make_calls(calibration)
    surgery = _Surgery(model, record, rules, blocks)
    total = sum(len(names) for _, _, names in blocks)
    started = time.perf_counter()
    with torch.no_grad(), _evaluating(model), showing(progress, record.name, total) as listener:
        surgery.clock = ProgressClock(listener, total)
        state = None
        if state_dir is not None:
            state = ResumeState.open(state_dir, model, record, rules, calls)
        surgery.run(calls, state)
    return QuantizationReport(
        preset=record.name,
        layers=tuple(surgery.reports),
        left_out=tuple(_list_left_out(model)),
        uncalibrated=tuple(surgery.uncalibrated),
        seconds=time.perf_counter() - started,
        peak_memory_bytes=read_peak_memory_bytes(),
    )


_Block = tuple[str, nn.Module, list[str]]


@dataclass
class _Surgery:
    model: nn.Module
    preset: SVDQuantPreset
    rules: LinearRules
    blocks: list[_Block]
    reports: list[LinearReport] = field(default_factory=list)
    uncalibrated: list[str] = field(default_factory=list)
    num_calls: dict[str, int] = field(default_factory=dict)  # of a linear in one run of its block
    clock: ProgressClock = field(default_factory=lambda: ProgressClock(lambda _: None, 0))

    def run(self, calls: list[Call] | None, state: ResumeState | None) -> None:
        """Quantize all blocks; those that `state` holds are put in place as they are."""
        walk = None
        if calls is not None:
            walk = BlockWalk(self.model, [block for _, block, _ in self.blocks], calls)
        for index, (name, _, linears) in enumerate(self.blocks):
            finished = None if state is None else state.read_block(index, linears)
            if finished is not None:
                self._restore(*finished, has_data=walk is not None)
                self.clock.advance(name, len(linears))
            else:
                first = len(self.reports)
                records = self._quantize_block(linears, walk)
                if state is not None:
                    state.write_block(index, records, self.reports[first:])
            if walk is not None:
                walk.advance()

    def _restore(
        self, records: dict[str, QuantizedLinear], reports: list[LinearReport], *, has_data: bool
    ) -> None:
        for name, record in records.items():
            _replace(self.model, name, record)
        self.reports += reports
        if has_data:
            self.uncalibrated += [entry.name for entry in reports if not entry.is_calibrated]

    def _quantize_block(
        self, linears: list[str], walk: BlockWalk | None
    ) -> dict[str, QuantizedLinear]:
        groups = [] if walk is None or not linears else self._find_groups(linears, walk)
        reached = {name for group in groups for name in group}
        columns = {name: self._linear(name).in_features for name in linears if name not in reached}
        records: dict[str, QuantizedLinear] = {}
        for group in [*groups, *self.rules.group_linears(columns)]:
            with _naming(group):
                statistics = self._gather(group, walk) if walk and group[0] in reached else None
                if statistics is not None and not statistics.num_rows:
                    statistics = None  # reached by batches of no rows alone
                if walk is not None and statistics is None:
                    self.uncalibrated += group
                records |= self._quantize_group(group, statistics)
            self.clock.advance(", ".join(group), len(group))
        return records

    def _find_groups(self, linears: list[str], walk: BlockWalk) -> list[Group]:
        """Return the linears that calibration reaches, those with the same inputs together."""
        seen: dict[str, list[_Input]] = {}  # keeps the inputs alive, so that identity tells them
        current: dict[str, list[_Input]] = {}

        def hooks() -> list[Any]:
            def watch(name: str) -> Any:
                def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                    if name not in seen:
                        current.setdefault(name, []).append(_Input(_get_input(args, kwargs)))

                return self._linear(name).register_forward_pre_hook(see, with_kwargs=True)

            return [watch(name) for name in linears]

        def have_all() -> bool:
            seen.update(current)
            current.clear()
            return len(seen) == len(linears)

        walk.observe(hooks, have_all)
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, inputs in seen.items():
            self.num_calls[name] = len(inputs)
            groups.setdefault(tuple(x.key for x in inputs), []).append(name)
        return [tuple(names) for names in groups.values()]

    def _gather(self, group: Group, walk: BlockWalk) -> InputStatistics:
        """Return statistics of the group's input over the whole calibration."""
        first = self._linear(group[0])
        is_weight_only = self.preset.activation is None
        statistics = InputStatistics(first.in_features, keep_gram=is_weight_only)

        def hooks() -> list[Any]:
            def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                statistics.update(_get_input(args, kwargs))
                if self.num_calls[group[0]] == 1:  # else it runs again in the same block
                    stop()

            return [first.register_forward_pre_hook(see, with_kwargs=True)]

        walk.observe(hooks)
        return statistics

    def _quantize_group(
        self, group: Group, statistics: InputStatistics | None
    ) -> dict[str, QuantizedLinear]:
        linears = [self._linear(name) for name in group]
        dtype = linears[0].weight.dtype
        preset = self.preset
        if dtype == torch.float16 and preset.low_rank_dtype == "bfloat16":
            preset = replace(preset, low_rank_dtype="float16")  # x's dtype: nothing to convert
        records, choice = quantize_linear_group(
            [linear.weight for linear in linears],
            [None if linear.bias is None else linear.bias.detach() for linear in linears],
            statistics,
            preset,
        )
        rows = None if statistics is None else statistics.held_out.rows
        for name, linear, record in zip(group, linears, records, strict=True):
            true = (linear.weight.detach(), linear.bias)
            self.reports.append(measure_linear(name, true, record, rows, (group, choice)))
            _replace(self.model, name, record)
        return dict(zip(group, records, strict=True))

    def _linear(self, name: str) -> nn.Linear:
        module = self.model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        return module


def _replace(model: nn.Module, name: str, record: QuantizedLinear) -> None:
    """Put the 4-bit module wherever the model holds the linear called `name`."""
    old = model.get_submodule(name)
    replace_module(model, old, W4A4Linear.from_record(record, choose_part_dtype(old)))


class _Input:
    """One input of a linear: the tensor, and what tells it from others."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.key = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, read_version(x))


def _get_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    x = args[0] if args else kwargs.get("input")  # nn.Linear.forward's own name
    if not isinstance(x, torch.Tensor):
        raise FormatError(f"a linear is called with {type(x).__name__}, wanted a tensor")
    return x


@contextmanager
def _naming(group: Group) -> Iterator[None]:
    """Say in an error which linears it is about."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{', '.join(group)}: {error}") from error


def _list_blocks(model: nn.Module, rules: LinearRules) -> list[_Block]:
    """Return the blocks that hold linears to quantize; each linear stands under its first name."""
    if not isinstance(model, nn.Module):
        raise FormatError(f"model: {type(model).__name__}, wanted torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise FormatError(
            "model: is itself an nn.Linear, which cannot be replaced in place; "
            "use W4A4Linear.from_linear"
        )
    taken: set[int] = set()
    blocks: list[_Block] = []
    for prefix, block in find_blocks(model):
        names = []
        fused = _list_fused(block, prefix)
        for name, module in block.named_modules(prefix=prefix):
            if name in fused or id(module) in taken:
                continue
            if _is_quantizable(name, module, rules):
                taken.add(id(module))
                names.append(name)
        blocks.append((prefix, block, names))
    if not taken:
        raise FormatError(
            "the model holds no linear to quantize: nn.Linear modules in its layers, at least "
            f"{rules.min_features} wide, whose names the rules take"
        )
    return blocks


def _is_quantizable(name: str, module: nn.Module, rules: LinearRules) -> bool:
    if type(module) is not nn.Linear or not rules.takes_name(name):
        return False
    if min(module.in_features, module.out_features) < rules.min_features:
        return False
    if module.weight.device.type != "cpu":
        raise FormatError(
            f"{name}: weight on {module.weight.device}, wanted the CPU; quantize there, then move "
            "the model"
        )
    if module.weight.dtype not in FLOAT_DTYPES:
        raise FormatError(
            f"{name}: weight is {module.weight.dtype}, wanted float16, bfloat16 or float32; "
            "convert the model first"
        )
    return True


def _list_fused(block: nn.Module, prefix: str) -> set[str]:
    """Return the linears whose parent reads their weights itself, past their forward."""
    return {
        f"{name}.{child}" if name else child
        for name, module in block.named_modules(prefix=prefix)
        if isinstance(module, nn.TransformerEncoderLayer)  # its fast path, in eval mode
        for child in ("linear1", "linear2")
    }


def _list_left_out(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; each module gets its own mode back."""
    modes = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, mode in modes.items():  # by name: a 4-bit module takes its linear's mode
            model.get_submodule(name).training = mode
