"""The low-rank branch: the leading singular directions of a matrix, by randomized iteration.

Source of the method: Halko, Martinsson, Tropp, "Finding structure with randomness" (2011), 4.4.
A matrix is given as chunks of rows, so that one too large to hold can be read piece by piece.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

OVERSAMPLING = 8  # columns beyond the rank (Halko et al., 1.3: 5 or 10 are plenty)
ITERATIONS = 4  # passes of subspace iteration

RowChunks = Callable[[], Iterable[torch.Tensor]]


@dataclass(frozen=True, eq=False)
class LowRank:
    """A factorization up @ down; the singular values are shared evenly between both.

    Attributes:
        up: [N, R].
        down: [R, K], the dtype of up.
    """

    up: torch.Tensor
    down: torch.Tensor

    def multiply(self) -> torch.Tensor:
        """Return up @ down as [N, K] float32."""
        return self.up.float() @ self.down.float()


def make_start(columns: int, rank: int, seed: int) -> torch.Tensor:
    """Return the random orthonormal start of the iteration: [K, min(R + 8, K)] float32."""
    width = min(rank + OVERSAMPLING, columns)
    draw = torch.Generator().manual_seed(seed)
    start: torch.Tensor = torch.linalg.qr(torch.randn(columns, width, generator=draw)).Q
    return start


def improve_basis(chunks: RowChunks, basis: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return the orthonormal row-space basis [K, width] after `iterations` passes over the rows.

    Args:
        chunks: gives the matrix as chunks [rows, K] float32, the same at every call.
        basis: [K, width] float32, orthonormal columns.
        iterations: each multiplies by the matrix and its transpose once.
    """
    for _ in range(iterations):
        product = torch.zeros_like(basis)
        for chunk in chunks():
            product.addmm_(chunk.T, chunk @ basis)
        basis = torch.linalg.qr(product).Q
    return basis


def find_row_space(
    chunks: RowChunks, columns: int, rank: int, *, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the leading right singular vectors [K, R] and singular values [R], float32.

    Deterministic: a fixed seed, and sums in row order.
    """
    basis = improve_basis(chunks, make_start(columns, rank, seed), ITERATIONS)
    gram = torch.zeros(basis.shape[1], basis.shape[1], dtype=torch.float64)
    for chunk in chunks():
        image = (chunk @ basis).double()
        gram.addmm_(image.T, image)
    values, vectors = torch.linalg.eigh(gram)
    leading = vectors.flip(1)[:, :rank].float()  # eigh sorts upwards
    return basis @ leading, values.flip(0)[:rank].clamp_(min=0).sqrt().float()


def split_low_rank(matrix: torch.Tensor, rank: int, *, seed: int = 0) -> LowRank:
    """Return the best approximation of rank at most `rank`, to randomized accuracy.

    Args:
        matrix: [N, K] float32, finite.
        rank: R, cut to min(N, K).
        seed: of the random start.
    """
    rank = min(rank, *matrix.shape)
    space, values = find_row_space(lambda: (matrix,), matrix.shape[1], rank, seed=seed)
    # Balanced factors keep both within 16-bit range for any matrix that is within float32's half.
    root = values.sqrt()
    inverse = torch.where(root > 0, 1.0 / root, torch.zeros(()))
    return LowRank(matrix @ (space * inverse), (space * root).T.contiguous())
