"""Every rule of the repository checks finds a made-up bad file, and passes a good one."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run_tool(name: str, root: Path) -> tuple[int, str]:
    command = [sys.executable, str(TOOLS / name), "--root", str(root)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not finished.stderr, finished.stderr
    return finished.returncode, finished.stdout


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def make_function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def make_cpp_function(name: str, lines: int) -> str:
    return f"int {name}(int a)\n{{\n" + "  a += 1;  // {\n" * (lines - 3) + "}\n"


BAD_SIZES = {
    "file-601-lines": ("src/halfbyte/formats/a.py", "x = 1\n" * 601, "file has 601 lines"),
    "function-61-lines": ("benchmarks/a.py", make_function("f", 61), "f has 61 lines"),
    "role-81-lines": ("src/halfbyte/a.py", make_function("load_role", 81), "limit 80"),
    "kernel-131-lines": ("src/halfbyte/kernels/g/s.py", make_function("kernel", 131), "limit 130"),
    "kernel-outside-kernels": ("src/halfbyte/a.py", make_function("kernel", 61), "limit 60"),
    "nine-parameters": ("tools/a.py", "def f(a, b, c, d, e, *, f, g, h, i): ...\n", "9 parameters"),
    "cpp-file-601-lines": ("src/a.cpp", "int x;\n" * 601, "file has 601 lines"),
    "cpp-function-61-lines": (
        "src/a.cpp",
        'extern "C" {\nnamespace n {\n' + make_cpp_function("g", 61) + "}\n}\n",
        "g has 61 lines",
    ),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_SIZES.values(), ids=BAD_SIZES.keys())
def test_check_sizes_finds(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, name, text)
    code, output = run_tool("check_sizes.py", tmp_path)
    assert code == 1
    assert f"{name}:" in output
    assert message in output


def test_check_sizes_passes_what_is_exactly_at_its_limit(tmp_path: Path) -> None:
    write(tmp_path, "src/a.py", make_function("f", 60) + make_function("load_role", 80))
    write(tmp_path, "src/halfbyte/kernels/g/s.py", make_function("kernel", 130))
    write(tmp_path, "src/b.py", "x = 1\n" * 600)
    write(tmp_path, "src/c.py", "def f(self, a, b, c, d, e, f, g, h): ...\n")
    cpp = "namespace {\nstruct S {\n" + make_cpp_function("g", 60) + "};\n}\n"
    write(tmp_path, "src/a.cpp", cpp + make_cpp_function("g", 60))
    code, output = run_tool("check_sizes.py", tmp_path)
    assert code == 0, output
    assert "biggest functions: 130 src/halfbyte/kernels/g/s.py:kernel" in output


def test_a_size_exception_raises_one_limit_and_must_stay_needed(tmp_path: Path) -> None:
    write(tmp_path, "src/a.py", make_function("f", 70))
    write(tmp_path, "tools/size_exceptions.txt", "src/a.py:f | 70 | one table\n")
    assert run_tool("check_sizes.py", tmp_path)[0] == 0
    write(tmp_path, "src/a.py", make_function("f", 71))
    assert run_tool("check_sizes.py", tmp_path)[0] == 1
    write(tmp_path, "src/a.py", make_function("f", 9))
    code, output = run_tool("check_sizes.py", tmp_path)
    assert code == 1
    assert "needs no exception" in output


def test_a_size_exception_without_a_reason_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "tools/size_exceptions.txt", "src/a.py:f | 70 | \n")
    command = [sys.executable, str(TOOLS / "check_sizes.py"), "--root", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert "reason" in finished.stderr


BAD_IMPORTS = {
    "formats-cpu": ("formats/a.py", "import halfbyte.cpu.x\n", "later in the folder order"),
    "lazy-counts": ("cpu/a.py", "def f():\n    from halfbyte import nn\n", "cpu imports nn"),
    "relative": ("svdquant/a.py", "from ..nn import x\n", "svdquant imports nn"),
    "native-formats": ("native/a.py", "from halfbyte.formats import x\n", "native imports formats"),
    "typing-only": (
        "formats/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import halfbyte.ops\n",
        "formats imports ops",
    ),
    "root": ("__init__.py", "from halfbyte.formats import x\n", "must stay light"),
    "folder": ("extra/a.py", "x = 1\n", "not in the order"),
    "cpu-half-cuda": ("cpu/a.py", "def f():\n    import cuda.bindings\n", "CPU half"),
    "cpu-half-cutlass": ("checks/a.py", "from cutlass import cute\n", "CPU half"),
    "eager-cutlass": ("ops/a.py", "import cutlass.cute as cute\n", "module level"),
    "class-body": ("nn/a.py", "class A:\n    import cutlass\n", "module level"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_IMPORTS.values(), ids=BAD_IMPORTS.keys())
def test_check_imports_finds(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, f"src/halfbyte/{name}", text)
    code, output = run_tool("check_imports.py", tmp_path)
    assert code == 1
    assert message in output


def test_check_imports_passes_the_allowed_directions(tmp_path: Path) -> None:
    write(tmp_path, "src/halfbyte/__init__.py", "from halfbyte.version import x\n")
    write(tmp_path, "src/halfbyte/formats/a.py", "import halfbyte.native\nimport torch\n")
    write(tmp_path, "src/halfbyte/formats/b.py", "from halfbyte.errors import E\nfrom . import a\n")
    write(
        tmp_path, "src/halfbyte/nn/a.py", "from halfbyte.ops import x\nfrom halfbyte import cpu\n"
    )
    write(tmp_path, "src/halfbyte/ops/a.py", "def f():\n    import cutlass.cute\n")
    code, output = run_tool("check_imports.py", tmp_path)
    assert code == 0, output


BAD_NAMES = {
    "module": ("src/halfbyte/formats/utils.py", "x = 1\n", "module name 'utils'"),
    "folder": ("src/halfbyte/common/a.py", "x = 1\n", "module name 'common'"),
    "module-word": ("src/halfbyte/formats/pack_v2.py", "x = 1\n", "module name 'pack_v2'"),
    "cpp-module": ("src/halfbyte/native/csrc/misc.cpp", "int x;\n", "module name 'misc'"),
    "class": ("a.py", "class LinearBase: ...\n", "'LinearBase' has a banned word: base"),
    "function": ("a.py", "def make_new_scale(): ...\n", "banned word: new"),
    "parameter": ("a.py", "def f(helper): ...\n", "banned word: helper"),
    "variable": ("a.py", "scale_v2 = 1\n", "banned word: v2"),
    "compute": ("a.py", "def compute_scale(): ...\n", "banned verb compute"),
    "private-process": ("a.py", "def _process_rows(): ...\n", "banned verb process"),
    "handle": ("a.py", "class A:\n    def handle_row(self): ...\n", "banned verb handle"),
    "do": ("a.py", "async def do_it(): ...\n", "banned verb do"),
    "temporary-path": ("README.md", "see /" + "tmp/x\n", "a path of one machine"),
    "work-path": ("docs/a.md", "cd /" + "work/main\n", "a path of one machine"),
    "registry": ("Makefile", "# py" + "pi.org\n", "a registry host"),
    "made-by": ("docs/a.md", "by a sub" + "agent\n", "how it was made"),
    "issue-number": ("docs/a.md", "see iss" + "ue #2\n", "an issue number"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_NAMES.values(), ids=BAD_NAMES.keys())
def test_check_names_finds(tmp_path: Path, name: str, text: str, message: str) -> None:
    write(tmp_path, name, text)
    code, output = run_tool("check_names.py", tmp_path)
    assert code == 1
    assert message in output


def test_check_names_passes_whole_words_that_only_contain_a_banned_one(tmp_path: Path) -> None:
    text = "class Renewal:\n    def __new__(cls): ...\ndef domain(database, processed): ...\n"
    text += "class Page(HTMLParser):\n    def handle_data(self, data): ...\n"  # the parent's name
    write(tmp_path, "src/halfbyte/formats/baseline.py", text)
    code, output = run_tool("check_names.py", tmp_path)
    assert code == 0, output


def test_the_checks_pass_on_this_repository() -> None:
    command = [sys.executable, str(TOOLS / "check_all.py")]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout
