"""Writes src/halfbyte/formats/conformance/vectors.json, or with --check compares it.

The vectors come from halfbyte's own code; `tests/formats/test_conformance.py` holds them to
ml_dtypes and to numbers derived by hand.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from halfbyte.formats.e8m0 import E8M0_ROUNDINGS, choose_e8m0, decode_e8m0
from halfbyte.formats.elements import ELEMENTS, ElementFormat, decode_table, encode_elements
from halfbyte.formats.packing import GGML_BLOCK, NIBBLE_ORDERS, pack_nibbles
from halfbyte.formats.quantize import dequantize, quantize_with_counts
from halfbyte.formats.scale_layout import scale_offset

PATH = Path(__file__).parents[1] / "src/halfbyte/formats/conformance/vectors.json"
ABOUT = {
    "numbers": "float32 bits as 8 hexadecimal digits, most significant first; bytes as hexadecimal",
    "elements": "by name: 'decode' lists the number of every code in order; 'encode' lists "
    "[number, code] for round-to-nearest-even, saturating: ties, their neighbours, extremes, zeros",
    "e8m0": "'decode' lists the scale of every byte; 'rounding' gives the byte of a block's amax",
    "nibble_orders": "4-bit codes and their packed bytes by order",
    "scale_offsets": "where logical scale (row, column) lies, counted in scales",
    "blocks": "one row x and what it becomes: 'data' packed low nibble first (6-bit: little-endian "
    "bit stream), 'scales' bytes (float16: little-endian), global_scale, the dequantized numbers "
    "element * (block scale * global scale), and [blocks, saturated, flushed, zero]",
}
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
NIBBLES = [*range(8), *range(8), *range(8, 16), *range(8, 16)]
E8M0_CASES = [
    *(("e2m1", amax) for amax in (1.75, 3.0001, 3.5, 6.0, 6.5, 7.0, 0.0, 2.0**-126, 3.4e38)),
    ("e2m3", 7.6),
    ("e3m2", 29.0),
    ("e4m3", 959.5632),
    ("e5m2", 57345.0),
]
OFFSETS = [(0, 0), (1, 0), (32, 0), (0, 4), (33, 5), (128, 0), (99, 15)]
ONES = [1.0] * 15
# name, format, x, settings of `quantize`
BLOCKS: list[tuple[str, str, list[float], dict[str, Any]]] = [
    ("zero block beside a live one", "nvfp4", [0.5] + [0.0] * 31, {}),
    ("all-zero tensor", "nvfp4", [0.0] * 16, {}),
    ("one-level flushes 0.005", "nvfp4_one_level", [0.005] * 16, {}),
    ("two-level keeps 0.005", "nvfp4", [0.005] * 16, {}),
    ("one-level saturates", "nvfp4_one_level", [5000.0, *ONES], {}),
    ("two-level reaches 5000", "nvfp4", [5000.0, *ONES], {}),
    ("ties to even", "nvfp4_one_level", [*TIES, *(-tie for tie in TIES)], {}),
    ("minus zero keeps its sign", "nvfp4_one_level", [6.0, -0.0, -0.2, 0.2] + [0.0] * 12, {}),
    ("minus zero, modelopt", "nvfp4", [6.0, -0.0, -0.2] + [0.0] * 13, {"mode": "modelopt"}),
    ("scale floor, torchao", "nvfp4", [6.0, *ONES] + [1e-5] * 16, {"mode": "torchao"}),
    ("scale floor, modelopt", "nvfp4", [6.0, *ONES] + [1e-7] * 16, {"mode": "modelopt"}),
    ("unrounded payload", "nvfp4_one_level", [5.3, *ONES], {"mode": "nunchaku"}),
    ("optimal scale", "nvfp4", [6.0] + [5.0] * 15, {"scale_search": "optimal"}),
    ("int4 reaches -7 and 7", "int4", [i / 4 - 8 for i in range(64)], {}),
    ("int4 block 32", "int4_block32", [i / 4 - 4 for i in range(32)], {}),
    ("uint4 block 32", "uint4_block32", [i / 4 for i in range(32)], {}),
    ("mxfp4 floor", "mxfp4", [3.5, -1.75] + [0.1] * 30, {}),
    ("mxfp4 ceil", "mxfp4", [3.5, -1.75] + [0.1] * 30, {"e8m0_rounding": "ceil"}),
    ("mxfp6 e2m3", "mxfp6_e2m3", [i / 3 for i in range(32)], {}),
    ("mxfp6 e3m2", "mxfp6_e3m2", [-i / 3 for i in range(32)], {}),
    ("mxfp8 floor saturates", "mxfp8_e4m3", [959.5632, 957.0] + [1.0] * 30, {}),
    ("mxfp8 ceil", "mxfp8_e4m3", [959.5632, 957.0] + [1.0] * 30, {"e8m0_rounding": "ceil"}),
    ("mxfp8 e5m2", "mxfp8_e5m2", [float(3**i) for i in range(-8, 24)], {}),
]


def make_vectors() -> dict[str, Any]:
    """Return the whole content of the file."""
    return {
        "version": 1,
        "about": ABOUT,
        "elements": {name: make_element_vectors(ELEMENTS[name]) for name in ELEMENTS},
        "e8m0": {
            "decode": to_hex(decode_e8m0(torch.arange(256, dtype=torch.uint8))),
            "rounding": [make_rounding_vector(name, amax) for name, amax in E8M0_CASES],
        },
        "nibble_orders": [make_nibble_vector(codes) for codes in ([2, 4] * 16, NIBBLES)],
        "scale_offsets": [
            {"layout": layout, "shape": [256, 16], "row": row, "column": column}
            | {"offset": scale_offset(row, column, (256, 16), layout)}
            for layout in ("linear", "swizzled_128x4", "tiled_8x4", "transposed")
            for row, column in OFFSETS
        ],
        "blocks": [make_block_vector(*case) for case in BLOCKS],
    }


def make_element_vectors(element: ElementFormat) -> dict[str, Any]:
    """Return the decode table of one element and the numbers that are hard to encode."""
    table = decode_table(element.name)
    finite = torch.tensor(sorted(set(table[table.isfinite()].tolist())))
    ties = (finite[:-1] + finite[1:]) / 2
    inf = torch.tensor(float("inf"))
    extremes = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38, float("inf"), -float("inf")])
    numbers = torch.cat((finite, ties, ties.nextafter(inf), ties.nextafter(-inf), extremes))
    codes = encode_elements(numbers, element).tolist()
    pairs = [list(pair) for pair in zip(to_hex(numbers), codes, strict=True)]
    return {"bits": element.bits, "decode": to_hex(table), "encode": pairs}


def make_rounding_vector(element: str, amax: float) -> dict[str, Any]:
    """Return the E8M0 byte of one amax under every rounding."""
    value = torch.tensor([amax])
    chosen = {rounding: int(choose_e8m0(value, element, rounding)) for rounding in E8M0_ROUNDINGS}
    return {"element": element, "amax": to_hex(value)[0], **chosen}


def make_nibble_vector(codes: list[int]) -> dict[str, Any]:
    """Return 32 codes packed in every order."""
    assert len(codes) == GGML_BLOCK
    tensor = torch.tensor(codes, dtype=torch.uint8)
    packed = {order: bytes(pack_nibbles(tensor, order).tolist()).hex() for order in NIBBLE_ORDERS}
    return {"codes": codes, **packed}


def make_block_vector(
    name: str, block_format: str, x: list[float], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return what one row of numbers becomes under some settings."""
    row = torch.tensor([x], dtype=torch.float32)
    quantized, counts = quantize_with_counts(row, block_format, **settings)
    scale = quantized.global_scale
    return {
        "name": name,
        "format": block_format,
        "settings": settings,
        "x": to_hex(row[0]),
        "data": bytes(quantized.data[0].tolist()).hex(),
        "scales": quantized.scales[0].view(torch.uint8).numpy().tobytes().hex(),
        "global_scale": None if scale is None else to_hex(scale.reshape(1))[0],
        "dequantized": to_hex(dequantize(quantized)[0]),
        "counts": [counts.blocks, counts.saturated, counts.flushed, counts.zero],
    }


