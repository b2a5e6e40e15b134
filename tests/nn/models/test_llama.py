import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.nn.models.llama import Llama, LlamaConfig, RMSNorm, Rotary

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    rope_theta=1000.0,
    rms_eps=1e-5,
    context_length=64,
)


@pytest.fixture(scope="module")
def model() -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG).double().requires_grad_(False).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, (3, 20), generator=torch.Generator().manual_seed(1))


def attend_plainly(model: Llama, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Return the attention of one sequence [T, hidden], one head and one query at a time."""
    attention = model.layers[layer].self_attn
    d = CONFIG.head_dim
    q, k, v = (p(x) for p in (attention.q_proj, attention.k_proj, attention.v_proj))

    def rotate(vector: torch.Tensor, position: int) -> torch.Tensor:
        pairs = torch.complex(vector[: d // 2], vector[d // 2 :])
        steps = torch.arange(d // 2, dtype=torch.float64) * 2 / d
        return torch.view_as_real(
            pairs * torch.polar(torch.ones(d // 2).double(), position * CONFIG.rope_theta**-steps)
        ).T.flatten()

    out = torch.zeros_like(x)
    for head in range(CONFIG.num_heads):
        own = slice(head * d, (head + 1) * d)
        shared = head // (CONFIG.num_heads // CONFIG.num_kv_heads)
        kv = slice(shared * d, (shared + 1) * d)
        for t in range(len(x)):
            query = rotate(q[t, own], t)
            scores = torch.stack([query @ rotate(k[s, kv], s) for s in range(t + 1)]) / d**0.5
            out[t, own] = scores.softmax(0) @ v[: t + 1, kv]
    return attention.o_proj(out)


def test_attention_equals_its_definition_head_by_head(model: Llama) -> None:
    x = torch.randn(9, CONFIG.hidden_size, generator=torch.Generator().manual_seed(2)).double()
    measured = model.layers[1].self_attn(x[None])[0]
    expected = attend_plainly(model, 1, x)
    # The rotary tables are stored in float32: 2^-24 relative a factor.
    assert (measured - expected).norm() / expected.norm() < 1e-6


def test_changing_a_later_token_leaves_earlier_logits_alone(
    model: Llama, tokens: torch.Tensor
) -> None:
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])


def test_batch_rows_do_not_see_each_other(model: Llama, tokens: torch.Tensor) -> None:
    alone = torch.cat([model(row[None]) for row in tokens])
    together = model(tokens)
    assert (together - alone).norm() / alone.norm() < 1e-13


def test_prefix_gives_the_same_logits_as_the_whole(model: Llama, tokens: torch.Tensor) -> None:
    whole, prefix = model(tokens), model(tokens[:, :7])
    assert (whole[:, :7] - prefix).norm() / prefix.norm() < 1e-13


def test_output_head_is_the_embedding(model: Llama, tokens: torch.Tensor) -> None:
    hidden = model.hidden_states(tokens)
    assert torch.equal(model(tokens), hidden @ model.embed_tokens.weight.T)
    assert "lm_head.weight" not in model.state_dict()


def test_layers_applied_by_hand_give_the_hidden_states(model: Llama, tokens: torch.Tensor) -> None:
    hidden = model.embed_tokens(tokens)
    for layer in model.layers:
        hidden = layer(hidden)  # a layer takes the hidden states alone
    assert torch.equal(model.norm(hidden), model.hidden_states(tokens))


def test_rotary_scores_depend_on_distance_alone() -> None:
    rotary = Rotary(head_dim=16, theta=10000.0, max_positions=40).double()
    draw = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 16, generator=draw, dtype=torch.float64)
    q_at, k_at = (rotary(v.expand(1, 1, 40, 16))[0, 0] for v in (q, k))
    scores = q_at @ k_at.T
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        # float32 tables: each rotated pair is off by 2^-24 relative at most, twice.
        assert (diagonal - diagonal[0]).abs().max() < 4 * 2**-24 * q.norm() * k.norm()
    assert (scores.diagonal(-1)[0] - scores.diagonal(-7)[0]).abs() > 1e-3


def test_rotary_keeps_lengths_and_position_zero() -> None:
    rotary = Rotary(head_dim=8, theta=100.0, max_positions=5)
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(4))
    rotated = rotary(x)
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


def test_rotary_tables_hold_numbers_in_a_model_made_on_meta() -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
    assert model.layers[0].self_attn.rotary.cos.device.type == "cpu"
    assert model.layers[0].self_attn.rotary.cos[0].eq(1).all()


def test_sequence_longer_than_the_context_is_an_error(model: Llama) -> None:
    with pytest.raises(FormatError, match=r"65 tokens.*64.*windows"):
        model(torch.zeros(1, 65, dtype=torch.int64))


def test_rms_norm_of_three_four() -> None:
    norm = RMSNorm(2, eps=0.0)
    x = torch.tensor([3.0, 4.0])  # mean square 12.5
    torch.testing.assert_close(norm(x), x / 12.5**0.5)


@pytest.mark.parametrize(
    ("changed", "message"), [({"num_heads": 5}, "hidden_size=48"), ({"num_kv_heads": 4}, "=4")]
)
def test_sizes_that_do_not_fit_are_named(changed: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        LlamaConfig(**{**vars(CONFIG), **changed})
