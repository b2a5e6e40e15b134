"""Which tensors count as linears, and which of them share an input."""

import pytest

from halfbyte.formats.safetensors_header import FILE_DTYPES, TensorSpec
from halfbyte.svdquant.linear_rules import LinearRules


def is_linear(
    name: str,
    shape: tuple[int, ...] = (128, 128),
    dtype: str = "BF16",
    siblings: tuple[str, ...] = ("weight",),
    rules: LinearRules | None = None,
) -> bool:
    spec = TensorSpec(name, FILE_DTYPES[dtype], shape)
    return (rules or LinearRules()).is_linear(spec, siblings)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight",
        "bert.encoder.layer.11.output.dense.weight",
        "transformer_blocks.3.ff.net.0.proj.weight",
        "model.layers.2.mlp.experts.7.w1.weight",
        "model.layers.2.mlp.gate_proj.weight",
        "x.weight",
    ],
)
def test_linear_names_are_taken(name: str) -> None:
    assert is_linear(name)
    assert is_linear(name, siblings=("weight", "bias"))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "embeddings.word_embeddings.weight",
        "transformer.wte.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.gate.weight",
        "block.0.router.weight",
        "classifier.weight",
        "pooler.dense.weight",
        "model.layers.0.q_proj.weight_scale",
        "model.layers.0.q_proj",
        ".weight",
        "weight",
    ],
)
def test_other_names_are_left_out(name: str) -> None:
    assert not is_linear(name)


def test_shape_dtype_and_company_decide() -> None:
    assert not is_linear("a.weight", (128,))
    assert not is_linear("a.weight", (128, 128, 1))
    assert not is_linear("a.weight", (63, 128))
    assert not is_linear("a.weight", (128, 63))
    assert not is_linear("a.weight", (0, 128))
    assert is_linear("a.weight", (64, 64))
    for dtype in ("I8", "U8", "F8_E4M3", "F64", "F4"):
        assert not is_linear("a.weight", dtype=dtype)
    assert not is_linear("a.weight", siblings=("weight", "weight_scale"))


def test_include_lifts_the_name_rule_and_exclude_wins() -> None:
    rules = LinearRules(include=("lm_head", "*.q_proj"), exclude=("*.3.*",))
    assert is_linear("lm_head.weight", rules=rules)
    assert is_linear("layers.2.q_proj.weight", rules=rules)
    assert not is_linear("layers.3.q_proj.weight", rules=rules)
    assert not is_linear("layers.2.k_proj.weight", rules=rules)


def test_groups_share_parent_columns_and_input() -> None:
    columns = {
        "l.0.attn.q_proj": 64,
        "l.0.attn.k_proj": 64,
        "l.0.attn.v_proj": 64,
        "l.0.attn.o_proj": 64,
        "l.1.attn.q_proj": 64,
        "l.0.mlp.gate_proj": 64,
        "l.0.mlp.up_proj": 64,
        "l.0.mlp.down_proj": 256,
        "d.attn2.to_q": 64,
        "d.attn2.to_k": 64,
        "d.attn2.to_v": 64,
        "e.attn.to_q": 64,
        "e.attn.to_k": 128,
    }
    assert LinearRules().group_linears(columns) == [
        ("d.attn2.to_k", "d.attn2.to_v"),
        ("d.attn2.to_q",),
        ("e.attn.to_k",),
        ("e.attn.to_q",),
        ("l.0.attn.k_proj", "l.0.attn.q_proj", "l.0.attn.v_proj"),
        ("l.0.attn.o_proj",),
        ("l.0.mlp.down_proj",),
        ("l.0.mlp.gate_proj", "l.0.mlp.up_proj"),
        ("l.1.attn.q_proj",),
    ]
