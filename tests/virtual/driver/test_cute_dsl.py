"""Programs written in CuTe DSL, compiled and run as they are; the core is the real one."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from halfbyte.virtual.driver.availability import find_absent_packages, find_missing_parts

pytestmark = pytest.mark.peers

ADD_ONE = """
    import cutlass
    import cutlass.cute as cute
    import torch
    from cutlass.cute.runtime import from_dlpack

    import halfbyte.virtual

    @cute.kernel
    def add_one_kernel(x: cute.Tensor, limit: cutlass.Int32):
        index = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
        if index < limit:
            x[index] = x[index] + cutlass.Float32(1.0)

    @cute.jit
    def add_one(x: cute.Tensor, limit: cutlass.Int32):
        add_one_kernel(x, limit).launch(grid=(4, 1, 1), block=(32, 1, 1))
"""


@pytest.fixture(autouse=True)
def whole_virtual_gpu() -> None:
    missing = [*find_missing_parts(), *find_absent_packages()]
    if missing:
        pytest.skip(f"needs {'; '.join(missing)}")


def run_python(text: str, folder: Path) -> str:
    """Run a program in its own process: CuTe DSL reads its environment once."""
    file = folder / "program.py"  # CuTe DSL reads the source of its kernels
    file.write_text(textwrap.dedent(ADD_ONE) + textwrap.dedent(text))
    finished = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_a_compiled_function_runs_natively_and_its_launch_is_logged(tmp_path: Path) -> None:
    printed = run_python(
        """
        with halfbyte.virtual.cuda("b200") as session:
            x = torch.zeros(128, device="cuda")
            compiled = cute.compile(add_one, from_dlpack(x), 100)
            for _ in range(2):
                compiled(from_dlpack(x), 100)
            print(x.tolist() == [2.0] * 100 + [0.0] * 28)
            record = session.log.records[1]
            print(record.request.grid, record.request.block, record.instructions > 0)
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["True", "(4, 1, 1) (32, 1, 1) True"]


def test_two_functions_with_the_same_kernel_name_keep_their_own_ptx(tmp_path: Path) -> None:
    printed = run_python(
        """
        def make(step: float):
            @cute.kernel
            def add_kernel(x: cute.Tensor):
                x[cute.arch.thread_idx()[0]] = x[cute.arch.thread_idx()[0]] + cutlass.Float32(step)

            @cute.jit
            def add(x: cute.Tensor):
                add_kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

            return add

        with halfbyte.virtual.cuda("b200") as session:
            x, y = (torch.zeros(32, device="cuda") for _ in range(2))
            functions = [cute.compile(make(step), from_dlpack(x)) for step in (1.0, 10.0)]
            functions[0](from_dlpack(x))
            functions[1](from_dlpack(y))
            print(len({record.request.kernel for record in session.log}))
            print(x[0].item(), y[0].item())
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["1", "1.0 10.0"]


def test_a_fault_is_raised_from_the_compiled_call(tmp_path: Path) -> None:
    printed = run_python(
        """
        from halfbyte.virtual.report import KernelFault

        with halfbyte.virtual.cuda("b200") as session:
            x = torch.zeros(100, device="cuda")
            compiled = cute.compile(add_one, from_dlpack(x), 100)
            try:
                compiled(from_dlpack(x), 101)
            except KernelFault as fault:
                print("torch float32 [100]" in str(fault))
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["True"]


def test_tvm_ffi_takes_torch_tensors_and_raises_faults(tmp_path: Path) -> None:
    printed = run_python(
        """
        from halfbyte.virtual.report import KernelFault

        with halfbyte.virtual.cuda("b200") as session:
            x = torch.zeros(128, device="cuda")
            fake = from_dlpack(x, enable_tvm_ffi=True).mark_layout_dynamic()
            compiled = cute.compile(add_one, fake, 100, options="--enable-tvm-ffi")
            compiled(x, 128)
            print(x.sum().item())
            try:
                compiled(x[:100].clone(), 101)
            except KernelFault as fault:
                print("torch float32 [100]" in str(fault))
            try:
                compiled(x.cpu(), 100)
            except Exception as error:
                print("device" in str(error).lower())
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["128.0", "True", "True"]


def test_an_exported_object_carries_its_ptx(tmp_path: Path) -> None:
    printed = run_python(
        f"""
        with halfbyte.virtual.cuda("b200") as session:
            x = torch.zeros(128, device="cuda")
            compiled = cute.compile(add_one, from_dlpack(x), 100)
            compiled.export_to_c("{tmp_path}", "exported", function_prefix="exported")
        del compiled
        with halfbyte.virtual.cuda("b200") as session:
            module = cute.runtime.load_module("{tmp_path}/exported.o")
            y = torch.zeros(128, device="cuda")
            module.exported(from_dlpack(y), 128)
            print(y.sum().item())
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["128.0"]


def test_tvm_ffi_knows_the_tensors_of_every_session(tmp_path: Path) -> None:
    printed = run_python(
        """
        for name in ("b200", "h200"):
            with halfbyte.virtual.cuda(name):
                x = torch.zeros(128, device="cuda")
                fake = from_dlpack(x, enable_tvm_ffi=True).mark_layout_dynamic()
                compiled = cute.compile(add_one, fake, 100, options="--enable-tvm-ffi")
                compiled(x, 128)
                print(x.sum().item())
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["128.0", "128.0"]
