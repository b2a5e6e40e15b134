"""The shipped vectors: equal to what the code gives, to ml_dtypes, and to numbers by hand."""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.formats.conformance import read_vectors
from halfbyte.formats.e8m0 import E8M0_ROUNDINGS, choose_e8m0
from halfbyte.formats.elements import encode_elements
from halfbyte.formats.packing import NIBBLE_ORDERS, pack_nibbles
from halfbyte.formats.quantize import dequantize, quantize_with_counts
from halfbyte.formats.scale_layout import scale_offset

VECTORS = read_vectors()
GENERATOR = Path(__file__).parents[2] / "tools" / "make_conformance_vectors.py"
FLOATS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
INTEGERS = {"int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}


def from_hex(bits: list[str]) -> np.ndarray:
    return np.array([int(word, 16) for word in bits], np.uint32).view(np.float32)


def find_block(name: str) -> dict[str, Any]:
    return next(block for block in VECTORS["blocks"] if block["name"] == name)


def test_the_file_is_what_the_generator_writes() -> None:
    command = [sys.executable, str(GENERATOR), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_decode_tables_equal_ml_dtypes(name: str) -> None:
    entry = VECTORS["elements"][name]
    codes = np.arange(1 << entry["bits"], dtype=np.uint8)
    dtype = FLOATS.get(name) or INTEGERS[name]
    wanted = codes.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(from_hex(entry["decode"]), wanted)


@pytest.mark.parametrize("name", FLOATS)
def test_encode_vectors_equal_ml_dtypes(name: str) -> None:
    pairs = VECTORS["elements"][name]["encode"]
    values = from_hex([bits for bits, _ in pairs])
    largest = np.float32(ml_dtypes.finfo(FLOATS[name]).max)
    wanted = np.clip(values, -largest, largest).astype(FLOATS[name]).view(np.uint8)
    assert [code for _, code in pairs] == wanted.tolist()
    assert len(pairs) > 3 * 2 ** (VECTORS["elements"][name]["bits"] - 1)


@pytest.mark.parametrize("name", [*FLOATS, *INTEGERS])
def test_encode_vectors_equal_the_codec(name: str) -> None:
    pairs = VECTORS["elements"][name]["encode"]
    values = torch.from_numpy(from_hex([bits for bits, _ in pairs]))
    assert encode_elements(values, name).tolist() == [code for _, code in pairs]


def test_e8m0_table_equals_ml_dtypes() -> None:
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(from_hex(VECTORS["e8m0"]["decode"]), wanted)


def test_e8m0_roundings_equal_the_code_and_the_numbers_by_hand() -> None:
    for entry in VECTORS["e8m0"]["rounding"]:
        amax = torch.from_numpy(from_hex([entry["amax"]]).copy())
        for rounding in E8M0_ROUNDINGS:
            assert int(choose_e8m0(amax, entry["element"], rounding)) == entry[rounding]
    by_hand = {1.75: (125, 126, 126), 3.5: (126, 127, 127), 6.5: (127, 128, 127)}
    by_hand |= {7.0: (127, 128, 128)}
    for amax, wanted in by_hand.items():
        bits = struct.pack(">f", amax).hex()
        entry = next(e for e in VECTORS["e8m0"]["rounding"] if e["amax"] == bits)
        assert (entry["floor"], entry["ceil"], entry["even"]) == wanted


def test_nibble_orders_equal_the_code_and_the_bytes_by_hand() -> None:
    for entry in VECTORS["nibble_orders"]:
        codes = torch.tensor(entry["codes"], dtype=torch.uint8)
        for order in NIBBLE_ORDERS:
            assert bytes(pack_nibbles(codes, order).tolist()).hex() == entry[order]
    ones_and_twos, all_codes = VECTORS["nibble_orders"]
    assert ones_and_twos["low_first"] == "42" * 16
    assert ones_and_twos["high_first"] == "24" * 16
    assert all_codes["low_first"] == "103254761032547698badcfe98badcfe"
    assert all_codes["ggml_split"] == "8091a2b3c4d5e6f78091a2b3c4d5e6f7"


def test_scale_offsets_equal_the_code_and_the_numbers_by_hand() -> None:
    swizzled = {}
    for entry in VECTORS["scale_offsets"]:
        place = entry["row"], entry["column"]
        assert scale_offset(*place, tuple(entry["shape"]), entry["layout"]) == entry["offset"]
        if entry["layout"] == "swizzled_128x4":
            swizzled[place] = entry["offset"]
    by_hand = {(0, 0): 0, (1, 0): 16, (32, 0): 4, (0, 4): 512, (33, 5): 533, (128, 0): 2048}
    assert by_hand.items() <= swizzled.items()


@pytest.mark.parametrize("block", VECTORS["blocks"], ids=lambda block: block["name"])
def test_blocks_equal_the_code(implementation: str, block: dict[str, Any]) -> None:
    x = torch.from_numpy(from_hex(block["x"])).reshape(1, -1)
    t, counts = quantize_with_counts(x, block["format"], **block["settings"])
    assert bytes(t.data[0].tolist()).hex() == block["data"]
    assert t.scales[0].view(torch.uint8).numpy().tobytes().hex() == block["scales"]
    wanted = block["dequantized"]
    assert [f"{int(v):08x}" for v in dequantize(t)[0].numpy().view(np.uint32)] == wanted
    counted = [counts.blocks, counts.saturated, counts.flushed, counts.zero]
    assert counted == block["counts"]
    if block["global_scale"] is not None:
        assert float(t.global_scale) == float(from_hex([block["global_scale"]])[0])


@pytest.mark.parametrize(
    ("name", "data", "scales"),
    [
        ("zero block beside a live one", "07" + "00" * 15, "7e00"),
        ("all-zero tensor", "00" * 8, "00"),
        ("one-level flushes 0.005", "00" * 8, "00"),
        ("two-level keeps 0.005", "77" * 8, "7e"),
        ("one-level saturates", "07" + "00" * 7, "7e"),
        ("two-level reaches 5000", "07" + "00" * 7, "7e"),
        ("ties to even", "20426476a8caecfe", "38"),
        ("minus zero keeps its sign", "8708" + "00" * 6, "38"),
        ("mxfp8 floor saturates", "7e7e" + "30" * 30, "80"),
        ("mxfp8 ceil", "7777" + "28" * 30, "81"),
    ],
)
def test_blocks_equal_the_bytes_by_hand(name: str, data: str, scales: str) -> None:
    block = find_block(name)
    assert block["data"] == data
    assert block["scales"] == scales
