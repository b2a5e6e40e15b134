"""Faults injected into a working pipeline: each is found, and the report says what is wrong."""

import pytest

from halfbyte.virtual.report import Deadlock, KernelFault
from tests.virtual.pipeline_program import TEXT, run_pipeline

SCHEDULES = (
    {},
    {"adversarial_try_wait": True},
    {"reverse_warps": True},
    *({"latency_seed": seed, "adversarial_try_wait": seed % 2 == 0} for seed in range(1, 7)),
)
COPY_OF_A = """cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%t3], [%offset], 512, [%full];"""
COPY_TO_ACCUMULATOR = (
    "@%elected cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes\n"
    "    [%t5], [%t6], 512, [%t7];"
)


def edit(old, replacement, count=1):
    """Return the program with `old` replaced; an edit that changes nothing is a mistake."""
    assert TEXT.count(old) >= 1, old
    return TEXT.replace(old, replacement, count)


def find_deadlock(text):
    """Return (the report's text, facts of the waits by barrier name) of a program that hangs."""
    with pytest.raises(Deadlock) as caught:
        run_pipeline(text)
    facts = {}
    for stop in caught.value.report.hang.waits:
        if stop.wait == "mbarrier":
            operand = stop.place.text.split("[")[1].split("]")[0]
            facts[operand] = stop.facts
    return str(caught.value), facts


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
def test_the_intact_pipeline_is_right_in_every_schedule(options):
    report, wrong = run_pipeline(TEXT, **options)
    assert wrong == 0
    assert report.findings == ()


def test_a_producer_that_starts_at_parity_zero_deadlocks():
    text, facts = find_deadlock(edit("mov.u32 %parity, 1; //", "mov.u32 %parity, 0; //"))
    assert facts["%empty"] | {"offset": 0} == {
        "barrier_rank": facts["%empty"]["barrier_rank"],
        "offset": 0,
        "parity": 0,
        "phases": 0,
        "pending": 2,
        "expected": 2,
        "pending_bytes": 0,
        "valid": True,
    }
    assert {"%empty", "%full", "acc_full"} <= set(facts)
    assert "parity 0, 0 phases completed, pending arrivals 2/2, missing bytes 0" in text


def test_a_math_warp_that_waits_for_the_first_accumulator_deadlocks():
    _, facts = find_deadlock(edit("mov.u32 %acc_parity, 1; //", "mov.u32 %acc_parity, 0; //"))
    assert (facts["acc_empty"]["pending"], facts["acc_empty"]["expected"]) == (64, 64)
    assert facts["acc_empty"]["phases"] == 0


def find_outcomes(text):
    """Return, per schedule, the kinds of findings, faults and hangs; "wrong" for wrong results."""
    outcomes = []
    for options in SCHEDULES:
        try:
            report, wrong = run_pipeline(text, **options)
            ending = {"wrong"} if wrong else set()
        except (KernelFault, Deadlock) as error:
            report = error.report
            ending = {report.fault.kind if report.fault else report.hang.kind}
        outcomes.append({finding.kind for finding in report.findings} | ending)
    return outcomes


def test_a_stage_read_before_its_data_came_is_found():
    # Where the reads come before the copies are even issued, the ring ends in a deadlock instead.
    outcomes = find_outcomes(edit("mov.u32 %parity, 0; // math", "mov.u32 %parity, 1; // math"))
    assert all(kinds & {"read-in-flight", "deadlock", "over-arrival"} for kinds in outcomes)
    assert any("read-in-flight" in kinds for kinds in outcomes)


def test_an_accumulator_read_before_its_data_came_is_found():
    text = edit("mov.u32 %acc_parity, 0; // epilogue", "mov.u32 %acc_parity, 1; // epilogue")
    outcomes = find_outcomes(text)
    assert all(kinds - {"wrong"} for kinds in outcomes)


@pytest.mark.parametrize(("expected", "missing"), [(1040, 16), (1008, -16)])
def test_a_wrong_number_of_expected_bytes_deadlocks_and_shows_the_difference(expected, missing):
    _, facts = find_deadlock(edit("[%full], 1024;", f"[%full], {expected};"))
    assert facts["%full"]["pending_bytes"] == missing
    assert facts["%full"]["pending"] == 0


def test_one_arrival_too_many_expected_deadlocks_and_shows_it():
    text, facts = find_deadlock(edit("[acc_empty], 64;", "[acc_empty], 65;"))
    assert (facts["acc_empty"]["pending"], facts["acc_empty"]["expected"]) == (1, 65)
    assert "pending arrivals 1/65" in text


def test_a_multicast_that_leaves_out_a_cta_deadlocks_and_shows_its_missing_bytes():
    _, facts = find_deadlock(edit("mov.b16 %mask, 3;", "mov.b16 %mask, 1;"))
    assert facts["%full"]["pending_bytes"] == 512 or facts["%full"]["pending_bytes"] == -256


def test_a_signal_that_never_comes_deadlocks():
    _, facts = find_deadlock(edit(COPY_TO_ACCUMULATOR, ""))
    assert facts["acc_full"]["pending_bytes"] == 512


def test_a_producer_that_ignores_empty_is_found_only_by_adversarial_waits_or_at_once():
    text = edit("@!%done bra WAIT_EMPTY;", "")
    with pytest.raises(KernelFault) as caught:
        run_pipeline(text, adversarial_try_wait=True)
    fault = caught.value.report.fault
    assert fault.kind == "over-arrival"
    assert "1 more arrival than the phase expects" in fault.message
    assert fault.warp == 0
    report, wrong = run_pipeline(text)  # a suspending try_wait does the waiting
    assert wrong == 0
    assert report.findings == ()


def test_different_thread_counts_at_one_barrier_fault_and_name_both():
    with pytest.raises(KernelFault) as caught:
        run_pipeline(edit("bar.sync 2, 96;", "bar.sync 2, 128;"))
    fault = caught.value.report.fault
    assert fault.kind == "barrier-count-mismatch"
    assert "96" in fault.message
    assert "128" in fault.message


def test_a_phase_restarted_at_each_tile_is_found():
    # 3 stages, 4 steps: the ring does not end where it began, so parities must go on over tiles.
    restarted = edit("MATH_TILE:\n", "MATH_TILE:\nmov.u32 %parity, 0; mov.u32 %stage, 0;\n")
    restarted = restarted.replace(
        "LOAD_TILE:\n", "LOAD_TILE:\nmov.u32 %parity, 1; mov.u32 %stage, 0;\n", 1
    )
    for kinds in find_outcomes(restarted):
        assert kinds & {"mbarrier-phase-reused", "over-arrival", "deadlock"}


def test_bytes_that_nobody_expects_do_not_complete_a_phase():
    # Without the expectation the bytes come first: the phase still needs its arrival.
    text = edit("mbarrier.arrive.expect_tx.shared.b64 %state, [%full], 1024;", "")
    _, facts = find_deadlock(text)
    assert facts["%full"]["pending"] == 1
    assert facts["%full"]["pending_bytes"] == -1024


def test_a_copy_that_is_missing_shows_its_bytes():
    _, facts = find_deadlock(edit(COPY_OF_A, ""))
    assert facts["%full"]["pending_bytes"] == 512
