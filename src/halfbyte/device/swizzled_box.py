"""K-major tiles in shared memory as `wgmma` and TMA see them: rows of one swizzle span of bytes.

Eight rows make a swizzle atom; atoms follow one another. A box of TMA is a number of such rows; a
matrix descriptor (`device.warpgroup_product.make_descriptor`) points at one.
"""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from halfbyte.device.operand_load import BlockLoad, TmaOperand

ATOM_ROWS = 8
_SWIZZLE_BITS = {128: 3, 64: 2, 32: 1}


def make_box_layout(element: Any, rows: int, span: int) -> Any:
    """Return the composed layout of one box, [rows, span bytes of elements]."""
    return _compose(span, _make_rows(element, rows, span))


def make_box_tensor(pointer: Any, element: Any, shape: tuple[int, int], places: Any) -> Any:
    """Return boxes in shared memory as (rows, columns, place), swizzled.

    Args:
        pointer: to shared memory, aligned to 8 rows.
        element: type of the elements.
        shape: (rows, bytes of a row) of a box.
        places: layout of the boxes, in bytes.
    """
    rows, span = shape
    swizzle = cute.make_swizzle(_SWIZZLE_BITS[span], 4, 3)
    strides = cute.make_layout(places.shape, stride=_divide(places.stride, element.width // 8))
    layout = cute.append(_make_rows(element, rows, span), strides)
    return cute.make_tensor(cute.recast_ptr(pointer, swizzle, dtype=element), layout)


def make_load_operand(tensor: Any, rows: int, span: int, is_multicast: bool) -> TmaOperand:
    """Return the descriptor that loads boxes of [rows, span bytes] of a [rows, K] tensor."""
    make = cpasync.CopyBulkTensorTileG2SOp
    if is_multicast:
        make = cpasync.CopyBulkTensorTileG2SMulticastOp
    return _make_operand(make(), tensor, rows, span)


def make_store_operand(tensor: Any, rows: int, span: int) -> TmaOperand:
    """Return the descriptor that stores boxes of [rows, span bytes] of a [rows, columns] tensor."""
    return _make_operand(cpasync.CopyBulkTensorTileS2GOp(), tensor, rows, span)


def partition_boxes(
    operand: TmaOperand, boxes: Any, shape: tuple[int, int], multicast: Any = None
) -> BlockLoad:
    """Return the copies between `operand` and `boxes`, (rows, columns, place) in shared memory.

    Args:
        operand: descriptor and coordinates.
        boxes: from `make_box_tensor`.
        shape: (rows, elements of a row) of a box.
        multicast: mask of the CTAs that receive a box.
    """
    places = cute.local_tile(operand.tensor, shape, (None, None))
    target, source = cpasync.tma_partition(
        operand.atom,
        0,
        cute.make_layout(1),
        cute.group_modes(boxes, 0, 2),
        cute.group_modes(places, 0, 2),
    )
    return BlockLoad(operand.atom, source, target, multicast)


def _make_operand(operation: Any, tensor: Any, rows: int, span: int) -> TmaOperand:
    element = tensor.element_type
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation,
        tensor,
        make_box_layout(element, rows, span),
        (rows, span * 8 // element.width),
    )
    return TmaOperand(atom, coordinates)


def _make_rows(element: Any, rows: int, span: int) -> Any:
    columns = span * 8 // element.width
    return cute.make_layout((rows, columns), stride=(columns, 1))


def _compose(span: int, layout: Any) -> Any:
    return cute.make_composed_layout(cute.make_swizzle(_SWIZZLE_BITS[span], 4, 3), 0, layout)


def _divide(strides: Any, size: int) -> Any:
    if isinstance(strides, tuple):
        return tuple(_divide(stride, size) for stride in strides)
    return strides // size
