"""How far a quantized sentence encoder is from its float32 self, on Python's own docstrings.

The texts are docstrings of the standard library, ordered by the SHA-256 of their text so that no
module fills a slice: the first calibrate, the next ones judge. Both figures compare with the
float32 model on the same texts, so no labels are needed.
"""

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F

from halfbyte.errors import FormatError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_CALIBRATION = 128
NUM_EVALUATION = 256
MAX_TOKENS = 128  # a docstring's first 128 tokens: bounds the time, the model would take 512
_MIN_CHARACTERS = 200  # whole docstrings; one-liners ("Return a copy.") recur in many classes
_BATCH = 32

# Modules with long public docstrings and no import side effects, on every platform.
_MODULES = (
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "codecs",
    "collections",
    "concurrent.futures",
    "configparser",
    "contextlib",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "email.message",
    "fractions",
    "functools",
    "glob",
    "heapq",
    "html.parser",
    "http.client",
    "inspect",
    "ipaddress",
    "itertools",
    "json",
    "logging",
    "math",
    "os",
    "os.path",
    "pathlib",
    "pickle",
    "random",
    "re",
    "shutil",
    "socket",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "unittest.mock",
    "urllib.parse",
    "uuid",
    "zipfile",
)


@dataclass(frozen=True)
class TextSlices:
    """Two disjoint lists of texts: one calibrates, the other judges."""

    calibration: list[str]
    evaluation: list[str]


@dataclass(frozen=True)
class SentenceSimilarity:
    """The agreement of two encoders on the same texts.

    Attributes:
        cosine: mean cosine between the two embeddings of a text.
        spearman: rank correlation of the two models' similarities over all pairs of texts.
        num_texts: texts compared.
    """

    cosine: float
    spearman: float
    num_texts: int


def read_docstrings() -> list[str]:
    """Return the distinct public docstrings of the listed modules, ordered by SHA-256."""
    texts = set()
    for name in _MODULES:
        for owner in _public_members(importlib.import_module(name)):
            members = _public_members(owner) if inspect.isclass(owner) else []
            texts |= {inspect.getdoc(member) or "" for member in (owner, *members)}
    long_enough = (text for text in texts if len(text) >= _MIN_CHARACTERS)
    return sorted(long_enough, key=lambda text: hashlib.sha256(text.encode()).digest())


def _public_members(owner: object) -> list[object]:
    members = (getattr(owner, name, None) for name in dir(owner) if not name.startswith("_"))
    return [member for member in members if inspect.isroutine(member) or inspect.isclass(member)]


def split_texts(
    texts: Sequence[str],
    num_calibration: int = NUM_CALIBRATION,
    num_evaluation: int = NUM_EVALUATION,
) -> TextSlices:
    """Return the first texts to calibrate and the next to judge; FormatError if too few."""
    end = num_calibration + num_evaluation
    if len(texts) < end:
        raise FormatError(f"texts: {len(texts)}, wanted at least {end}")
    return TextSlices(list(texts[:num_calibration]), list(texts[num_calibration:end]))


def encode_texts(
    tokenizer: "Tokenizer", texts: Sequence[str], max_tokens: int = MAX_TOKENS
) -> list[torch.Tensor]:
    """Return the token ids of each text, [1, tokens] int64, at most `max_tokens` with specials.

    Unpadded, so that each can calibrate a model as it is.
    """
    encoded = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        # The last id closes the text ([SEP]) and stays when a long text is cut.
        ids = ids if len(ids) <= max_tokens else [*ids[: max_tokens - 1], ids[-1]]
        encoded.append(torch.tensor([ids], dtype=torch.int64))
    return encoded


@torch.no_grad()
def embed_texts(model: nn.Module, encoded: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return unit embeddings [texts, hidden] float32, in the order of `encoded`.

    Texts of similar length share a padded batch; padding never reaches another text.
    """
    order = sorted(range(len(encoded)), key=lambda i: encoded[i].shape[1])
    rows: list[torch.Tensor | None] = [None] * len(encoded)
    for start in range(0, len(order), _BATCH):
        chosen = order[start : start + _BATCH]
        longest = max(encoded[i].shape[1] for i in chosen)
        tokens = torch.zeros(len(chosen), longest, dtype=torch.int64)
        is_token = torch.zeros(len(chosen), longest, dtype=torch.bool)
        for row, i in enumerate(chosen):
            length = encoded[i].shape[1]
            tokens[row, :length] = encoded[i][0]
            is_token[row, :length] = True
        for i, embedding in zip(chosen, model(tokens, is_token), strict=True):
            rows[i] = embedding
    return F.normalize(torch.stack([row for row in rows if row is not None]).float(), dim=-1)


def compare_embeddings(reference: torch.Tensor, embeddings: torch.Tensor) -> SentenceSimilarity:
    """Return the agreement of unit embeddings [texts, hidden] with reference [texts, hidden].

    Raises FormatError for two shapes, or fewer than 3 texts.
    """
    if reference.shape != embeddings.shape or len(reference) < 3:
        raise FormatError(
            f"embeddings {tuple(embeddings.shape)} against {tuple(reference.shape)}: wanted the "
            "same shape and at least 3 texts"
        )
    expected, measured = reference.double().numpy(), embeddings.double().numpy()
    cosine = float((expected * measured).sum(-1).mean())
    pairs = np.triu_indices(len(expected), k=1)
    spearman = rank_correlation((expected @ expected.T)[pairs], (measured @ measured.T)[pairs])
    return SentenceSimilarity(cosine, spearman, len(expected))


def rank_correlation(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Return Spearman's coefficient of two [n] samples: Pearson's of their average ranks."""
    return float(np.corrcoef(_average_ranks(first), _average_ranks(second))[0, 1])


def _average_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rank 1..n of each value; equal values share the mean of their ranks."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank: npt.NDArray[np.float64] = last - (counts - 1) / 2
    return mean_rank[index]
