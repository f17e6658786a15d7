"""Reports laid out as text."""

from __future__ import annotations

import textwrap
from typing import Any

from ._findings import GROUPS, AuditReport, Finding
from ._memory_text import show_bytes
from ._plan import Plan, PlanRow

WIDTH = 100
_MARKS = {True: "ok", False: "NO", None: "??"}
_COLOURS = {True: "green", False: "bold red", None: "yellow"}
_VERDICTS = {
    "equivalent": "EQUIVALENT: accumulating this {subject} is the whole batch, to rounding.",
    "not_equivalent": "NOT EQUIVALENT: accumulating this {subject} is not the whole batch.",
    "inconclusive": "INCONCLUSIVE: whether this {subject} is the whole batch cannot be told.",
}
_PLAN_VERDICTS = {
    "fits_without_accumulation": (True, "FITS WITHOUT ACCUMULATION: the whole batch, k = 1."),
    "accumulate": (True, "ACCUMULATE: microbatches of {size} rows, k = {k}."),
    "accumulation_cannot_help": (False, "ACCUMULATION CANNOT HELP: too large at any microbatch."),
    "nothing_fits": (False, "NOTHING FITS: not even the smallest microbatch."),
}


def audit_text(report: AuditReport) -> str:
    """The report in at most 100 columns: verdict, causes, findings, what was not tested."""
    return "\n".join(line for _, line in _audit_lines(report))


def plan_text(plan: Plan) -> str:
    """The plan in at most 100 columns: verdict, what was compiled, cost, advice."""
    return "\n".join(line for _, line in _plan_lines(plan))


def rich_text(report: AuditReport | Plan) -> Any:
    """The lines of either with colours, for a `rich` console."""
    from rich.text import Text

    text = Text()
    for style, line in _plan_lines(report) if isinstance(report, Plan) else _audit_lines(report):
        text.append(line + "\n", style=style)
    text.rstrip()
    return text


def _audit_lines(report: AuditReport) -> list[tuple[str, str]]:
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


def _plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """Pairs of a style and a line."""
    best = plan.best
    ok, text = _PLAN_VERDICTS[plan.verdict]
    text = text.format(size=best and best.microbatch_size, k=best and best.k)
    devices = f" over {plan.data_parallel} devices" if plan.data_parallel > 1 else ""
    limit = "no memory limit"
    if plan.memory_limit is not None:
        budget = show_bytes(plan.memory_limit * (1 - plan.headroom))
        limit = f"{budget} a device ({show_bytes(plan.memory_limit)} less {plan.headroom:.0%})"
    how = f"effective batch {plan.num_rows}{devices}, {plan.target}, {limit}"
    lines = [(_COLOURS[ok], text), ("dim", how)]
    if plan.rows:
        lines += [("", ""), ("bold", "".join(f"{h:>{n}}" for h, n in _PLAN_COLUMNS))]
        for row in plan.rows:
            cells = zip(_plan_cells(row), _PLAN_COLUMNS, strict=True)
            line = "".join(f"{cell:>{n}}" for cell, (_, n) in cells)
            lines.append((_COLOURS[row.fits], line))
    if best is not None:
        cost = f"An update costs each device {_flops(best.flops)}"
        if best.traffic_bytes is not None:
            cost += f" and about {show_bytes(best.traffic_bytes)} through memory"
        if best.estimated_seconds is not None:
            cost += (
                f"; at published peak rates ({plan.rates}) not less than "
                f"{best.estimated_seconds:.3g} s, an estimate"
            )
        lines += [("", ""), *(("", x) for x in _wrap(cost + ".", ""))]
    lines += [("", "")]
    for sentence in plan.advice:
        lines += [("cyan", x) for x in _wrap(sentence, "")]
    return lines


def _flops(number: float) -> str:
    units = ["PFLOP", "TFLOP", "GFLOP", "MFLOP"]
    number /= 1e6
    while number >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop()
    return f"{number:.3g} {units[-1]}"


_PLAN_COLUMNS = (
    ("microbatch", 10),
    ("k", 7),
    ("peak", 11),
    ("params", 11),
    ("optimizer", 11),
    ("accumulator", 13),
    ("batch", 11),
    ("activations", 13),
    ("fits", 6),
)


def _plan_cells(row: PlanRow) -> list[str]:
    sizes = (
        row.peak_bytes,
        row.params_bytes,
        row.optimizer_bytes,
        row.accumulator_bytes,
        row.batch_bytes,
        row.activation_bytes,
    )
    shown = ["refused" if size is None else show_bytes(size) for size in sizes]
    return [str(row.microbatch_size), str(row.k), *shown, "yes" if row.fits else "no"]


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
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(report.distances)), report.distances[1:], "o-", label="your step")
    axes.axhline(report.tolerance, color="grey", linestyle="--", label="rounding")
    axes.set(
        xlabel="updates", ylabel="relative distance from the whole batch", title=report.verdict
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=150)


def save_plan_plot(plan: Plan, path: Any) -> None:
    """Writes what the compiled microbatches hold, part by part, as a PNG."""
    from matplotlib.figure import Figure

    rows = [row for row in plan.rows if row.peak_bytes is not None]
    names = [f"{row.microbatch_size} (k={row.k})" for row in rows]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, below = figure.subplots(), [0.0] * len(rows)
    for part in ("params", "optimizer", "accumulator", "batch", "activation"):
        sizes = [getattr(row, f"{part}_bytes") / 2**30 for row in rows]
        axes.bar(names, sizes, bottom=below, label=part)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    if plan.memory_limit is not None:
        budget = plan.memory_limit * (1 - plan.headroom) / 2**30
        axes.axhline(budget, color="grey", linestyle="--", label="limit less headroom")
    axes.set(
        xlabel="microbatch", ylabel="GiB on one device", title=f"{plan.verdict}, {plan.target}"
    )
    axes.legend()
    figure.savefig(path, dpi=150)
