"""Adapter files that PEFT and LyCORIS write give the outputs that those tools compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.errors import CheckpointError
from halfbyte.nn.adapters import add_adapter

pytestmark = pytest.mark.peers

TARGETS = ["to_q", "mod"]
MAX_ERROR = 1e-6  # float32 sums in another order; an adapter changes 1e-2 and more


class Pair(nn.Module):
    """Two float linears, the same on every call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_q = nn.Linear(64, 96)
        self.mod = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.to_q(x), self.mod(x)], dim=-1)


def assert_same_change(path: Path, x: torch.Tensor, wanted: torch.Tensor) -> None:
    model = Pair()
    with torch.no_grad():
        plain = model(x)
        assert (wanted - plain).norm() > 0.01 * plain.norm()
        add_adapter(model, path)
        assert (model(x) - wanted).norm() <= MAX_ERROR * wanted.norm()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LoraConfig", {"r": 4, "lora_alpha": 7}),
        (
            "LoraConfig",
            {
                "r": 4,
                "lora_alpha": 7,
                "use_rslora": True,
                "alpha_pattern": {"mod": 3},
                "rank_pattern": {"mod": 2},
            },
        ),
        ("LoHaConfig", {"r": 3, "alpha": 5}),
        ("LoKrConfig", {"r": 2, "alpha": 5}),
        ("LoKrConfig", {"r": 64, "alpha": 5}),
        ("LoKrConfig", {"r": 2, "alpha": 5, "decompose_both": True, "decompose_factor": 4}),
    ],
    ids=["lora", "rslora_patterns", "loha", "lokr", "lokr_whole", "lokr_both"],
)
def test_peft(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    name = "init_lora_weights" if kind == "LoraConfig" else "init_weights"
    config = getattr(peft, kind)(target_modules=TARGETS, **{name: False}, **settings)
    adapted = peft.get_peft_model(Pair(), config)
    adapted.save_pretrained(tmp_path)
    x = torch.randn(5, 64)
    with torch.no_grad():
        assert_same_change(tmp_path, x, adapted(x))


def test_dora_of_peft_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True)
    peft.get_peft_model(Pair(), config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="DoRA"):
        add_adapter(Pair(), tmp_path)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("lora", {}),
        ("loha", {}),
        ("lokr", {"factor": 4}),
        ("lokr", {"factor": 4, "full_matrix": True}),
    ],
    ids=["lora", "loha", "lokr", "lokr_whole"],
)
def test_lycoris(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    lycoris = pytest.importorskip("lycoris", reason="needs lycoris-lora")
    model, x = Pair(), torch.randn(5, 64)
    lycoris.LycorisNetwork.apply_preset(
        {
            "target_name": [".*"],
            "target_module": ["Linear"],
            "unet_target_module": ["Linear"],
            "unet_target_name": [],
        }
    )
    network = lycoris.create_lycoris(
        model, 1.0, linear_dim=4, linear_alpha=2.0, algo=algorithm, **settings
    )
    network.apply_to()
    for part in network.loras:
        for parameter in part.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=0.3)
    path = tmp_path / "lycoris.safetensors"
    network.save_weights(str(path), torch.float32, {})
    with torch.no_grad():
        assert_same_change(path, x, model(x))
