"""Mutations of configurations, GGUF files, torch archives and dumps; they join `MUTATIONS`."""

import io
import json
import math
import pickle
import random
import re
import struct
import zipfile
from typing import Any

import torch

from tests.checkpoints.mutation_files import RawFile, RawTensor, save_bytes
from tests.checkpoints.mutations import MUTATIONS, Mutation, Needles, mutation

# ---- configurations ----

AMBIGUOUS = "could be read as"  # what an error says of a file whose configuration is gone


def list_documents(file: RawFile) -> list[tuple[str, str, Any]]:
    """Return (kind, name, value) of every JSON document of a file, configurations and metadata."""
    found = []
    for name, data in sorted(file.files.items()):
        if name.endswith(".json"):
            found.append(("files", name, json.loads(data)))
    for key, text in sorted(file.metadata.items()):
        if isinstance(text, str) and text[:1] in "{[":
            found.append(("metadata", key, json.loads(text)))
    for name, tensor in sorted(file.tensors.items()):
        if name.endswith("comfy_quant"):
            found.append(("tensors", name, json.loads(tensor.data)))
    return found


def store_document(file: RawFile, kind: str, name: str, text: str) -> None:
    if kind == "files":
        file.files[name] = text.encode()
    elif kind == "metadata":
        file.metadata[name] = text
    else:
        data = text.encode()
        file.tensors[name] = RawTensor("U8", [len(data)], data)


def list_leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [p for key in value for p in list_leaves(value[key], (*path, key))]
    if isinstance(value, list):
        return [p for place, v in enumerate(value) for p in list_leaves(v, (*path, place))]
    return [path]


def _other_value(value: Any, draw: random.Random) -> Any:
    if isinstance(value, bool):
        return draw.choice([not value, None, "yes", 7])
    if isinstance(value, int):
        return draw.choice([value * 2, value + 1, 0, -1, 2**70, str(value), None, 1.5])
    if isinstance(value, str):
        words = ["int4", "nvfp4", "fp4_e2m1_all", "mxfp4", "FP8", "", "high_first", value + "x"]
        return draw.choice([*words, None, 4, ["nvfp4"], {"a": value}])
    return draw.choice([1, "nvfp4", {"a": 1}, [value]])


@mutation("config: one value")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    documents = list_documents(file)
    if not documents:
        return None
    kind, name, value = draw.choice(documents)
    leaves = list_leaves(value)
    leaf = draw.choice(leaves)
    target = value
    for key in leaf[:-1]:
        target = target[key]
    old = target[leaf[-1]]
    target[leaf[-1]] = _other_value(old, draw)
    if target[leaf[-1]] == old:
        return None
    store_document(file, kind, name, json.dumps(value))
    file.name += f" <{name}: {'.'.join(map(str, leaf))} {old!r} -> {target[leaf[-1]]!r}>"
    return (name, *(str(key) for key in leaf if isinstance(key, str)), *file.layers, AMBIGUOUS)


@mutation("config: one key gone")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    documents = list_documents(file)
    if not documents:
        return None
    kind, name, value = draw.choice(documents)
    leaf = draw.choice(list_leaves(value))
    target = value
    for key in leaf[:-1]:
        target = target[key]
    del target[leaf[-1]]
    store_document(file, kind, name, json.dumps(value))
    file.name += f" <{name}: {'.'.join(map(str, leaf))} gone>"
    return (name, *(str(key) for key in leaf if isinstance(key, str)), *file.layers, AMBIGUOUS)


