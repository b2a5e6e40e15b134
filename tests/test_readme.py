"""The README is true: its Python runs, its commands exist, and the cheap ones are run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer.main
from safetensors.torch import save_file

from halfbyte.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def list_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


PYTHON_BLOCKS = list_blocks("python")
COMMANDS = [
    shlex.split(line, comments=True)
    for block in list_blocks("(?:sh|bash|console)")
    for line in block.splitlines()
    if line.split("#")[0].strip()
]


def list_commands(program: str) -> list[list[str]]:
    """The arguments of each README command whose program's file name is `program`."""
    return [words[1:] for words in COMMANDS if Path(words[0]).name == program]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_readme_has_examples_and_known_programs_only() -> None:
    assert len(PYTHON_BLOCKS) >= 2
    programs = {Path(words[0]).name for words in COMMANDS}
    assert programs <= {"make", "halfbyte", "python"}, "teach this test the other programs"


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=range(1, len(PYTHON_BLOCKS) + 1))
def test_python_block_runs(block: str, tmp_path: Path) -> None:
    finished = run([sys.executable, "-W", "error::DeprecationWarning", "-c", block], tmp_path)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("words", list_commands("make"), ids=" ".join)
def test_make_target_and_variables_exist(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, is_variable, _ = word.partition("=")
        wanted = rf"\$\({name}\)|origin {name}" if is_variable else rf"^{name}:"
        assert re.search(wanted, makefile, re.MULTILINE), f"the Makefile has no {word}"


@pytest.mark.parametrize("words", list_commands("halfbyte"), ids=" ".join)
def test_halfbyte_verb_and_options_exist(words: list[str]) -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert words[0] in verbs or words[0].startswith("--")
    if verbs[words[0]].context_settings.get("ignore_unknown_options"):
        return  # options of what it runs; the commands are run below
    known = {option for parameter in verbs[words[0]].params for option in parameter.opts}
    options = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert options <= known


@pytest.mark.parametrize("words", list_commands("python"), ids=" ".join)
def test_program_exists_and_knows_its_options(words: list[str]) -> None:
    program, options = words[0], [word for word in words[1:] if word.startswith("--")]
    finished = run([sys.executable, program, "--help"], ROOT)
    assert finished.returncode == 0, finished.stderr
    assert all(option in finished.stdout for option in options)


def test_the_commands_run_one_after_the_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prefix = "model.layers.0.mlp"
    tensors = {
        f"{prefix}.up_proj.weight": torch.randn(192, 128, dtype=torch.bfloat16),
        f"{prefix}.down_proj.weight": torch.randn(128, 192, dtype=torch.bfloat16),
        "model.norm.weight": torch.ones(128, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    program = "import torch\nassert float(torch.ones(4, device='cuda').sum()) == 4\n"
    (tmp_path / "program.py").write_text(program)
    commands = [words for words in list_commands("halfbyte") if words[0] != "demo"]
    assert commands, "the README shows no command"
    for words in commands:
        finished = run([sys.executable, "-m", "halfbyte.cli.main", *words], tmp_path)
        assert finished.returncode == 0, f"halfbyte {' '.join(words)}: {finished.stderr}"
        assert (finished.stdout + finished.stderr).strip()
