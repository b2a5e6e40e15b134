"""Names of a file to names of a model."""

import pytest

from halfbyte.checkpoints.key_map import KeyMap
from halfbyte.errors import UsageError


@pytest.mark.parametrize(
    ("pattern", "target", "name", "wanted"),
    [
        ("model.diffusion_model", "", "model.diffusion_model.blocks.0.up", "blocks.0.up"),
        ("", "transformer", "blocks.0.up.weight", "transformer.blocks.0.up.weight"),
        ("blocks.*.attn.qkv", "layers.*.qkv_proj", "blocks.3.attn.qkv", "layers.3.qkv_proj"),
        ("blocks.*.attn", "layers.*.a", "blocks.3.attn.q.weight", "layers.3.a.q.weight"),
        ("a.**.z", "b.**.y", "a.0.m.1.z.bias", "b.0.m.1.y.bias"),
        ("**.inv_freq", None, "layers.0.rotary.inv_freq", None),
        ("*.*.x", "n.*.m.*", "a.b.x.w", "n.a.m.b.w"),
        ("h.*", "layers.*", "h.12.ln_1.weight", "layers.12.ln_1.weight"),
    ],
)
def test_a_rule_renames(pattern: str, target: str | None, name: str, wanted: str | None) -> None:
    assert KeyMap({pattern: target}).rename([name]) == {name: wanted}


def test_components_are_matched_whole_and_dots_are_no_wildcards() -> None:
    names = ["blocks.0.attn.w", "blocks.0.attn2.w", "blocksX0.attn.w"]
    renamed = KeyMap({"blocks.*.attn": "b.*.a"}).rename(names)
    assert list(renamed.values()) == ["b.0.a.w", *names[1:]]


def test_the_first_rule_that_matches_is_used() -> None:
    rules = {"a.special": "kept", "a": "b"}
    assert list(KeyMap(rules).rename(["a.special.w", "a.other.w"]).values()) == [
        "kept.w",
        "b.other.w",
    ]


def test_a_rule_without_a_match_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"'blokcs\.\*'"):
        KeyMap({"blokcs.*": "layers.*"}).rename(["blocks.0.w"])


def test_two_names_that_become_one_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"'a\.w' and 'b\.w' would both be 'c\.w'"):
        KeyMap({"a": "c", "b": "c"}).rename(["a.w", "b.w"])


@pytest.mark.parametrize(
    ("pattern", "target"), [("a.*", "b"), ("a", "b.*"), ("a.*", "b.**"), ("a", 3), (3, "a")]
)
def test_rules_that_cannot_be_meant_are_refused(pattern: str, target: str) -> None:
    with pytest.raises(UsageError, match="key map"):
        KeyMap({pattern: target})


@pytest.mark.parametrize("parts", ["qkv", ("q",), ("a.q", "a.k"), ("q", "")])
def test_fused_names_that_cannot_be_meant_are_refused(parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="two or more names"):
        KeyMap(fused={"qkv": parts})


def test_the_callers_fused_names_come_before_the_known_ones() -> None:
    fused = KeyMap(fused={"qkv_proj": ("v_proj", "q_proj")}).list_fused()
    assert fused[0] == ("qkv_proj", ("v_proj", "q_proj"))
    assert [name for name, _ in fused].count("qkv_proj") == 1
