"""2,000 damaged checkpoints: an error that names the cause, or the sound file's numbers."""

import random
import re
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from halfbyte.errors import HalfbyteError
from tests.checkpoints.container_mutations import Payload
from tests.checkpoints.mutation_files import (
    RawFile,
    Reading,
    copy_file,
    is_same_reading,
    list_specimens,
    read_reference,
)
from tests.checkpoints.mutations import MUTATIONS

COUNT = 2_000
CI_STEP = 7
SECONDS = 10  # for one file of some hundred kB
SPARE_BYTES = 3 * 2**30  # of address space beside what the process has; a sound file needs 1 MB


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    number: int
    kind: str
    file: RawFile
    needles: tuple[str, ...]
    reading: Reading


class SlowReadError(BaseException):
    """Reading took longer than allowed; no Exception, so that nothing catches it."""


def make_cases(step: int = 1) -> Iterator[Case]:
    """Yield every `step`-th of the cases; a case is the same whatever the step."""
    specimens = list_specimens()
    kinds = sorted(MUTATIONS)
    number = made = 0
    while made < COUNT:
        kind = kinds[number % len(kinds)]
        draw = random.Random(f"{number} {kind}")
        number += 1
        sound, reading = draw.choice([s for s in specimens if applies(kind, s[0])])
        file = copy_file(sound)
        needles = MUTATIONS[kind](file, draw)
        if needles is None:
            continue
        made += 1
        if made % step == 0:
            yield Case(made, kind, file, needles, reading)


def applies(kind: str, file: RawFile) -> bool:
    """Return whether a file has a container of the kind that a mutation is for."""
    first = kind.split(":")[0]
    if first == "gguf":
        return file.family == "gguf"
    if first in ("pickle", "archive", "dump"):
        return any(name.endswith(".pt") for name in file.files) and (
            first != "dump" or file.family == "deepcompressor"
        )
    return bool(file.tensors) or first == "file"


@contextmanager
def limits() -> Iterator[None]:
    """Allow one file its time and memory."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SlowReadError(f"more than {SECONDS} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.fixture
def address_space() -> Iterator[None]:
    """Bound what the process may map, so that a huge allocation fails instead of swapping."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_BYTES, before[1])
    )
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def judge(case: Case, folder: Path) -> tuple[str, str]:
    """Return the outcome and what to say of it."""
    path = case.file.write(folder)
    try:
        with limits():
            _, reading, _ = read_reference(path, case.file.named)
    except HalfbyteError as error:
        text = str(error)
        if str(folder) not in text or not any(needle in text for needle in case.needles):
            return "unnamed error", text
        return "named error", text
    except (SlowReadError, Exception) as error:
        return "crash", f"{type(error).__name__}: {error}"
    if is_same_reading(reading, case.reading):
        return "equal", ""
    return explain_difference(case, reading)


# Other sound numbers in the places of the right ones: nothing in the file says so.
UNDETECTABLE = {
    "codes: nibbles swapped": "every byte is a pair of codes in either order; the family's "
    "keys, or a bf16 original, decide",
    "block: swizzled once more": "each order of the same positive scales is a sound one; "
    "shapes are equal where nothing is padded",
    "block: transposed under the old shape": "the same: the shape is the only witness, and it lies",
    "tensor: float16 for bfloat16": "the header's dtype is what says which of the two it is",
}
# What may be missing: a layer without it is a sound layer. A rank or a configuration that needs it
# is checked.
OPTIONAL = re.compile(
    r"(bias|smooth|smooth_factor|pre_quant_scale|wcscales|channel_scale|alpha|wtscale|"
    r"input_scale|activation)(s|_orig|\.0)?$",
    re.IGNORECASE,
)
# Tensors of dumps whose absence is a choice of the quantizer's: layers without smoothing or bias,
# modulations that stay unquantized (their weight in model.pt is that of the quantized one).
OPTIONAL_IN_DUMPS = re.compile(r"(smooth\.pt|\.bias|norm1\.linear\.weight\.scale\.0)$")


def find_reason(case: Case, reading: Reading, parts: set[str]) -> str | None:
    """Return why no reader can tell the file from a sound one, None if one could."""
    kind, name = case.kind, case.file.name
    if kind in UNDETECTABLE:
        return UNDETECTABLE[kind]
    if kind.startswith("dump"):
        if name.endswith(" gone>") and any(map(OPTIONAL_IN_DUMPS.search, case.needles[:2])):
            return "an optional tensor of a dump is missing"
        if name.endswith(" zero>") and parts <= {"lora_down", "lora_up", "bias", "weight"}:
            return "zero is a sound number of a weight, factor or bias"
        return None
    if set(reading) != set(case.reading):
        return None
    if kind == "tensor: missing" and case.needles[0].endswith("comfy_quant"):
        return "the mark alone tells ComfyUI's layer from ModelOpt's"
    if kind in ("tensor: missing", "tensor: renamed") and OPTIONAL.search(case.needles[0]):
        return "an optional part is missing; a tensor of another layer's name is not the layer's"
    if kind.startswith("config: ") and parts == {"activation"}:
        return "the description alone says how x is quantized"
    if kind == "config: one value" and "orig_shape" in name:
        return "the mark alone says how much of a padded weight is the layer's"
    if kind == "block: negative" and "INT4 in blocks of 32" in name:
        return "scales of this format have signs"
    if kind == "global: reciprocal" and "independent" in name:
        return "block scales far from 448, as if the scale was not made by amax / 2688"
    return None


def explain_difference(case: Case, reading: Reading) -> tuple[str, str]:
    layers = set(case.reading) ^ set(reading)
    parts = [
        f"{layer}.{part}"
        for layer in set(case.reading) & set(reading)
        for part in reading[layer]
        if not is_same_reading(
            {"": {"": case.reading[layer][part]}}, {"": {"": reading[layer][part]}}
        )
    ]
    reason = find_reason(case, reading, {part.rpartition(".")[2] for part in parts})
    if reason is not None:
        return "undetectable", reason
    return "SILENT", f"layers {sorted(layers)} parts {sorted(parts)}"


def run(step: int, folder: Path) -> None:
    Payload.path = str(folder / "executed")
    table: dict[str, Counter[str]] = {}
    failures = []
    reasons: Counter[str] = Counter()
    for case in make_cases(step):
        outcome, text = judge(case, folder / f"{case.number}")
        table.setdefault(case.kind, Counter())[outcome] += 1
        reasons[text] += outcome == "undetectable"
        if outcome in ("unnamed error", "crash", "SILENT"):
            failures.append(f"{outcome}: {case.number} {case.kind} of {case.file.name}: {text}")
        assert not Path(Payload.path).exists(), f"case {case.number} ran a pickle"
    print_table(table)
    for reason, count in reasons.items():
        if count:
            print(f"undetectable, {count}: {reason}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)


def print_table(table: dict[str, Any]) -> None:
    words = ("named error", "equal", "undetectable", "unnamed error", "crash", "SILENT")
    print(f"\n{'mutation':40}" + "".join(f"{word:>15}" for word in words))
    for kind in sorted(table):
        print(f"{kind:40}" + "".join(f"{table[kind][word] or '':>15}" for word in words))
    total: Counter[str] = sum(table.values(), Counter())
    print(f"{'total of ' + str(total.total()):40}" + "".join(f"{total[w]:>15}" for w in words))


def test_a_sample_of_damaged_files(tmp_path: Path, address_space: None) -> None:
    run(CI_STEP, tmp_path)


@pytest.mark.long
def test_all_damaged_files(tmp_path: Path, address_space: None) -> None:
    run(1, tmp_path)
