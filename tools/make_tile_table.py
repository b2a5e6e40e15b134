"""Writes docs/kernels/gemm_w4a4_tiles.md from the compiled tiles, or with --check compares it."""

import argparse
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from halfbyte.checks.cubin import CubinKernel, read_cubin
from halfbyte.checks.sass import SassKernel, disassemble
from halfbyte.kernels.gemm_w4a4.config import (
    BLOCK_SIZES,
    LARGE_TILES,
    EpilogueConfig,
    GemmConfig,
    LowRankConfig,
    StorageConfig,
    TileConfig,
    plan_storage,
)
from halfbyte.kernels.gemm_w4a4.source import make_source
from halfbyte.runtime.cute_compiler import compile_source

PAGE = Path(__file__).parents[1] / "docs" / "kernels" / "gemm_w4a4_tiles.md"
RANK: Final = 128
LARGEST: Final = GemmConfig(
    "sm_100a",
    "nvfp4",
    "float16",
    LARGE_TILES[0],
    LowRankConfig("float16"),
    EpilogueConfig(has_column_scale=True, has_bias=True),
)
FEW_TOKENS: Final = tuple(
    TileConfig(128, tokens, 1, swap=True, num_splits=splits)
    for tokens in (16, 32, 64)
    for splits in (1, 8)
)
TILES: Final = (*LARGE_TILES, *FEW_TOKENS)
HEAD = """# Tiles of gemm_w4a4

<!-- made by tools/make_tile_table.py -->

What each shipped tile takes: float16 output and low-rank branch, rank {rank} in chunks of 64 that
ride the main ring, column scale and bias, static scheduler, sm_100a. Registers are those of
ptxas {ptxas}; no tile has a stack, spills a register or touches local memory. Shared memory is per
CTA, of {capacity:,} bytes; a tile allocates all 512 columns of tensor memory and uses those named.
Nothing here is measured on silicon: sizes and code are the compiler's.
"""
COLUMNS = (
    "tile",
    "ring slots",
    "bytes a slot",
    "registers",
    "shared memory, used",
    "slack",
    "output staging",
    "accumulator columns",
    "scale columns",
    "MMAs in machine code",
)


@dataclass(frozen=True)
class CompiledTile:
    """One compiled configuration.

    Attributes:
        config: what was compiled.
        storage: its budget.
        sass, cubin: its machine code and what the cubin says of it.
        ptxas: CUDA version of the assembler.
    """

    config: GemmConfig
    storage: StorageConfig
    sass: SassKernel
    cubin: CubinKernel
    ptxas: str

    def list_products(self) -> list[str]:
        """Return the MMA instructions with their counts, e.g. `4 UTCOMMA.2CTA.4X`."""
        opcodes = [
            one.opcode for one in self.sass.instructions if re.match(r"UTC[A-Z]+MMA", one.opcode)
        ]
        return [f"{opcodes.count(opcode)} {opcode}" for opcode in sorted(set(opcodes))]


@cache
def compile_tile(config: GemmConfig) -> CompiledTile:
    """Return a configuration, compiled once in this process."""
    compiled = compile_source(make_source(config))
    (sass,) = disassemble(compiled.cubin)
    (cubin,) = read_cubin(compiled.cubin)
    return CompiledTile(config, plan_storage(config), sass, cubin, compiled.ptxas)


def make_row(compiled: CompiledTile) -> str:
    """Return a tile's row of the table."""
    storage = compiled.storage
    staging = "straight to global memory"
    if storage.num_output_slots:
        slots, columns = storage.num_output_slots, storage.output_slot_bytes // 64
        staging = f"{slots} x {columns} columns a warp"
    overlap = f", {storage.overlap_columns} shared" if storage.overlap_columns else ""
    cells = (
        str(compiled.config.tile),
        storage.num_stages,
        f"{storage.slot_bytes:,}",
        compiled.cubin.num_registers,
        f"{storage.used_bytes:,}",
        f"{storage.slack_bytes:,}",
        staging,
        f"{storage.accumulator_columns}{overlap}",
        storage.scale_columns,
        ", ".join(compiled.list_products()),
    )
    return f"| {' | '.join(map(str, cells))} |"


def make_page() -> str:
    """Return the page: one table per block format."""
    compiled = compile_tile(LARGEST)
    capacity = compiled.storage.capacity_bytes
    lines = [HEAD.format(rank=RANK, ptxas=compiled.ptxas, capacity=capacity)]
    for block_format in BLOCK_SIZES:
        lines += [
            f"## {block_format.upper()}",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{'---|' * len(COLUMNS)}",
        ]
        for tile in TILES:
            config = replace(LARGEST, block_format=block_format, tile=tile)
            lines.append(make_row(compile_tile(config)))
        lines.append("")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    page = make_page()
    if parser.parse_args(arguments).check:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page:
            print(f"{PAGE.name} is not what the compiler makes: run tools/make_tile_table.py")
            return 1
        return 0
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
