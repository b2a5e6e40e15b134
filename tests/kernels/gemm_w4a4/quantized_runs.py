"""One call of a GEMM that quantizes y for the next layer, and the bytes that it must write."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halfbyte.formats.activation import get_activation_format
from halfbyte.kernels.gemm_w4a4.source import list_arguments
from halfbyte.reference.quantize_act_lora import quantize_rows
from tests.kernels.gemm_w4a4.gemm_runs import Launch, OutputBuffer
from tests.kernels.gemm_w4a4.operands import DTYPES, GemmOperands, list_scale_offsets

POISON_BYTE = 0x7F
BLOCK_SIZE = 16
SF_TILE_BYTES = 512
GUARD_BYTES = 512  # poison on both sides of the scales
GUARD_COLUMNS = 16  # poison between the rows of codes: they stay multiples of 16 bytes apart


@dataclass(frozen=True)
class QuantizedRun:
    """What a launch wrote, on the CPU.

    Attributes:
        y: [M, N], or None where the epilogue does not write it.
        codes: uint8 [M, N_pad / 2]. sf: uint8, flat.
    """

    y: torch.Tensor | None
    codes: np.ndarray[Any, np.dtype[np.uint8]]
    sf: np.ndarray[Any, np.dtype[np.uint8]]


class CodeBuffer:
    """Codes [M, N_pad / 2] and scales of [M, N], each inside poison, on the virtual GPU."""

    def __init__(self, m: int, n: int) -> None:
        """Poison everything."""
        width = -(-n // 32) * 16
        sf_bytes = -(-m // 128) * -(-n // (4 * BLOCK_SIZE)) * SF_TILE_BYTES
        self._codes = _make_poison(m + 2, width + GUARD_COLUMNS)
        self._sf = _make_poison(1, sf_bytes + 2 * GUARD_BYTES)
        self._inside_codes = (slice(1, m + 1), slice(0, width))
        self._inside_sf = (0, slice(GUARD_BYTES, GUARD_BYTES + sf_bytes))
        self.codes = self._codes[self._inside_codes]
        self.sf = self._sf[self._inside_sf]

    def read(self) -> tuple[Any, Any]:
        """Return codes and scales on the CPU; AssertionError where anything around was written."""
        found = []
        for buffer, inside in ((self._codes, self._inside_codes), (self._sf, self._inside_sf)):
            values = buffer.cpu().numpy()
            found.append(values[inside].copy())
            values[inside] = POISON_BYTE
            outside = np.argwhere(values != POISON_BYTE)
            assert not len(outside), f"written outside of the output at {outside[:4].tolist()}"
        return found[0], found[1]


def _make_poison(rows: int, columns: int) -> torch.Tensor:
    return torch.full((rows, columns), POISON_BYTE, dtype=torch.uint8).cuda()


def run_quantized(gpu: Any, launch: Launch, operands: GemmOperands) -> QuantizedRun:
    """Return what one launch wrote; nothing may be found, and nothing around outputs be written.

    `operands` hold next_smooth and next_global_scale where the configuration takes them.
    """
    config, shape = operands.config, operands.shape
    quantized = CodeBuffer(shape.m, shape.n)
    given = {name: tensor.cuda() for name, tensor in operands.tensors.items()}
    given |= {"next_codes": quantized.codes, "next_sf": quantized.sf}
    dense = None
    if config.epilogue.has_dense_output:
        dense = OutputBuffer(shape.m, shape.n, DTYPES[config.out_dtype])
        given["y"] = dense.y
    before = len(gpu.log)
    launch(tuple(given[name] for name in list_arguments(config)), shape.max_clusters)
    records = list(gpu.log)[before:]
    assert len(records) == 1, f"{len(records)} launches, 1 wanted"
    found = [str(finding) for finding in records[0].findings]
    assert not found, f"the virtual GPU found {found}"
    return QuantizedRun(None if dense is None else dense.read(), *quantized.read())


def quantize_by_reference(y: torch.Tensor, operands: GemmOperands) -> QuantizedRun:
    """Return the bytes that the reference makes of y [M, N] for the next layer, and padding."""
    epilogue = operands.config.epilogue
    m, n = y.shape
    z = y.float().numpy()
    if epilogue.has_next_smooth:
        with np.errstate(over="ignore", invalid="ignore"):
            z = (z / operands.tensors["next_smooth"].numpy()).astype(np.float32)
    global_scale = None
    if epilogue.has_next_global_scale:
        global_scale = np.float32(operands.tensors["next_global_scale"].item())
    wanted = quantize_rows(z, get_activation_format(epilogue.next_activation), global_scale)
    assert wanted.scale_bytes is not None
    codes = np.zeros((m, -(-n // 32) * 32), dtype=np.uint8)
    codes[:, : wanted.codes.shape[1]] = wanted.codes
    blocks = wanted.scale_bytes.shape[1]
    sf = np.zeros(-(-m // 128) * -(-blocks // 4) * SF_TILE_BYTES, dtype=np.uint8)
    sf[list_scale_offsets(np.arange(m), blocks)] = wanted.scale_bytes
    return QuantizedRun(y, codes[:, ::2] | codes[:, 1::2] << 4, sf)


def assert_same_bytes(found: QuantizedRun, wanted: QuantizedRun) -> None:
    """Assert equal codes and scales, naming the first difference."""
    for name, one, other in (
        ("codes", found.codes, wanted.codes),
        ("scales", found.sf, wanted.sf),
    ):
        assert one.shape == other.shape
        wrong = np.argwhere(one != other)
        assert not len(wrong), (
            f"{len(wrong)} bytes of {name} differ, first at {wrong[0].tolist()}: "
            f"{one[tuple(wrong[0])]:#04x}, the reference has {other[tuple(wrong[0])]:#04x}"
        )


def find_scales(run: QuantizedRun, n: int, row: int) -> Any:
    """Return the scale bytes of a row of y [M, n]."""
    offsets = list_scale_offsets(np.array([row]), -(-n // BLOCK_SIZE))
    return run.sf[offsets[0]]
