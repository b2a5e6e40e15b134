"""A small Llama decoder in plain torch: RMSNorm, rotary, grouped-query attention, SwiGLU.

Every projection is an `nn.Linear` named as model surgery expects (`q_proj`, `k_proj`, `v_proj`,
`o_proj`, `gate_proj`, `up_proj`, `down_proj` under `layers.<i>`), and every layer maps a hidden
tensor alone to a hidden tensor, so that calibration can walk the model layer by layer. There is
no KV cache: the model exists to be evaluated on whole windows.
Architecture: Touvron et al. 2023 (Llama), Su et al. 2021 (rotary, half-split pairing).
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from halfbyte.errors import FormatError


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of one Llama model, as read from its checkpoint.

    Attributes:
        vocab_size: rows of the embedding and of the tied output head.
        hidden_size: width of the residual stream; num_heads * head_dim.
        intermediate_size: width of the gated feed-forward.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        rope_theta: base of the rotary frequencies.
        rms_eps: added to the mean square in RMSNorm.
        context_length: longest sequence the rotary tables cover.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    rope_theta: float
    rms_eps: float
    context_length: int

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    def __post_init__(self) -> None:
        """Raise FormatError where the sizes do not fit together."""
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise FormatError(
                f"hidden_size={self.hidden_size} must be num_heads={self.num_heads} times an even "
                "head width"
            )
        if self.num_heads % self.num_kv_heads:
            raise FormatError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )


class RMSNorm(nn.Module):
    """Scales each vector by its root mean square, then by a learned weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        """Make a norm of `width` channels with weight 1."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised x, [..., width], same dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(nn.Module):
    """The rotary position tables; element i is paired with element i + head_dim/2."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, theta: float, max_positions: int) -> None:
        """Make the tables [max_positions, head_dim/2] float32, computed in float64."""
        super().__init__()
        # Placed explicitly: the tables must hold numbers even when the model is built on "meta".
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
        positions = torch.arange(max_positions, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, theta**-exponents)  # [positions, head_dim/2]
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, heads, T, head_dim] rotated by the positions 0..T-1."""
        length = x.shape[-2]
        if length > self.cos.shape[0]:
            raise FormatError(
                f"sequence of {length} tokens is longer than the model's {self.cos.shape[0]}; "
                "split it into windows"
            )
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class LlamaAttention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        """Make the four projections; weights are random until loaded."""
        super().__init__()
        kv_size = config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.queries_per_kv = config.num_heads // config.num_kv_heads
        self.rotary = rotary
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.shape[-1] // self.head_dim
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)  # [B, heads, T, head_dim]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention output [B, T, hidden] for x [B, T, hidden]."""
        q = self.rotary(self._split_heads(self.q_proj(x)))
        k = self.rotary(self._split_heads(self.k_proj(x)))
        v = self._split_heads(self.v_proj(x))
        k = k.repeat_interleave(self.queries_per_kv, dim=1)
        v = v.repeat_interleave(self.queries_per_kv, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return projected


class LlamaMLP(nn.Module):
    """The SwiGLU feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the three projections; weights are random until loaded."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward output [B, T, hidden] for x [B, T, hidden]."""
        projected: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class LlamaLayer(nn.Module):
    """One decoder layer: attention and feed-forward, each normalised before and added after."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        """Make one layer; `rotary` is shared by all layers."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = LlamaAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states [B, T, hidden]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        after: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return after


class Llama(nn.Module):
    """The decoder with its output head tied to the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the model of `config`; weights are random until loaded."""
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        rotary = Rotary(config.head_dim, config.rope_theta, config.context_length)
        self.layers = nn.ModuleList(LlamaLayer(config, rotary) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the final normalised hidden states [B, T, hidden] of tokens [B, T] int64.

        They hold all that the logits depend on, at 1/85 of the size for SmolLM2; see `logits`.
        """
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        normalised: torch.Tensor = self.norm(hidden)
        return normalised

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of final hidden states [..., hidden] through the tied head."""
        return F.linear(hidden, self.embed_tokens.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, vocab] of tokens [B, T] int64."""
        return self.logits(self.hidden_states(tokens))
