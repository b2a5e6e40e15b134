"""Which tensors of a checkpoint are linears to quantize, and which of them share an input: data.

A linear is a 2-D float tensor called `<layer>.weight` that is large enough and that no name rule
leaves out. Everything else passes through as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from halfbyte.formats.safetensors_header import TensorSpec

WEIGHT_SUFFIX = ".weight"
BIAS_SUFFIX = ".bias"
_FLOAT_DTYPES = ("F32", "F16", "BF16")

# Globs on the lower-case layer name. Embeddings and output heads are lookups or decide the
# logits; norms are vectors in disguise; routers choose experts, where small errors flip a choice.
NAMES_LEFT_OUT = (
    "*embed*",
    "*wte",
    "*wpe",
    "shared",
    "*.shared",
    "*relative_attention_bias*",
    "*lm_head*",
    "*output_head*",
    "head",
    "*.head",
    "output",
    "*classifier*",
    "score",
    "*.score",
    "*pooler*",
    "*norm*",
    "*.ln_*",
    "*router*",
    "*.gate",
)

# Last name parts of linears that read one input: they share smooth and lora_down.
SHARED_INPUTS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
# In cross attention the query reads another input than key and value.
CROSS_ATTENTION_MARKS = ("attn2", "cross", "encoder_attn", "encdecattention")
_QUERY_PARTS = ("q_proj", "query", "to_q", "q", "wq")


@dataclass(frozen=True)
class LinearRules:
    """The rule record; it is part of what identifies a run.

    Attributes:
        min_features: least N and K of a linear; smaller ones cost little and gain little.
        names_left_out: globs on the lower-case layer name that are not quantized.
        shared_inputs: sets of last name parts that read one input.
        cross_attention_marks: text in a layer name that sets its query apart.
        include: if not empty, globs on the layer name: these alone, whatever `names_left_out`.
        exclude: globs on the layer name that are never quantized.
    """

    min_features: int = 64
    names_left_out: tuple[str, ...] = NAMES_LEFT_OUT
    shared_inputs: tuple[tuple[str, ...], ...] = SHARED_INPUTS
    cross_attention_marks: tuple[str, ...] = CROSS_ATTENTION_MARKS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def is_linear(self, spec: TensorSpec, siblings: Iterable[str]) -> bool:
        """Return whether `spec` is the weight of a linear to quantize.

        Args:
            spec: name, dtype and shape of the tensor.
            siblings: last name parts of all tensors directly under the same layer.
        """
        layer, dot, _ = spec.name.rpartition(WEIGHT_SUFFIX)
        if not dot or not spec.name.endswith(WEIGHT_SUFFIX) or not layer:
            return False
        is_matrix = len(spec.shape) == 2 and spec.dtype.name in _FLOAT_DTYPES
        if not is_matrix or min(spec.shape) < self.min_features:
            return False
        if not set(siblings) <= {"weight", "bias"}:
            return False  # something else belongs to this layer: not a plain linear
        return self.takes_name(layer)

    def takes_name(self, layer: str) -> bool:
        """Return whether the name rules let the layer be quantized."""
        if any(fnmatchcase(layer, glob) for glob in self.exclude):
            return False
        if self.include:
            return any(fnmatchcase(layer, glob) for glob in self.include)
        return not any(fnmatchcase(layer.lower(), glob) for glob in self.names_left_out)

    def group_linears(self, columns: Mapping[str, int]) -> list[tuple[str, ...]]:
        """Return the layers in name order, those that share an input in one tuple.

        Args:
            columns: K of every linear by layer name; only equal K can share an input.
        """
        groups: dict[tuple[str, int, str], list[str]] = {}
        for layer in sorted(columns):
            parent, _, part = layer.rpartition(".")
            mark = next(("|".join(g) for g in self.shared_inputs if part in g), part)
            is_cross = any(mark in parent.lower() for mark in self.cross_attention_marks)
            if is_cross and part in _QUERY_PARTS:
                mark = part
            groups.setdefault((parent, columns[layer], mark), []).append(layer)
        return sorted(tuple(sorted(group)) for group in groups.values())
