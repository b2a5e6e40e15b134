"""The grid of configurations and shapes that the GEMM is proven on, and selections from it."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from halfbyte.kernels.gemm_w4a4.config import (
    ACTIVATIONS,
    LARGE_TILES,
    OUT_DTYPES,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    TileConfig,
)
from tests.covering_array import make_covering_array
from tests.kernels.gemm_w4a4.operands import GemmShape

FACTORS: Final = {
    "none": EpilogueConfig(),
    "column_scale": EpilogueConfig(has_column_scale=True),
    "bias": EpilogueConfig(has_bias=True),
    "both": EpilogueConfig(has_column_scale=True, has_bias=True),
}
# Chunks of 32 columns of rank, and of 64.
RANKS: Final = {0: (0,), 32: (16, 24, 32), 64: (64, 96, 128, 256)}
LOW_RANK: Final = (
    (0, "tail"),
    *itertools.product((32, 64), ("tail", "spread", "own_ring")),
)
SHAPES: Final = (
    GemmShape(1, 8, 32),
    GemmShape(1, 1, 1),
    GemmShape(3, 5, 33),
    GemmShape(130, 257, 95),
    GemmShape(129, 131, 257),
    GemmShape(300, 264, 520),
    GemmShape(257, 515, 1055),
    GemmShape(520, 776, 289, max_clusters=2),
    GemmShape(70, 1033, 512, max_clusters=1),
)
# What decides the compiled program; a rank, a shape and the data do not.
COMPILED_AXES: Final[dict[str, tuple[Any, ...]]] = {
    "low_rank": LOW_RANK,
    "tile": LARGE_TILES,
    "factors": tuple(FACTORS),
    "activation": ACTIVATIONS,
    "out_dtype": OUT_DTYPES,
    "lora_dtype": OUT_DTYPES,
    "block_format": ("nvfp4", "mxfp4"),
    "scheduler": ("static", "clc"),
    "has_alpha": (False, True),
    "use_pdl": (False, True),
    "target": ("sm_100a", "sm_103a"),
}


@dataclass(frozen=True)
class GridCase:
    """One launch: a rank, a shape, and whether the data is integer."""

    rank: int
    shape: GemmShape
    is_integer: bool


def make_config(row: dict[str, Any]) -> GemmConfig:
    """Return the configuration of a row of `COMPILED_AXES`."""
    chunk, placement = row["low_rank"]
    return GemmConfig(
        target=row["target"],
        block_format=row["block_format"],
        out_dtype=row["out_dtype"],
        tile=row["tile"],
        low_rank=LowRankConfig(row["lora_dtype"], chunk, placement) if chunk else None,
        epilogue=replace(
            FACTORS[row["factors"]], activation=row["activation"], has_alpha=row["has_alpha"]
        ),
        scheduler=row["scheduler"],
        use_pdl=row["use_pdl"],
    )


def list_pairwise_configs(target: str, strength: int = 2) -> list[GemmConfig]:
    """Return the configurations of `target` in which any two (or `strength`) choices meet."""
    rows = make_covering_array(COMPILED_AXES, strength)
    return list(dict.fromkeys(make_config(row) for row in rows if row["target"] == target))


def list_full_configs(
    target: str, tile: TileConfig, block_format: str, out_dtype: str, scheduler: str
) -> list[GemmConfig]:
    """Return all configurations with these choices: factors, ranks and placements of low rank."""
    fixed = {
        "target": target,
        "tile": tile,
        "block_format": block_format,
        "out_dtype": out_dtype,
        "lora_dtype": out_dtype,
        "scheduler": scheduler,
        "activation": "none",
        "has_alpha": False,
        "use_pdl": False,
    }
    axes = itertools.product(LOW_RANK, FACTORS)
    return [make_config(fixed | {"low_rank": low, "factors": factors}) for low, factors in axes]


def list_shape_cases(config: GemmConfig, start: int) -> Iterator[GridCase]:
    """Yield every shape once, the ranks of `config` and kinds of data in turn.

    Two neighbouring `start` together run all shapes with both kinds of data.
    """
    ranks = RANKS[config.low_rank.chunk if config.low_rank is not None else 0]
    for number, shape in enumerate(SHAPES):
        is_integer = (start + number) % 2 == 0 and config.epilogue.activation == "none"
        yield GridCase(ranks[(start + number) % len(ranks)], shape, is_integer)
