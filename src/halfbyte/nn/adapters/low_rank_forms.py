"""LoRA, LoKr and LoHa factors as one low-rank delta: exactly where the rank allows, else by SVD.

    LoRA   dW = up @ down
    LoKr   dW = kron(w1, w2); of ranks r1 and r2 it has rank r1 * r2:
               kron(up_a down_a, up_b down_b) = kron(up_a, up_b) kron(down_a, down_b)
    LoHa   dW = (a1 b1) * (a2 b2), elementwise; the columns of its factors are all products of
               columns, rank r^2

Where the exact rank is above `max_rank`, the smallest rank is taken whose relative Frobenius error
is at most `max_error`; if that is above `max_rank` too, the conversion is refused with the error
that `max_rank` reaches. Singular values of a Kronecker product are the products of those of its
factors, so that nothing of the size of the weight is decomposed for LoKr.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.nn.low_rank_stack import LowRankDelta

Factors = Mapping[str, torch.Tensor]

_LOHA_PARTS: Final = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


@dataclass(frozen=True)
class RankLimits:
    """When a LoKr or LoHa is shortened.

    Attributes:
        max_rank: an exact form up to this rank is kept as it is, and none is longer.
        max_error: relative Frobenius error that shortening may cost.
    """

    max_rank: int = 256
    max_error: float = 0.01

    def __post_init__(self) -> None:
        """Check both; UsageError names the one that is wrong."""
        if not isinstance(self.max_rank, int) or self.max_rank < 1:
            raise UsageError(f"max_rank {self.max_rank!r}, wanted a positive integer")
        if not 0 <= self.max_error < 1:
            raise UsageError(f"max_error {self.max_error!r}, wanted a number from 0 to below 1")


def make_lora(down: torch.Tensor, up: torch.Tensor, scale: float) -> LowRankDelta:
    """Return the delta of LoRA factors [R, K] and [N, R], as they are."""
    return LowRankDelta(down, up, scale)


def find_lokr_rank(factors: Factors) -> int | None:
    """Return the network rank of a LoKr; None where both of its matrices are whole."""
    for name in ("lokr_w2_b", "lokr_w1_b"):
        if name in factors:
            return int(factors[name].shape[0])
    return None


def make_lokr(where: str, factors: Factors, scale: float, limits: RankLimits) -> LowRankDelta:
    """Return the delta of a LoKr.

    Args:
        where: file and path, for errors.
        factors: lokr_w1 [a, b] or lokr_w1_a [a, r] and lokr_w1_b [r, b]; w2 likewise.
        scale: what the product is multiplied by.
        limits: see the module.
    """
    pairs = [_split_whole(_get_pair(where, factors, name)) for name in ("lokr_w1", "lokr_w2")]
    (up_a, down_a), (up_b, down_b) = pairs
    if up_a.shape[1] * up_b.shape[1] <= limits.max_rank:
        return LowRankDelta(torch.kron(down_a, down_b), torch.kron(up_a, up_b), scale)
    (left1, s1, right1), (left2, s2, right2) = (_decompose(up, down) for up, down in pairs)
    products = torch.outer(s1, s2).flatten()
    order = products.argsort(descending=True)
    rank, error = _choose_rank(where, products[order], limits)
    rows, cols = order[:rank] // s2.numel(), order[:rank] % s2.numel()
    root = products[order[:rank]].sqrt()
    up = left1[:, None, rows] * left2[None, :, cols]  # [a, c, rank]
    down = right1[rows, :, None] * right2[cols, None, :]  # [rank, b, d]
    return LowRankDelta(
        (down.flatten(1) * root[:, None]).float(), (up.flatten(0, 1) * root).float(), scale, error
    )


def make_loha(where: str, factors: Factors, scale: float, limits: RankLimits) -> LowRankDelta:
    """Return the delta of a LoHa of hada_w1_a [N, r], hada_w1_b [r, K] and the w2 pair.

    Args: as of `make_lokr`.
    """
    missing = [name for name in _LOHA_PARTS if name not in factors]
    if missing:
        raise CheckpointError(f"{where}: LoHa without {', '.join(missing)}")
    a1, b1, a2, b2 = (factors[name].float() for name in _LOHA_PARTS)
    shapes = [tuple(part.shape) for part in (a1, b1, a2, b2)]
    is_pair = a1.shape[1] == b1.shape[0] and a2.shape[1] == b2.shape[0]
    if not is_pair or a1.shape[0] != a2.shape[0] or b1.shape[1] != b2.shape[1]:
        raise CheckpointError(
            f"{where}: LoHa of {shapes}, wanted hada_w1_a [N, r], hada_w1_b [r, K] and the same "
            "for w2"
        )
    exact_rank = a1.shape[1] * a2.shape[1]
    if exact_rank <= max(limits.max_rank, min(a1.shape[0], b1.shape[1])):
        up = (a1[:, :, None] * a2[:, None, :]).flatten(1)
        down = (b1[:, None, :] * b2[None, :, :]).flatten(0, 1)
        if exact_rank <= limits.max_rank:
            return LowRankDelta(down, up, scale)
        left, values, right = _decompose(up, down)
    else:  # the weight itself is smaller than those factors
        dense = (a1.double() @ b1.double()) * (a2.double() @ b2.double())
        left, values, right = torch.linalg.svd(dense, full_matrices=False)
    rank, error = _choose_rank(where, values, limits)
    root = values[:rank].sqrt()
    return LowRankDelta(
        (right[:rank] * root[:, None]).float(), (left[:, :rank] * root).float(), scale, error
    )


def _get_pair(
    where: str, factors: Factors, name: str
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return a whole matrix or its two factors, float32."""
    whole, a, b = (factors.get(name + part) for part in ("", "_a", "_b"))
    if whole is not None and a is None and b is None:
        return whole.float()
    if whole is not None or a is None or b is None:
        found = sorted(key for key in factors if key.startswith("lokr"))
        raise CheckpointError(
            f"{where}: LoKr of {', '.join(found)}; wanted {name}, or {name}_a and {name}_b"
        )
    if a.shape[1] != b.shape[0]:
        raise CheckpointError(
            f"{where}: {name}_a {list(a.shape)}, {name}_b {list(b.shape)}: wanted [n, r] and [r, k]"
        )
    return a.float(), b.float()


