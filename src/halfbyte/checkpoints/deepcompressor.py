"""deepcompressor's dumps of SVDQuant runs: a folder of `torch.save` files. Read only.

    model.pt   LAYER.weight [N, K]: the residual on its 4-bit grid, smoothing folded in; biases
    scale.pt   LAYER.weight.scale.0: INT4 [N, 1, K/64, 1]; NVFP4: one number, with
               LAYER.weight.scale.1 [N, 1, K/16, 1], numbers of E4M3
    smooth.pt  K factors that x is divided by, shared: q, k and v have those of one of them
    branch.pt  {"a.weight": [R, K], "b.weight": [rows, R]}, sees the SMOOTHED x; q, k, v share it,
               their rows of b one after the other

Codes are weight / scales, rounded: 16-bit weights are near the grid, not on it. Which smoothing and
branch a layer has follows from its name, as deepcompressor's own converter has it (models of FLUX's
names). The smoothing of attention outputs is folded into the layer before them unless
`proj.fuse_when_possible` is false.
Source: mit-han-lab/deepcompressor 69f3473, backend/nunchaku/convert.py and utils.py,
app/diffusion/ptq.py, nn/patch/lowrank.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn, Self

import torch

from halfbyte.checkpoints.family import NO_CLAIM, Claim, Facts, Family, LayerPlan, Parts
from halfbyte.checkpoints.nunchaku import UNSIGNED_LAYERS
from halfbyte.checkpoints.nunchaku_awq import find_splits
from halfbyte.checkpoints.scalar_parts import as_scalar
from halfbyte.checkpoints.tensor_source import TensorSource, get_spec
from halfbyte.checkpoints.torch_archive import TorchArchiveSource
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.halfbyte_layer import has_only_finite
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import TensorSpec, quoted

FILES: Final = ("model", "scale", "smooth", "branch")
_FLOATS: Final = ("F16", "BF16", "F32")
# End of a name -> (whose smoothing, whose branch, all that share the branch in row order).
_QKV: Final = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV: Final = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
_SHARED: Final = {
    **dict.fromkeys(_QKV, ("attn.to_q", "attn.to_q", _QKV)),
    **dict.fromkeys(_ADDED_QKV, ("attn.add_k_proj", "attn.add_k_proj", _ADDED_QKV)),
    "proj_mlp": ("attn.to_q", "proj_mlp", ("proj_mlp",)),
    "attn.to_add_out": ("attn.to_out.0", "attn.to_add_out", ("attn.to_add_out",)),
}
_FUSED: Final = ("attn.to_out.0", "attn.to_add_out", "proj_out.linears.0")
_FUSE_KEY: Final = "smooth:proj.fuse_when_possible"
SHIFT: Final = get_activation_format("uint4_shifted").shift
GRID_ERROR: Final = 2.0**-7  # of a bfloat16 weight that was rounded twice, relative
_E2M1_MIDDLES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E2M1_STEPS: Final = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)  # between neighbours, lowest first


class DumpSource:
    """The files of a dump as one source; a `TensorSource` and a context manager.

    Tensors of model.pt have their names; those of other files are called FILE:NAME.
    """

    def __init__(self, path: Path) -> None:
        """Open folder `path`; CheckpointError for damage or a pickle that is more than data."""
        self.path = path
        self.configs: Mapping[str, Any] = {}
        self._places: dict[str, tuple[TorchArchiveSource, str]] = {}
        self.file_names = tuple(f"{file}.pt" for file in FILES if (path / f"{file}.pt").exists())
        metadata: dict[str, str] = {}
        with ExitStack() as stack:
            for file in FILES:
                if f"{file}.pt" not in self.file_names:
                    continue
                source = stack.enter_context(TorchArchiveSource(path / f"{file}.pt"))
                prefix = "" if file == "model" else f"{file}:"
                self._places |= {f"{prefix}{name}": (source, name) for name in source.specs}
                metadata |= {f"{file}:{key}": text for key, text in source.metadata.items()}
            self._stack = stack.pop_all()
        self.metadata: Mapping[str, str] = metadata
        specs = {name: source.specs[own] for name, (source, own) in sorted(self._places.items())}
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(name, spec.dtype, spec.shape) for name, spec in specs.items()
        }

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close every file."""
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, in its own memory."""
        get_spec(self, name)
        source, own = self._places[name]
        return source.read(own)

    def close(self) -> None:
        """Close every file."""
        self._stack.close()


def is_dump_folder(path: Path) -> bool:
    """Return whether `path` is a folder with a dump's model.pt and scale.pt."""
    return (path / "model.pt").is_file() and (path / "scale.pt").is_file()


