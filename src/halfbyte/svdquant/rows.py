"""Working through a large matrix a few rows at a time."""

from collections.abc import Iterator
from dataclasses import replace

from halfbyte.formats.quantized_linear import QuantizedLinear

ROW_CHUNK_ELEMENTS = 4 * 2**20  # 16 MiB of float32


def iter_row_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) ranges that cover `rows`, each of about ROW_CHUNK_ELEMENTS elements."""
    step = max(1, ROW_CHUNK_ELEMENTS // max(columns, 1))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def slice_rows(linear: QuantizedLinear, start: int, stop: int) -> QuantizedLinear:
    """Return output features [start, stop) of `linear`, sharing its memory."""
    return replace(
        linear,
        weight=linear.weight.take_rows(start, stop),
        channel_scale=None if linear.channel_scale is None else linear.channel_scale[start:stop],
        lora_up=None if linear.lora_up is None else linear.lora_up[start:stop],
        bias=None if linear.bias is None else linear.bias[start:stop],
    )
