"""The tables of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evaluations.results import markdown_table
from evaluations.suite import find_metric, format_mean, format_metric
from extras.report.experiments import Experiment, change_words, curve_measure, differences, leading_measure


@dataclass
class Table:
    """Rows as {column: cell}. Columns without any text are not shown."""

    caption: str
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name, cell in row.items() if cell))
        table = markdown_table(columns, [[row.get(name, "") for name in columns] for row in self.rows])
        return f"### {self.caption}\n\n{table}" + "".join(f"\n- {note}" for note in dict.fromkeys(self.notes))


def difference_text(metric: str, value: float, reference: float) -> str:
    """`+2.00 (+20%)`."""
    sign = "+" if value >= reference else "−"
    relative = f" ({sign}{abs((value - reference) / reference):.0%})" if reference else ""
    return f"{sign}{format_metric(metric, abs(value - reference))}{relative}"


def machine_of(start: dict) -> str:
    return f"{start['num_processes']} × {start['device']}"


def results_table(experiments: Sequence[Experiment]) -> Table:
    """The leading figure of each experiment, against the paper's and the dense runs', and its cost."""
    leading = leading_measure(experiments)
    table = Table(f"Results, {leading.in_words()}" if leading else "Results")
    for experiment in experiments:
        runs, baseline, measures = experiment.runs, experiment.baseline, experiment.measures()
        row = {"Experiment": experiment.label, "Seeds": ", ".join(sorted(str(run.config["seed"]) for run in runs))}
        last, planned = max(run.step for run in runs), experiment.identity["train.num_steps"]
        row["Steps"] = f"{last:,} of {planned:,}" if last < planned else f"{last:,}"
        row["Images seen"] = f"{last * experiment.identity['train.batch_size']:,}"
        row["Hours of training"] = f"{fmean(run.clock[1][-1] for run in runs):.3g}"
        notes = []
        if measures:
            measure = leading if leading in measures else measures[0]
            step, values = [*experiment.curve(measure).items()][-1]
            row["Measured"] = format_mean(measure.metric, values) + (f" ({measure.in_words()})" if measure != leading else "")
            if (paper := experiment.paper(measure)) is not None:
                is_comparable = experiment.has_paper(measure)
                ours = f"ours {difference_text(measure.metric, fmean(values), paper)}"
                samples = f"{experiment.row['num_samples']:,} samples"
                row["Paper"] = f"{format_metric(measure.metric, paper)}, {ours if is_comparable else samples}"
            if baseline and (dense := baseline.curve(measure).get(step)):
                row["Against dense"] = difference_text(measure.metric, fmean(values), fmean(dense))
            if len(values) < len(runs):
                notes.append(f"only {len(values)} of {len(runs)} runs have the figure at step {step:,}")
        if baseline and (different := differences(experiment, baseline)):
            notes.append(f"its dense runs differ in more than routes: {change_words(different)}")
        if experiment.is_routed and baseline is None:
            notes.append("there are no dense runs with the same settings")
        if source := experiment.identity.get("init_from"):
            missing = "hours" if experiment.identity["init_state"] == "all" else "steps and hours"
            notes.append(f"started from {source}, whose training is not in the {missing}")
        table.rows.append(row)
        table.notes += [f"{experiment.label}: {note}" for note in notes]
    return table


def speedup_table(experiments: Sequence[Experiment]) -> Table:
    """How much earlier routed runs reach a figure than their dense runs.

    The figure is the best that both reach: the worse of their bests. Runs that start from different weights have no row.
    """
    table = Table("Speedup to the same figure")
    for routed in experiments:
        dense = routed.baseline
        if dense is None or "init_from" in differences(routed, dense) or (measure := curve_measure(dense, routed)) is None:
            continue
        sign = 1 if find_metric(measure.metric).direction == "lower" else -1
        curves = [{step: sign * fmean(values) for step, values in e.curve(measure).items()} for e in (dense, routed)]
        target = max(min(curve.values()) for curve in curves)
        (dense_step, dense_is_bound), (step, is_bound) = (first_reached(curve, target) for curve in curves)
        bound = "≤ " if dense_is_bound else "≥ " if is_bound else ""
        hours = [experiment.hours_at(at, measure) for experiment, at in ((dense, dense_step), (routed, step))]
        table.rows.append({
            "Routed": routed.label,
            "Best that both reach": f"{format_metric(measure.metric, sign * target)} ({measure.in_words()})",
            "Dense": f"{dense.label}, {'at or before ' if dense_is_bound else ''}step {dense_step:,.0f}",
            "Reached": f"{'at or before ' if is_bound else ''}step {step:,.0f}",
            "Speedup in steps": f"{bound}{dense_step / step:.3g}×",
            "Speedup in hours": f"{bound}{hours[0] / hours[1]:.3g}×",
        })  # fmt: skip
        machines = [" and ".join(sorted({machine_of(s) for run in e.runs for s in run.starts})) for e in (routed, dense)]
        if machines[0] != machines[1]:
            table.notes.append(f"{routed.label}: hours on {machines[0]} against hours on {machines[1]}")
    return table


def first_reached(curve: Mapping[int, float], target: float) -> tuple[float, bool]:
    """(the step at which a curve first falls to the target, whether its first evaluation is already below it).

    `curve` maps steps to values, of which lower is better. Between two steps, values are interpolated linearly.
    """
    before = None
    for step, value in curve.items():
        if value <= target:
            break
        before = step, value
    if before is None or value == target:
        return step, value < target
    return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - value), False


def figures_table(experiments: Sequence[Experiment]) -> Table:
    """Every figure at its last step, and how it was measured."""
    table = Table("Every figure, and how it was measured")
    for experiment in experiments:
        rows: dict[tuple, dict[str, str]] = {}
        for measure in experiment.measures():
            metric, num_samples, guidance, settings = measure
            step, values = [*experiment.curve(measure).items()][-1]
            row = {"Experiment": experiment.label, "Samples": f"{num_samples:,}", "Guidance": guidance, "Measured with": settings}
            row |= {"Step": f"{step:,}", "Runs": str(len(values))}
            paper = f" (paper: {format_metric(metric, experiment.paper(measure))})" if experiment.has_paper(measure) else ""
            rows.setdefault((measure[1:], step), row)[metric] = format_mean(metric, values) + paper
        table.rows += rows.values()
    return table
