"""The evaluation text and its fixed slices: Python's own documentation, `pydoc_data.topics`.

The protocol: the topics' texts in key order, joined by blank lines, tokenised once. Tokens 0-511
calibrate, tokens 512-2,559 are evaluated, the rest may serve to choose settings. The text ships
with every CPython, so nothing is downloaded; its wording changes between CPython releases,
therefore each slice is published with its SHA-256.
"""

import hashlib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from halfbyte.errors import FormatError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CALIBRATION_TOKENS = 512
EVALUATION_TOKENS = 2048
WINDOW_TOKENS = 512


@dataclass(frozen=True)
class TokenSlices:
    """The three disjoint parts of the tokenised text, each [tokens] int64.

    Attributes:
        calibration: the first tokens; the only ones a quantizer may see in the demo.
        evaluation: the tokens that are predicted, each once.
        spare: what is left, for choosing settings.
    """

    calibration: torch.Tensor
    evaluation: torch.Tensor
    spare: torch.Tensor

    @property
    def sha256(self) -> dict[str, str]:
        """The SHA-256 of each slice's token ids, written as little-endian int32."""
        return {name: hash_tokens(getattr(self, name)) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class PredictionWindow:
    """One forward pass: `inputs` [T] int64 predict `targets` [T] int64, position by position.

    inputs[i] is the token before targets[i], so a window's first input is the token before the
    window, and its first target is predicted from that single token.
    """

    inputs: torch.Tensor
    targets: torch.Tensor


def read_topics_text() -> str:
    """Return the text of all pydoc topics in key order, joined by blank lines."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def encode_topics(tokenizer: "Tokenizer") -> torch.Tensor:
    """Return the token ids [tokens] int64 of the topics' text, tokenised in one piece."""
    ids = tokenizer.encode(read_topics_text(), add_special_tokens=False).ids
    return torch.tensor(ids, dtype=torch.int64)


def split_tokens(
    tokens: torch.Tensor,
    num_calibration: int = CALIBRATION_TOKENS,
    num_evaluation: int = EVALUATION_TOKENS,
) -> TokenSlices:
    """Return the slices of tokens [tokens] int64; FormatError where the text is too short."""
    end = num_calibration + num_evaluation
    if num_calibration < 1 or num_evaluation < 1:
        raise FormatError(f"{num_calibration=} and {num_evaluation=} must both be at least 1")
    if tokens.ndim != 1 or len(tokens) < end:
        raise FormatError(f"tokens: shape {tuple(tokens.shape)}, wanted one row of >= {end} tokens")
    return TokenSlices(tokens[:num_calibration], tokens[num_calibration:end], tokens[end:])


def make_windows(
    before: torch.Tensor, tokens: torch.Tensor, length: int = WINDOW_TOKENS
) -> list[PredictionWindow]:
    """Return windows that together predict each of `tokens` exactly once, in order.

    Args:
        before: [>= 1] int64, the tokens that precede `tokens` in the text; the last one is the
            first window's first input.
        tokens: [tokens] int64, the targets.
        length: targets in a window; the last window may be shorter.

    Raises FormatError without a token before the first target, or for a length under 1.
    """
    if len(before) < 1 or length < 1:
        raise FormatError(f"{len(before)=} and {length=} must both be at least 1")
    previous = torch.cat([before[-1:], tokens[:-1]])  # the last token is a target only
    return [
        PredictionWindow(previous[start : start + length], tokens[start : start + length])
        for start in range(0, len(tokens), length)
    ]


def make_evaluation_windows(slices: TokenSlices) -> list[PredictionWindow]:
    """Return the protocol's windows over the evaluation slice."""
    return make_windows(slices.calibration, slices.evaluation)


def hash_tokens(tokens: torch.Tensor) -> str:
    """Return the SHA-256 hex digest of token ids [tokens], each as a little-endian int32."""
    return hashlib.sha256(tokens.numpy().astype("<i4").tobytes()).hexdigest()


def describe_protocol(slices: TokenSlices) -> list[str]:
    """Return the protocol in plain lines, with the slices' sizes and hashes."""
    calibration, evaluation = len(slices.calibration), len(slices.evaluation)
    end = calibration + evaluation
    digests = slices.sha256
    return [
        "text: pydoc_data.topics, texts in key order joined by blank lines, tokenised once",
        f"tokens 0-{calibration - 1} calibrate, {calibration}-{end - 1} are evaluated in windows "
        f"of {min(WINDOW_TOKENS, evaluation)}, the {len(slices.spare)} after them are spare",
        "each evaluated token is predicted once; a window's first token is predicted from the one "
        "token before it",
        *(f"sha256 {name}: {digest}" for name, digest in digests.items()),
    ]
