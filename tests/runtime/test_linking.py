"""What compiled kernels call is what the stand-in for the CUDA runtime has."""

import ctypes
import re
from pathlib import Path

import pytest

from halfbyte.errors import HalfbyteError
from halfbyte.runtime import linking
from halfbyte.runtime.kernel_entry import KernelEntry
from halfbyte.runtime.loading import load_for_virtual
from halfbyte.virtual.driver import stand_in

CALLS = Path(linking.__file__).with_name("csrc") / "stand_in_calls.h"
STAND_IN = Path(stand_in.__file__).with_name("csrc") / "cuda_runtime_stand_in.cpp"


def test_every_function_of_the_stand_in_is_forwarded_to() -> None:
    listed = re.findall(r"FORWARD\((\w+)\)", CALLS.read_text())
    defined = re.findall(
        r"EXPORTED \w+ (_cu\w+|cuda_dialect_\w+|CuteDSLRT_\w+)\(", STAND_IN.read_text()
    )
    assert sorted(listed) == sorted(defined)
    assert len(listed) > 50


@pytest.mark.usefixtures("built_stand_in")
def test_the_stand_in_that_is_built_has_them() -> None:
    library = ctypes.CDLL(str(stand_in.find_library()))
    missing = [
        name
        for name in re.findall(r"FORWARD\((\w+)\)", CALLS.read_text())
        if not hasattr(library, name)
    ]
    assert missing == []


def test_another_library_in_the_stand_in_s_place_is_refused(entry: KernelEntry) -> None:
    with pytest.raises(HalfbyteError, match=r"lacks \d+ functions"):
        load_for_virtual(entry, linking.find_tvm_ffi_library())


def test_the_linker_s_message_is_shown() -> None:
    compiler = linking.find_c_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    with pytest.raises(HalfbyteError, match=r"could not link.*exit code 1"):
        linking.link_for_virtual(compiler, b"no object file")


def test_the_compiler_that_cc_names_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "my-cc"
    named.write_text("#!/bin/sh\n")
    named.chmod(0o755)
    monkeypatch.setenv("CC", str(named))
    assert linking.find_c_compiler() == str(named)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CC", "")
    assert linking.find_c_compiler() is None
