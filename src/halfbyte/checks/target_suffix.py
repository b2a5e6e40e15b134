"""Check: the PTX target has the suffix that its instructions need.

`sm_100a` is one GPU, `sm_100f` its family, `sm_100` all that follow it; tcgen05 and its kin are in
the first two alone (PTX ISA, "Target ISA Notes" of each instruction). A driver that gets the wrong
one reports no kernel image, and names no suffix.
"""

import re
from dataclasses import dataclass

from halfbyte.checks.finding import CheckFinding, CheckReport, Severity
from halfbyte.checks.kernel_text import KernelText

CHECK = "target-suffix"


@dataclass(frozen=True, slots=True)
class _Rule:
    """Instructions that `pattern` matches exist on these targets alone."""

    pattern: re.Pattern[str]
    targets: tuple[str, ...]


_BLACKWELL = ("sm_100a", "sm_100f", "sm_103a", "sm_103f", "sm_110a", "sm_110f")
_RULES = (
    _Rule(re.compile(r"tcgen05\."), _BLACKWELL),
    _Rule(re.compile(r"wgmma\."), ("sm_90a",)),
    _Rule(re.compile(r"mma\.sync\..*block_scale"), ("sm_120a", "sm_120f", "sm_121a", "sm_121f")),
)
# A family has the later spelling of block sizes alone (ptxas 12.9).
_SCALE_VECTOR_WORDS = re.compile(r"\.scale_vec::([124])X")
_FAMILY_BLOCK_WORDS = {"1": ".block32", "2": ".block32", "4": ".block16"}


def check_target_suffix(kernel: KernelText) -> CheckReport:
    """Return the first instruction of each kind that the module's `.target` does not have."""
    arch = next((word for word in kernel.module.target if word.startswith("sm_")), "")
    findings: dict[str, CheckFinding] = {}
    count = 0
    for index, instruction in enumerate(kernel.flow.instructions):
        opcode = instruction.opcode
        for rule in _RULES:
            if not rule.pattern.match(opcode):
                continue
            count += 1
            if arch not in rule.targets:
                key = rule.pattern.pattern
                message = (
                    f"{opcode} does not exist on .target {arch or '(none)'}{_explain(arch)}; it "
                    f"does on {', '.join(rule.targets)}"
                )
                findings.setdefault(key, _make(kernel, index, "target", message))
        old = _SCALE_VECTOR_WORDS.search(opcode)
        if old and arch.endswith("f"):
            message = (
                f"{opcode} on .target {arch}: a family target spells blocks "
                f"{_FAMILY_BLOCK_WORDS[old[1]]}, not {old[0]}"
            )
            findings.setdefault("block-word", _make(kernel, index, "block-word", message))
    return CheckReport(CHECK, tuple(findings.values()), num_examined=count)


def _make(kernel: KernelText, index: int, rule: str, message: str) -> CheckFinding:
    return CheckFinding(f"{CHECK}/{rule}", Severity.ERROR, kernel.describe(index), message)


def _explain(arch: str) -> str:
    if arch[-1:].isdigit():
        return f": the suffix is missing ({arch}a or {arch}f)" if _has_suffixed(arch) else ""
    return ""


def _has_suffixed(arch: str) -> bool:
    return any(target.rstrip("af") == arch for rule in _RULES for target in rule.targets)
