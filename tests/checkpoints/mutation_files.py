"""Sound checkpoints of every family as raw headers and bytes, which mutations then damage."""

import copy
import importlib.util
import io
import json
import struct
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from halfbyte.checkpoints.conversion_plan import find_obstacle
from halfbyte.checkpoints.family import Family, Layer, read_layer, write_layer
from halfbyte.checkpoints.open_source import open_source
from halfbyte.checkpoints.registry import FAMILIES, recognise
from halfbyte.errors import CheckpointError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES
from halfbyte.formats.packing import view_as_bytes
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import FILE_DTYPES, make_spec
from halfbyte.reference.decode import dequantize, read_floats
from tests.checkpoints import test_comfyui, test_deepcompressor, test_gguf, test_torchao

N, K = 128, 256
ROOT = Path(__file__).resolve().parents[2]
# What real layers look like: amax 0.6 of the weight, amax 11 of x, block scales up to 448.
GLOBAL_SCALE, ACTIVATION_SCALE = 0.6 / 2688, 11 / 2688
VECTORS = ("activation_global_scale", "channel_scale", "smooth", "lora_down", "lora_up", "bias")


@dataclass
class RawTensor:
    """One entry of a header and its bytes."""

    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class RawFile:
    """A checkpoint before it is written; a mutation changes any of it.

    Attributes:
        name: of the specimen.
        family: that reads it.
        named: what a user has to say with `--from` where the sound file is ambiguous.
        layers: layer -> part -> name of the tensor.
        tensors: of the safetensors file; empty for another container.
        metadata: of its header.
        files: beside it, or instead of it: name -> bytes.
        opened: name of the file to open, "" for the directory.
        header: replaces the header's JSON text where set.
        tail: bytes that are appended, or cut off where negative.
        length: replaces the header's length where set.
    """

    name: str
    family: str
    named: str | None = None
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    opened: str = ""
    header: str | None = None
    tail: int = 0
    length: int | None = None

    def list_entries(self) -> dict[str, Any]:
        """Return the header as a dictionary, offsets as the writer of the format sets them."""
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        start = 0
        for name, tensor in self.tensors.items():
            end = start + len(tensor.data)
            entries[name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": [start, end],
            }
            start = end
        return entries

    def encode(self) -> bytes:
        """Return the safetensors file."""
        text = self.header if self.header is not None else json.dumps(self.list_entries())
        head = text.encode()
        head += b" " * (-len(head) % 8)
        length = len(head) if self.length is None else self.length
        data = b"".join(tensor.data for tensor in self.tensors.values())
        whole = struct.pack("<Q", length) + head + data
        return whole + b"\1" * self.tail if self.tail >= 0 else whole[: self.tail]

    def write(self, folder: Path) -> Path:
        """Write everything and return what is to be opened."""
        folder.mkdir(parents=True)
        if self.tensors or self.header is not None:
            (folder / "model.safetensors").write_bytes(self.encode())
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / self.opened if self.opened else folder


Reading = dict[str, dict[str, Any]]


def read_reference(path: Path, family: str | None = None) -> tuple[str, Reading, dict[str, Any]]:
    """Return family, every layer as float64 numbers, and the plans' tensors."""
    source = open_source(path)
    try:
        found = recognise(source, family)
        layers = {
            name: read_layer(found.family, source, plan).linear
            for name, plan in found.layers.items()
        }
        plans = {name: dict(plan.tensors) for name, plan in found.layers.items()}
    finally:
        source.close()
    return found.family.name, {n: list_numbers(linear) for n, linear in layers.items()}, plans


def list_numbers(linear: QuantizedLinear) -> dict[str, Any]:
    """Return all that a layer means, in float64."""
    numbers: dict[str, Any] = {"activation": linear.activation and linear.activation.name}
    numbers["weight"] = dequantize(linear.weight)
    for name in VECTORS:
        value = getattr(linear, name)
        numbers[name] = None if value is None else read_floats(value)
    return numbers


