"""The example of docs/adapters.md runs."""

import re
from pathlib import Path

import pytest
import torch

from halfbyte.nn import load_model, save_model
from tests.nn.adapters.adapter_files import Tower, make_tower_factors, spell, write
from tests.random_linears import make_input

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapters.md"


def test_the_example_runs_and_keeps_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(
        r"test_page.py -->\n```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M
    )
    monkeypatch.chdir(tmp_path)
    save_model(Tower(), "model-4bit.safetensors")
    write(Path("style.safetensors"), spell("kohya", make_tower_factors()))
    write(Path("detail.safetensors"), spell("comfyui", make_tower_factors(rank=8)))
    names = {"model": Tower(seed=4)}
    exec(compile(example, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == "style 8 0.0\n"
    merged, x = load_model(Tower(), "model-4bit-style.safetensors"), make_input(4, 64)
    assert torch.equal(merged(x), names["model"](x))
    assert not torch.allclose(merged(x), Tower()(x), rtol=1e-2)
