"""A BERT encoder in plain torch with mean pooling, as sentence-embedding models use it.

Projections are `nn.Linear`, named as in `llama.py` (`q_proj`, `k_proj`, `v_proj`, `o_proj`,
`up_proj`, `down_proj`) under `layers.<i>`, so that one surgery rule serves both. Every layer
maps `(hidden, is_token)` to hidden. Architecture: Devlin et al. 2018, post-norm, GELU by erf.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from halfbyte.errors import FormatError


@dataclass(frozen=True)
class BertConfig:
    """The sizes of one BERT encoder, as its checkpoint's config.json states them.

    Attributes:
        vocab_size: rows of the word embedding.
        hidden_size: width of the residual stream; a multiple of num_heads.
        intermediate_size: width of the feed-forward.
        num_layers: encoder layers.
        num_heads: attention heads.
        max_positions: longest sequence.
        num_token_types: rows of the token-type embedding; type 0 is used throughout.
        norm_eps: added to the variance in LayerNorm.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_token_types: int
    norm_eps: float

    def __post_init__(self) -> None:
        """Raise FormatError where the sizes do not fit together."""
        if self.hidden_size % self.num_heads:
            raise FormatError(
                f"hidden_size={self.hidden_size} must be a multiple of num_heads={self.num_heads}"
            )


class BertEmbeddings(nn.Module):
    """The sum of word, position and token-type embeddings, normalised."""

    def __init__(self, config: BertConfig) -> None:
        """Make the tables; weights are random until loaded."""
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type = nn.Embedding(config.num_token_types, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [B, T, hidden] of tokens [B, T] int64."""
        length, longest = tokens.shape[1], self.position.num_embeddings
        if length > longest:
            raise FormatError(f"text of {length} tokens, the model takes {longest}; truncate it")
        summed = self.word(tokens) + self.position.weight[:length] + self.token_type.weight[0]
        normalised: torch.Tensor = self.norm(summed)
        return normalised


class BertAttention(nn.Module):
    """Bidirectional multi-head attention over the positions that hold tokens."""

    def __init__(self, config: BertConfig) -> None:
        """Make the four projections; weights are random until loaded."""
        super().__init__()
        self.num_heads = config.num_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)  # [B, heads, T, head_dim]

    def forward(self, x: torch.Tensor, is_token: torch.Tensor | None) -> torch.Tensor:
        """Return the attention output [B, T, hidden]; is_token [B, T] bool or None for all."""
        q, k, v = (self._split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        mask = None if is_token is None else is_token[:, None, None, :]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        projected: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return projected


class BertMLP(nn.Module):
    """The feed-forward: down(gelu(up(x)))."""

    def __init__(self, config: BertConfig) -> None:
        """Make the two projections; weights are random until loaded."""
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward output [B, T, hidden]."""
        projected: torch.Tensor = self.down_proj(F.gelu(self.up_proj(x)))
        return projected


class BertLayer(nn.Module):
    """One encoder layer: attention and feed-forward, each added and then normalised."""

    def __init__(self, config: BertConfig) -> None:
        """Make one layer; weights are random until loaded."""
        super().__init__()
        self.attention = BertAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = BertMLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, hidden: torch.Tensor, is_token: torch.Tensor | None = None) -> torch.Tensor:
        """Return the next hidden states [B, T, hidden]; is_token [B, T] bool or None for all."""
        hidden = self.attention_norm(hidden + self.attention(hidden, is_token))
        after: torch.Tensor = self.mlp_norm(hidden + self.mlp(hidden))
        return after


class BertEncoder(nn.Module):
    """The encoder; its output is the mean of the last layer's states over the tokens."""

    def __init__(self, config: BertConfig) -> None:
        """Make the model of `config`; weights are random until loaded."""
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(self, tokens: torch.Tensor, is_token: torch.Tensor | None = None) -> torch.Tensor:
        """Return text embeddings [B, hidden] of tokens [B, T] int64.

        Args:
            tokens: [B, T] int64, padded with any id where is_token is False.
            is_token: [B, T] bool, or None where no text is padded; each row has a True.
        """
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, is_token)
        if is_token is None:
            mean: torch.Tensor = hidden.mean(1)
            return mean
        weights = is_token[..., None].to(hidden.dtype)
        pooled: torch.Tensor = (hidden * weights).sum(1) / weights.sum(1)
        return pooled
