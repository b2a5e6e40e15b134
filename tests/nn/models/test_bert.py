import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.nn.models.bert import BertConfig, BertEncoder

CONFIG = BertConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    max_positions=24,
    num_token_types=2,
    norm_eps=1e-12,
)


@pytest.fixture(scope="module")
def model() -> BertEncoder:
    torch.manual_seed(0)
    return BertEncoder(CONFIG).double().requires_grad_(False).eval()


def test_padding_does_not_change_an_embedding(model: BertEncoder) -> None:
    text = torch.randint(0, 50, (1, 9), generator=torch.Generator().manual_seed(1))
    padded = torch.cat([text, torch.full((1, 6), 7)], dim=1)
    is_token = torch.arange(15)[None] < 9
    alone, among_padding = model(text), model(padded, is_token)
    assert (alone - among_padding).norm() / alone.norm() < 1e-13


def test_attention_looks_both_ways(model: BertEncoder) -> None:
    text = torch.zeros(1, 6, dtype=torch.int64)
    changed = text.clone()
    changed[0, 5] = 3
    first, second = (model.layers[0](model.embeddings(t))[0, 0] for t in (text, changed))
    assert not torch.allclose(first, second)


def test_embedding_is_the_mean_of_the_last_states(model: BertEncoder) -> None:
    text = torch.arange(10)[None]
    hidden = model.embeddings(text)
    for layer in model.layers:
        hidden = layer(hidden)
    torch.testing.assert_close(model(text), hidden.mean(1))


def test_text_longer_than_the_positions_is_an_error(model: BertEncoder) -> None:
    with pytest.raises(FormatError, match=r"25 tokens.*24.*truncate"):
        model(torch.zeros(1, 25, dtype=torch.int64))


def test_head_count_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(FormatError, match="num_heads=5"):
        BertConfig(**{**vars(CONFIG), "num_heads": 5})
