"""Adapter files in the spelling of each tool, and a small model for them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn import W4A4Linear
from tests.random_linears import LinearShape, make_linear

HIDDEN, INNER = 64, 96
# Of one block of Tower: name, (N, K).
TARGETS = {
    "attn.to_q": (HIDDEN, HIDDEN),
    "attn.to_out.0": (HIDDEN, HIDDEN),
    "img_mod.1": (INNER, HIDDEN),
    "txt_mod.1": (INNER, HIDDEN),
}


class Attention(nn.Module):
    """The names that diffusers gives."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.to_q = make_layer(*TARGETS["attn.to_q"], seed=seed)
        self.to_out = nn.ModuleList([make_layer(*TARGETS["attn.to_out.0"], seed=seed + 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.to_out[0](self.to_q(x))
        return y


class Block(nn.Module):
    """4-bit attention, a weight-only img_mod and a float txt_mod."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.attn = Attention(seed)
        pair = ("int4", None)
        mod = make_layer(*TARGETS["img_mod.1"], seed=seed + 2, pair=pair)
        self.img_mod = nn.Sequential(nn.SiLU(), mod)
        self.txt_mod = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, INNER))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.attn(self.norm(x)) * 0.01
        return y + self.img_mod(y)[..., :HIDDEN] + self.txt_mod(y)[..., :HIDDEN]


class Tower(nn.Module):
    """Two blocks."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.transformer_blocks = nn.ModuleList([Block(10 * i + seed) for i in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.transformer_blocks:
            x = x + block(x)
        return x


def make_layer(
    n: int, k: int, *, rank: int = 16, seed: int = 0, pair: Any = ("nvfp4", "nvfp4_nunchaku")
) -> W4A4Linear:
    """Return a random 4-bit layer with float32 parts."""
    return W4A4Linear.from_record(make_linear(LinearShape(n=n, k=k, rank=rank), pair, seed))


@dataclass(frozen=True)
class Factors:
    """A LoRA of one linear."""

    down: torch.Tensor
    up: torch.Tensor

    @property
    def dense(self) -> torch.Tensor:
        """The delta in float64, scale 1."""
        return self.up.double() @ self.down.double()


def make_factors(n: int, k: int, rank: int = 4, seed: int = 0) -> Factors:
    """Return random factors."""
    draw = torch.Generator().manual_seed(1000 + seed)
    down = torch.randn(rank, k, generator=draw) / k**0.5
    return Factors(down, torch.randn(n, rank, generator=draw))


def make_tower_factors(rank: int = 4) -> dict[str, Factors]:
    """Return factors for every target of both blocks."""
    return {
        f"transformer_blocks.{i}.{name}": make_factors(*shape, rank, seed=10 * i + j)
        for i in range(2)
        for j, (name, shape) in enumerate(TARGETS.items())
    }


def spell(style: str, factors: Mapping[str, Factors], alpha: float = 2.0) -> dict[str, Any]:
    """Return the tensors of a file in one tool's spelling."""
    tensors: dict[str, torch.Tensor] = {}
    for path, one in factors.items():
        flat = path.replace(".", "_")
        down, up, scale = {
            "peft": (
                f"base_model.model.{path}.lora_A.weight",
                f"base_model.model.{path}.lora_B.weight",
                None,
            ),
            "peft_named": (f"{path}.lora_A.default.weight", f"{path}.lora_B.default.weight", None),
            "diffusers": (
                f"transformer.{path}.lora_A.weight",
                f"transformer.{path}.lora_B.weight",
                None,
            ),
            "diffusers_old": (
                f"transformer.{path}.lora.down.weight",
                f"transformer.{path}.lora.up.weight",
                None,
            ),
            "kohya": (
                f"lora_unet_{flat}.lora_down.weight",
                f"lora_unet_{flat}.lora_up.weight",
                f"lora_unet_{flat}.alpha",
            ),
            "comfyui": (
                f"diffusion_model.{path}.lora_down.weight",
                f"diffusion_model.{path}.lora_up.weight",
                f"diffusion_model.{path}.alpha",
            ),
        }[style]
        tensors[down], tensors[up] = one.down.clone(), one.up.clone()
        if scale is not None:
            tensors[scale] = torch.tensor(alpha)
    return tensors


def write(path: Path, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Path:
    """Write a safetensors file with the library of that name."""
    save_file({name: part.contiguous() for name, part in tensors.items()}, path, metadata or None)
    return path


def lengthen(record: QuantizedLinear, *deltas: tuple[Factors, float]) -> QuantizedLinear:
    """Return the record with deltas times their factor behind its low-rank branch."""
    downs = [] if record.lora_down is None else [record.lora_down]
    ups = [] if record.lora_up is None else [record.lora_up]
    downs += [one.down for one, _ in deltas]
    ups += [one.up * factor for one, factor in deltas]
    return replace(record, lora_down=torch.cat(downs), lora_up=torch.cat(ups, dim=1))
