"""LoKr and LoHa become low-rank deltas: exact, or within the error that is stated."""

from pathlib import Path

import pytest
import torch

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.nn.adapters import Adapter, RankLimits, read_adapter
from tests.nn.adapters.adapter_files import write

P = "diffusion_model.x"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measure(adapter: Adapter, wanted: torch.Tensor) -> float:
    """Return the relative Frobenius error of the one delta against the dense float64 one."""
    (delta,) = adapter.deltas.values()
    found = delta.scale * (delta.up.double() @ delta.down.double())
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("w1_shape", [(4, 4), (4, 6), (6, 2)])
@pytest.mark.parametrize("is_w1_split", [False, True])
def test_a_lokr_of_low_rank_is_exact(
    tmp_path: Path, w1_shape: tuple[int, int], is_w1_split: bool
) -> None:
    a, b = w1_shape
    tensors = {
        f"{P}.lokr_w2_a": draw(16, 3, seed=1),
        f"{P}.lokr_w2_b": draw(3, 12, seed=2),
        f"{P}.alpha": torch.tensor(6.0),
    }
    w1 = draw(a, b, seed=3)
    if is_w1_split:
        tensors |= {f"{P}.lokr_w1_a": draw(a, 3, seed=4), f"{P}.lokr_w1_b": draw(3, b, seed=5)}
        w1 = tensors[f"{P}.lokr_w1_a"] @ tensors[f"{P}.lokr_w1_b"]
    else:
        tensors[f"{P}.lokr_w1"] = w1
    w2 = tensors[f"{P}.lokr_w2_a"].double() @ tensors[f"{P}.lokr_w2_b"].double()
    adapter = read_adapter(write(tmp_path / "k.safetensors", tensors))
    (delta,) = adapter.deltas.values()
    assert delta.error == 0.0
    assert delta.rank <= 3 * min(a, b, 3 if is_w1_split else 99)
    assert measure(adapter, 2.0 * torch.kron(w1.double(), w2)) < 1e-6


def test_a_lokr_of_two_whole_matrices_has_scale_one_and_a_stated_error(tmp_path: Path) -> None:
    w1 = draw(4, 4)
    left, right = torch.linalg.qr(draw(48, 40))[0], torch.linalg.qr(draw(40, 40, seed=1))[0]
    w2 = (left * 0.6 ** torch.arange(40)) @ right.T  # full rank, as trained ones: a falling tail
    path = write(
        tmp_path / "full.safetensors",
        {f"{P}.lokr_w1": w1, f"{P}.lokr_w2": w2, f"{P}.alpha": torch.tensor(1e10)},
    )
    wanted = torch.kron(w1.double(), w2.double())
    adapter = read_adapter(path, limits=RankLimits(max_rank=64, max_error=0.02))
    (delta,) = adapter.deltas.values()
    assert delta.rank <= 64
    assert 0 < delta.error <= 0.02
    assert measure(adapter, wanted) == pytest.approx(delta.error, rel=1e-3)
    assert measure(read_adapter(path), wanted) < 1e-6  # rank 160 fits the default limit
    with pytest.raises(CheckpointError, match=r"'diffusion_model.x'.*max_rank 8 reaches 0\.\d+"):
        read_adapter(path, limits=RankLimits(max_rank=8))


def test_a_loha_is_exact_up_to_the_limit_and_shortened_above(tmp_path: Path) -> None:
    rank, n, k = 6, 40, 56
    parts = {
        f"{P}.hada_w1_a": draw(n, rank, seed=1),
        f"{P}.hada_w1_b": draw(rank, k, seed=2),
        f"{P}.hada_w2_a": draw(n, rank, seed=3) * 0.3 ** torch.arange(rank),
        f"{P}.hada_w2_b": draw(rank, k, seed=4),
        f"{P}.alpha": torch.tensor(3.0),
    }
    a1, b1, a2, b2 = (part.double() for part in list(parts.values())[:4])
    wanted = 0.5 * (a1 @ b1) * (a2 @ b2)
    path = write(tmp_path / "h.safetensors", parts)
    exact = read_adapter(path)
    assert {(delta.rank, delta.error) for delta in exact.deltas.values()} == {(36, 0.0)}
    assert measure(exact, wanted) < 1e-6
    short = read_adapter(path, limits=RankLimits(max_rank=24, max_error=0.05))
    (delta,) = short.deltas.values()
    assert delta.rank <= 24
    assert 0 < delta.error <= 0.05
    assert measure(short, wanted) == pytest.approx(delta.error, rel=1e-3)


def test_a_rank_above_the_smaller_side_is_decomposed_whole(tmp_path: Path) -> None:
    parts = {
        f"{P}.hada_w1_a": draw(10, 8, seed=1),
        f"{P}.hada_w1_b": draw(8, 12, seed=2),
        f"{P}.hada_w2_a": draw(10, 8, seed=3),
        f"{P}.hada_w2_b": draw(8, 12, seed=4),
    }
    a1, b1, a2, b2 = (part.double() for part in parts.values())
    path = write(tmp_path / "h.safetensors", parts)
    adapter = read_adapter(path, limits=RankLimits(max_rank=10, max_error=1e-6))
    assert measure(adapter, (a1 @ b1) * (a2 @ b2)) < 1e-6


def test_limits_are_checked() -> None:
    with pytest.raises(UsageError, match="max_rank 0"):
        RankLimits(max_rank=0)
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(UsageError, match="max_error"):
            RankLimits(max_error=wrong)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lokr_w1": (4, 4)}, "wanted lokr_w2, or lokr_w2_a and lokr_w2_b"),
        ({"lokr_w1": (4, 4), "lokr_w2_a": (4, 2)}, "wanted lokr_w2, or"),
        ({"lokr_w1": (4, 4), "lokr_w2_a": (4, 2), "lokr_w2_b": (3, 4)}, r"\[n, r\] and \[r, k\]"),
        ({"lokr_w1": (4, 4), "lokr_w2": (4, 4), "lokr_t2": (2, 2, 3, 3)}, "Tucker"),
        ({"hada_w1_a": (4, 2), "hada_w1_b": (2, 4)}, "without hada_w2_a, hada_w2_b"),
        (
            {"hada_w1_a": (4, 2), "hada_w1_b": (2, 4), "hada_w2_a": (5, 2), "hada_w2_b": (2, 4)},
            "wanted hada_w1_a",
        ),
    ],
)
def test_factors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    write(path, {f"{P}.{name}": draw(*shape) for name, shape in tensors.items()})
    with pytest.raises(CheckpointError, match=message):
        read_adapter(path)


def test_zeros_have_rank_one_and_no_error(tmp_path: Path) -> None:
    tensors = {f"{P}.lokr_w1": torch.zeros(20, 20), f"{P}.lokr_w2": draw(20, 20)}
    (delta,) = read_adapter(write(tmp_path / "z.safetensors", tensors)).deltas.values()
    assert (delta.rank, delta.error) == (1, 0.0)
