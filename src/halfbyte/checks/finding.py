"""What a check says: findings with a stable rule id, and the facts that it found, with evidence.

"Could not decide" is an answer of its own, counted and shown: a check that stays silent where it
does not know would be read as one that passed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from halfbyte.errors import HalfbyteError


class Severity(Enum):
    """How sure and how bad: a rule is broken, is probably broken, or could not be decided."""

    ERROR = "error"
    WARNING = "warning"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that a check has to say.

    Attributes:
        rule: stable id, "check/what", e.g. "scaled-mma/scale-dtype"; docs/checks.md lists them.
        severity: error, warning, or undecided.
        place: where, e.g. "gemm: PTX line 693" or "config gemm_w4a4".
        message: what came, what was wanted, what follows.
        facts: the numbers of the message, JSON-ready.
    """

    rule: str
    severity: Severity
    place: str
    message: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.severity.value} {self.rule}: {self.message} ({self.place})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "place": self.place,
            "message": self.message,
            "facts": dict(self.facts),
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact and the line of text, or the bytes, that show it."""

    fact: str
    shown_by: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.fact}  <- {self.shown_by}"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What one check found.

    Attributes:
        check: name of the check, the first part of its rule ids.
        findings: in the order of the text.
        evidence: facts that hold, each with what shows it.
        num_examined: things looked at (instructions, waits, operands); 0: it had nothing to do.
    """

    check: str
    findings: tuple[CheckFinding, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    num_examined: int = 0

    def count(self, severity: Severity) -> int:
        """Return how many findings have this severity."""
        return sum(finding.severity is severity for finding in self.findings)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong and nothing is left undecided."""
        return not self.findings

    def __str__(self) -> str:
        """Return a summary line, then one line per finding and per fact."""
        counts = Counter(finding.severity.value for finding in self.findings)
        summary = ", ".join(f"{counts[severity.value]} {severity.value}" for severity in Severity)
        lines = [f"{self.check}: {self.num_examined} examined, {summary}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  {fact}" for fact in self.evidence]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "check": self.check,
            "examined": self.num_examined,
            "findings": [finding.to_json() for finding in self.findings],
            "evidence": [{"fact": item.fact, "shown_by": item.shown_by} for item in self.evidence],
        }


class CheckFailedError(HalfbyteError, ValueError):
    """Findings that must not pass; `findings` holds them, the message lists them."""

    def __init__(self, findings: Iterable[CheckFinding]) -> None:
        """Keep the findings beside the message."""
        self.findings = tuple(findings)
        super().__init__("\n".join(map(str, self.findings)))


def require_clean(*reports: CheckReport, allows_undecided: bool = False) -> None:
    """Raise CheckFailedError where a report has an error or, unless allowed, something undecided.

    Warnings pass: they are for the reader.
    """
    refused = {Severity.ERROR} if allows_undecided else {Severity.ERROR, Severity.UNDECIDED}
    findings = [
        finding for report in reports for finding in report.findings if finding.severity in refused
    ]
    if findings:
        raise CheckFailedError(findings)
