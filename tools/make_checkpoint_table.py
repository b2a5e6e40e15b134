"""Writes docs/checkpoints/README.md from the families themselves, or with --check compares it.

Layers of every kind are encoded by each family that holds them, read back by what the file says of
itself, and offered to every other family. A family that is registered appears by running this.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoints.conversion_plan import LAYOUTS, find_obstacle
from halfbyte.checkpoints.family import Family, Layer, Parts, read_layer, write_layer
from halfbyte.checkpoints.registry import FAMILIES
from halfbyte.errors import CheckpointError, FormatError
from halfbyte.formats.activation import get_activation_format
from halfbyte.formats.block_format import get_format
from halfbyte.formats.block_scaled_tensor import BlockScaledTensor
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES
from halfbyte.formats.quantized_linear import QuantizedLinear
from halfbyte.formats.safetensors_header import TensorSpec, make_spec

FOLDER = Path(__file__).parents[1] / "docs" / "checkpoints"
PAGE = FOLDER / "README.md"
SIZE = 256  # N and K: a multiple of every family's tiles
HEAD = """# Checkpoint families

<!-- made by tools/make_checkpoint_table.py -->

Every family is read into one record and written from it (docs/formats.md), so that any two of them
are two steps apart. `halfbyte inspect FILE` tells what a file is, `halfbyte convert IN OUT --to
FAMILY --verify` converts it and proves the result, `halfbyte diff A B` compares what two files
compute. A layer that a family cannot hold is an error that names the layer and the reason, before
anything is written; nothing is dropped and nothing is quantized again.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        title: for the table.
        weight: block format of the weight.
        activation: how x is quantized; None: not at all.
        rank: of the low-rank branch; 0 without one.
        extras: which of "smooth", "bias" and "channel_scale" it has.
        dtype: of vectors and factors.
        layer: its name, where a family decides by names.
    """

    title: str
    weight: str
    activation: str | None = None
    rank: int = 0
    extras: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    layer: str = "transformer_blocks.0.attn.to_q"


BRANCH = ("smooth", "bias")
KINDS = (
    Kind("NVFP4 weight-only", "nvfp4"),
    Kind("NVFP4 weight-only, low rank", "nvfp4", None, 32, ("bias",), torch.bfloat16),
    Kind("NVFP4, calibrated x", "nvfp4", "nvfp4_static", extras=("bias",)),
    Kind("NVFP4, calibrated x, low rank", "nvfp4", "nvfp4_static", 32, BRANCH),
    Kind("NVFP4, two-level x, low rank", "nvfp4", "nvfp4_dynamic", 32, BRANCH),
    Kind("NVFP4, two-level x", "nvfp4", "nvfp4_dynamic"),
    Kind("NVFP4, one-level x, low rank", "nvfp4", "nvfp4_one_level", 32, BRANCH, torch.bfloat16),
    Kind(
        "NVFP4 of nunchaku",
        "nvfp4",
        "nvfp4_nunchaku",
        32,
        (*BRANCH, "channel_scale"),
        torch.bfloat16,
    ),
    Kind("NVFP4 without global scale", "nvfp4_one_level"),
    Kind("MXFP4", "mxfp4", "mxfp4"),
    Kind("MXFP4, low rank", "mxfp4", "mxfp4", 32, BRANCH, torch.bfloat16),
    Kind("MXFP4 weight-only", "mxfp4"),
    Kind("MXFP4 weight-only, low rank", "mxfp4", None, 32, ("bias",), torch.bfloat16),
    Kind("INT4, low rank", "int4", "int4", 32, BRANCH, torch.bfloat16),
    Kind(
        "INT4 behind a GELU, low rank",
        "int4",
        "uint4_shifted",
        32,
        BRANCH,
        torch.bfloat16,
        "transformer_blocks.0.ff.net.2",
    ),
    Kind("INT4 weight-only", "int4"),
    Kind("INT4 weight-only, low rank", "int4", None, 32, ("bias",), torch.bfloat16),
    Kind("INT4 in blocks of 32", "int4_block32"),
)


def make_linear(kind: Kind, seed: int = 0) -> QuantizedLinear:
    """Return a sound random layer of a kind, N = K = SIZE."""
    draw = torch.Generator().manual_seed(seed)
    block = get_format(kind.weight)
    shape = (SIZE, block.num_blocks(SIZE))
    data = torch.randint(0, 256, (SIZE, SIZE // 2), generator=draw).to(torch.uint8)
    if block.scale in BYTE_SCALE_DTYPES:
        low, high = (0x28, 0x48) if block.scale == "e4m3" else (120, 126)
        codes = torch.randint(low, high, shape, generator=draw).to(torch.uint8)
        scales = codes.view(BYTE_SCALE_DTYPES[block.scale])
    else:
        is_half = block.has_signed_scale
        scales = torch.rand(shape, generator=draw) + 0.5
        scales = scales.half() if is_half or kind.dtype == torch.float32 else scales.to(kind.dtype)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw).to(kind.dtype)

    def positive(size: int) -> torch.Tensor:
        return (torch.rand(size, generator=draw) + 0.5).to(kind.dtype)

    activation = None if kind.activation is None else get_activation_format(kind.activation)
    is_static = activation is not None and activation.global_scale == "static"
    scale = torch.tensor(0.0123).to(kind.dtype).float()  # a value that bfloat16 files hold too
    return QuantizedLinear(
        BlockScaledTensor(block, data, scales, scale if block.has_global_scale else None, SIZE),
        activation,
        activation_global_scale=torch.tensor(0.0017) if is_static else None,
        channel_scale=positive(SIZE).float() if "channel_scale" in kind.extras else None,
        smooth=positive(SIZE) if "smooth" in kind.extras else None,
        lora_down=normal(kind.rank, SIZE) if kind.rank else None,
        lora_up=normal(SIZE, kind.rank) if kind.rank else None,
        bias=normal(SIZE) if "bias" in kind.extras else None,
    )


class MemorySource:
    """A file of one layer that was never written."""

    def __init__(self, family: Family, layer: Layer) -> None:
        """Hold what `family` would write."""
        content = family.make_side_content({layer.name: layer}, None)
        parts = write_layer(family, layer)
        self.path = Path(family.name)
        self.metadata: Mapping[str, str] = content.metadata
        self.configs: Mapping[str, Any] = {}
        self._tensors: Parts = {
            family.tensor_name(layer.name, part): tensor for part, tensor in parts.items()
        }
        self.specs: Mapping[str, TensorSpec] = {
            name: make_spec(name, tensor.dtype, tensor.shape)
            for name, tensor in sorted(self._tensors.items())
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[name]

    def close(self) -> None:
        """Hold nothing open."""


def explain(family: Family, layer: Layer) -> str | None:
    """Return why `family` does not hold a layer; None where it does."""
    if not is_written(family):
        return "read, not written"
    return find_obstacle(family, layer)


def is_written(family: Family) -> bool:
    """Return whether files of the family are written."""
    return family.can_write and family.container in LAYOUTS


@cache
def list_held(name: str) -> dict[str, Layer]:
    """Return the kinds that a family holds, by title: the layer as its files are read."""
    family = FAMILIES[name]
    held = {}
    for kind in KINDS:
        layer = Layer(kind.layer, make_linear(kind))
        if explain(family, layer) is None:
            held[kind.title] = read_back(family, layer)
    return held


def read_back(family: Family, layer: Layer) -> Layer:
    """Return a layer as a file of `family` says it, read by the file's own words."""
    if family.lists_layers:
        return layer  # our own file is the record
    source = MemorySource(family, layer)
    try:
        claim = family.claim(source)
        return read_layer(family, source, claim.layers[layer.name])
    except (CheckpointError, FormatError, KeyError):
        return layer  # the container decides how it is read


