"""What the report says, as tables of text that the page and the Markdown file share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evaluations.suite import find_metric, format_metric
from extras.report.experiments import (
    Comparison,
    Experiment,
    Figure,
    compare_at_equal_cost,
    compared_metric,
    first_reached,
    leading_metric,
    other_settings,
    starts_alike,
)
from extras.report.runs import Run, machine_of

NONE = "—"
RESULTS = ("Experiment", "Seeds", "Measured", "Paper", "Difference", "Against dense", "Steps", "Images seen", "Device hours")
RESULTS += ("Images/s", "Commit")
SPEEDUPS = ("Run", "Metric", "Best that both reach", "Dense", "Reached", "Speedup in steps", "Speedup in hours")
EQUAL = ("Routed", "Metric", "Step", "Routed figure", "Dense, equal steps", "Difference", "Routed hours", "Dense, equal time")
EQUAL += ("Difference in time", "Seeds")
EQUAL_NOTE = f"""\
Equal steps: the last step at which both have been evaluated. Equal time: the dense figure at the step that took the dense runs, \
on average, as many hours of training as the routed runs took to the step of this row; for each seed it is interpolated linearly \
between the evaluations before and after, which overstates it where the curve flattens, and {NONE} where there are none. \
Differences are routed minus dense."""


@dataclass(frozen=True)
class Table:
    """One cell of text for each column of a row; the first names the row. Notes say how to read it rightly."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def make_table(caption: str, columns: Sequence[str], rows: Sequence[dict[str, str]], notes: Sequence[str]) -> Table:
    """Rows as {column: cell}; what they leave out is shown as missing. A note is said once."""
    return Table(caption, columns, [[row.get(column, NONE) for column in columns] for row in rows], list(dict.fromkeys(notes)))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text.


def figure_text(figure: Figure | None) -> str:
    """40.00 ± 1.41, with the digits that the table of metrics gives."""
    if figure is None:
        return NONE
    return " ± ".join(format_metric(figure.name, value) for value in (figure.mean, figure.spread) if value is not None)


def difference_text(metric: str, value: float, reference: float) -> str:
    """+2.00 (+20%)."""
    sign = "+" if value >= reference else "−"
    relative = f" ({sign}{abs((value - reference) / reference):.0%})" if reference else ""
    return f"{sign}{format_metric(metric, abs(value - reference))}{relative}"


def range_text(values: Sequence[float]) -> str:
    """One number, or the lowest and the highest."""
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values))] if values else [NONE]
    return " to ".join(dict.fromkeys(texts))


# ----------------------------------------------------------------------------------------------------------------------
# Results.


def results_table(experiments: Sequence[Experiment]) -> Table:
    """A row per experiment: its leading figure beside the paper's and the dense one's, and what it cost."""
    leading = leading_metric(experiments)
    rows, notes = [], []
    for experiment in experiments:
        runs, comparison = experiment.runs, next(iter(experiment.comparisons()), None)
        figures = map(experiment.figure, [leading or "", *experiment.metrics()])
        figure = comparison and comparison.figure or next(filter(None, figures), None)
        row = {"Experiment": experiment.label, "Seeds": str(len({run.config.get("seed") for run in runs}))}
        row["Measured"] = figure_text(figure) + (f" [{figure.name}]" if figure and figure.name != leading else "")
        if comparison is not None:
            row |= compare_with_paper(comparison, leading)
        if experiment.baseline is not None:
            row["Against dense"] = against_dense(experiment, figure)
        last, planned = max(run.step for run in runs), max(run.num_steps or 0 for run in runs)
        row["Steps"] = f"{last:,} of {planned:,}" if last < planned else f"{last:,}"
        images = max(run.step * run.config.get("train.batch_size", 0) for run in runs)
        row["Images seen"] = (f"{images:,}" if images < 1e6 else f"{images / 1e6:,.4g}M") if images else NONE
        row["Device hours"] = device_hours_text(runs)
        row["Images/s"] = range_text([run.images_per_sec for run in runs if run.images_per_sec])
        commits = [commit_text(start) for run in runs for start in run.starts]
        row["Commit"] = ", ".join(dict.fromkeys(commits)) or "not recorded"
        rows.append(row)
        notes += [f"{experiment.label}: {note}" for note in notes_on(experiment, figure)]
    if any("*" in row["Device hours"] for row in rows):
        notes.append("* Hours of training: these runs did not record the number of devices.")
    if any(len(experiment.runs) > 1 for experiment in experiments):
        notes.append("± is the standard deviation over seeds (n − 1).")
    columns = [column for column in RESULTS if any(column in row for row in rows)]
    return make_table(f"Results{f', {leading}' if leading else ''}", columns, rows, notes)


