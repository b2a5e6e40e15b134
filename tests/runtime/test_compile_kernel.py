"""Compiling for the target that is asked for, wherever it happens; loading from the cache."""

import dataclasses
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from halfbyte.errors import HalfbyteError, MissingDependencyError, UnsupportedHardwareError
from halfbyte.runtime import cute_compiler, kernel_build
from halfbyte.runtime.compile_kernel import compile_kernel, describe_absence, find_entry
from halfbyte.runtime.cute_compiler import check_ptx_target
from halfbyte.runtime.kernel_entry import (
    CUBIN,
    DEVICE_LIBRARY,
    DEVICE_OBJECT,
    PTX,
    VIRTUAL_LIBRARY,
    VIRTUAL_OBJECT,
    KernelEntry,
)
from halfbyte.virtual.driver.session import cuda
from tests.runtime.scaled_sum import ScaledSumConfig, make_source

BLOCK_COMPILER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl", "cuda", "triton"):
            raise ImportError(f"{name} is blocked by this test")
sys.meta_path.insert(0, Blocker())
"""


def test_an_entry_says_what_it_is(entry: KernelEntry) -> None:
    facts = entry.facts
    assert (facts.name, facts.target) == ("scaled_sum", "sm_100a")
    assert facts.config == repr(make_source().config)
    assert facts.toolchain.cute_dsl.startswith("4.")
    assert any("libs-cu" in wheel for wheel in facts.toolchain.wheels)
    assert facts.ptxas.startswith(("12.", "13."))
    ptx = entry.read_part(PTX).decode()
    assert ".target sm_100a" in ptx
    assert f".version {facts.ptx_version}" in ptx
    assert entry.read_part(CUBIN)[:4] == b"\x7fELF"


def test_ptx_is_in_the_virtual_library_alone(entry: KernelEntry) -> None:
    line = b".visible .entry"
    assert line in entry.read_part(VIRTUAL_LIBRARY)
    assert line not in entry.read_part(DEVICE_LIBRARY)
    assert entry.read_part(CUBIN)[:64] in entry.read_part(DEVICE_LIBRARY)


def test_a_second_call_finds_the_entry_without_compiling(
    entry: KernelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernel_build, "compile_source", refuse)
    assert find_entry(make_source()).folder == entry.folder
    with pytest.raises(AssertionError, match="compiled again"):
        find_entry(make_source(ScaledSumConfig(4.0)))


def test_a_forked_worker_compiles_for_its_own_target(
    cache: Path, run_python: Callable[..., str]
) -> None:
    program = """
import os, sys
from halfbyte.runtime.compile_kernel import find_entry
from tests.runtime.scaled_sum import ScaledSumConfig, make_source
first = find_entry(make_source(ScaledSumConfig(2.0, "sm_100a")))  # CuTe is imported for sm_100a
assert "cutlass" in sys.modules
sys.stdout.flush()
child = os.fork()
target = "sm_103a" if child == 0 else "sm_90a"
print(find_entry(make_source(ScaledSumConfig(2.0, target))).folder, flush=True)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
again = find_entry(make_source(ScaledSumConfig(5.0, "sm_100a")))
print(again.folder)
# No CUDA runtime and no driver came into the process, whose symbols could answer for the stand-in.
mapped = open("/proc/self/maps").read()
assert "libcute_dsl_runtime" not in mapped and "libcuda.so" not in mapped
"""
    output = run_python(program, HALFBYTE_KERNEL_CACHE=str(cache), CUTE_DSL_ARCH="sm_100a")
    found = set()
    for folder in output.split():
        text = (Path(folder) / PTX).read_text()
        machine_code = (Path(folder) / CUBIN).read_bytes()
        target = text.split(".target ")[1].split()[0].strip(",")
        # ELF header of a cubin: the architecture is in byte 0 (CUDA 12) or 1 of e_flags.
        assert int(target.strip("sm_a")) in machine_code[48:50]
        found.add(target)
    assert found == {"sm_103a", "sm_90a", "sm_100a"}


def test_code_for_another_target_is_refused(entry: KernelEntry) -> None:
    wanted = dataclasses.replace(make_source(), target="sm_103a")
    with pytest.raises(HalfbyteError, match="made code for sm_100a where sm_103a"):
        check_ptx_target(entry.read_part(PTX).decode(), wanted)
    with pytest.raises(HalfbyteError, match="no target"):
        check_ptx_target("", wanted)


def test_a_program_that_cannot_be_traced_is_named(cache: Path) -> None:
    def make() -> Any:
        raise ZeroDivisionError("in the kernel's host code")

    source = dataclasses.replace(make_source(ScaledSumConfig(6.0)), make=make)
    with pytest.raises(HalfbyteError, match=r"scaled_sum for sm_100a.*scale=6.0.*ZeroDivision"):
        find_entry(source)
    assert find_entry(make_source(ScaledSumConfig(6.0)))  # the compiler works after that


def test_without_the_compiler_the_message_names_the_package(
    cache: Path, run_python: Callable[..., str]
) -> None:
    program = f"""{BLOCK_COMPILER}