def count_conversions(origin: str, target: str) -> str:
    """Return how many of the kinds that `origin` holds `target` holds too, as a cell."""
    held = list_held(origin)
    if not is_written(FAMILIES[target]):
        return "-"
    if not held:
        return "by layer"
    count = sum(explain(FAMILIES[target], layer) is None for layer in held.values())
    return "all" if count == len(held) else f"{count} of {len(held)}" if count else "none"


def make_page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *list_families(), *list_kinds(), *list_conversions()]) + "\n"


def list_families() -> list[str]:
    """Return the table of families."""
    lines = [
        "## Families",
        "",
        "| name | what | container | read | written |",
        "|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        page = find_page(name)
        shown = f"[`{name}`]({page})" if page else f"`{name}`"
        written = "yes" if is_written(family) else "no"
        lines.append(f"| {shown} | {family.title} | {family.container} | yes | {written} |")
    return [*lines, ""]


def find_page(name: str) -> str | None:
    """Return the page of a family: its own, or of the longest name that it begins with."""
    if name == "halfbyte":
        return "../formats.md"
    stems = [path.stem for path in FOLDER.glob("*.md") if path != PAGE]
    found = [stem for stem in stems if name.replace("_", "-").startswith(stem.replace("_", "-"))]
    return f"{max(found, key=len)}.md" if found else None


def list_kinds() -> list[str]:
    """Return which family holds which kind of layer, and why not."""
    names = [name for name, family in FAMILIES.items() if is_written(family)]
    reasons: dict[str, list[str]] = {name: [] for name in names}
    lines = [
        "## What each family holds",
        "",
        "The number of a reason is that of the family's list below.",
        "",
        f"| layer | {' | '.join(names)} |",
        f"|{'---|' * (len(names) + 1)}",
    ]
    for kind in KINDS:
        layer = Layer(kind.layer, make_linear(kind))
        cells = [make_cell(explain(FAMILIES[name], layer), reasons[name]) for name in names]
        lines.append(f"| {kind.title} | {' | '.join(cells)} |")
    for name, texts in reasons.items():
        if texts:
            lines += ["", f"What {name} says of a layer that it does not hold:", ""]
            lines += [f"{number}. {text}" for number, text in enumerate(texts, 1)]
    return [*lines, ""]


def make_cell(reason: str | None, known: list[str]) -> str:
    """Return "yes", or "no" with the number of the reason in `known`, which it is added to."""
    if reason is None:
        return "yes"
    if reason not in known:
        known.append(reason)
    return f"no ({known.index(reason) + 1})"


def list_conversions() -> list[str]:
    """Return how many kinds of a row's family can be written as a column's."""
    names = [name for name, family in FAMILIES.items() if is_written(family)]
    lines = [
        "## Conversions",
        "",
        "From the family of the row to that of the column: how many of the kinds of layers above",
        "that the first holds the second holds too. `by layer`: what such a file holds decides.",
        "",
        f"| from | {' | '.join(names)} |",
        f"|{'---|' * (len(names) + 1)}",
    ]
    for origin in FAMILIES:
        cells = [count_conversions(origin, target) for target in names]
        lines.append(f"| {origin} | {' | '.join(cells)} |")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    page = make_page()
    if parser.parse_args(arguments).check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            print(
                f"docs/checkpoints/{PAGE.name} is out of date: run tools/make_checkpoint_table.py"
            )
            return 1
        return 0
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
