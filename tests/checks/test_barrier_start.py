"""Rings that start with the wrong parity: found in the text, and named by the virtual GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.checks.barrier_start import check_barrier_start, explain_hang
from halfbyte.checks.finding import Severity
from halfbyte.checks.kernel_text import read_kernel
from halfbyte.virtual.device import Device
from halfbyte.virtual.report import Deadlock
from tests.checks.ptx_texts import make_ring

RULES = "barrier-start/"


def list_rules(ptx: str) -> dict[str, Severity]:
    return {
        finding.rule.removeprefix(RULES): finding.severity
        for finding in check_barrier_start(read_kernel(ptx)).findings
    }


def test_a_ring_that_starts_right_is_clean() -> None:
    report = check_barrier_start(read_kernel(make_ring()))
    assert report.is_clean
    assert report.num_examined == 2
    facts = [item.fact for item in report.evidence]
    assert [fact.rpartition(" ")[2] for fact in facts] == ["1", "0"]


def test_a_producer_at_parity_0_closes_a_circle_of_waits() -> None:
    (finding,) = check_barrier_start(read_kernel(make_ring(producer=0))).findings
    assert finding.rule == "barrier-start/producer-parity"
    assert finding.severity is Severity.ERROR
    assert "parity 0 on the fresh barrier at shared+0x408 and waits for ever" in finding.message
    assert "stand behind waits on shared+0x400, which wait for it" in finding.message
    assert "PTX line" in finding.place


def test_a_slot_given_back_beforehand_makes_parity_0_right() -> None:
    free = "mbarrier.arrive.shared.b64 %rd4, [empty];"
    assert list_rules(make_ring(producer=0, arrival=free)) == {}


def test_an_arrival_that_cannot_be_traced_leaves_it_undecided() -> None:
    somewhere = "ld.shared.u32 %r9, [full];\nmbarrier.arrive.shared.b64 %rd4, [%r9];"
    assert list_rules(make_ring(producer=0, arrival=somewhere)) == {
        "producer-parity": Severity.UNDECIDED
    }


def test_a_consumer_at_parity_1_reads_what_has_not_come() -> None:
    (finding,) = check_barrier_start(read_kernel(make_ring(consumer=1))).findings
    assert finding.rule == "barrier-start/consumer-parity"
    assert "passes at once, before the bytes of its first phase have come" in finding.message


def test_a_parity_from_memory_is_counted_as_undecided() -> None:
    ptx = make_ring().replace("mov.u32 %r3, 1;", "ld.shared.u32 %r3, [full];")
    assert list_rules(ptx) == {"unknown": Severity.UNDECIDED}


def test_the_virtual_gpu_names_a_producer_that_starts_at_parity_0() -> None:
    module = Device("b200").load(make_ring(producer=0))
    with pytest.raises(Deadlock, match="a producer, starts at parity 1") as caught:
        module.launch("k", (1, 1, 1), (64, 1, 1), arguments=[2])
    hang = caught.value.report.hang
    assert hang is not None
    (finding,) = explain_hang(hang).findings
    assert finding.rule == "barrier-start/producer-parity"
    assert "parity 0 with 0 phases completed, on shared+0x400, 0x408" in finding.message


@pytest.mark.parametrize(
    "ptx", [make_ring(num_bytes=128), make_ring().replace("[full], 1;", "[full], 2;")]
)
def test_a_deadlock_of_another_kind_is_not_blamed_on_the_start(ptx: str) -> None:
    with pytest.raises(Deadlock) as caught:
        Device("b200").load(ptx).launch("k", (1, 1, 1), (64, 1, 1), arguments=[2])
    hang = caught.value.report.hang
    assert hang is not None
    assert explain_hang(hang).is_clean
    assert "starts at parity 1" not in str(caught.value)


def test_a_ring_that_starts_right_runs() -> None:
    report = Device("b200").load(make_ring()).launch("k", (1, 1, 1), (64, 1, 1), arguments=[4])
    assert report.findings == ()


PROGRAM = Path(__file__).parent / "programs" / "low_rank_product.py"


@pytest.mark.parametrize(("parity", "word"), [("1", "0 of 16384"), ("0", "Deadlock")])
def test_the_cute_dsl_program_hangs_by_its_producer_alone(parity: str, word: str) -> None:
    pytest.importorskip("cutlass")
    command = [sys.executable, "-m", "halfbyte.cli.main", "run", str(PROGRAM)]
    done = subprocess.run(
        [*command, "--producer-parity", parity], capture_output=True, text=True, check=False
    )
    assert word in done.stdout + done.stderr
    assert done.returncode == (0 if parity == "1" else 1)
    assert ("a producer, starts at parity 1" in done.stderr) == (parity == "0")
