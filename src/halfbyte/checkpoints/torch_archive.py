"""Tensors of a `torch.save` archive, read without executing any of its pickle.

The archive is a zip whose members are stored, not compressed: `NAME/data.pkl` says what the tensors
are, `NAME/data/KEY` hold their storages. The pickle is read as data (`pickle_data`), sizes and
strides are checked against the storages, and tensors are read from their place in the file.

Dictionaries are flattened with dots. A torchao tensor is given the names and the metadata that
torchao's own safetensors form has (`LAYER._weight_qdata`, ...), numbers and words become metadata,
so that a family reads both forms alike.

Source: torch 2.13 serialization.py, _utils.py (`_rebuild_*`); torchao 0.18
prototype/safetensors/safetensors_utils.py for the metadata.
"""

import json
import math
import os
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch

from halfbyte.checkpoints.file_range import read_range
from halfbyte.checkpoints.pickle_data import Call, Name, Outside, describe, read_pickle
from halfbyte.errors import CheckpointError
from halfbyte.formats.safetensors_header import FILE_DTYPES, TensorSpec, make_spec, quoted
from halfbyte.formats.safetensors_reader import open_regular_file

MAX_TENSORS: Final = 1_000_000
MAX_DEPTH: Final = 16
MAX_DIMENSIONS: Final = 64
LOCAL_HEADER_BYTES: Final = (
    30  # of a zip member, before its name; bytes 26..29: lengths that follow
)
_TORCH_DTYPES: Final = {
    str(record.torch_dtype): record.torch_dtype
    for record in FILE_DTYPES.values()
    if record.torch_dtype is not None
}
_STORAGES: Final = {
    "torch.ByteStorage": torch.uint8,
    "torch.CharStorage": torch.int8,
    "torch.ShortStorage": torch.int16,
    "torch.IntStorage": torch.int32,
    "torch.LongStorage": torch.int64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.BoolStorage": torch.bool,
    "torch.storage.UntypedStorage": torch.uint8,
}
_REBUILD: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER: Final = "torch._utils._rebuild_parameter"
_TYPED: Final = "torch._tensor._rebuild_from_type_v2"
_WRAPPER: Final = "torch._utils._rebuild_wrapper_subclass"
_DICTIONARY: Final = "collections.OrderedDict"
_TORCHAO_TENSORS: Final = {
    "torchao.prototype.mx_formats.nvfp4_tensor.NVFP4Tensor": (
        ("is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs", "block_size", "orig_dtype"),
        ("per_tensor_scale", "act_per_tensor_scale", "qdata", "scale"),
    ),
    "torchao.prototype.mx_formats.mx_tensor.MXTensor": (
        (
            "elem_dtype",
            "block_size",
            "orig_dtype",
            "kernel_preference",
            "act_quant_kwargs",
            "is_swizzled_scales",
        ),
        ("qdata", "scale"),
    ),
}
_TORCHAO_RECORDS: Final = (
    "torchao.prototype.mx_formats.nvfp4_tensor.QuantizeTensorToNVFP4Kwargs",
    "torchao.prototype.mx_formats.mx_tensor.QuantizeTensorToMXKwargs",
)
_TORCHAO_ENUMS: Final = (
    "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
    "torchao.prototype.mx_formats.config.ScaleCalculationMode",
)
# Dtypes that are named in attributes; the element dtype of MXFP4 has no storage of its own.
_ATTRIBUTE_DTYPES: Final = (*_TORCH_DTYPES, "torch.float4_e2m1fn_x2")
ALLOWED_NAMES: Final = frozenset(
    {
        *_STORAGES,
        *_REBUILD,
        *_TORCHAO_TENSORS,
        *_TORCHAO_RECORDS,
        *_TORCHAO_ENUMS,
        *_ATTRIBUTE_DTYPES,
        _PARAMETER,
        _TYPED,
        _WRAPPER,
        _DICTIONARY,
        "torch.device",
        "torch.serialization._get_layout",
        "torch.Size",
    }
)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; sizes and strides in elements.

    Attributes:
        spec: name, dtype and shape.
        start: byte of the file at which its first element lies.
        stride: of each dimension, none negative; all of it inside the storage.
    """

    spec: TensorSpec
    start: int
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.stride == find_row_major_stride(self.spec.shape)

    @property
    def num_elements_spanned(self) -> int:
        """Elements of storage from the first to the last."""
        return find_span(self.spec.shape, self.stride)


class TorchArchiveSource:
    """A `torch.save` file; a `TensorSource` and a context manager.

    Attributes:
        path: as given.
        metadata: torchao's description of its tensors, and the file's numbers and words as JSON.
        configs: always empty.
        specs: the tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`; CheckpointError for other files, damage, or a pickle that is more than data.

        Nothing but the list of members and the pickle is read.
        """
        self.path = path
        self.configs: Mapping[str, Any] = {}
        self._fd = open_regular_file(path)
        try:
            members = _Members(path, self._fd)
            value = read_pickle(f"{path}: data.pkl", members.read_pickle(), ALLOWED_NAMES)
            if find_items(value) is None:
                members.fail(describe(value), "a dictionary of tensors, as state_dict() gives it")
            contents = _Contents(path, members)
            contents.add("", value, 0)
        except OSError as error:
            self.close()
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        except BaseException:
            self.close()
            raise
        self._tensors = dict(sorted(contents.tensors.items()))
        self.specs: Mapping[str, TensorSpec] = {name: t.spec for name, t in self._tensors.items()}
        self.metadata: Mapping[str, str] = contents.make_metadata()

    def __enter__(self) -> Self:
        """Return the source itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, contiguous and in its own memory."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: has no tensor {quoted(name)}")
        tensor = self._tensors[name]
        dtype = tensor.spec.dtype.torch_dtype
        assert dtype is not None  # only such are taken in
        num_bytes = tensor.num_elements_spanned * dtype.itemsize
        if num_bytes == 0:  # torch refuses to see such bytes as another dtype
            return torch.empty(tensor.spec.shape, dtype=dtype)
        data = read_range(self.path, self._fd, tensor.start, num_bytes)
        flat = torch.from_numpy(data).view(dtype)
        if tensor.is_contiguous:
            return flat.reshape(tensor.spec.shape)
        return flat.as_strided(tensor.spec.shape, tensor.stride).contiguous()

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Members:
    """The members of the archive, with their places checked."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd
        self._file_bytes = os.fstat(fd).st_size
        try:
            with open(fd, "rb", closefd=False) as stream, zipfile.ZipFile(stream) as archive:
                infos = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
            self.fail(f"a damaged zip ({error})", "an archive of torch.save")
        self._infos = {info.filename: info for info in infos}
        pickles = [name for name in self._infos if name.count("/") == 1 and "/data.pkl" in name]
        if len(pickles) != 1 or len(self._infos) != len(infos):
            self.fail(
                f"a zip with {len(pickles)} data.pkl and {len(infos)} members",
                "one data.pkl and no name twice; older torch files: save again with torch >= 1.6",
            )
        self._root = pickles[0].removesuffix("data.pkl")
        order = self._infos.get(self._root + "byteorder")
        if order is not None and self._read(order) != b"little":
            self.fail(f"byte order {quoted(self._read(order))}", "little")

    def read_pickle(self) -> bytes:
        return self._read(self._infos[self._root + "data.pkl"])

    def find_storage(self, key: str) -> tuple[int, int]:
        """Return (first byte, number of bytes) of a storage."""
        info = self._infos.get(f"{self._root}data/{key}")
        if info is None:
            self.fail(f"no member data/{quoted(key)}", "the storage that its pickle names")
        return self._find_place(info), info.file_size

    def _find_place(self, info: zipfile.ZipInfo) -> int:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            self.fail(f"compressed member {quoted(info.filename)}", "stored members, as torch has")
        head = os.pread(self._fd, LOCAL_HEADER_BYTES, info.header_offset)
        if len(head) != LOCAL_HEADER_BYTES or head[:4] != b"PK\x03\x04":
            self.fail(f"no header of member {quoted(info.filename)}", "one where the list says")
        name_bytes, extra_bytes = struct.unpack("<HH", head[26:30])
        start = info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + info.file_size > self._file_bytes:
            self.fail(f"member {quoted(info.filename)} beyond the end", "a whole file")
        return int(start)

    def _read(self, info: zipfile.ZipInfo) -> bytes:
        start = self._find_place(info)
        return read_range(self._path, self._fd, start, info.file_size).tobytes()

    def fail(self, came: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: got {came}, wanted {wanted}")


class _Contents:
    """Takes the value of the pickle apart into tensors and metadata."""

    def __init__(self, path: Path, members: _Members) -> None:
        self._path, self._members = path, members
        self.tensors: dict[str, StoredTensor] = {}
        self._words: dict[str, str] = {}
        self._typed: dict[str, str] = {}

    def make_metadata(self) -> dict[str, str]:
        """Return the metadata, in the form of torchao's files where it has torchao's tensors."""
        if not self._typed:
            return self._words
        names = {"tensor_names": json.dumps(sorted(self._typed))}
        return {**self._words, **self._typed, **names}

    def add(self, name: str, value: Any, depth: int) -> None:
        if depth > MAX_DEPTH or len(self.tensors) + len(self._words) > MAX_TENSORS:
            self._fail(
                name, f"more than {MAX_DEPTH} levels or {MAX_TENSORS} values", "a checkpoint"
            )
        items = find_items(value)
        if items is not None:
            for key, item in items.items():
                self.add(f"{name}.{key}" if name else str(key), item, depth + 1)
        elif value is None or isinstance(value, str | int | float):
            self._words[name] = json.dumps(value)
        elif isinstance(value, Call) and value.function == _TYPED:
            self._add_torchao(name, value)
        else:
            self._add_tensor(name, value)

    def _add_tensor(self, name: str, value: Any) -> None:
        if isinstance(value, Call) and value.function == _PARAMETER and value.arguments:
            value = value.arguments[0]
            if isinstance(value, Call) and value.function == _TYPED:
                return self._add_torchao(name, value)
        if not isinstance(value, Call) or value.function not in _REBUILD:
            self._fail(name, describe(value), "a tensor, a number or a dictionary of them")
        if name in self.tensors:
            self._fail(name, "the name twice", "one tensor of a name")
        self.tensors[name] = self._place_tensor(name, value)
        return None

    def _place_tensor(self, name: str, value: Call) -> StoredTensor:
        try:
            storage, offset, shape, stride = value.arguments[:4]
            kind, type_name, key, _, count = storage.key
            dtype = _STORAGES[type_name.text]
            if value.function == _REBUILD[1]:
                dtype = _TORCH_DTYPES[value.arguments[6].text]
        except (ValueError, IndexError, KeyError, AttributeError, TypeError):
            self._fail(name, "a tensor described by other values", "storage, offset, size, stride")
        shape, stride = _find_size(shape), _find_size(stride)
        numbers = (offset, count, *(shape or ()), *(stride or ()))
        is_sound = isinstance(storage, Outside) and kind == "storage" and isinstance(key, str)
        if shape is None or stride is None or len(shape) != len(stride) or not is_sound:
            self._fail(name, "a tensor without sizes and strides", "a tensor in a storage")
        if len(shape) > MAX_DIMENSIONS or not all(
            type(number) is int and 0 <= number < 2**63 for number in numbers
        ):
            self._fail(name, "sizes that are none", "whole numbers of at least 0")
        start, num_bytes = self._members.find_storage(key)
        span, elements = find_span(shape, stride), math.prod(shape)
        if (offset + span) * dtype.itemsize > num_bytes or elements > max(span, 1):
            self._fail(
                name,
                f"shape {list(shape)} of {dtype} with strides {list(stride)} from {offset}",
                f"one inside its storage of {num_bytes} bytes that shares no element",
            )
        return StoredTensor(make_spec(name, dtype, shape), start + offset * dtype.itemsize, stride)

    def _add_torchao(self, name: str, value: Call) -> None:
        try:
            function, kind, _, state = value.arguments[:4]
            is_known = function.text == _WRAPPER and kind.text in _TORCHAO_TENSORS
            fields = find_items(state)
        except (ValueError, AttributeError, TypeError):
            is_known, fields = False, None
        if not is_known or fields is None:
            self._fail(name, "a tensor of an unknown class", "torchao's NVFP4Tensor or MXTensor")
        layer, _, attribute = name.rpartition(".")
        attributes, parts = _TORCHAO_TENSORS[kind.text]
        present = [part for part in parts if fields.get(part) is not None]
        for part in present:
            part_name = f"{layer}._{attribute}_{part}" if layer else f"_{attribute}_{part}"
            self._add_tensor(part_name, fields[part])
            if not self.tensors[part_name].is_contiguous:
                self._fail(part_name, "a transposed tensor", "one in row-major order")
        description = {
            "_type": kind.text.rpartition(".")[2],
            "_data": {key: self._as_json(name, fields.get(key), 0) for key in attributes},
            "_tensor_data_names": present,
        }
        self._typed[name] = json.dumps(description)

    def _as_json(self, name: str, value: Any, depth: int) -> Any:
        """Return an attribute as torchao's JSON has it."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Name) and value.text in _ATTRIBUTE_DTYPES:
            return {"_type": "torch.dtype", "_data": value.text.rpartition(".")[2]}
        if isinstance(value, Call) and depth < 2:
            kind = value.function.rpartition(".")[2]
            if value.function in _TORCHAO_ENUMS and isinstance(value.arguments[0], str):
                return {"_type": kind, "_data": value.arguments[0].upper()}
            if value.function in _TORCHAO_RECORDS and isinstance(value.state, dict):
                items = value.state.items()
                data = {str(key): self._as_json(name, item, depth + 1) for key, item in items}
                return {"_type": kind, "_data": data}
        self._fail(name, f"attribute {describe(value)}", "a number, dtype or torchao's settings")

    def _fail(self, name: str, came: str, wanted: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {quoted(name)}: got {came}, wanted {wanted}")


def find_row_major_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch writes them."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def find_span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the storage elements from a tensor's first to its last; 0 if it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def find_items(value: Any) -> dict[Any, Any] | None:
    """Return the items of a dictionary in a pickle, None for other values."""
    if isinstance(value, dict):
        return value
    is_dictionary = isinstance(value, Call) and value.function == _DICTIONARY
    return value.items if is_dictionary and not value.arguments else None


def _find_size(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Call) and value.function == "torch.Size" and len(value.arguments) == 1:
        value = value.arguments[0]
    return value if isinstance(value, tuple) else None
