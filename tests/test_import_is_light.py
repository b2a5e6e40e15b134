"""Importing stays light: the root needs nothing, and the CPU half needs no CuTe and no CUDA."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "halfbyte"

# The folders that never import CuTe or CUDA, and those that may only do so inside functions.
CPU_HALF = [
    *("native", "formats", "reference", "svdquant", "checkpoints", "cpu"),
    *("arch", "ptx", "virtual", "timing", "checks"),
]
LATER_HALF = ["device", "kernels", "runtime", "ops", "nn", "bench", "cli"]

BLOCKER = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cuda", "cute", "triton"):
            raise ImportError(f"{name} is blocked by this test")

sys.meta_path.insert(0, Blocker())
"""


def run_python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def list_device_code() -> set[str]:
    """Return the modules that import CuTe at their top: nothing but device code imports them."""
    found = set()
    for path in [*(PACKAGE / "device").rglob("*.py"), *(PACKAGE / "kernels").rglob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "cutlass" for name in names):
                relative = path.relative_to(PACKAGE.parent).with_suffix("")
                found.add(".".join(relative.parts))
    return found


def list_modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    return {name.partition(".")[0] for name in run_python(program).split()}


def test_import_halfbyte_imports_no_torch_no_numpy_no_gpu_package() -> None:
    heavy = {"torch", "numpy", "cuda", "cutlass", "safetensors", "typer", "rich"}
    assert list_modules_after("import halfbyte") & heavy == set()


def test_the_command_line_imports_no_torch_and_no_numpy() -> None:
    assert list_modules_after("import halfbyte.cli.main") & {"torch", "numpy"} == set()


def test_native_imports_no_torch() -> None:
    assert "torch" not in list_modules_after("import halfbyte.native")


@pytest.mark.parametrize("folders", [CPU_HALF, LATER_HALF], ids=["cpu-half", "later-half"])
def test_every_module_imports_without_cute_and_cuda(folders: list[str]) -> None:
    present = [name for name in folders if any((PACKAGE / name).glob("*.py"))]
    program = f"""{BLOCKER}
device_code = {list_device_code()}
for folder in {present}:
    package = importlib.import_module(f"halfbyte.{{folder}}")
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        compiled = ("_halfbyte", "_virtual_", "_cuda_runtime_stand_in")  # no extension modules
        is_compiled = module.name.rpartition(".")[2].startswith((*compiled, "__main__"))
        if is_compiled or module.name in device_code:
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            raise ImportError(f"{{module.name}} imports device code at its top") from error
        print(module.name)
"""
    modules = run_python(program).split()
    assert {name.split(".")[1] for name in modules} == set(present)


def test_the_blocker_of_this_test_blocks() -> None:
    program = f"{BLOCKER}\ntry:\n    import cutlass\nexcept ImportError as error:\n    print(error)"
    assert "blocked" in run_python(program)