def compare_with_paper(comparison: Comparison, leading: str | None) -> dict[str, str]:
    metric, paper = comparison.metric, format_metric(comparison.metric, comparison.paper)
    if leading is None or leading.partition("/")[0] != metric.partition("/")[0]:
        paper += f" [{metric}]"
    if comparison.is_same:
        return {"Paper": paper, "Difference": difference_text(metric, comparison.figure.mean, comparison.paper)}
    return {"Paper": paper, "Difference": "not comparable: other sample count" if comparison.figure else "not measured"}


def against_dense(experiment: Experiment, figure: Figure | None) -> str:
    """The difference from the same metric at the same step."""
    if figure is None:
        return NONE
    dense = next((other for other in experiment.baseline.curve(figure.name) if other.step == figure.step), None)
    return difference_text(figure.name, figure.mean, dense.mean) if dense else "no dense figure at this step"


def device_hours_text(runs: Sequence[Run]) -> str:
    """Of each run; of several, the lowest and the highest."""
    known = [run.device_hours for run in runs]
    if None not in known:
        return range_text(known)
    hours = [run.hours[-1][1] for run in runs if run.hours]
    return range_text(hours) + ("*" if hours else "")


def commit_text(start: dict) -> str:
    commit = start.get("commit")
    return f"{commit[:8]}{' + changes' if start.get('modified') else ''}" if isinstance(commit, str) else "unknown"


def notes_on(experiment: Experiment, figure: Figure | None) -> list[str]:
    """What the row of an experiment does not show: unfinished runs, missing seeds, other settings."""
    runs = experiment.runs
    unfinished = [run for run in runs if run.num_steps is not None and not run.is_finished]
    notes = [f"{run.name} is unfinished, at step {run.step:,} of {run.num_steps:,}" for run in unfinished]
    if figure is not None and len(figure.values) < len(runs):
        notes.append(f"the figure at step {figure.step:,} is of {len(figure.values)} of {len(runs)} runs")
    elif figure is not None and figure.step != max(run.step for run in runs):
        notes.append(f"the figure is of step {figure.step:,}")
    if len({run.config.get("seed") for run in runs}) < len(runs):
        notes.append("several runs have the same seed, and count as runs of their own in the mean and in ±")
    if experiment.changes is None:
        name = experiment.about["name"]
        notes.append(f"this version has no row {name}: whether these runs are what it was cannot be seen")
    if runs[0].config.get("init_from"):
        notes.append(f"started from {experiment.identity['init_from']}, whose training is not in the images and hours")
    if experiment.baseline is not None and (keys := other_settings(experiment, experiment.baseline)):
        own, dense = experiment.identity, experiment.baseline.identity
        what = ", ".join(f"{key}={dense.get(key)} instead of {own.get(key)}" for key in keys)
        notes.append(f"its dense runs differ in more than routes: {what}")
    return notes


def figures_table(experiments: Sequence[Experiment]) -> Table | None:
    """Every figure at its last step, beside the paper's, with the longer of metrics and experiments as rows."""
    metrics = list(dict.fromkeys(name for experiment in experiments for name in experiment.metrics()))
    if not metrics:
        return None
    is_wide = len(metrics) >= len(experiments)
    table = [["Metric" if is_wide else "Experiment", *metrics]]
    for experiment in experiments:
        paper = {
            one.figure.name: f" [paper {format_metric(one.metric, one.paper)}]" for one in experiment.comparisons() if one.is_same
        }
        table.append([experiment.label, *(figure_text(experiment.figure(name)) + paper.get(name, "") for name in metrics)])
    columns, *rows = zip(*table) if is_wide else table
    return Table("Every figure, at the last step that has it", columns, rows)


# ----------------------------------------------------------------------------------------------------------------------
# Routed against dense.


