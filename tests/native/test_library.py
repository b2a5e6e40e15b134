"""Loading: the switch, the cap on instruction sets, and refusal of a library that does not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfbyte.errors import FormatError, HalfbyteError
from halfbyte.native import NativeLibrary, describe, library, records
from halfbyte.native import library as package_library
from halfbyte.native.packed_linear import (
    Epilogue,
    PackedOperand,
    dequantize_packed,
    multiply_packed,
)
from halfbyte.native.quantize_blocks import (
    QuantizeSettings,
    choose_threads,
    measure_amax,
    quantize_blocks,
)

loader = sys.modules["halfbyte.native.library"]
SCRIPT = """
import torch
from halfbyte.formats.quantize import quantize
from halfbyte.native import describe, library
print(library() is None, describe()["state"], quantize(torch.ones(1, 16), "nvfp4").data.tolist())
"""


def test_environment_switch_disables_the_library_in_a_fresh_process() -> None:
    environment = os.environ | {"HALFBYTE_NATIVE": "0"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"True disabled by HALFBYTE_NATIVE=0 {[[0x77] * 8]}\n"


def test_an_unknown_instruction_set_is_named(
    loaded: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_NATIVE_ISA", "sse9")
    with pytest.raises(HalfbyteError, match="'sse9', wanted one of: generic, avx2, avx512"):
        package_library()


def test_a_library_of_another_abi_version_is_refused_and_torch_used(
    loaded: NativeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "ABI_VERSION", records.ABI_VERSION + 1)
    loader._load.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"ABI version 1, this package needs 2; rebuild"):
            assert library() is None
        assert describe()["state"].startswith("present but refused")
    finally:
        loader._load.cache_clear()


@pytest.mark.filterwarnings("ignore:.*is refused:RuntimeWarning")
def test_a_file_that_is_no_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "_halfbyte.so"
    broken.write_bytes(b"not a library")
    monkeypatch.delenv("HALFBYTE_NATIVE", raising=False)
    monkeypatch.setattr(loader, "LIBRARY_PATH", broken)
    assert library() is None


def test_a_missing_library_is_reported_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HALFBYTE_NATIVE", raising=False)
    monkeypatch.setattr(loader, "LIBRARY_PATH", tmp_path / "absent.so")
    assert library() is None
    assert "install a C++ compiler" in describe()["state"]


def test_amax_ignores_what_is_not_finite_and_says_so(loaded: NativeLibrary) -> None:
    x = torch.full((3, 40), -2.5)
    assert measure_amax(loaded, x) == (2.5, True)
    x[1, 39] = float("nan")
    assert measure_amax(loaded, x) == (2.5, False)
    assert measure_amax(loaded, torch.empty(0, 40)) == (0.0, True)
    smooth = torch.full((40,), 0.5)
    assert measure_amax(loaded, torch.ones(2, 40), smooth=smooth, shift=1.0) == (4.0, True)


def test_a_block_that_is_not_finite_gets_a_nan_scale_and_zero_codes(loaded: NativeLibrary) -> None:
    x = torch.ones(2, 64)
    x[1, 20] = float("inf")
    blocks = quantize_blocks(loaded, x, QuantizeSettings("e2m1", 16, "e4m3"))
    assert blocks.scales.view(torch.uint8)[1].tolist() == [0x23, 0x7F, 0x23, 0x23]
    assert blocks.codes[1, 8:16].tolist() == [0] * 8
    assert blocks.nonfinite == 1


def test_arguments_that_the_loops_cannot_read_are_refused(loaded: NativeLibrary) -> None:
    settings = QuantizeSettings("e2m1", 16, "e4m3")
    with pytest.raises(FormatError, match="unit column stride"):
        quantize_blocks(loaded, torch.ones(32, 16).t(), settings)
    with pytest.raises(FormatError, match="float64"):
        quantize_blocks(loaded, torch.ones(2, 16, dtype=torch.float64), settings)
    with pytest.raises(FormatError, match=r"smooth: .*\(15,\)"):
        quantize_blocks(loaded, torch.ones(2, 16), settings, smooth=torch.ones(15))
    codes = torch.zeros(2, 8, dtype=torch.uint8)
    scales = torch.zeros(2, 1, dtype=torch.uint8)
    good = PackedOperand(codes, scales, "e2m1", "e4m3", 16)
    narrow = PackedOperand(codes, scales[:, :0], "e2m1", "e4m3", 16)
    with pytest.raises(FormatError, match="w: codes"):
        multiply_packed(loaded, good, narrow, Epilogue(), torch.empty(2, 2))
    with pytest.raises(FormatError, match="out: "):
        multiply_packed(loaded, good, good, Epilogue(), torch.empty(2, 3))
    with pytest.raises(FormatError, match="bias: "):
        multiply_packed(loaded, good, good, Epilogue(bias=torch.ones(3)), torch.empty(2, 2))
    with pytest.raises(FormatError, match="out: "):
        dequantize_packed(loaded, good, torch.empty(2, 33))


def test_threads_follow_torch_and_the_amount_of_work(two_threads: None) -> None:
    assert choose_threads(1) == 1
    assert choose_threads(1 << 30) == 2