import halfbyte, halfbyte.runtime
from halfbyte.errors import MissingDependencyError
from halfbyte.runtime.cute_compiler import compile_source
from tests.runtime.scaled_sum import make_source
try:
    compile_source(make_source())
except MissingDependencyError as error:
    print(error)
"""
    assert 'pip install "halfbyte[kernels]"' in run_python(program)


def test_no_compiler_on_record_is_told_with_the_artifacts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "halfbyte.runtime.compile_kernel.read_toolchain"
    monkeypatch.setattr(module, lambda: None)
    with pytest.raises(MissingDependencyError, match=r"halfbyte\[kernels\].*HALFBYTE_ARTIFACTS"):
        find_entry(make_source())
    assert "HALFBYTE_ARTIFACTS" in describe_absence(make_source())
    monkeypatch.undo()
    assert describe_absence(make_source()) == ""


def test_a_torch_without_cuda_is_told_what_runs(cache: Path) -> None:
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(UnsupportedHardwareError, match="backend='cpu'"):
        compile_kernel(make_source())


@pytest.mark.usefixtures("built_stand_in")
def test_without_a_c_compiler_kernels_load_through_cute(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(kernel_build, "find_c_compiler", lambda: None)
    source = make_source(ScaledSumConfig(3.0))
    with cuda("b200"):
        kernel = compile_kernel(source)
        assert kernel.entry.has_part(VIRTUAL_OBJECT)
        assert not kernel.entry.has_part(VIRTUAL_LIBRARY)
        a = torch.arange(200.0, device="cuda")
        y = torch.full((200,), float("nan"), device="cuda")
        kernel(a, a, y, 200)
        assert torch.equal(y.cpu(), 6 * torch.arange(200.0))
        kernel.prepare(a, a, y, 200).launch()


@pytest.mark.parametrize("content", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\n", "of another machine"])
def test_a_c_compiler_that_cannot_link_counts_as_none(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "my-cc"
    compiler.write_text(content)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(tmp_path / "kernels"))
    entry = find_entry(make_source())
    assert sorted(entry.digests) == sorted((PTX, CUBIN, DEVICE_OBJECT, VIRTUAL_OBJECT))
    assert "my-cc" in caplog.text


def test_no_room_for_temporary_files_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cute_compiler, "_compile", refuse)
    monkeypatch.setenv("HALFBYTE_KERNEL_CACHE", str(tmp_path / "kernels"))
    with pytest.raises(HalfbyteError, match=r"No space left on device.*TMPDIR"):
        find_entry(make_source())


def test_the_compiler_s_own_setting_of_the_target_is_put_back(cache: Path) -> None:
    from cutlass.cutlass_dsl import CuTeDSL

    before = CuTeDSL._get_dsl().envar._arch
    cute_compiler.compile_source(make_source(ScaledSumConfig(2.0, "sm_120a")))
    assert CuTeDSL._get_dsl().envar._arch == before