def to_hex(numbers: torch.Tensor) -> list[str]:
    """Return the bits of float32 numbers; every NaN as 7fc00000."""
    plain = torch.where(numbers.isnan(), torch.tensor(float("nan")), numbers)
    return [f"{bits & 0xFFFFFFFF:08x}" for bits in plain.contiguous().view(torch.int32).tolist()]


def to_text(vectors: dict[str, Any]) -> str:
    """Return the file's text: one line for each second-level entry, to keep changes readable."""
    lines = []
    for key, value in vectors.items():
        if isinstance(value, dict):
            inner = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
            lines.append(f" {json.dumps(key)}: {{\n" + ",\n".join(inner) + "\n }")
        elif isinstance(value, list):
            inner = [f"  {json.dumps(entry)}" for entry in value]
            lines.append(f" {json.dumps(key)}: [\n" + ",\n".join(inner) + "\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the file; with --check exit 1 where it differs from what the code gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    text = to_text(make_vectors())
    if parser.parse_args().check:
        if PATH.read_text(encoding="ascii") == text:
            return 0
        print(f"{PATH.name} differs from what the code gives; run {Path(__file__).name}")
        return 1
    partial = PATH.with_suffix(".partial")
    partial.write_text(text, encoding="ascii")
    os.replace(partial, PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
