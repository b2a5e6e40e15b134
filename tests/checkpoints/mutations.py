"""Mutations of sound checkpoints: what damaged, hostile and wrongly converted files look like.

Each takes a copy of a file and a random source, changes the file and returns the words of which an
error must name one, or None where the file has nothing of the kind. Nothing here knows how
`checkpoints` reads: parts are told apart by their names, dtypes and shapes alone.
"""

import json
import math
import random
import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from halfbyte.formats.safetensors_header import FILE_DTYPES
from tests.checkpoints.mutation_files import RawFile, RawTensor

Needles = tuple[str, ...]
Mutation = Callable[[RawFile, random.Random], Needles | None]
MUTATIONS: dict[str, Mutation] = {}
CODES = r"^(weight|qweight|weight_packed|wgt|weight_fp4|qdata|weight_codes)$"
BLOCK = r"^(weight_scale|wscales|weight_sf|scale|weight_block_scale)$"
GLOBAL = r"^(weight_scale_2|weight_global_scale|wtscale|per_tensor_scale|alpha)$"
INPUT = (
    r"^(input_scale|input_global_scale|act_per_tensor_scale|activation_global_scale|global_scale)$"
)
SMOOTH = r"^(smooth|smooth_factor|pre_quant_scale)$"
FACTOR = r"^(lora_down|lora_up|proj_down|proj_up|svdquant_lora_[ab]|l2t_smoothed|l1_scaled)$"
VECTOR = r"^(bias|wcscales|channel_scale)$"
SWIZZLED = r"^(weight_sf|weight_scale|scale)$"
PATTERNS = {"block": BLOCK, "global": GLOBAL, "input": INPUT, "smooth": SMOOTH}
PATTERNS |= {"factor": FACTOR, "vector": VECTOR}


def mutation(name: str) -> Callable[[Mutation], Mutation]:
    def add(function: Mutation) -> Mutation:
        MUTATIONS[name] = function
        return function

    return add


def pick(file: RawFile, draw: random.Random, pattern: str = ".") -> tuple[str, str, str] | None:
    """Return (layer, part, tensor) of a part whose name matches."""
    found = [
        (layer, part, name)
        for layer, parts in file.layers.items()
        for part, name in sorted(parts.items())
        if re.search(pattern, part) and name in file.tensors
    ]
    return draw.choice(found) if found else None


def needles_of(layer: str, part: str, name: str) -> Needles:
    return (name, f"{layer}.{part}", layer)


# ---- headers ----


def edit_header(change: Callable[[str, random.Random], str]) -> Mutation:
    def mutate(file: RawFile, draw: random.Random) -> Needles | None:
        if not file.tensors:
            return None
        file.header = change(json.dumps(file.list_entries()), draw)
        return ("model.safetensors", *file.layers)

    return mutate


def edit_entry(change: Callable[[dict[str, Any], random.Random], None]) -> Mutation:
    def mutate(file: RawFile, draw: random.Random) -> Needles | None:
        if not file.tensors:
            return None
        entries = file.list_entries()
        name = draw.choice([name for name in entries if name != "__metadata__"])
        change(entries[name], draw)
        file.header = json.dumps(entries)
        return (name, "model.safetensors")

    return mutate


def _set_offset(entry: dict[str, Any], draw: random.Random) -> None:
    place = draw.randrange(2)
    old = entry["data_offsets"][place]
    choices = [-1, old + 1, old - 1, 2**40, 2**63, 2**64, old + 0.5, None, "0", True, [old], 1e400]
    entry["data_offsets"][place] = draw.choice(choices)


def _set_size(entry: dict[str, Any], draw: random.Random) -> None:
    place = draw.randrange(max(1, len(entry["shape"])))
    sizes = [-1, 0, 3, 2**31, 2**62, 2**64, 1.5, None, "8", True, [8], 1e400]
    entry["shape"][place : place + 1] = [draw.choice(sizes)]


MUTATIONS |= {
    "header: not JSON": edit_header(lambda text, draw: text[: draw.randrange(len(text))]),
    "header: one byte": edit_header(
        lambda text, draw: _flip_text(text, draw, r'[\[\]{},:"]')  # structure, not names
    ),
    "header: another document": edit_header(
        lambda _, draw: draw.choice(
            ["[]", "null", "1", '""', "{}", "[" * 100_000, '{"a":' * 60_000, "NaN", '{"a": 1}']
        )
    ),
    "header: duplicate key": edit_header(
        lambda text, draw: (
            text[:-1] + "," + text[text.index('"', 20) :]
            if draw.random() < 0.3
            else _repeat_entry(text, draw)
        )
    ),
    "header: offsets": edit_entry(_set_offset),
    "header: offsets swapped": edit_entry(lambda e, _: e["data_offsets"].reverse()),
    "header: size": edit_entry(_set_size),
    "header: no such dtype": edit_entry(
        lambda e, draw: e.update(
            dtype=draw.choice(["F4", "f32", "", None, 7, "NVFP4", "../x", "F8_E9", ["F32"]])
        )
    ),
    "header: dtype of another width": edit_entry(
        lambda e, draw: e.update(
            dtype=draw.choice(
                [w for w, d in FILE_DTYPES.items() if d.bits != FILE_DTYPES[e["dtype"]].bits]
            )
        )
    ),
    "header: field gone": edit_entry(lambda e, draw: e.pop(draw.choice(sorted(e)))),
    "header: field too many": edit_entry(lambda e, _: e.update(layout="swizzled")),
}


