"""What an audit found: numbers and sentences, not yet laid out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["equivalent", "not_equivalent", "inconclusive"]
GROUPS = ("math", "cadence", "numerics", "equivalence")


@dataclass(frozen=True)
class Finding:
    """One question that an audit asked, with its answer.

    Attributes:
      group: "math", "cadence", "numerics" or "equivalence".
      check: what was asked.
      ok: whether it is as it should be; None where it could not be told.
      cause: name of the fault, where `ok` is False and the fault is known.
      measured: what came out.
      expected: what should have.
      advice: what to change; empty where nothing is to be done.
    """

    group: str
    check: str
    ok: bool | None
    cause: str | None = None
    measured: str = ""
    expected: str = ""
    advice: str = ""


@dataclass(frozen=True)
class AuditReport:
    """Answer of `audit` or `audit_step`; `str()` lays it out in at most 100 columns.

    Attributes:
      verdict: "equivalent", "not_equivalent" or "inconclusive". It speaks of this batch.
      findings: what was asked and answered: math, cadence, numerics, equivalence.
      subject: "loss" or "step".
      num_rows: rows of the effective batch.
      k: microbatches per update.
      precision: of the reference: "float64", or what the loss itself computes in.
      tolerance: the relative difference from which on two results are called different.
      not_tested: what nobody should conclude from this report.
      distances: of the step's parameters from the reference's after 0, 1, 2, ... updates,
        relative to how far the reference had moved; empty for a loss.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    subject: str
    num_rows: int
    k: int
    precision: str = "float64"
    tolerance: float = 0.0
    not_tested: tuple[str, ...] = ()
    distances: tuple[float, ...] = ()

    @property
    def causes(self) -> set[str]:
        """Names of the faults found."""
        return {f.cause for f in self.findings if f.cause is not None and f.ok is not True}

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as values that JSON can hold."""
        # JSON has no infinity and no NaN.
        far = [x if math.isfinite(x) else None for x in self.distances]
        return {**asdict(self), "causes": sorted(self.causes), "distances": far}

    def __str__(self) -> str:
        from ._report import audit_text

        return audit_text(self)


def ordered(findings: list[Finding]) -> tuple[Finding, ...]:
    """Findings by group, in the order in which to read them."""
    return tuple(sorted(findings, key=lambda finding: GROUPS.index(finding.group)))
