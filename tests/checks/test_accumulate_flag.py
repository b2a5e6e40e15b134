"""A flag of an MMA that tracing froze, and flags that are right."""

import subprocess
import sys
from pathlib import Path

import pytest

from halfbyte.checks.accumulate_flag import check_accumulate_flag
from halfbyte.checks.finding import Severity
from halfbyte.checks.kernel_text import read_kernel
from tests.checks.ptx_texts import ALWAYS, NEVER, VARIES, make_products, plain_mma, scaled_mma


def list_findings(ptx: str) -> list[tuple[str, Severity]]:
    report = check_accumulate_flag(read_kernel(ptx))
    assert report.num_examined == ptx.count("tcgen05.mma.")
    return [
        (finding.rule.removeprefix("accumulate-flag/"), finding.severity)
        for finding in report.findings
    ]


RIGHT = {
    "depends on the counter": make_products(scaled_mma(VARIES) + plain_mma(ALWAYS)),
    "first block peeled": make_products(plain_mma(ALWAYS), first=plain_mma(NEVER)),
    "a loop over tiles": make_products(
        plain_mma(NEVER)
        + plain_mma(ALWAYS)
        + "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];",
        behind="",
    ),
    "another accumulator in each pass": make_products(
        "shl.b32 %r6, %r4, 5;\nadd.u32 %r7, %r2, %r6;\n" + plain_mma(NEVER, "%r7")
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_flags_that_are_right_are_clean(name: str) -> None:
    assert list_findings(RIGHT[name]) == []


def test_a_flag_that_is_always_true_never_starts_the_accumulator() -> None:
    ptx = make_products(scaled_mma(ALWAYS) + plain_mma(ALWAYS))
    (finding,) = check_accumulate_flag(read_kernel(ptx)).findings
    assert finding.rule == "accumulate-flag/always-true"
    assert finding.severity is Severity.ERROR
    assert "constant true in all 2 MMAs of the accumulator at column 0" in finding.message


def test_a_flag_that_is_always_false_keeps_the_last_block_alone() -> None:
    ptx = make_products(scaled_mma(NEVER) + plain_mma(ALWAYS))
    (finding,) = check_accumulate_flag(read_kernel(ptx)).findings
    assert finding.rule == "accumulate-flag/always-false"
    assert "only the last k-block counts" in finding.message
    assert "frozen when the kernel is traced" in finding.message


def test_an_accumulator_that_may_have_been_stored_is_undecided() -> None:
    store = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r4};\n"
    ptx = make_products(plain_mma(ALWAYS), first=store)
    assert list_findings(ptx) == [("always-true", Severity.UNDECIDED)]


def test_two_accumulators_are_told_apart() -> None:
    started = plain_mma(NEVER, "%r3")
    ptx = make_products(plain_mma(ALWAYS), first=started)
    assert list_findings(ptx) == [("always-true", Severity.ERROR)]


PROGRAM = Path(__file__).parent / "programs" / "low_rank_product.py"


@pytest.mark.parametrize("flag", ["varies", "always-true", "always-false"])
def test_the_cute_dsl_program_is_wrong_and_found_by_its_flag(flag: str, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    code = (
        "import sys; sys.argv = sys.argv[1:]\n"
        "import halfbyte.virtual\n"
        "from halfbyte.checks.accumulate_flag import check_accumulate_flag\n"
        "from halfbyte.checks.kernel_text import read_kernel\n"
        "with halfbyte.virtual.cuda('b200') as gpu:\n"
        "    from tests.checks.programs.low_rank_product import main\n"
        "    code = main(sys.argv[1:])\n"
        "record = gpu.log.records[0]\n"
        "report = check_accumulate_flag(read_kernel(record.syntax))\n"
        "print([finding.rule for finding in report.findings])\n"
        "raise SystemExit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "program", "--flag", flag],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    is_right = flag == "varies"
    wanted = [] if is_right else [f"accumulate-flag/{flag}"]
    assert done.stdout.splitlines()[-1:] == [str(wanted)], done.stderr
    assert done.returncode == (0 if is_right else 1)


READER = """
READER:
mbarrier.try_wait.parity.shared.b64 %p3, [ready], 0;
@!%p3 bra READER;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r2];
"""


@pytest.mark.parametrize(("signal", "is_clean"), [("ready", True), ("done", False)])
def test_a_loop_that_hands_each_product_over_starts_each_anew(signal: str, is_clean: bool) -> None:
    # Attention multiplies anew in each pass and tells who reads; a ring's release tells others.
    commit = f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{signal}];\n"
    ptx = make_products(plain_mma(NEVER) + commit, between="", first="").replace(
        ".shared .align 8 .b64 done;", ".shared .align 8 .b64 done;\n.shared .align 8 .b64 ready;"
    )
    ptx = ptx.replace("ret;", READER + "ret;")
    assert list_findings(ptx) == ([] if is_clean else [("always-false", Severity.ERROR)])
