"""What docs/learn says goes wrong does, and is reported in the words that the pages quote."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Program, list_missing, run_program

FOLDER = ROOT / "docs" / "learn"


@dataclass(frozen=True)
class Fault:
    """A change of a program, and the report of it as its page quotes it."""

    name: str
    program: str
    page: str
    sound: str
    faulty: str
    quote: str


FAULTS = (
    Fault(
        "no wait for the product",
        "01_scaled_mma.py",
        "01-scaled-mma.md",
        "    cute.arch.mbarrier_wait(done, 0)\n",
        "",
        "tensor-memory-race: loads from columns [0, 32) of tensor memory while work of warp 0 "
        "... still writes",
    ),
    Fault(
        "lanes of another warp",
        "02_tensor_memory.py",
        "02-tensor-memory.md",
        "make_tmem_copy(read, cells).get_slice(thread)",
        "make_tmem_copy(read, cells).get_slice(thread % 32)",
        "tensor-memory-lanes: warp 3 (number 3 of its warpgroup) addresses lane 0; "
        "it reaches lanes 96 to 127",
    ),
    Fault(
        "not given back",
        "02_tensor_memory.py",
        "02-tensor-memory.md",
        "cute.arch.dealloc_tmem(pointer, COLUMNS)",
        "pass",
        "tensor-memory-not-freed",
    ),
    Fault(
        "16 bytes too many",
        "03_tma.py",
        "03-tma.md",
        "BOX_BYTES = ROWS * COLUMNS * 2",
        "BOX_BYTES = ROWS * COLUMNS * 2 + 16",
        "pending arrivals 0/1, missing bytes 16",
    ),
    Fault(
        "bytes of one CTA",
        "04_two_ctas.py",
        "04-two-ctas.md",
        "PAIR_BYTES = (256 + 128) * 64 * 2",
        "PAIR_BYTES = (256 + 128) * 64",
        "missing bytes -24576",
    ),
    Fault(
        "both CTAs expect",
        "04_two_ctas.py",
        "04-two-ctas.md",
        "if rank == 0:  # one barrier",
        "if rank < 2:  # one barrier",
        "exit-with-pending-bytes: ... missing bytes 49152",
    ),
    Fault(
        "commit to one CTA",
        "04_two_ctas.py",
        "04-two-ctas.md",
        "tcgen05.commit(multiplied, BOTH, SHAPE.group)",
        "tcgen05.commit(multiplied, None, SHAPE.group)",
        "parity 0, 0 phases completed",
    ),
    Fault(
        "reading before the barrier",
        "05_rings_and_roles.py",
        "03-tma.md",
        "position = RingPosition.consumer(STAGES)\n    lane",
        "position = RingPosition.producer(STAGES)\n    lane",
        "read-in-flight: reads shared memory [0x600, 0x604) ... while the asynchronous operation "
        "that warp 0 issued ... still writes",
    ),
    Fault(
        "every lane arrives",
        "05_rings_and_roles.py",
        "05-rings-and-roles.md",
        "        with cute.arch.elect_one():\n"
        "            cute.arch.mbarrier_arrive(work.ring.empty(position))",
        "        cute.arch.mbarrier_arrive(work.ring.empty(position))",
        "over-arrival: 32 lanes of the warp arrive together, more than the phase waits for",
    ),
    Fault(
        "given back too early",
        "06_accumulator_pair.py",
        "06-persistence.md",
        "pair.is_free_after(step, COLUMNS, NUM_PARTS)",
        "step == 0",
        "tensor-memory-race: loads from columns [192, 224) ... while work of warp 4 "
        "... still writes [208, 464)",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_reported_as_its_page_says(fault: Fault, b200: Any, tmp_path: Path) -> None:
    text = (FOLDER / fault.program).read_text(encoding="utf-8")
    assert text.count(fault.sound) == 1
    changed = text.replace(fault.sound, fault.faulty)
    said, _ = run_program(Program(fault.program, None, changed, (), (), ()), b200, tmp_path)
    assert list_missing(said, (fault.quote,)) == [], said
    page = (FOLDER / fault.page).read_text(encoding="utf-8")
    assert f"`{fault.quote}" in " ".join(page.split())
