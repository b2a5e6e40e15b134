"""GGUF bytes written number by number from the format's description, for tests."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M1 = E2M1 + [-value for value in E2M1]
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "MXFP4": 39, "NVFP4": 40}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: its type, its sizes with the fastest last, its bytes."""

    kind: str
    shape: Sequence[int]
    data: bytes


@dataclass(frozen=True)
class GgufBytes:
    """A file; `changes` replaces fields of the header by name."""

    tensors: Mapping[str, GgufTensor]
    key_values: Sequence[bytes] = field(default_factory=list)
    changes: Mapping[str, int] = field(default_factory=dict)

    def encode(self, alignment: int = 32) -> bytes:
        change = self.changes.get
        head = b"GGUF" + struct.pack(
            "<IQQ",
            change("version", 3),
            change("tensors", len(self.tensors)),
            change("pairs", len(self.key_values)),
        )
        head += b"".join(self.key_values)
        data = b""
        for name, tensor in self.tensors.items():
            head += text(name) + struct.pack("<I", change("dimensions", len(tensor.shape)))
            head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
            number = change("type", NUMBERS[tensor.kind])
            head += struct.pack("<IQ", number, len(data) + change("offset", 0))
            data += tensor.data + b"\0" * (-len(tensor.data) % alignment)
        return head + b"\0" * (-len(head) % alignment) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string_pair(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def array_pair(key: str, values: Sequence[str]) -> bytes:
    head = text(key) + struct.pack("<IIQ", 9, 8, len(values))
    return head + b"".join(text(value) for value in values)


def number_pair(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def plain(value: torch.Tensor) -> GgufTensor:
    kind = {torch.float32: "F32", torch.float16: "F16"}[value.dtype]
    return GgufTensor(kind, list(value.shape), value.numpy().tobytes())


def random_blocks(kind: str, n: int, k: int, seed: int = 0) -> tuple[GgufTensor, np.ndarray]:
    """Return a matrix of random blocks and its numbers in float64, without a global scale."""
    draw = np.random.default_rng(seed)
    make = {"NVFP4": _nvfp4, "MXFP4": _mxfp4, "Q4_0": _q4_0, "Q4_1": _q4_1}[kind]
    size = 64 if kind == "NVFP4" else 32
    data, numbers = b"", np.zeros((n, k))
    for row in range(n):
        for start in range(0, k, size):
            block, numbers[row, start : start + size] = make(draw)
            data += block
    return GgufTensor(kind, [n, k], data), numbers


def _halves(codes: np.ndarray) -> bytes:
    half = len(codes) // 2
    return bytes(int(codes[i]) | int(codes[i + half]) << 4 for i in range(half))


def _nvfp4(draw: np.random.Generator) -> tuple[bytes, np.ndarray]:
    scales = draw.integers(0x28, 0x48, 4).astype(np.uint8)
    values = torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()
    codes = draw.integers(0, 16, 64)
    data = scales.tobytes() + b"".join(_halves(codes[i : i + 16]) for i in range(0, 64, 16))
    return data, np.array(E2M1)[codes] * values.repeat(16)


def _mxfp4(draw: np.random.Generator) -> tuple[bytes, np.ndarray]:
    exponent, codes = int(draw.integers(118, 130)), draw.integers(0, 16, 32)
    return bytes([exponent]) + _halves(codes), np.array(E2M1)[codes] * 2.0 ** (exponent - 127)


def _q4_0(draw: np.random.Generator) -> tuple[bytes, np.ndarray]:
    d, codes = np.float16(draw.standard_normal()), draw.integers(0, 16, 32)
    return d.tobytes() + _halves(codes), (codes - 8.0) * np.float64(d)


def _q4_1(draw: np.random.Generator) -> tuple[bytes, np.ndarray]:
    d, m = np.float16(draw.random()), np.float16(draw.standard_normal())
    codes = draw.integers(0, 16, 32)
    numbers = codes * np.float64(d) + np.float64(m)
    return d.tobytes() + m.tobytes() + _halves(codes), numbers
