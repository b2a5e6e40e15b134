"""Inputs that quantizers get wrong: zeros, ties, subnormals, saturation, what is not finite."""

import torch

from halfbyte.reference.decode import make_value_table
from tests.kernels.quantize_act_lora.quantize_runs import DTYPES, Operands, pad_rows

SPAN = 64  # columns that every block length divides
TINY = 2.0**-24  # float16's smallest subnormal


def make_ties(dtype: str) -> Operands:
    """Return rows whose scale is 1 and whose values are on, just above and just below ties."""
    table = make_value_table("e2m1")[:8]
    ties = torch.from_numpy((table[1:] + table[:-1]) / 2)
    row = torch.cat([ties, -ties, torch.tensor([6.0, -0.0])]).repeat(4)
    x = torch.stack([row, row * 2.0, row * 0.5, -row]).to(DTYPES[dtype])
    one = torch.ones(row.numel())
    smooth = one.clone()
    smooth[0::3] = torch.nextafter(one[0::3], 2 * one[0::3])
    smooth[1::3] = torch.nextafter(one[1::3], 0 * one[1::3])
    smooth[row == 6.0] = 1.0
    return Operands(pad_rows(x), smooth, None)


def make_tiny_ties(dtype: str) -> Operands:
    """Return ties of numbers so small that remainders of quotients are subnormal, where they fit.

    A negative smooth factor takes its sign along.
    """
    ties = make_ties(dtype)
    assert ties.smooth is not None
    tiny = 2.0**-118 if dtype == "bfloat16" else 2.0**-12
    smooth = ties.smooth.clone()
    smooth[32::5] *= -1.0
    return Operands(pad_rows(ties.x * tiny), smooth, None)


def make_extremes(dtype: str) -> Operands:
    """Return 1 row of spans: zero, -0, subnormal, flushed, saturating, one outlier, negative."""
    draw = torch.Generator().manual_seed(5)
    large = 6.0e4 if dtype == "float16" else 3.0e38
    smallest = torch.finfo(DTYPES[dtype]).smallest_normal
    noise = torch.randn((1, SPAN), generator=draw)
    spans = [
        torch.zeros(1, SPAN),
        -torch.zeros(1, SPAN),
        torch.linspace(-30, 30, SPAN).round()[None] * max(TINY, smallest / 64),
        noise * 1e-3,
        noise * 1e-6,
        noise.sign() * large,
        torch.where(torch.arange(SPAN) % 16 == 7, torch.tensor(large), noise),
        -noise.abs() - 0.2,
    ]
    x = torch.cat(spans, dim=1).to(DTYPES[dtype])
    return Operands(pad_rows(x), None, None)


def make_extreme_smooth(dtype: str) -> Operands:
    """Return rows divided by numbers from 2^-149 to the largest float32, 0 and infinity."""
    exponents = torch.linspace(-149, 127, 3 * SPAN).double()
    smooth = torch.exp2(exponents).float()
    smooth[SPAN // 2] = 0.0
    smooth[-1] = float("inf")
    draw = torch.Generator().manual_seed(6)
    x = torch.randn((3, smooth.numel()), generator=draw).to(DTYPES[dtype])
    x[1, ::7] = 0.0
    x[2] = x[2].sign() * torch.finfo(DTYPES[dtype]).smallest_normal
    return Operands(pad_rows(x), smooth, None)


def make_magnitudes(dtype: str) -> Operands:
    """Return rows of all magnitudes over columns with smooth of all magnitudes.

    Where three-instruction quotients end and the plain ones begin, every row and column differs.
    """
    draw = torch.Generator().manual_seed(9)
    low, high = (-24, 15) if dtype == "float16" else (-133, 126)
    rows = torch.exp2(torch.linspace(low, high, 53).round().double())
    groups = torch.exp2(torch.tensor([-21, -17, -16, -9, 0, 9, 15, 16, 17, 21]).double())
    x = rows[:, None] * (torch.randn((rows.numel(), 32 * groups.numel()), generator=draw).double())
    smooth = groups.repeat_interleave(32) * (1.0 + torch.rand(x.shape[1], generator=draw) / 2)
    largest = torch.finfo(DTYPES[dtype]).max
    return Operands(pad_rows(x.clamp(-largest, largest).to(DTYPES[dtype])), smooth.float(), None)


def make_spoilt(dtype: str) -> Operands:
    """Return random rows; NaN, infinity and -infinity sit in one block of one row each."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn((5, 3 * SPAN), generator=draw).to(DTYPES[dtype])
    x[1, SPAN + 3] = float("nan")
    x[2, 1] = float("inf")
    x[4, -1] = float("-inf")
    lora_down = pad_rows(torch.randn((10, 3 * SPAN), generator=draw).to(DTYPES[dtype]))
    return Operands(pad_rows(x), None, lora_down)


def make_every_float16() -> Operands:
    """Return every finite float16 up to 6 in magnitude, in blocks whose largest value is 6."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[every.abs() <= 6.0]
    every = torch.nn.functional.pad(every, (0, -every.numel() % (15 * SPAN)))
    blocks = torch.cat([every.reshape(-1, 15), torch.full((every.numel() // 15, 1), 6.0)], dim=1)
    return Operands(blocks.to(torch.float16).reshape(-1, 16 * SPAN), None, None)


def make_integers(m: int, k: int, rank: int, dtype: str) -> Operands:
    """Return small integers, whose products and sums are exact in float32 and in 16 bits."""
    draw = torch.Generator().manual_seed(8)
    x = torch.randint(-2, 3, (m, k), generator=draw).to(DTYPES[dtype])
    lora_down = torch.randint(-1, 2, (rank, k), generator=draw)
    lora_down[:, 100:] *= torch.arange(100, k) % 5 == 0  # few terms: the sums stay small
    return Operands(pad_rows(x), None, pad_rows(lora_down.to(DTYPES[dtype])))
