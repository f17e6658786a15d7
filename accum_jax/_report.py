"""Reports laid out as text."""

from __future__ import annotations

import textwrap
from typing import Any

from ._findings import GROUPS, AuditReport, Finding

WIDTH = 100
_MARKS = {True: "ok", False: "NO", None: "??"}
_COLOURS = {True: "green", False: "bold red", None: "yellow"}
_VERDICTS = {
    "equivalent": "EQUIVALENT: accumulating this {subject} is the whole batch, to rounding.",
    "not_equivalent": "NOT EQUIVALENT: accumulating this {subject} is not the whole batch.",
    "inconclusive": "INCONCLUSIVE: whether this {subject} is the whole batch cannot be told.",
}


def audit_text(report: AuditReport) -> str:
    """The report in at most 100 columns: verdict, causes, findings, what was not tested."""
    return "\n".join(line for _, line in _lines(report))


def audit_rich(report: AuditReport) -> Any:
    """The same lines with colours, for a `rich` console."""
    from rich.text import Text

    text = Text()
    for style, line in _lines(report):
        text.append(line + "\n", style=style)
    text.rstrip()
    return text


def _lines(report: AuditReport) -> list[tuple[str, str]]:
    """Pairs of a style and a line."""
    verdict = {"equivalent": True, "not_equivalent": False, "inconclusive": None}[report.verdict]
    subject = "loss" if report.subject == "loss" else "step"
    lines = [(_COLOURS[verdict], _VERDICTS[report.verdict].format(subject=subject))]
    if report.causes:
        lines.append((_COLOURS[verdict], "Causes: " + ", ".join(sorted(report.causes))))
    how = f"{report.num_rows} rows, k={report.k}, reference in {report.precision}"
    if report.tolerance:
        how += f', "equal" up to {report.tolerance:.1e}'
    lines.append(("dim", how))
    for group in GROUPS:
        findings = [f for f in report.findings if f.group == group]
        if findings:
            lines += [("", ""), ("bold", group)]
            for finding in findings:
                lines += _finding(finding)
    if report.distances:
        lines += [
            ("", ""),
            ("bold", "distance from the whole batch's parameters after each update"),
        ]
        far = " ".join(f"{x:.1e}" for x in report.distances[1:])
        lines += [("", line) for line in _wrap(far, "  ")]
    if report.not_tested:
        lines += [("", ""), ("bold", "not tested")]
        for line in report.not_tested:
            lines += [("dim", wrapped) for wrapped in _wrap(line, "  - ")]
    return lines


def _finding(finding: Finding) -> list[tuple[str, str]]:
    cause = f" [{finding.cause}]" if finding.cause else ""
    style = _COLOURS[finding.ok]
    lines = [(style, x) for x in _wrap(finding.check + cause, f"  {_MARKS[finding.ok]}  ")]
    if finding.measured:
        lines += [("", x) for x in _wrap(finding.measured, "      measured  ")]
    if finding.expected and finding.ok is not True:
        lines += [("", x) for x in _wrap(finding.expected, "      expected  ")]
    if finding.advice:
        lines += [("cyan", x) for x in _wrap(finding.advice, "      advice    ")]
    return lines


def _wrap(text: str, start: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )


def save_audit_plot(report: AuditReport, path: Any) -> None:
    """Writes the parameters' distance from the whole batch's over updates as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.semilogy(range(1, len(report.distances)), report.distances[1:], "o-", label="your step")
    axes.axhline(report.tolerance, color="grey", linestyle="--", label="rounding")
    axes.set(
        xlabel="updates", ylabel="relative distance from the whole batch", title=report.verdict
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