def is_same_reading(one: Reading, other: Reading) -> bool:
    """Return whether two readings are the same layers with the same numbers."""
    if set(one) != set(other):
        return False
    return all(
        _is_same(one[layer][part], other[layer][part]) for layer in one for part in one[layer]
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and bool(np.array_equal(one, other))
    return type(one) is type(other) and (one is None or one == other)


@cache
def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_checkpoint_table", ROOT / "tools" / "make_checkpoint_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_sound_linear(kind: Any, seed: int) -> QuantizedLinear:
    """Return a layer whose scales are those of a real one: the largest block scale is 448."""
    draw = torch.Generator().manual_seed(seed)
    block = get_format(kind.weight)
    shape = (N, block.num_blocks(K))
    data = torch.randint(0, 256, (N, K // 2), generator=draw).to(torch.uint8)
    if block.scale in BYTE_SCALE_DTYPES:
        low, high = (0x58, 0x7F) if block.has_global_scale else (0x08, 0x30)
        low, high = (low, high) if block.scale == "e4m3" else (110, 120)
        codes = torch.randint(low, high, shape, generator=draw).to(torch.uint8)
        scales = codes.view(BYTE_SCALE_DTYPES[block.scale])
    else:
        scales = (torch.rand(shape, generator=draw) + 0.5) * 0.02
        scales = scales.to(torch.float16 if kind.dtype == torch.float32 else kind.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(kind.dtype)

    def positive(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=draw) + 0.5).to(kind.dtype)

    activation = None if kind.activation is None else get_activation_format(kind.activation)
    is_static = activation is not None and activation.global_scale == "static"
    scale = torch.tensor(GLOBAL_SCALE).bfloat16().float()
    return QuantizedLinear(
        BlockScaledTensor(block, data, scales, scale if block.has_global_scale else None, K),
        activation,
        activation_global_scale=torch.tensor(ACTIVATION_SCALE) if is_static else None,
        channel_scale=positive(N).float() if "channel_scale" in kind.extras else None,
        smooth=positive(K) if "smooth" in kind.extras else None,
        lora_down=normal(kind.rank, K) if kind.rank else None,
        lora_up=normal(N, kind.rank) if kind.rank else None,
        bias=normal(N) if "bias" in kind.extras else None,
    )


def raw(tensor: torch.Tensor) -> RawTensor:
    spec = make_spec("x", tensor.dtype, tensor.shape)
    data = bytes(view_as_bytes(tensor.contiguous()).numpy().tobytes())
    return RawTensor(spec.dtype.name, list(tensor.shape), data)


def raw_files(name: str, family: str, tensors: Mapping[str, torch.Tensor], **rest: Any) -> RawFile:
    named = {key: raw(tensor) for key, tensor in sorted(tensors.items())}
    return RawFile(name, family, tensors=named, **rest)


def make_written(family: Family, kind: Any) -> RawFile | None:
    """Return two layers of a kind as `family` writes them, None where it does not hold them."""
    names = [kind.layer, kind.layer.replace(".0.", ".1.", 1)]
    linears = {name: make_sound_linear(kind, seed) for seed, name in enumerate(names)}
    layers = {name: Layer(name, linear) for name, linear in linears.items()}
    if not family.can_write or find_obstacle(family, layers[names[0]]) is not None:
        return None
    try:
        side = family.make_side_content(layers, None)
    except (CheckpointError, NotImplementedError):
        return None
    tensors = {"norm_out.weight": torch.ones(8)}
    for name, layer in layers.items():
        for part, tensor in write_layer(family, layer).items():
            tensors[family.tensor_name(name, part)] = tensor
    return raw_files(
        f"{family.name}: {kind.title}",
        family.name,
        tensors,
        metadata=dict(side.metadata),
        files=dict(side.files),
    )


def make_independent() -> list[RawFile]:
    """Return files that tests build number by number, without the families' own writers."""
    found = []
    for size in ((256, 64), (18, 40)):
        parts, _ = test_comfyui.make_layer(*size, {"orig_shape": list(size)})
        tensors = {f"a.up.{part}": tensor for part, tensor in parts.items()}
        tensors["norm.weight"] = torch.ones(4)
        found.append(raw_files(f"comfyui: independent {size}", "comfyui", tensors))
    for case, settings in test_torchao.CASES.items():
        file, _ = test_torchao.make_file(40, 96, **settings)
        found.append(
            raw_files(
                f"torchao: independent {case}",
                "torchao",
                file.tensors,
                metadata=dict(file.metadata),
            )
        )
    for kind in test_gguf.KINDS:
        data = test_gguf.make_file(kind, scaled=kind == "NVFP4")[0].encode()
        found.append(RawFile(f"gguf: {kind}", "gguf", files={"x.gguf": data}, opened="x.gguf"))
    for kind in ("int4", "nvfp4"):
        dump = test_deepcompressor.make_dump(kind)
        files = {
            f"{name}.pt": save_bytes(dump[name]) for name in ("model", "scale", "smooth", "branch")
        }
        found.append(RawFile(f"deepcompressor: {kind}", "deepcompressor", files=files))
    return found


def save_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def make_archive(file: RawFile) -> RawFile:
    """Return the tensors of a safetensors specimen as `torch.save` writes them."""
    tensors = {}
    for name, tensor in file.tensors.items():
        dtype = FILE_DTYPES[tensor.dtype].torch_dtype
        flat = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8)
        tensors[name] = flat.view(dtype).reshape(tensor.shape)
    files = {**file.files, "model.pt": save_bytes(tensors)}
    return RawFile(f"{file.name}, archive", file.family, files=files, opened="model.pt")


@cache
def list_specimens() -> tuple[tuple[RawFile, Reading], ...]:
    """Return every sound file with its reading."""
    files = []
    for family in FAMILIES.values():
        if family.container != "safetensors":
            continue
        for kind in load_tool().KINDS:
            file = make_written(family, kind)
            files += [file] if file is not None else []
    archives = [file for file in files if file.name.startswith("modelopt: NVFP4, cal")]
    archives += [file for file in files if file.name.startswith("flashinfer")]
    files += make_independent() + [make_archive(file) for file in archives]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, file in enumerate(files):
            path = file.write(Path(folder) / str(number))
            file.named = file.family if is_ambiguous(path) else None
            family, reading, plans = read_reference(path, file.named)
            assert family == file.family, file.name
            assert reading, file.name
            file.layers = plans
            found.append((file, reading))
    return tuple(found)


def is_ambiguous(path: Path) -> bool:
    source = open_source(path)
    try:
        recognise(source)
    except CheckpointError:
        return True
    finally:
        source.close()
    return False


def copy_file(file: RawFile) -> RawFile:
    return copy.deepcopy(file)
