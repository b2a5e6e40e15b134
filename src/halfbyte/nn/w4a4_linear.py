"""W4A4Linear: an nn.Linear whose weight is 4-bit and whose input is quantized on the fly.

Everything is a buffer, under the names of `ops.PART_NAMES`; absent parts are None. Two invariants:

* What encodes the weight (`weight_data`, `weight_scales`, the global scales, `channel_scale`) never
  changes its dtype: `.half()`, `.bfloat16()` and `.to(dtype)` convert `smooth`, `lora_down`,
  `lora_up` and `bias` alone. One-byte block scales are kept as uint8.
* The meaning of the bytes travels with them: the state holds `_extra_state`, a uint8 tensor of the
  text `halfbyte.W4A4Linear/1 <weight format>/<activation>/<columns>`. Loading bytes of another
  format is a FormatError that names both.

Who runs it is `backend`: "auto" follows the device; "virtual-b200", "virtual-b300" and
"virtual-h200" run CPU tensors through the kernels of that GPU on a virtual one. How accurately it
runs on Hopper is `mode` (`ops.hopper_modes`). What kernels read is made from the buffers at the
first call and kept until they change; it is no part of the state or of a copy.

Adapters (`nn.adapters`) lengthen the low-rank branch that runs: `adapted_down` and `adapted_up`
stand in for `lora_down` and `lora_up`, which stay as they are. They are no part of the state, nor
of `to_record()`; `low_rank_stack` says how they are kept.

There is no backward pass: the module is for inference.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import nn

from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.dtypes import FLOAT_DTYPES
from halfbyte.formats.halfbyte_layer import check_linear_values
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantize_plan import check_dense
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn.low_rank_stack import get_stacked, restack
from halfbyte.ops.backends import check_backend
from halfbyte.ops.call_plan import CallPlan, plan_call
from halfbyte.ops.checks import check_float_dtype
from halfbyte.ops.hopper_modes import check_mode, check_tokens
from halfbyte.ops.linear_parts import (
    PART_NAMES,
    LinearSpec,
    decode_spec,
    is_present,
    list_parts,
    make_linear,
    make_spec,
)
from halfbyte.ops.placed_linears import count_placed_bytes, forget_placed
from halfbyte.ops.prepared import PreparedLinear, prepare_linear
from halfbyte.ops.w4a4_linear import call_w4a4_linear

if TYPE_CHECKING:
    from halfbyte.svdquant.presets import SVDQuantPreset
    from halfbyte.svdquant.statistics import InputStatistics

_EXTRA_STATE: Final = "_extra_state"  # torch's key for get_extra_state()
_STATE_KIND: Final = "halfbyte.W4A4Linear/1"
# Parts that a dtype cast converts; all others are exact.
_CASTABLE: Final = ("smooth", "lora_down", "lora_up", "bias")
_EXACT: Final = tuple(name for name in PART_NAMES if name not in _CASTABLE)
_LORA_DOWN: Final = PART_NAMES.index("lora_down")
_LORA_UP: Final = PART_NAMES.index("lora_up")


class W4A4Linear(nn.Module):
    """y = x @ W^T + bias with a 4-bit W, for x [..., in_features] in fp16, bf16 or fp32.

    The result has x's dtype and leading dimensions and is the same on every call. Formulas:
    `halfbyte.reference.w4a4_linear`. Build one with `from_linear`, `from_record` or
    `from_state_dict`.

    Attributes:
        in_features: K. out_features: N. rank: R of the low-rank branch, 0 without one; adapters
            are not counted.
        spec: what the bytes mean (weight format, activation format, K).
        backend: one of `ops.BACKENDS`; may be set at any time.
        mode: one of `ops.MODES`, the accuracy on Hopper; may be set at any time.
        tokens: "both", "prefill" or "decode": which calls it is placed for. Hopper's one layout
            serves all of them at the same bytes, and the other backends have one as well.
    """

    backend: str = "auto"  # also of modules that were pickled without one
    mode: str = "auto"
    tokens: str = "both"

    weight_data: torch.Tensor
    weight_scales: torch.Tensor
    smooth: torch.Tensor | None
    bias: torch.Tensor | None
    adapted_down: torch.Tensor | None
    adapted_up: torch.Tensor | None
    _absent: torch.Tensor

    def __init__(
        self,
        record: QuantizedLinear,
        backend: str = "auto",
        mode: str = "auto",
        tokens: str = "both",
    ) -> None:
        """Make a module that owns copies of the record's tensors, dtypes unchanged.

        Raises UsageError for an unknown backend, mode or tokens.
        """
        super().__init__()
        check_backend(backend)
        check_mode(mode)
        check_tokens(tokens)
        self.backend, self.mode, self.tokens = backend, mode, tokens
        self.spec: LinearSpec = make_spec(record)
        self.in_features = record.in_features
        self.out_features = record.out_features
        _check_smooth(record.smooth)
        normal = make_linear(list_parts(record), self.spec)  # empty parts become absent ones
        self.rank = normal.rank
        parts = dict(zip(PART_NAMES, list_parts(normal), strict=True))
        kept = [name for name in PART_NAMES if name in PART_NAMES[:2] or is_present(parts[name])]
        for name in kept:
            # A copy: loading a state writes in place, and q, k, v records share tensors.
            self.register_buffer(name, parts[name].detach().contiguous().clone())
        # What stands for a part that is None; a buffer, so that it moves with the module.
        absent = torch.empty(0, device=record.weight.data.device)
        self.register_buffer("_absent", absent, persistent=False)
        # Last: torch.export of a module counts buffers that are None and does not pass them.
        for name in (*PART_NAMES, "adapted_down", "adapted_up"):
            if name not in kept:
                self.register_buffer(name, None, persistent=name in PART_NAMES)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        preset: "str | SVDQuantPreset" = "nvfp4_svdquant_r32",
        *,
        statistics: "InputStatistics | None" = None,
        backend: str = "auto",
        mode: str = "auto",
    ) -> Self:
        """Return the 4-bit module of a float linear, on its device.

        The 16/32-bit parts are in the linear's dtype if that is fp16 or bf16; beside an fp32 or
        fp64 weight they stay what the preset makes them.

        Args:
            linear: weight [N, K] and bias [N] or None, fp16, bf16, fp32 or fp64.
            preset: a name in `svdquant.presets.PRESETS`, or a record.
            statistics: what the inputs of this linear look like; None quantizes without data.
            backend: one of `ops.BACKENDS`.
            mode: one of `ops.MODES`.

        Raises FormatError for another module type, a weight without values or of another dtype, NaN
        or Inf in the weight, or an unknown preset.
        """
        if not isinstance(linear, nn.Linear):
            raise FormatError(f"linear: {type(linear).__name__}, wanted torch.nn.Linear")
        record = _quantize_linear(linear, preset, statistics)
        dtype = choose_part_dtype(linear)
        module = cls.from_record(record, dtype, backend=backend, mode=mode)
        module = module.to(linear.weight.device)
        return module.train(linear.training)

    @classmethod
    def from_record(
        cls,
        record: QuantizedLinear,
        dtype: torch.dtype | None = None,
        *,
        backend: str = "auto",
        mode: str = "auto",
    ) -> Self:
        """Return a module of `record`, its 16/32-bit parts converted to `dtype` (None: kept).

        Raises FormatError for a dtype other than fp16, bf16, fp32, and for a part that does not
        fit it (a float32 bias of 1e6 in float16).
        """
        module = cls(record, backend, mode)
        if dtype is not None:
            check_float_dtype("dtype", dtype)
            for name in _CASTABLE:
                part = getattr(module, name)
                if part is not None:
                    setattr(module, name, _convert(name, part, dtype))
            _check_smooth(module.smooth)
        return module

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], prefix: str = "", *, backend: str = "auto"
    ) -> Self:
        """Return the module whose state is under `prefix`, whatever its format and parts are.

        Raises CheckpointError naming keys that are missing or unknown and values that no sound
        quantizer writes, FormatError for tensors that do not fit the format.
        """
        keys = [key for key in state if key.startswith(prefix)]
        known = {prefix + name for name in (*PART_NAMES, _EXTRA_STATE)}
        unknown = sorted(set(keys) - known)
        required = (_EXTRA_STATE, "weight_data", "weight_scales")
        missing = [prefix + name for name in required if prefix + name not in state]
        if unknown or missing:
            raise CheckpointError(
                f"state of W4A4Linear at {prefix!r}: missing keys {missing}, unknown keys {unknown}"
            )
        spec = _read_extra_state(state[prefix + _EXTRA_STATE], prefix)
        parts = [state.get(prefix + name, torch.empty(0)) for name in PART_NAMES]
        for name, part in zip(PART_NAMES, parts, strict=True):
            check_dense(prefix + name, part)
        record = make_linear(parts, spec)
        check_linear_values(prefix.removesuffix(".") or "state", record)
        return cls(record, backend)

    def to_record(self) -> QuantizedLinear:
        """Return the canonical record; its tensors are this module's buffers, not copies.

        Adapters are left out; `adapters.merge_adapters` makes them part of the record.
        """
        return make_linear(self._own_parts(), self.spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y [..., N] of x [..., K] in x's dtype.

        A NaN or an infinity in a quantized x makes its row of y NaN, other rows do not change.

        Raises FormatError for a wrong last dimension or dtype, UsageError for an unknown backend
        or mode, UnsupportedHardwareError for a device or formats without a kernel.
        """
        check_backend(self.backend)
        check_mode(self.mode)
        check_dense("x", x)
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise FormatError(
                f"x: shape {tuple(x.shape)}, wanted [..., {self.in_features}] (in_features)"
            )
        rows = x if x.ndim == 2 else x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)
        parts = self.list_running_parts()
        y = call_w4a4_linear(rows, parts, self.spec, self.backend, self.mode)
        return y if x.ndim == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def plan_call(self, tokens: int, dtype: torch.dtype | None = None) -> CallPlan:
        """Return what a call with `tokens` rows of x runs; places what it needs, as the call would.

        Args:
            tokens: rows of x, leading dimensions flattened.
            dtype: of x; None for that of the 16-bit parts, bfloat16 where there are none.

        Raises what a call raises.
        """
        if dtype is None:
            parts = (getattr(self, name) for name in _CASTABLE)
            dtypes = [part.dtype for part in parts if part is not None]
            dtype = next((one for one in dtypes if one != torch.float32), torch.bfloat16)
        return plan_call(
            self.list_running_parts(), self.spec, (tokens, dtype), self.backend, self.mode
        )

    def prepare(self, x: torch.Tensor) -> PreparedLinear:
        """Return this layer bound to x [M, K] on a GPU, run once; see `ops.prepare_linear`.

        For buffers that stay: `launch()` takes the host a few microseconds.
        """
        return prepare_linear(x, self.list_running_parts(), self.spec.encode(), self.mode)

    @property
    def placed_bytes(self) -> int:
        """Bytes that what GPUs read takes beside the buffers, all modes; 0 before a call."""
        return count_placed_bytes(self.list_running_parts())

    def get_extra_state(self) -> torch.Tensor:
        """Return the format text as uint8, so that a state holds nothing but tensors."""
        text = f"{_STATE_KIND} {self.spec.encode()}"
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Check that the state is of this module's format; FormatError names both."""
        self._check_spec(state, prefix="")

    def extra_repr(self) -> str:
        """Return sizes, formats, rank, dtype and bytes for print(module)."""
        dtypes = [part.dtype for name in _CASTABLE if (part := getattr(self, name)) is not None]
        fields = (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight={self.spec.weight_format}, "
            f"activation={self.spec.activation}, rank={self.rank}"
        )
        dtype = f", dtype={dtypes[0]}" if dtypes else ""
        backend = "" if self.backend == "auto" else f", backend={self.backend}"
        backend += "" if self.mode == "auto" else f", mode={self.mode}"
        placed = f", placed_bytes={self.placed_bytes}" if self.placed_bytes else ""
        stacked = get_stacked(self)
        adapters = f", adapters={sorted(stacked)}" if stacked else ""
        return f"{fields}{dtype}, bytes={self.to_record().num_bytes}{placed}{backend}{adapters}"

    def _own_parts(self) -> list[torch.Tensor]:
        buffers = self._buffers  # attributes of a module are looked up at ten times the cost
        absent = buffers["_absent"]
        assert absent is not None
        found = (buffers[name] for name in PART_NAMES)
        return [absent if part is None else part for part in found]

    def list_running_parts(self) -> list[torch.Tensor]:
        """Return the parts that run, as `ops` take them: with the ranks of adapters."""
        parts = self._own_parts()
        down, up = self._buffers["adapted_down"], self._buffers["adapted_up"]
        if down is not None and up is not None:
            parts[_LORA_DOWN], parts[_LORA_UP] = down, up
        return parts

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Move or cast buffers, the exact ones as bytes so that no cast can reach them."""
        exact = {id(part) for name in _EXACT if (part := getattr(self, name)) is not None}

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in exact:
                return _apply_to_bytes(fn, tensor)
            result: torch.Tensor = fn(tensor)
            if result.dtype not in FLOAT_DTYPES:
                raise FormatError(
                    f"W4A4Linear cannot be cast to {result.dtype}; "
                    "wanted float16, bfloat16 or float32"
                )
            return result

        forget_placed(self.list_running_parts())
        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]  # torch gives it no types
        return self

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        *arguments: Any,
    ) -> None:
        """Load as torch does, after checking format and dtypes (torch would convert silently)."""
        error_msgs: list[str] = arguments[-1]
        extra_state = state_dict.get(prefix + _EXTRA_STATE)
        if extra_state is not None:
            self._check_spec(extra_state, prefix)
        elif prefix + "weight_data" in state_dict:
            raise FormatError(
                f"state has {prefix}weight_data without {prefix}{_EXTRA_STATE}, which names the "
                f"format; this module is {self.spec.encode()}"
            )
        problems = self._list_dtype_problems(state_dict, prefix)
        if problems:
            error_msgs.extend(problems)
            return
        forget_placed(self.list_running_parts())
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        restack(self)
        if self.weight_data.is_meta:
            return
        try:  # a negative or NaN scale would not fail later, it would be wrong
            check_linear_values(prefix.removesuffix(".") or "state", self.to_record())
        except CheckpointError as error:
            error_msgs.append(str(error))

    def _list_dtype_problems(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        problems = []
        for name in PART_NAMES:
            part, loaded = getattr(self, name), state_dict.get(prefix + name)
            if part is None or not isinstance(loaded, torch.Tensor):
                continue  # torch reports keys without a place, and places without a key
            wanted = FLOAT_DTYPES if name in _CASTABLE else (part.dtype,)
            if loaded.dtype not in wanted:
                names = " or ".join(str(dtype) for dtype in wanted)
                problems.append(f"{prefix}{name}: dtype {loaded.dtype}, wanted {names}")
        return problems

    def _check_spec(self, state: Any, prefix: str) -> None:
        spec = _read_extra_state(state, prefix)
        if spec != self.spec:
            raise FormatError(
                f"state at {prefix!r} is {spec.encode()}, this W4A4Linear is {self.spec.encode()}; "
                "build the module from that state with W4A4Linear.from_state_dict"
            )


def set_backend(
    model: nn.Module, backend: str, *, mode: str | None = None, tokens: str | None = None
) -> int:
    """Let every W4A4Linear of `model` run on `backend`; return how many there are.

    Args:
        model: any module, a W4A4Linear itself too.
        backend: one of `ops.BACKENDS`.
        mode: one of `ops.MODES`; None leaves each as it is.
        tokens: "both", "prefill" or "decode"; None leaves each as it is.

    Raises UsageError for an unknown name, UnsupportedHardwareError for a backend without kernels.
    """
    check_backend(backend)
    if mode is not None:
        check_mode(mode)
    if tokens is not None:
        check_tokens(tokens)
    linears = [module for module in model.modules() if isinstance(module, W4A4Linear)]
    for linear in linears:
        linear.backend = backend
        linear.mode = linear.mode if mode is None else mode
        linear.tokens = linear.tokens if tokens is None else tokens
    return len(linears)


def choose_part_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype that the 16/32-bit parts take when a 4-bit linear replaces `module`.

    That of an fp16 or bf16 nn.Linear: then x needs no conversion. None, for as they are, beside a
    wider weight and for any other module.
    """
    dtype = module.weight.dtype if isinstance(module, nn.Linear) else None
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _apply_to_bytes(fn: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    moved: torch.Tensor = fn(view_as_bytes(tensor))
    if moved.dtype != torch.uint8:  # module.type(dtype) casts integers too
        raise FormatError(
            f"W4A4Linear cannot be cast to {moved.dtype}: its bytes encode numbers; "
            "use .half(), .bfloat16(), .float() or .to(dtype)"
        )
    return moved.view(tensor.dtype).reshape(tensor.shape)


def _read_extra_state(state: Any, prefix: str) -> LinearSpec:
    key = prefix + _EXTRA_STATE
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        raise CheckpointError(f"{key}: wanted a 1-D uint8 tensor of text, got {type(state)}")
    if state.device.type == "meta":
        raise CheckpointError(
            f"{key}: is on the meta device, without values; load the values first"
        )
    text = bytes(state.tolist()).decode("utf-8", errors="replace")
    kind, _, spec = text.partition(" ")
    if kind != _STATE_KIND:
        raise CheckpointError(f"{key}: says {text!r}, wanted '{_STATE_KIND} <spec>'")
    return decode_spec(spec)


def _convert(name: str, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = part.to(dtype)
    if part.device.type != "meta" and not bool(torch.isfinite(converted).all()):
        largest = part.abs().max().item()
        raise FormatError(f"{name}: {part.dtype} up to {largest:g} does not fit {dtype}")
    return converted


def _check_smooth(smooth: torch.Tensor | None) -> None:
    if smooth is None or smooth.device.type == "meta":
        return
    if not bool((torch.isfinite(smooth) & (smooth > 0)).all()):
        raise FormatError(
            f"smooth ({smooth.dtype}): wanted finite and positive, x is divided by it"
        )


def _check_float_weight(linear: nn.Linear) -> None:
    weight = linear.weight
    if isinstance(weight, nn.UninitializedParameter):
        raise FormatError("linear: has no weight yet; run the lazy module once, then quantize it")
    if weight.dtype not in (*FLOAT_DTYPES, torch.float64):
        raise FormatError(f"weight: {weight.dtype}, wanted float16, bfloat16, float32 or float64")
    if weight.device.type == "meta":
        raise FormatError("weight: on the meta device, without values; load the values first")


def _quantize_linear(
    linear: nn.Linear,
    preset: "str | SVDQuantPreset",
    statistics: "InputStatistics | None",
) -> QuantizedLinear:
    """Return the record of one linear through the SVDQuant core."""
    from halfbyte.svdquant.presets import SVDQuantPreset, get_preset
    from halfbyte.svdquant.quantize_layer import quantize_linear_group

    if not isinstance(preset, SVDQuantPreset):
        preset = get_preset(preset)
    _check_float_weight(linear)
    weight = linear.weight.detach().float().cpu()
    bias = None if linear.bias is None else linear.bias.detach().float().cpu()
    records, _ = quantize_linear_group([weight], [bias], statistics, preset)
    return records[0]