def _flip_text(text: str, draw: random.Random, pattern: str) -> str:
    place = draw.choice([match.start() for match in re.finditer(pattern, text)])
    return text[:place] + draw.choice('x0",}{[]:') + text[place + 1 :]


def _repeat_entry(text: str, draw: random.Random) -> str:
    entries = json.loads(text)
    name = draw.choice([name for name in entries if name != "__metadata__"])
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}" + "}"


@mutation("header: length")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if not file.tensors:
        return None
    true = struct.unpack("<Q", file.encode()[:8])[0]
    choices = [0, 1, true - 8, true + 8, 2**31, 2**40, 2**63, 2**64 - 1]
    file.length = draw.choice(choices)
    return ("model.safetensors",)


@mutation("file: cut or longer")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if file.tensors:
        size = len(file.encode())
        file.tail = draw.choice([1, 7, 4096, -1, -8, -size // 2, -size + draw.randrange(16)])
        return ("model.safetensors",)
    name = draw.choice([name for name in sorted(file.files) if not name.endswith(".json")])
    data = file.files[name]
    file.files[name] = data[: draw.randrange(len(data))]
    return (name,) if not name.endswith(".pt") else (name, ".pt", "directory")


@mutation("metadata: not strings")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if not file.tensors:
        return None
    file.metadata["more"] = draw.choice([1, None, ["x"], {"a": "b"}, True])
    return ("model.safetensors",)


# ---- tensors: which there are, what their headers say ----


@mutation("tensor: missing")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None:
        return None
    del file.tensors[found[2]]
    return needles_of(*found)


@mutation("tensor: renamed")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None:
        return None
    name = found[2]
    other = draw.choice([name + "s", name + "_orig", name[:-1], name.upper(), name + ".0"])
    file.tensors[other] = file.tensors.pop(name)
    return (other, *needles_of(*found))


@mutation("tensor: another one of a layer")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if not file.tensors:
        return None
    layer = draw.choice(sorted(file.layers))
    name = f"{layer}." + draw.choice(["weight_zero_point", "g_idx", "qzeros", "scales", "extra.x"])
    file.tensors[name] = RawTensor("F32", [4], bytes(16))
    return (name, layer)


@mutation("tensor: unrelated one")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if not file.tensors:
        return None
    file.tensors["zz.norm.weight"] = RawTensor("F32", [4], struct.pack("<4f", 1, 2, 3, 4))
    return ("zz.norm",)


@mutation("tensor: other shape, same bytes")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    shape = tensor.shape
    shapes = [shape[::-1], [math.prod(shape)], [*shape, 1], [1, *shape], [2, *shape]]
    if len(shape) == 2 and shape[0] % 2 == 0:
        shapes.append([shape[0] // 2, shape[1] * 2])
    tensor.shape = draw.choice([s for s in shapes if s != shape])
    return needles_of(*found) if math.prod(tensor.shape) == math.prod(shape) else ("model.safe",)


@mutation("tensor: rows or columns lost")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None or not file.tensors[found[2]].shape:
        return None
    tensor = file.tensors[found[2]]
    place = draw.randrange(len(tensor.shape))
    array = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape, -1)
    size = tensor.shape[place]
    kept = np.take(array, range(draw.choice([0, size // 2, size - 1])), axis=place)
    tensor.shape = list(kept.shape[:-1])
    tensor.data = kept.tobytes()
    return needles_of(*found)


@mutation("tensor: scalar of another shape")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, f"{GLOBAL}|{INPUT}")
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    shape = draw.choice([[], [1], [1, 1], [2], [0], [3, 1]])
    tensor.data = tensor.data * math.prod(shape)
    tensor.shape = shape
    return needles_of(*found)


@mutation("tensor: dtype of the same width")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    bits = FILE_DTYPES[tensor.dtype].bits
    words = [w for w, d in FILE_DTYPES.items() if d.bits == bits and w != tensor.dtype]
    # float16 bytes called bfloat16 are sound numbers: the header is all there is (see UNDETECTABLE)
    halves = {"F16", "BF16"}
    words = [word for word in words if not {word, tensor.dtype} <= halves]
    tensor.dtype = draw.choice(words)
    return needles_of(*found)


@mutation("tensor: float16 for bfloat16")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None or file.tensors[found[2]].dtype not in ("F16", "BF16"):
        return None
    tensor = file.tensors[found[2]]
    tensor.dtype = "F16" if tensor.dtype == "BF16" else "BF16"
    return needles_of(*found)


@mutation("tensor: widened to float32")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw)
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    if tensor.dtype not in ("F16", "BF16"):
        return None
    values = read_values(tensor).float()
    tensor.dtype, tensor.data = "F32", values.numpy().tobytes()
    return needles_of(*found)


# ---- values ----


def read_values(tensor: RawTensor) -> torch.Tensor:
    dtype = FILE_DTYPES[tensor.dtype].torch_dtype
    assert dtype is not None
    flat = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8)
    return flat.view(dtype).reshape(tensor.shape)


def write_values(tensor: RawTensor, values: torch.Tensor) -> None:
    dtype = FILE_DTYPES[tensor.dtype].torch_dtype
    assert dtype is not None
    flat = values.contiguous().to(dtype).reshape(-1)
    tensor.data = flat.view(torch.uint8).numpy().tobytes()


def _set_one(tensor: RawTensor, value: float, draw: random.Random) -> None:
    values = read_values(tensor).double().reshape(-1)
    values[draw.randrange(values.numel())] = value
    write_values(tensor, values)


def set_value(pattern: str, make: Callable[[float], float]) -> Mutation:
    def mutate(file: RawFile, draw: random.Random) -> Needles | None:
        found = pick(file, draw, pattern)
        if found is None:
            return None
        tensor = file.tensors[found[2]]
        if not tensor.dtype.startswith(("F16", "F32", "BF16")) or not tensor.data:
            return None
        old = read_values(tensor).double().reshape(-1)
        place = draw.randrange(old.numel())
        old[place] = make(float(old[place]))
        write_values(tensor, old)
        return needles_of(*found)

    return mutate


for _role, _pattern in PATTERNS.items():
    MUTATIONS[f"{_role}: NaN"] = set_value(_pattern, lambda _: math.nan)
    MUTATIONS[f"{_role}: infinite"] = set_value(_pattern, lambda _: -math.inf)
for _role in ("block", "global", "input", "smooth"):
    MUTATIONS[f"{_role}: negative"] = set_value(PATTERNS[_role], lambda value: -value - 1e-3)
for _role in ("global", "input", "smooth"):
    MUTATIONS[f"{_role}: zero"] = set_value(PATTERNS[_role], lambda _: 0.0)
for _role in ("global", "input"):
    MUTATIONS[f"{_role}: reciprocal"] = set_value(PATTERNS[_role], lambda value: 1 / value)
    MUTATIONS[f"{_role}: out of range"] = set_value(PATTERNS[_role], lambda _: 1e30)
    MUTATIONS[f"{_role}: next to zero"] = set_value(PATTERNS[_role], lambda _: 1e-30)


@mutation("block: one byte is NaN")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, BLOCK)
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    if FILE_DTYPES[tensor.dtype].bits != 8:
        return None
    is_mx = tensor.dtype == "F8_E8M0" or (tensor.dtype == "U8" and "MXFP4" in file.name)
    code = 0xFF if is_mx else draw.choice([0x7F, 0xFF])
    data = bytearray(tensor.data)
    data[draw.randrange(len(data))] = code
    tensor.data = bytes(data)
    return needles_of(*found)


@mutation("block: one byte is negative")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, BLOCK)
    if found is None or file.tensors[found[2]].dtype != "F8_E4M3":
        return None
    tensor = file.tensors[found[2]]
    data = bytearray(tensor.data)
    data[draw.randrange(len(data))] |= 0x81
    tensor.data = bytes(data)
    return needles_of(*found)


@mutation("codes: nibbles swapped")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, CODES)
    if found is None:
        return None
    codes = np.frombuffer(file.tensors[found[2]].data, np.uint8)
    file.tensors[found[2]].data = (codes << 4 | codes >> 4).astype(np.uint8).tobytes()
    return needles_of(*found)


@mutation("block: transposed with its shape")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, BLOCK)
    if found is None or len(file.tensors[found[2]].shape) != 2:
        return None
    tensor = file.tensors[found[2]]
    if tensor.shape[0] == tensor.shape[1]:
        return None
    array = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape, -1).transpose(1, 0, 2)
    tensor.shape, tensor.data = tensor.shape[::-1], array.tobytes()
    return needles_of(*found)


@mutation("block: transposed under the old shape")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, BLOCK)
    if found is None or len(file.tensors[found[2]].shape) != 2:
        return None
    tensor = file.tensors[found[2]]
    array = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape, -1).transpose(1, 0, 2)
    tensor.data = array.tobytes()
    return needles_of(*found)


def _tile(data: bytes, rows: int, columns: int) -> bytes:
    """Place padded scales where cuBLAS wants them."""
    tiles = np.frombuffer(data, np.uint8).reshape(rows // 128, 4, 32, columns // 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).tobytes()


@mutation("block: swizzled once more")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    found = pick(file, draw, SWIZZLED)
    if found is None:
        return None
    tensor = file.tensors[found[2]]
    if FILE_DTYPES[tensor.dtype].bits != 8 or len(tensor.data) % 512:
        return None
    tensor.data = _tile(tensor.data, 128, len(tensor.data) // 128)
    return needles_of(*found)
