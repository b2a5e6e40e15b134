"""Small models with layers in a list, for the tests of quantize_model."""

from typing import Any

import torch
from torch import nn

from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.nn import W4A4Linear, quantize_model
from halfbyte.svdquant.presets import SVDQuantPreset

WIDTH = 64
QUICK = SVDQuantPreset(
    "quick", "int4", "int4", rank=8, smoothing_points=3, rounding="gptq", refinements=1
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(
            self.q_proj(x), self.k_proj(x), self.v_proj(x), is_causal=True
        )
        y: torch.Tensor = self.o_proj(mixed)
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)
        self.tiny = nn.Linear(WIDTH, 8)  # below min_features

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if shift is not None:
            x = x + shift
        y = x + self.down_proj(nn.functional.gelu(self.up_proj(x)))
        y = y + self.tiny(y).sum(-1, keepdim=True) * 1e-3
        return y


class Decoder(nn.Module):
    """Token ids -> logits; each block's output is the next one's input."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.lm_head = nn.Linear(WIDTH, 100)

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embed(tokens) * scale
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


class ShiftedDecoder(Decoder):
    """The second block also gets another argument, so that the blocks are no chain."""

    def __init__(self, num_layers: int = 3, is_zero: bool = True) -> None:
        super().__init__(num_layers)
        self.is_zero = is_zero

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        x = self.embed(tokens) * scale
        for index, layer in enumerate(self.layers):
            shift = torch.zeros(()) if self.is_zero else torch.ones(())
            x = layer(x, shift) if index == 1 else layer(x)
        logits: torch.Tensor = self.lm_head(x)
        return logits


def make_model(kind: type[nn.Module] = Decoder, **arguments: Any) -> Any:
    """Return a model with fixed random weights; some of its channels are far too large."""
    torch.manual_seed(3)
    model = kind(**arguments)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data[::13] *= 12.0
    return model.requires_grad_(False)


def make_tokens(batches: int = 3, length: int = 40) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randint(0, 100, (1, length), generator=draw) for _ in range(batches)]


def read_state(model: nn.Module) -> dict[str, tuple[torch.dtype, bytes]]:
    """Return every tensor of a model's state as its dtype and bytes."""
    return {
        name: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in model.state_dict().items()
    }


def count_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def quantize(model: nn.Module, calibration: Any, preset: Any = QUICK, **others: Any) -> Any:
    return quantize_model(model, preset, calibration=calibration, **{"progress": False, **others})


def list_swapped(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, W4A4Linear)]


def record_of(model: nn.Module, name: str) -> QuantizedLinear:
    module = model.get_submodule(name)
    assert isinstance(module, W4A4Linear)
    return module.to_record()
