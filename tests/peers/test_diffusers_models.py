"""Diffusion transformers of diffusers, built from a configuration, through `halfbyte.load`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.peers.loaded_models import assert_loads_equal

diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install 'halfbyte[peers]'"
)

pytestmark = pytest.mark.peers

BF16 = torch.bfloat16


def normal(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(BF16)


def make_flux() -> nn.Module:
    model: nn.Module = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(16, 24, 24),
    )
    return model.to(BF16).eval()


def make_qwen_image() -> nn.Module:
    model: nn.Module = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=64,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(16, 24, 24),
    )
    return model.to(BF16).eval()


def make_z_image() -> nn.Module:
    model: nn.Module = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=384,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=6,
        n_kv_heads=6,
        cap_feat_dim=32,
        axes_dims=[16, 24, 24],
        axes_lens=[64, 32, 32],
    )
    return model.to(BF16).eval()


INPUTS: dict[Callable[[], nn.Module], dict[str, Any]] = {
    make_flux: {
        "hidden_states": normal(1, 16, 4),
        "encoder_hidden_states": normal(1, 8, 32),
        "pooled_projections": normal(1, 32),
        "timestep": torch.tensor([0.5], dtype=BF16),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(8, 3),
    },
    make_qwen_image: {
        "hidden_states": normal(1, 16, 16),
        "encoder_hidden_states": normal(1, 8, 32),
        "encoder_hidden_states_mask": torch.ones(1, 8, dtype=torch.long),
        "timestep": torch.tensor([0.5], dtype=BF16),
        "img_shapes": [[(1, 4, 4)]],
    },
    make_z_image: {
        "x": [normal(4, 1, 8, 8)],
        "t": torch.tensor([0.5], dtype=BF16),
        "cap_feats": [normal(8, 32)],
    },
}


@pytest.mark.parametrize(
    ("make", "activation", "family"),
    [
        (make_flux, "nvfp4_nunchaku", "nunchaku"),
        (make_qwen_image, "nvfp4_one_level", "svdquant-kernels"),
        (make_z_image, "nvfp4_nunchaku", "nunchaku"),
    ],
    ids=["flux", "qwen-image", "z-image"],
)
def test_a_loaded_transformer_is_the_quantized_one(
    tmp_path: Path, make: Callable[[], nn.Module], activation: str, family: str
) -> None:
    @torch.no_grad()
    def run(model: nn.Module) -> torch.Tensor:
        y = model(**INPUTS[make], return_dict=False)[0]
        return y if isinstance(y, torch.Tensor) else torch.stack(list(y))

    assert_loads_equal(make, run, tmp_path, activation, [family])
