"""What tensor copies do, element by element in NumPy: boxes, fills, strides, swizzled lines.

The swizzle tables are those of the PTX ISA ("Swizzling Modes"): row = line of 128 bytes, entry =
which 16-byte chunk of the source line stands there.
"""

import itertools

import numpy as np

_LINE = list(range(8))
SWIZZLE_TABLES = {
    (0, "16"): [_LINE],
    (32, "16"): [_LINE, [1, 0, 3, 2, 5, 4, 7, 6]],
    (64, "16"): [
        _LINE,
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
        [3, 2, 1, 0, 7, 6, 5, 4],
    ],
    (128, "16"): [
        _LINE,
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
        [3, 2, 1, 0, 7, 6, 5, 4],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [5, 4, 7, 6, 1, 0, 3, 2],
        [6, 7, 4, 5, 2, 3, 0, 1],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ],
    (128, "32"): [
        _LINE,
        [2, 3, 0, 1, 6, 7, 4, 5],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [6, 7, 4, 5, 2, 3, 0, 1],
    ],
    (128, "64"): [_LINE, [4, 5, 6, 7, 0, 1, 2, 3]],
}


def swizzle_bytes(dense, swizzle, atom="16", start=0):
    """Return `dense` as it lies in shared memory from address `start` on, a multiple of 128."""
    flips = atom == "32_flip_8"
    table = SWIZZLE_TABLES[swizzle, "32" if flips else atom]
    lines = -(-dense.size // 128)
    padded = np.zeros(lines * 128, np.uint8)
    padded[: dense.size] = dense
    source = padded.reshape(lines, 8, 2, 8)
    target = np.empty_like(source)
    for line in range(lines):
        number = line + start // 128
        for position, chunk in enumerate(table[number % len(table)]):
            halves = source[line, chunk]
            target[line, position] = halves[::-1] if flips and number % 2 else halves
    return target.reshape(-1)


def take_box(tensor, corner, box, strides=None, fill=0):
    """Return the box of `tensor` (outermost dimension first) as bytes, innermost element first.

    `corner`, `box` and `strides` count from the innermost dimension, as tensor maps do.
    """
    strides = strides or [1] * len(box)
    counts = [-(-extent // stride) for extent, stride in zip(box, strides, strict=True)]
    elements = []
    for index in itertools.product(*(range(count) for count in counts[::-1])):
        at = [
            first + i * stride
            for first, i, stride in zip(corner[::-1], index, strides[::-1], strict=True)
        ]
        is_inside = all(0 <= i < size for i, size in zip(at, tensor.shape, strict=True))
        elements.append(tensor[tuple(at)] if is_inside else fill)
    return np.array(elements, tensor.dtype).view(np.uint8)


def walk_im2col(shape, start, lower, upper, strides, pixels):
    """Yield (spatial position..., image) of each pixel, W first; `shape` is [W, H, D..., N]."""
    position = list(start)
    spatial = len(shape) - 1
    for _ in range(pixels):
        yield tuple(position)
        for i in range(spatial):
            position[i] += strides[i]
            if position[i] <= shape[i] - 1 + upper[i]:
                break
            position[i] = lower[i]
        else:
            position[spatial] += 1