class DeepCompressor(Family):
    """Dumps of deepcompressor, INT4 and NVFP4."""

    name: ClassVar[str] = "deepcompressor"
    title: ClassVar[str] = "deepcompressor dump"
    container: ClassVar[str] = "torch"
    can_write: ClassVar[bool] = False

    def claim(self, source: TensorSource) -> Claim:
        """Claim the weights with scales; CheckpointError for a scale or branch that nobody has."""
        marks = [name for name in source.specs if name.startswith("scale:")]
        if not marks:
            return NO_CLAIM
        ending = ".weight.scale.0"
        names = [name[len("scale:") : -len(ending)] for name in marks if name.endswith(ending)]
        layers = {name: _plan_layer(source, name) for name in names}
        used = {tensor for plan in layers.values() for tensor in plan.tensors.values()}
        # A branch or smoothing that is shared is used by each; the shift belongs to a wrapper.
        for name in source.specs:
            if ":" in name and name not in used:
                raise CheckpointError(
                    f"{source.path}: {quoted(name)} belongs to no layer that this reader knows; "
                    "zero points and models of other names than FLUX's are not read"
                )
        return Claim(layers, True, "model.pt and scale.pt of one run")

    def decode(self, parts: Parts, facts: Facts) -> QuantizedLinear:
        """Return the record; the low-rank branch is turned to see the raw x, in float32."""
        packed = quantize_to_grid(parts, facts["format"])
        smooth = None if facts["is_fused"] == "true" else parts.get("smooth")
        down = up = None
        if ("branch_a" in parts) != ("branch_b" in parts):
            raise FormatError("a.weight and b.weight of the branch come together: one is missing")
        columns = parts["weight"].shape[1]
        for name, sizes in (("smooth", [columns]), ("branch_a", [None, columns])):
            if name in parts:
                _check_shape(name, parts[name], sizes)
        if "branch_a" in parts:
            _check_shape("branch_b", parts["branch_b"], [None, parts["branch_a"].shape[0]])
            down = parts["branch_a"].float()
            down = down if smooth is None else down / smooth.float()
            up = parts["branch_b"][int(facts["first_row"]) :][: packed.shape[0]].float()
        bias = parts.get("bias")
        if "shift" in parts and down is not None and up is not None:
            moved = (up @ down.sum(1)) * SHIFT
            if bias is not None and bias.shape != moved.shape:
                raise FormatError(f"bias: shape {list(bias.shape)}, wanted {list(moved.shape)}")
            bias = moved if bias is None else bias.float() + moved
        activation = facts["activation"]
        return QuantizedLinear(
            weight=packed,
            activation=None if activation == "none" else get_activation_format(activation),
            smooth=smooth,
            lora_down=down,
            lora_up=up,
            bias=bias,
        )

    def find_bad_value(self, parts: Parts, facts: Facts) -> str | None:
        """Return a weight that is not on its grid, a subscale that is no E4M3, another shift."""
        if "scale_1" in parts:
            scale = parts["scale_1"].float()
            if not torch.equal(scale.to(torch.float8_e4m3fn).float(), scale):
                return "weight.scale.1: got numbers that E4M3 does not have, wanted NVFP4's scales"
        if "shift" in parts and not bool((parts["shift"].float() == SHIFT).all()):
            return f"shift: got {float(parts['shift'].float().max())}, wanted {SHIFT}"
        try:
            numbers, scales = find_grid(parts)
        except FormatError as problem:
            return f"weight: {problem}"
        weight = parts["weight"].float()
        codes = round_to_codes(numbers, facts["format"])
        error = (codes * scales - weight.reshape(numbers.shape)).abs()
        if not has_only_finite(weight):
            return "weight: got NaN or infinite numbers, wanted finite ones"
        is_near = error <= GRID_ERROR * weight.reshape(numbers.shape).abs() + 1e-30
        if not bool(is_near.all()):
            count = int((~is_near).sum())
            return (
                f"weight: got {count} numbers of {weight.numel()} off the grid of scale.pt, wanted "
                "the quantized model and its scales of one run"
            )
        return None


def _check_shape(name: str, part: torch.Tensor, sizes: Sequence[int | None]) -> None:
    shape = list(part.shape)
    if len(shape) != len(sizes) or any(
        size not in (None, own) for size, own in zip(sizes, shape, strict=True)
    ):
        wanted = ["any" if size is None else size for size in sizes]
        raise FormatError(f"{name}: shape {shape}, wanted {wanted}")


