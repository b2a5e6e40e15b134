"""Bytes of an open file by place, without moving its position."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.errors import CheckpointError

READ_BYTES = 2**30  # of one system call; Linux takes at most 2 GiB


def read_range(path: Path, fd: int, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes [start, start + num_bytes) of an open file; CheckpointError if it has less."""
    buffer: npt.NDArray[np.uint8] = np.empty(num_bytes, dtype=np.uint8)
    view: Any = buffer.data
    done = 0
    while done < num_bytes:
        count = os.preadv(fd, [view[done : done + READ_BYTES]], start + done)
        if count <= 0:
            raise CheckpointError(f"{path}: ends at byte {start + done}; it has been cut short")
        done += count
    return buffer
