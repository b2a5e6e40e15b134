"""The configurations and shapes that the Hopper GEMM is proven on, and selections from them."""

from collections.abc import Iterator
from typing import Any, Final

from halfbyte.errors import FormatError
from halfbyte.kernels.gemm_w4_wgmma.config import (
    OUT_DTYPES,
    WgmmaGemmConfig,
    check_legal,
)
from tests.covering_array import make_covering_array
from tests.kernels.gemm_w4_wgmma.gemm_runs import GemmShape

# Every width class: whole tiles staged at once or in parts, all kinds of slots, one stmatrix of 8.
TOKENS: Final = (8, 16, 48, 64, 128, 192, 208, 256)
PRODUCTS: Final = (("fp8", "e2m1"), ("fp8", "int4"), ("exact", "e2m1"))
AXES: Final[dict[str, tuple[Any, ...]]] = {
    "tokens": TOKENS,
    "product": PRODUCTS,
    "cluster": (1, 2),
    "lora_dtype": (None, "float16", "bfloat16"),
    "out_dtype": OUT_DTYPES,
    "few_stages": (False, True),
    "has_bias": (False, True),
    "has_alpha": (False, True),
    "use_pdl": (False, True),
    "raster_group": (1, 2, 32),
}
# Ragged and whole, odd and even numbers of blocks, one tile and several of a cluster.
SHAPES: Final = (
    (1, 8, 32, 1),
    (3, 5, 130, 64),
    (130, 257, 95, 2),
    (129, 131, 384, 64),
    (300, 264, 520, 3),
    (520, 776, 289, 1),
)
RANKS: Final = (8, 32, 40, 96, 128)


def make_config(row: dict[str, Any]) -> WgmmaGemmConfig | None:
    """Return the configuration of a row of `AXES` with most stages, or 3; None where illegal."""
    mode, weight = row["product"]
    names = ("tokens", "cluster", "lora_dtype", "out_dtype", "has_bias", "has_alpha")
    chosen = {name: row[name] for name in (*names, "use_pdl", "raster_group")}
    for stages in (3,) if row["few_stages"] else (8, 7, 6, 5, 4):
        config = WgmmaGemmConfig(mode=mode, weight=weight, stages=stages, **chosen)
        try:
            check_legal(config)
        except FormatError:
            continue
        return config
    return None


def list_pairwise_configs(strength: int = 2) -> list[WgmmaGemmConfig]:
    """Return the configurations in which any two (or `strength`) choices meet, where legal."""
    configs = [make_config(row) for row in make_covering_array(AXES, strength)]
    return list(dict.fromkeys(config for config in configs if config is not None))


def list_cases(config: WgmmaGemmConfig, start: int) -> Iterator[tuple[GemmShape, bool]]:
    """Yield (shape, whether the data is integer), ranks and kinds of data in turn."""
    for number, (m, n, k, max_clusters) in enumerate(SHAPES):
        rank = 0 if config.lora_dtype is None else RANKS[(start + number) % len(RANKS)]
        yield GemmShape(m, n, k, rank, max_clusters), (start + number) % 2 == 0