def find_grid(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weight / scales [N, blocks, size], scales [N, blocks, 1]), float32.

    Raises FormatError for scales of another number of rows or blocks.
    """
    weight, scale = parts["weight"].float(), parts["scale_0"].float()
    if weight.ndim != 2:
        raise FormatError(f"weight: shape {list(weight.shape)}, wanted [N, K]")
    rows, columns = weight.shape
    blocked = parts.get("scale_1", scale).float()
    blocks = blocked.numel() // max(rows, 1)
    if blocked.numel() != rows * blocks or blocks == 0 or columns % blocks:
        raise FormatError(f"scales: shape {list(blocked.shape)}, wanted [N, 1, blocks, 1]")
    scales = blocked.reshape(rows, blocks, 1)
    if "scale_1" in parts:
        scales = scales * as_scalar("weight.scale.0", scale)
    return weight.reshape(rows, blocks, columns // blocks) / scales, scales


def round_to_codes(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Return the nearest numbers of the format's elements, float32."""
    if name == "int4":
        return numbers.round().clamp(-8, 7)
    magnitude = numbers.abs()
    total = torch.zeros_like(magnitude)
    for middle, step in zip(_E2M1_MIDDLES, _E2M1_STEPS, strict=True):
        total += (magnitude > middle) * step
    return total * numbers.sign()


def quantize_to_grid(parts: Parts, name: str) -> BlockScaledTensor:
    """Return the packed weight of a layer."""
    numbers, _ = find_grid(parts)
    rows, columns = parts["weight"].shape
    if numbers.shape[2] != get_format(name).block_size:
        raise FormatError(f"groups of {numbers.shape[2]}: wanted {get_format(name).block_size}")
    nearest = round_to_codes(numbers, name).reshape(rows, columns)
    if name == "int4":
        codes = nearest.to(torch.int8).view(torch.uint8) & 0x0F
    else:
        magnitude = nearest.abs()
        codes = torch.zeros_like(magnitude, dtype=torch.uint8)
        for middle in _E2M1_MIDDLES:
            codes += magnitude > middle
        codes |= (nearest < 0).to(torch.uint8) << 3
    data = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scales = parts.get("scale_1", parts["scale_0"]).reshape(rows, -1)
    if name == "int4":
        return BlockScaledTensor(get_format(name), data, scales, None, columns)
    one = as_scalar("weight.scale.0", parts["scale_0"]).float()
    encoded = scales.float().to(torch.float8_e4m3fn)
    return BlockScaledTensor(get_format(name), data, encoded, one, columns)


def _plan_layer(source: TensorSource, layer: str) -> LayerPlan:
    candidates = {
        "weight": f"{layer}.weight",
        "bias": f"{layer}.bias",
        "scale_0": f"scale:{layer}.weight.scale.0",
        "scale_1": f"scale:{layer}.weight.scale.1",
    }
    local = next((end for end in _SHARED if layer == end or layer.endswith(f".{end}")), None)
    block = layer[: -len(local)] if local else ""
    smooth, branch, group = _SHARED[local] if local else (layer, layer, (layer,))
    candidates["smooth"] = f"smooth:{block}{smooth}"
    candidates["branch_a"] = f"branch:{block}{branch}.a.weight"
    candidates["branch_b"] = f"branch:{block}{branch}.b.weight"
    if layer.endswith(".linear"):
        candidates["shift"] = f"{layer.removesuffix('.linear')}.shift"
    tensors = {part: name for part, name in candidates.items() if name in source.specs}
    if "weight" not in tensors:
        _fail(source, f"{layer}.weight", "no such tensor", "the weight of the scales in scale.pt")
    for part, name in tensors.items():
        if source.specs[name].dtype.name not in _FLOATS:
            _fail(source, name, f"{part} of {source.specs[name].dtype.name}", "floats")
    for name in (f"{block}{other}.weight" for other in group if local):
        if name in source.specs and f"scale:{name}.scale.0" not in source.specs:
            _fail(source, f"scale:{name}.scale.0", "no such tensor", f"scales, as {layer} has them")
    shares = group[: group.index(local)] if local else ()
    before = [f"{block}{name}.weight" for name in shares]
    rows = [source.specs[name].shape[0] for name in before if name in source.specs]
    kind = "nvfp4" if "scale_1" in tensors else "int4"
    wrapped = layer.removesuffix(".linear")
    is_shifted = kind == "int4" and wrapped != layer and UNSIGNED_LAYERS.match(wrapped) is not None
    if is_shifted and "shift" not in tensors:
        _fail(source, f"{wrapped}.shift", "no such tensor", "the shift of x behind a GELU")
    is_weight_only = find_splits(layer) > 1
    activation = "nvfp4_nunchaku" if kind == "nvfp4" else "int4"
    activation = "uint4_shifted" if "shift" in tensors else activation
    is_output = any(layer == end or layer.endswith(f".{end}") for end in _FUSED)
    is_fused = is_output and source.metadata.get(_FUSE_KEY, "true") == "true"
    facts = {
        "format": kind,
        "activation": "none" if is_weight_only else activation,
        "is_fused": "true" if is_fused else "false",
        "first_row": str(sum(rows)),
    }
    return LayerPlan(layer, tensors, facts)


def _fail(source: TensorSource, name: str, came: str, wanted: str) -> NoReturn:
    raise CheckpointError(f"{source.path}: {quoted(name)}: got {came}, wanted {wanted}")