def _split_whole(
    pair: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (up, down) of the smallest rank that needs no arithmetic."""
    if isinstance(pair, torch.Tensor):
        rows, columns = pair.shape
        wide = rows < columns
        one = torch.eye(min(rows, columns))
        return (one, pair) if wide else (pair, one)
    up, down = pair
    if up.shape[1] > min(up.shape[0], down.shape[1]):
        return _split_whole(up @ down)
    return up, down


def _decompose(
    up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (left, singular values, right) of up @ down in float64, without the product."""
    if up.shape[1] >= min(up.shape[0], down.shape[1]):
        left, values, right = torch.linalg.svd(up.double() @ down.double(), full_matrices=False)
        return left, values, right
    q_up, r_up = torch.linalg.qr(up.double())
    q_down, r_down = torch.linalg.qr(down.double().T)
    left, values, right = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    return q_up @ left, values, right @ q_down.T


def _choose_rank(where: str, values: torch.Tensor, limits: RankLimits) -> tuple[int, float]:
    """Return the rank to keep of sorted singular values, and its relative error."""
    squares = values.square()
    # tail[r]: what is lost when r values are kept.
    tail = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
    if float(tail[0]) == 0:
        return 1, 0.0
    errors = (tail / tail[0]).sqrt()
    rank = max(int((errors > limits.max_error).sum()), 1)
    if rank > limits.max_rank:
        reached = float(errors[limits.max_rank])
        raise CheckpointError(
            f"{where}: an error of {limits.max_error:g} takes rank {rank}, max_rank "
            f"{limits.max_rank} reaches {reached:.3g}; raise max_rank, or accept the error with "
            "max_error"
        )
    return rank, float(errors[rank])