def speedup_table(experiments: Sequence[Experiment]) -> Table | None:
    """How much earlier routed runs reach a figure than the dense runs: the paper's 14x, as a number.

    The figure is the best of the dense runs, or, where the routed ones do not reach that, the best of the routed ones. Runs that
    start from different weights have no row.
    """
    rows, notes = [], []
    for experiment in experiments:
        metric, label, dense = compared_metric(experiment), experiment.label, experiment.baseline
        if metric is None:
            continue
        known = find_metric(metric)
        if known is None:
            notes.append(f"{label} is left out: the table of metrics does not say which direction of {metric} is better")
        if known is None or not starts_alike(experiment):
            continue
        notes += notes_on_dense(experiment, metric)
        find_best, find_worst = (min, max) if known.direction == "lower" else (max, min)
        curves = {one: [(figure.step, figure.mean) for figure in one.curve(metric)] for one in (dense, experiment)}
        bests = {one: find_best(value for _, value in curve) for one, curve in curves.items()}
        target = find_worst(bests.values())
        owner = "dense" if target == bests[dense] else "its own"
        row = {"Run": label, "Metric": metric, "Best that both reach": f"{format_metric(metric, target)} ({owner} best)"}
        bound, costs = "", []
        for one, who, if_first in ((dense, f"{label}, dense", "≤ "), (experiment, label, "≥ ")):
            curve = curves[one]
            step, between = first_reached(curve, target, 1 if known.direction == "lower" else -1)
            values = " and ".join(f"{format_metric(metric, value)} at step {at:,}" for at, value in between)
            if is_first := len(between) == 1 and curve[0][1] != target:
                bound = if_first
                notes.append(f"{who}: the first evaluation is already {values}")
            elif step != between[-1][0]:
                notes.append(f"{who}: linear interpolation between {values}; hours are those of training at that step")
            reached = f"{'at or before ' if is_first else ''}step {step:,.0f}"
            row |= {"Reached": reached} if one is experiment else {"Dense": f"{dense.label}, {reached}"}
            costs.append((step, one.hours_at(step, metric)))
        for clock, needed_dense, needed in zip(("steps", "hours"), *costs):
            if needed and needed_dense:
                row[f"Speedup in {clock}"] = f"{bound}{needed_dense / needed:.3g}×"
        rows.append(row)
    if rows:
        notes.append("The paper's headline, for DiT-XL/2 on ImageNet-256 against the dense run at 400,000 steps, is 14×.")
    return make_table("Speedup to the same figure", SPEEDUPS, rows, notes) if notes else None


def notes_on_dense(experiment: Experiment, metric: str) -> list[str]:
    """What makes a comparison with the dense runs preliminary or unequal."""
    notes, dense = [], experiment.baseline
    last = dense.curve(metric)[-1].step
    planned = dense.identity.get("train.num_steps")
    if planned is not None and last < planned:
        notes.append(f"{dense.label} has been evaluated until step {last:,} of {planned:,}: its figures so far")
    machines = [{machine_of(start) for run in one.runs for start in run.starts} for one in (experiment, dense)]
    own, other = (" and ".join(sorted(words)) for words in machines)
    if own != other and own and other:
        notes.append(f"{experiment.label}: hours on {own} against hours on {other}")
    return notes


def equal_table(experiments: Sequence[Experiment]) -> Table | None:
    """Routed against dense, once after as many steps and once after as many hours."""
    rows, notes = [], []
    for experiment in experiments:
        if not experiment.is_routed or experiment.baseline is None:
            continue
        if not starts_alike(experiment):
            notes.append(f"{experiment.label} is left out: it and its dense runs do not start from the same weights")
            continue
        metric = compared_metric(experiment)
        row = {"Routed": experiment.label, "Metric": metric or NONE}
        rows.append(row)
        result = compare_at_equal_cost(experiment, metric) if metric else None
        if result is None:
            continue
        routed, dense, hours, in_time = result
        row |= {"Step": f"{routed.step:,}", "Routed figure": figure_text(routed), "Dense, equal steps": figure_text(dense)}
        row["Difference"] = difference_text(metric, routed.mean, dense.mean)
        row["Routed hours"] = range_text([] if hours is None else [hours])
        num_routed, num_dense = len(routed.values), len(dense.values)
        row["Seeds"] = str(num_routed) if num_routed == num_dense else f"{num_routed} routed, {num_dense} dense"
        notes += notes_on_dense(experiment, metric)
        if in_time is not None:
            row["Dense, equal time"] = f"{figure_text(in_time)} (step {in_time.step:,.0f})"
            row["Difference in time"] = difference_text(metric, routed.mean, in_time.mean)
            if len(in_time.values) < num_dense:
                notes.append(f"{experiment.label}: at equal time of {len(in_time.values)} of {num_dense} dense runs")
    caption = "Routed against dense at equal steps and at equal time"
    return make_table(caption, EQUAL, rows, [*notes, EQUAL_NOTE]) if rows or notes else None
