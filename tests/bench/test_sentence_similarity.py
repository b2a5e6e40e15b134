import numpy as np
import pytest
import torch

from halfbyte.bench.sentence_similarity import (
    compare_embeddings,
    encode_texts,
    rank_correlation,
    read_docstrings,
    split_texts,
)
from halfbyte.errors import FormatError


def test_rank_correlation_by_hand() -> None:
    # Without ties: 1 - 6 * sum d^2 / (n (n^2 - 1)), d = (0, 1, 1, 0, 0) and n = 5
    values = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(values, values[[0, 2, 1, 3, 4]]) == pytest.approx(1 - 6 * 2 / 120)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1.0)
    assert rank_correlation(values, -values) == pytest.approx(-1.0)


def test_rank_correlation_gives_ties_their_mean_rank() -> None:
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, squares 4.5 and 5
    first, second = np.array([0.0, 5.0, 5.0, 9.0]), np.array([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(first, second) == pytest.approx(4.5 / np.sqrt(4.5 * 5))


def test_embeddings_against_themselves_agree_fully() -> None:
    unit = torch.nn.functional.normalize(torch.randn(9, 16, generator=torch.Generator()), dim=-1)
    similarity = compare_embeddings(unit, unit)
    assert similarity.cosine == pytest.approx(1.0, abs=1e-6)
    assert similarity.spearman == pytest.approx(1.0, abs=1e-12)
    assert similarity.num_texts == 9


def test_turning_all_embeddings_alike_keeps_spearman_but_not_cosine() -> None:
    unit = torch.nn.functional.normalize(
        torch.randn(9, 16, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    similarity = compare_embeddings(unit, unit.roll(1, dims=1))
    assert similarity.spearman == pytest.approx(1.0, abs=1e-3)
    assert similarity.cosine < 0.5


def test_embeddings_of_other_shapes_are_an_error() -> None:
    with pytest.raises(FormatError, match=r"\(4, 3\) against \(5, 3\)"):
        compare_embeddings(torch.zeros(5, 3), torch.zeros(4, 3))


def test_docstrings_are_distinct_and_slices_disjoint() -> None:
    texts = read_docstrings()
    assert len(texts) == len(set(texts)) > 500
    assert min(map(len, texts)) >= 200
    assert texts == read_docstrings()
    slices = split_texts(texts)
    assert (len(slices.calibration), len(slices.evaluation)) == (128, 256)
    assert not set(slices.calibration) & set(slices.evaluation)


def test_too_few_texts_are_an_error() -> None:
    with pytest.raises(FormatError, match="texts: 10, wanted at least 384"):
        split_texts(["text"] * 10)


def test_encoded_texts_keep_their_last_token_when_cut() -> None:
    class Encoding:
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

    class Letters:
        def encode(self, text: str) -> Encoding:
            return Encoding([101, *map(ord, text), 102])

    short, long = encode_texts(Letters(), ["ab", "abcdefgh"], max_tokens=5)
    assert short.tolist() == [[101, 97, 98, 102]]
    assert long.tolist() == [[101, 97, 98, 99, 102]]
