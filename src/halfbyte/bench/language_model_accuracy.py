"""How far a quantized language model is from the model as shipped, over fixed windows.

The reference is stored as its final hidden states (4.7 MB for 2,048 SmolLM2 tokens) and not as
its log-probabilities (400 MB): the output head is the same for both, so they are recomputed a few
rows at a time. Logits of more than `_ROWS` positions never exist together.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from halfbyte.bench.text_corpus import PredictionWindow
from halfbyte.errors import FormatError

_ROWS = 256  # positions whose logits exist at once: 50 MB in float32 for 49,152 tokens


class LanguageModel(Protocol):
    """What the evaluation needs of a model; `nn.models.llama.Llama` provides it."""

    def hidden_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return final hidden states [B, T, hidden] of tokens [B, T] int64."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of final hidden states [..., hidden]."""
        ...


@dataclass(frozen=True)
class LanguageModelAccuracy:
    """The accuracy of one model over all evaluated tokens.

    Attributes:
        perplexity: exp of the mean negative log-likelihood.
        kl: mean KL(reference || model) in nats per token; 0 for the reference itself.
        top1: share of positions where both models' most likely token is the same, 0 to 1.
        num_tokens: predicted tokens.
    """

    perplexity: float
    kl: float
    top1: float
    num_tokens: int


@dataclass(frozen=True)
class RowStatistics:
    """Per-position figures, each [rows] float64 or bool."""

    negative_log_likelihood: torch.Tensor
    kl: torch.Tensor
    is_same_top1: torch.Tensor


@torch.no_grad()
def record_hidden_states(
    model: LanguageModel,
    windows: Sequence[PredictionWindow],
    on_window: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Return the final hidden states of each window, [T, hidden] each, one window at a time.

    `on_window` is called after each window, for progress bars.
    """
    states = []
    for window in windows:
        states.append(model.hidden_states(window.inputs[None])[0])
        on_window()
    return states


def measure_accuracy(
    model: LanguageModel,
    reference: Sequence[torch.Tensor],
    windows: Sequence[PredictionWindow],
    on_window: Callable[[], None] = lambda: None,
) -> LanguageModelAccuracy:
    """Return the accuracy of `model` against recorded reference hidden states.

    Args:
        model: its output head must be the reference's own (it serves both).
        reference: one [T, hidden] tensor for each window, from `record_hidden_states`.
        windows: the windows that `reference` was recorded on.
        on_window: called after each window, for progress bars.
    """
    states = record_hidden_states(model, windows, on_window)
    return compare_states(model.logits, reference, states, windows)


@torch.no_grad()
def compare_states(
    head: Callable[[torch.Tensor], torch.Tensor],
    reference: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    windows: Sequence[PredictionWindow],
) -> LanguageModelAccuracy:
    """Return the accuracy that recorded `states` give against `reference`, window by window.

    Args:
        head: maps hidden states [rows, hidden] to logits [rows, vocab], for both models.
        reference: [T, hidden] for each window, of the model as shipped.
        states: [T, hidden] for each window, of the model that is judged.
        windows: the windows that both were recorded on.

    Raises FormatError where the three differ in number or are empty.
    """
    if not len(reference) == len(states) == len(windows) > 0:
        raise FormatError(
            f"{len(reference)} reference and {len(states)} measured windows for {len(windows)} "
            "windows; record both on the same, non-empty windows"
        )
    sums = torch.zeros(3, dtype=torch.float64)
    for expected, measured, window in zip(reference, states, windows, strict=True):
        for start in range(0, len(window.targets), _ROWS):
            rows = slice(start, start + _ROWS)
            figures = compare_logits(
                head(expected[rows]), head(measured[rows]), window.targets[rows]
            )
            losses = (figures.negative_log_likelihood, figures.kl, figures.is_same_top1)
            sums += torch.stack([column.sum(dtype=torch.float64) for column in losses])
    num_tokens = sum(len(window.targets) for window in windows)
    loss, kl, top1 = (sums / num_tokens).tolist()
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(709.8) overflows a double
    return LanguageModelAccuracy(perplexity, kl, top1, num_tokens)


def compare_logits(
    reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor
) -> RowStatistics:
    """Return per-row figures of logits [rows, vocab] against reference logits [rows, vocab].

    KL(p || q) = sum p (log p - log q) with p the softmax of the reference, in nats; targets
    [rows] int64 give the likelihood. Softmax in float32, sums over the vocabulary in float64.
    """
    log_p = F.log_softmax(reference.float(), dim=-1)
    log_q = F.log_softmax(logits.float(), dim=-1)
    likelihood = log_q.gather(-1, targets[:, None]).squeeze(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)
    is_same = log_p.argmax(-1) == log_q.argmax(-1)
    return RowStatistics(-likelihood.double(), kl, is_same)
