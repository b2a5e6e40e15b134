import math

import pytest
import torch

from halfbyte.bench.language_model_accuracy import (
    compare_logits,
    compare_states,
    measure_accuracy,
    record_hidden_states,
)
from halfbyte.bench.text_corpus import make_windows
from halfbyte.errors import FormatError


class TableModel:
    """A toy model: the hidden state of a token is a row of a table, the head the identity."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.calls: list[int] = []

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls.append(tokens.shape[1])
        return self.table[tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_figures_of_a_row_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    figures = compare_logits(p.log() + 3, q.log() - 7, torch.tensor([1]))
    # KL = .5 ln 2 + .25 ln .5 + 0 = .25 ln 2; -ln q[1] = ln 2; argmax 0 against 1
    assert figures.kl.item() == pytest.approx(0.25 * math.log(2), rel=1e-6)
    assert figures.negative_log_likelihood.item() == pytest.approx(math.log(2), rel=1e-6)
    assert figures.is_same_top1.tolist() == [False]


def test_kl_is_not_symmetric_and_has_the_reference_first() -> None:
    p, q = torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])
    forward = compare_logits(p.log(), q.log(), torch.tensor([0])).kl.item()
    assert forward == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-6)
    assert forward != pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), rel=1e-2)


def test_accuracy_averages_over_tokens_of_all_windows() -> None:
    # p for any token: (1/2, 1/2). q: (3/4, 1/4) after token 0, (1/2, 1/2) after token 1.
    reference = TableModel(torch.zeros(2, 2))
    model = TableModel(torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log())
    windows = make_windows(torch.tensor([0]), torch.tensor([0, 1, 1, 0, 1]), length=2)
    states = record_hidden_states(reference, windows)
    accuracy = measure_accuracy(model, states, windows)
    # inputs 0 0 1 1 0, targets 0 1 1 0 1: q of the targets 3/4, 1/4, 1/2, 1/2, 1/4
    likelihood = math.log(3 / 4) + 2 * math.log(1 / 4) + 2 * math.log(1 / 2)
    assert accuracy.perplexity == pytest.approx(math.exp(-likelihood / 5), rel=1e-6)
    # three inputs are 0: KL((1/2, 1/2) || (3/4, 1/4)) = ln(2 / sqrt 3)
    assert accuracy.kl == pytest.approx(3 / 5 * math.log(2 / math.sqrt(3)), rel=1e-6)
    assert accuracy.top1 == 1.0  # ties go to the first token in both
    assert accuracy.num_tokens == 5
    assert model.calls == [2, 2, 1]


def test_model_against_itself_has_zero_kl_and_full_agreement() -> None:
    draw = torch.Generator().manual_seed(0)
    model = TableModel(torch.randn(50, 50, generator=draw))
    tokens = torch.randint(0, 50, (700,), generator=draw)  # more rows than one chunk of logits
    windows = make_windows(tokens[:1], tokens[1:], length=300)
    accuracy = measure_accuracy(model, record_hidden_states(model, windows), windows)
    assert (accuracy.kl, accuracy.top1, accuracy.num_tokens) == (0.0, 1.0, 699)
    log_q = model.table.log_softmax(-1)
    expected = -log_q[tokens[:-1], tokens[1:]].double().mean().exp().log()
    assert math.log(accuracy.perplexity) == pytest.approx(expected.item(), rel=1e-6)


def test_progress_is_reported_once_a_window() -> None:
    model = TableModel(torch.zeros(4, 4))
    windows = make_windows(torch.tensor([0]), torch.tensor([1, 2, 3]), length=1)
    seen: list[int] = []
    record_hidden_states(model, windows, lambda: seen.append(1))
    assert len(seen) == 3


def test_hopeless_model_has_infinite_perplexity_and_no_exception() -> None:
    windows = make_windows(torch.tensor([0]), torch.tensor([1]))
    model = TableModel(torch.tensor([[0.0, -1000.0], [0.0, 0.0]]))
    states = record_hidden_states(model, windows)
    assert compare_states(model.logits, states, states, windows).perplexity == math.inf


def test_windows_that_do_not_match_are_an_error() -> None:
    model = TableModel(torch.zeros(4, 4))
    windows = make_windows(torch.tensor([0]), torch.tensor([1, 2, 3]), length=1)
    with pytest.raises(FormatError, match="2 reference and 3 measured windows for 3"):
        measure_accuracy(model, record_hidden_states(model, windows[:2]), windows)
    with pytest.raises(FormatError, match="non-empty"):
        measure_accuracy(model, [], [])
