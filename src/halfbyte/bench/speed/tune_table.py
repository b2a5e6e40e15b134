"""The table of measured choices that `kernels.gemm_w4_wgmma.choose` reads: one JSON object a line.

A line says for one product on one GPU which configuration was fastest, what it took with and
without the quantizer, and whether torch's 16-bit product of the merged weight was faster still.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from halfbyte.errors import CheckpointError, UsageError
from halfbyte.kernels.gemm_w4_wgmma.measured_choices import FILE_NAME, parse_line


@dataclass(frozen=True)
class TunedChoice:
    """One line of the table.

    Attributes:
        gpu: `torch.cuda.get_device_name()`.
        mode, weight, out_dtype, m, n, k, rank: the product; with `gpu` they name the line.
        tokens, stages, cluster, splits: of the fastest configuration.
        gemm_us: the GEMM alone. quantize_us: the quantizer alone. total_us: both, one after the
            other. bf16_us: torch's product of the merged weight in 16 bits.
        fastest: "kernel", or "bf16" where total_us is larger than bf16_us.
        extra: all else that the configuration chose, by its field's name.
    """

    gpu: str
    mode: str
    weight: str
    out_dtype: str
    m: int
    n: int
    k: int
    rank: int
    tokens: int
    stages: int
    cluster: int
    splits: int
    gemm_us: float
    quantize_us: float
    total_us: float
    bf16_us: float
    fastest: Literal["kernel", "bf16"]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str | int, ...]:
        """What a line is about, in the order that lines are sorted by."""
        product = (self.mode, self.weight, self.out_dtype, self.n, self.k, self.rank, self.m)
        return (self.gpu, *product)


def choose_fastest(total_us: float, bf16_us: float) -> Literal["kernel", "bf16"]:
    """Return what to run: never what takes longer than the 16-bit product."""
    return "bf16" if total_us > bf16_us else "kernel"


def read_table(path: Path) -> list[TunedChoice]:
    """Return the lines of a table; none where there is no file.

    Raises:
        CheckpointError: a line is no such object.
        UsageError: the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().decode(errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    choices = []
    for number, line in enumerate(lines, start=1):
        place = f"{path} line {number}"
        try:
            choices.append(TunedChoice(**parse_line(line, place)))
        except TypeError as error:
            raise CheckpointError(f"{place} is no measured choice: {error}") from None
    return choices


def find_table(folder: Path | None) -> Path:
    """Return the table in `folder`; None: the one that the chooser reads."""
    if folder is not None:
        return folder / FILE_NAME
    return Path(str(resources.files("halfbyte.kernels.gemm_w4_wgmma"))) / FILE_NAME


def merge_choices(old: Iterable[TunedChoice], measured: Iterable[TunedChoice]) -> list[TunedChoice]:
    """Return all lines, sorted; of two about the same the measured one."""
    by_key = {choice.key: choice for choice in [*old, *measured]}
    return [by_key[key] for key in sorted(by_key)]


def write_table(path: Path, choices: Iterable[TunedChoice]) -> None:
    """Write the lines at once, so that no reader sees half a table.

    Raises:
        UsageError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    text = "".join(json.dumps(asdict(choice)) + "\n" for choice in choices)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}") from None