@mutation("config: another document")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    documents = list_documents(file)
    if not documents:
        return None
    kind, name, value = draw.choice(documents)
    text = json.dumps(value)
    text = draw.choice(
        [text[: len(text) // 2], "[]", "null", "{}", '"x"', "\x00", "[" * 50_000, "", "1e999"]
    )
    if kind == "tensors" and not text:
        return None
    store_document(file, kind, name, text)
    file.name += f" <{name} = {text[:20]!r}>"
    return (name, *file.layers, AMBIGUOUS)


# ---- other containers ----


def flip_bytes(name: str, start: int, end: int) -> Mutation:
    def mutate(file: RawFile, draw: random.Random) -> Needles | None:
        if name not in file.files:
            return None
        data = bytearray(file.files[name])
        place = draw.randrange(start, min(end, len(data)))
        data[place] ^= 1 << draw.randrange(8)
        file.files[name] = bytes(data)
        return (name,)

    return mutate


MUTATIONS["gguf: magic, version, counts"] = flip_bytes("x.gguf", 0, 24)


@mutation("gguf: length, type or offset")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if "x.gguf" not in file.files:
        return None
    data = bytearray(file.files["x.gguf"])
    names = list(re.finditer(rb"(blk\.0|output_norm)\.[a-z_.]+", bytes(data)))
    match = draw.choice(names)
    place = draw.choice([match.start() - 8 + draw.randrange(8), match.end() + draw.randrange(24)])
    data[place] ^= 1 << draw.randrange(8)
    file.files["x.gguf"] = bytes(data)
    return ("x.gguf",)


@mutation("gguf: block scale is no number")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if "x.gguf" not in file.files:
        return None
    kind = file.name.split()[-1]
    size, bad = {
        "NVFP4": (36, b"\x7f"),
        "MXFP4": (17, b"\xff"),
        "Q4_0": (18, b"\x00\x7c"),
        "Q4_1": (20, b"\xff\x7e"),
    }[kind]
    data = bytearray(file.files["x.gguf"])
    count = 12 * 128 // (64 if kind == "NVFP4" else 32)
    # the order of tensors is that of the header: 5 floats of the norm, padded, then the weight
    at = next(m.end() for m in re.finditer(rb"blk\.0\.ffn_up\.weight", bytes(data)))
    dims = struct.unpack("<I", data[at : at + 4])[0]
    offset = struct.unpack("<Q", data[at + 8 + 8 * dims : at + 16 + 8 * dims])[0]
    starts = [m.end() for m in re.finditer(rb"(blk\.0|output_norm)\.[a-z_.]+", bytes(data))]
    last = max(starts)
    dims = struct.unpack("<I", data[last : last + 4])[0]
    end = last + 16 + 8 * dims
    start = end + -end % 32 + offset + size * draw.randrange(count)
    data[start : start + len(bad)] = bad
    file.files["x.gguf"] = bytes(data)
    return ("blk.0.ffn_up",)


class Payload:
    """Its pickle makes a directory when it is executed."""

    path = ""

    def __reduce__(self) -> Any:
        import os

        return os.mkdir, (self.path,)


@mutation("pickle: a payload")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    pickles = [name for name in sorted(file.files) if name.endswith(".pt")]
    if not pickles:
        return None
    name = draw.choice(pickles)
    value = {"a.weight": torch.ones(2), "x": Payload()}
    file.files[name] = draw.choice(
        [save_bytes(value), pickle.dumps({"x": Payload()}), pickle.dumps(Payload(), 0)]
    )
    return (name, ".pt", *file.layers)


@mutation("pickle: a byte of it")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    pickles = [name for name in sorted(file.files) if name.endswith(".pt")]
    if not pickles:
        return None
    name = draw.choice(pickles)
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(file.files[name])) as archive,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as changed,
    ):
        for info in archive.infolist():
            data = bytearray(archive.read(info))
            if info.filename.endswith("data.pkl"):
                opcodes = [i for i, byte in enumerate(data) if not 0x2E <= byte <= 0x7A]
                data[draw.choice(opcodes)] = draw.randrange(256)
            changed.writestr(info.filename, bytes(data))
    file.files[name] = out.getvalue()
    return (name, ".pt", *file.layers)


@mutation("archive: a byte of its directory")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    pickles = [name for name in sorted(file.files) if name.endswith(".pt")]
    if not pickles:
        return None
    name = draw.choice(pickles)
    data = bytearray(file.files[name])
    place = data.rindex(b"PK\x01\x02")
    data[draw.randrange(place, len(data))] ^= 1 << draw.randrange(8)
    file.files[name] = bytes(data)
    return (name, ".pt", *file.layers)


@mutation("dump: a tensor changed")
def _(file: RawFile, draw: random.Random) -> Needles | None:
    if file.family != "deepcompressor":
        return None
    name = draw.choice(["model.pt", "scale.pt", "smooth.pt", "branch.pt"])
    value = torch.load(io.BytesIO(file.files[name]), weights_only=True)
    key = draw.choice([key for key in sorted(value) if key != "proj_out.weight"])
    target = value
    if isinstance(value[key], dict):
        target, key = value[key], draw.choice(sorted(value[key]))
    tensor = target[key]
    kind = draw.choice(["gone", "NaN", "infinite", "shorter", "dtype", "zero"])
    if kind == "gone":
        del target[key]
    elif kind in ("NaN", "infinite", "zero"):
        tensor = tensor.clone()
        tensor.view(-1)[0] = {"NaN": math.nan, "infinite": math.inf, "zero": 0.0}[kind]
        target[key] = tensor
    elif kind == "shorter":
        target[key] = tensor[:-1].contiguous()
    else:
        target[key] = tensor.to(torch.int32)
    file.files[name] = save_bytes(value)
    file.name += f" <{name} {key} {kind}>"
    return (name, key, "transformer_blocks.0")
