"""The block-scaled operand: packed codes and scales in one frozen record.

It is a plain record and not a torch.Tensor subclass: an operation that does not know the format
fails loudly instead of reading bytes as numbers.
"""

from dataclasses import dataclass

import torch

from halfbyte.errors import FormatError
from halfbyte.formats.block_format import BlockFormat
from halfbyte.formats.dtypes import BYTE_SCALE_DTYPES, FLOAT_DTYPES


@dataclass(frozen=True, eq=False)
class BlockScaledTensor:
    """A logical [rows, columns] matrix; value = code * block_scale * global_scale.

    Attributes:
        format: the number format.
        data: [rows, format.row_bytes(columns)] uint8, row-major; 4-bit codes are packed two a
            byte, the low nibble holding the even column. Padding columns hold zero codes.
        scales: [rows, format.num_blocks(columns)], row-major ("linear" scale layout):
            float8_e4m3fn, float8_e8m0fnu, or float16/bfloat16/float32 by `format.scale`.
        global_scale: [] float32 multiplier, present exactly when `format.has_global_scale`.
        columns: the logical number of columns, before padding.
    """

    format: BlockFormat
    data: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None
    columns: int

    def __post_init__(self) -> None:
        """Check that shapes, dtypes and scale levels are those of the format."""
        if not isinstance(self.format, BlockFormat):
            raise FormatError(f"format: {type(self.format).__name__}, wanted BlockFormat")
        if not isinstance(self.columns, int) or self.columns < 0:
            raise FormatError(f"columns {self.columns!r}: wanted an integer of 0 or more")
        for name, part in (("data", self.data), ("scales", self.scales)):
            _check_is_tensor(part, name, self.format)
        rows = self.data.shape[0] if self.data.ndim == 2 else -1
        wanted_data = (rows, self.format.row_bytes(self.columns))
        _check(self.data, "data", self.format, wanted_data, (torch.uint8,))
        wanted_scales = (rows, self.format.num_blocks(self.columns))
        byte_dtype = BYTE_SCALE_DTYPES.get(self.format.scale)
        dtypes = FLOAT_DTYPES if byte_dtype is None else (byte_dtype,)
        _check(self.scales, "scales", self.format, wanted_scales, dtypes)
        if self.format.has_global_scale != (self.global_scale is not None):
            wanted = "needs" if self.format.has_global_scale else "has no"
            raise FormatError(f"{self.format.name} {wanted} global_scale, got {self.global_scale}")
        if self.global_scale is not None:
            _check_is_tensor(self.global_scale, "global_scale", self.format)
            _check(self.global_scale, "global_scale", self.format, (), (torch.float32,))

    @property
    def shape(self) -> tuple[int, int]:
        """The logical (rows, columns), without padding."""
        return self.data.shape[0], self.columns

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, block scales and global scale together."""
        tensors = [self.data, self.scales]
        if self.global_scale is not None:
            tensors.append(self.global_scale)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def take_rows(self, start: int, stop: int) -> "BlockScaledTensor":
        """Return rows [start, stop) as a record that shares this one's memory."""
        return BlockScaledTensor(
            self.format,
            self.data[start:stop],
            self.scales[start:stop],
            self.global_scale,
            self.columns,
        )


def _check_is_tensor(part: object, name: str, block_format: BlockFormat) -> None:
    if not isinstance(part, torch.Tensor):
        raise FormatError(f"{block_format.name} {name}: {type(part).__name__}, wanted torch.Tensor")


def _check(
    tensor: torch.Tensor,
    name: str,
    block_format: BlockFormat,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise FormatError(f"{block_format.name} {name}: dtype {tensor.dtype}, wanted {wanted}")
    if tuple(tensor.shape) != shape:
        raise FormatError(
            f"{block_format.name} {name}: shape {tuple(tensor.shape)}, wanted {shape}"
        )
