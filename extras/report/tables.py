"""What the report says, as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evaluations.suite import find_metric, format_mean, format_metric
from extras.report.experiments import Experiment, Figure, change_words, curve_measure, differences_from, leading_measure
from extras.report.runs import LOSS, Measure

INTERPOLATED = (
    "Steps and hours between two evaluations are interpolated linearly. ≥ or ≤: the first evaluation is already better, so that "
    "the speedup is at least or at most this. Hours are hours of training; compare them only between runs that had the same "
    "machine to themselves. The paper's headline, for DiT-XL/2 on ImageNet-256 against 400,000 dense steps, is 14×."
)


@dataclass
class Table:
    """Rows as {column: cell}. The first column names the row, and a cell that is left out is shown as missing."""

    caption: str
    columns: Sequence[str]
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def difference_text(measure: Measure, value: float, reference: float) -> str:
    """+2.00 (+20%)."""
    sign = "+" if value >= reference else "−"
    relative = f" ({sign}{abs((value - reference) / reference):.0%})" if reference else ""
    return f"{sign}{format_metric(measure.metric, abs(value - reference))}{relative}"


def machine_of(start: dict) -> str:
    return f"{start['num_processes']} × {start['device']}"


def results_table(experiments: Sequence[Experiment]) -> Table:
    """Of each experiment the leading figure, beside the paper's and the dense runs', and what it cost."""
    leading = leading_measure(experiments)
    columns = ("Experiment", "Seeds", "Measured", "Paper", "Against dense", "Steps", "Images seen", "Training time", "Images/s")
    table = Table(f"Results, {leading.in_words()}" if leading else "Results", columns)
    for one in experiments:
        runs, measures = one.runs, one.measures()
        last, planned = max(run.step for run in runs), one.identity["train.num_steps"]
        row = {"Experiment": one.label, "Seeds": ", ".join(sorted(str(run.config["seed"]) for run in runs))}
        if source := one.identity.get("init_from"):
            missing = "hours" if one.identity["init_state"] == "all" else "steps and hours"
            table.notes.append(f"{one.label}: started from {source}, whose training is not in the {missing}")
        row["Steps"] = f"{last:,} of {planned:,}" if last < planned else f"{last:,}"
        row["Images seen"] = f"{last * one.identity['train.batch_size']:,}"
        row["Training time"] = duration(fmean(run.clock[1][-1] for run in runs))
        row["Images/s"] = f"{fmean(run.images_per_sec for run in runs):,.1f}"
        if one.is_routed and one.baseline is None:
            table.notes.append(f"{one.label}: there are no dense runs with the same settings")
        if measures:
            measure = leading if leading in measures else measures[0]
            figure = one.curve(measure)[-1]
            how = f" ({measure.in_words()})" if measure != leading else ""
            row["Measured"] = format_mean(measure.metric, figure.values) + how
            row["Paper"] = paper_text(one, measure, figure)
            table.notes += [f"{one.label}: {note}" for note in figure_notes(one, figure)]
            if one.baseline is not None:
                dense = {other.step: other for other in one.baseline.curve(measure)}.get(figure.step)
                if dense:
                    row["Against dense"] = difference_text(measure, figure.mean, dense.mean)
        table.rows.append(row)
    if any("±" in row.get("Measured", "") for row in table.rows):
        table.notes.append("Figures, times and images/s are means over seeds; ± is the standard deviation (n − 1).")
    table.columns = [name for name in columns if any(row.get(name, "—") != "—" for row in table.rows)]
    return table


def duration(hours: float) -> str:
    """2.5 h, 13 min or 5 s: three significant digits in the largest unit of which there is one."""
    unit, size = next(((unit, size) for unit, size in (("h", 1), ("min", 60)) if hours * size >= 1), ("s", 3600))
    return f"{hours * size:.3g} {unit}"


def paper_text(one: Experiment, measure: Measure, figure: Figure) -> str:
    """21.34, ours +0.66 (+3%); or only the figure, where it is of another number of samples."""
    if (paper := one.paper(measure)) is None:
        return "—"
    words = format_metric(measure.metric, paper)
    if not one.has_paper(measure):
        return f"{words}, of {one.row['num_samples']:,} samples"
    return f"{words}, ours {difference_text(measure, figure.mean, paper)}"


def figure_notes(one: Experiment, figure: Figure) -> list[str]:
    """What would be read wrongly without being told."""
    notes = []
    if len(figure.values) < len(one.runs):
        notes.append(f"the figure at step {figure.step:,} is of {len(figure.values)} of {len(one.runs)} runs")
    if one.baseline is not None and (different := differences_from(one, one.baseline)):
        notes.append(f"its dense runs differ in more than routes: {change_words(different)}")
    return notes


def speedup_table(experiments: Sequence[Experiment]) -> Table:
    """How much earlier routed runs reach a figure than their dense runs: the paper's 14x, as a number.

    The figure is the best that both reach: the worse of their bests. Runs that start from different weights have no row.
    """
    columns = ("Routed", "Best that both reach", "Dense", "Reached", "Speedup in steps", "Speedup in hours")
    table = Table("Speedup to the same figure", columns)
    for routed in experiments:
        if routed.baseline is None or "init_from" in differences_from(routed, routed.baseline):
            continue
        pair = (routed.baseline, routed)
        measure = curve_measure(pair)
        curves = [one.curve(measure) for one in pair]
        if measure == LOSS or not all(curves):
            continue
        sign = 1 if find_metric(measure.metric).direction == "lower" else -1
        target = sign * max(min(sign * figure.mean for figure in curve) for curve in curves)
        steps, bounds = zip(*(first_reached(curve, target, sign) for curve in curves))
        hours = [one.hours_at(step, measure) for one, step in zip(pair, steps)]
        bound = "≤ " if bounds[0] else "≥ " if bounds[1] else ""
        reached = [f"{'at or before ' if is_bound else ''}step {step:,.0f}" for step, is_bound in zip(steps, bounds)]
        row = {"Routed": routed.label, "Best that both reach": f"{format_metric(measure.metric, target)} ({measure.in_words()})"}
        row |= {"Dense": f"{routed.baseline.label}, {reached[0]}", "Reached": reached[1]}
        for clock, (dense_cost, cost) in (("steps", steps), ("hours", hours)):
            if cost > 0:
                row[f"Speedup in {clock}"] = f"{bound}{dense_cost / cost:.3g}×"
        table.rows.append(row)
        machines = [" and ".join(sorted({machine_of(start) for run in one.runs for start in run.starts})) for one in pair]
        if machines[0] != machines[1]:
            table.notes.append(f"{routed.label}: hours on {machines[1]} against hours on {machines[0]}")
    table.notes.append(INTERPOLATED)
    return table


def first_reached(curve: Sequence[Figure], target: float, sign: int) -> tuple[float, bool]:
    """(step at which a curve first reaches a figure that it does reach, whether its first evaluation is already better).

    `sign` is 1 where lower is better, and -1 where higher is.
    """
    i = next(i for i, figure in enumerate(curve) if sign * figure.mean <= sign * target)
    after, before = curve[i], curve[i - 1]
    if i == 0 or after.mean == target:
        return after.step, i == 0 and after.mean != target
    return before.step + (after.step - before.step) * (target - before.mean) / (after.mean - before.mean), False


def figures_table(experiments: Sequence[Experiment]) -> Table:
    """Every figure at its last step, and how it was measured."""
    metrics = dict.fromkeys(measure.metric for one in experiments for measure in one.measures())
    columns = ("Experiment", "Samples", "Guidance", "Step", "Runs", *metrics, "How")
    table = Table("Every figure, and how it was measured", columns)
    for one in experiments:
        rows: dict[tuple, dict[str, str]] = {}
        for measure in one.measures():
            figure, (metric, num_samples, guidance, how) = one.curve(measure)[-1], measure
            row = rows.setdefault(measure[1:], {"Experiment": one.label, "Samples": f"{num_samples:,}", "Guidance": guidance})
            row |= {"Step": f"{figure.step:,}", "Runs": str(len(figure.values)), "How": how}
            paper = f" (paper: {format_metric(metric, one.paper(measure))})" if one.has_paper(measure) else ""
            row[metric] = format_mean(metric, figure.values) + paper
        table.rows += rows.values()
    return table
