"""What the report says, as tables of text that the page and the Markdown file share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evaluations.suite import find_metric, format_metric
from reports.experiments import (
    Comparison,
    Experiment,
    Figure,
    Speedup,
    compare_at_equal_cost,
    compared_metric,
    find_speedup,
    leading_metric,
    other_settings,
    starts_alike,
)
from reports.runs import Run

NONE = "—"


@dataclass(frozen=True)
class Table:
    """Attributes:
    rows: one cell for each column; the first names the row.
    notes: what a reader must know to read it rightly.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text.


def figure_text(figure: Figure | None) -> str:
    """40.00 ± 1.41, with the digits that the table of metrics gives."""
    if figure is None:
        return NONE
    spread = "" if figure.spread is None else f" ± {format_metric(figure.name, figure.spread)}"
    return format_metric(figure.name, figure.mean) + spread


def difference_text(metric: str, value: float, reference: float) -> str:
    """+2.00 (+20%)."""
    sign = "+" if value >= reference else "−"
    relative = f" ({sign}{abs((value - reference) / reference):.0%})" if reference else ""
    return f"{sign}{format_metric(metric, abs(value - reference))}{relative}"


def count_text(value: float | None) -> str:
    """76800 -> 76,800; 102400000 -> 102.4M."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.4g}M"


def factor_text(factor: float | None, at_least: bool) -> str:
    return NONE if factor is None else f"{'≥ ' if at_least else ''}{factor:.3g}×"


def range_text(values: Sequence[float]) -> str:
    """One number, or the lowest and the highest."""
    if not values:
        return NONE
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ----------------------------------------------------------------------------------------------------------------------
# The tables.


def results_table(experiments: Sequence[Experiment]) -> Table:
    """A row per experiment: its leading figure beside the paper's and the dense one's, and what it cost."""
    leading = leading_metric(experiments)
    has_paper = any(experiment.comparisons() for experiment in experiments)
    has_baseline = any(experiment.baseline for experiment in experiments)
    columns = ["Experiment", "Seeds", "Measured"] + (["Paper", "Difference"] if has_paper else [])
    columns += ["Against dense"] if has_baseline else []
    columns += ["Steps", "Images seen", "Device hours", "Images/s", "Commit"]
    rows, notes = [], []
    for experiment in experiments:
        runs, comparison = experiment.runs, next(iter(experiment.comparisons()), None)
        figure = leading_figure(experiment, comparison, leading)
        measured = figure_text(figure) + (f" [{figure.name}]" if figure and figure.name != leading else "")
        row = [experiment.label, str(len({run.config.get("seed") for run in runs})), measured]
        row += comparison_cells(comparison, leading) if has_paper else []
        row += [against_dense(experiment, figure)] if has_baseline else []
        images = max((run.images_seen for run in runs if run.images_seen), default=None)
        speeds = [run.images_per_sec for run in runs if run.images_per_sec]
        rows.append([*row, steps_text(runs), count_text(images), device_hours_text(runs), range_text(speeds), commit_text(runs)])
        notes += [f"{experiment.label}: {note}" for note in notes_on(experiment, figure)]
    if any("*" in row[-3] for row in rows):
        notes.append("* Hours of training: these runs did not record the number of devices.")
    if any(len(experiment.runs) > 1 for experiment in experiments):
        notes.append("± is the standard deviation over seeds (n − 1).")
    return Table(f"Results{f', {leading}' if leading else ''}", columns, rows, notes)


def leading_figure(experiment: Experiment, comparison: Comparison | None, leading: str | None) -> Figure | None:
    if comparison is not None and (comparison.measured or comparison.instead):
        return comparison.measured or comparison.instead
    names = [name for name in (leading, *experiment.metrics()) if name]
    return next((figure for name in names if (figure := experiment.figure(name))), None)


def comparison_cells(comparison: Comparison | None, leading: str | None) -> list[str]:
    """The paper's figure, and the measured one's difference from it."""
    if comparison is None:
        return [NONE, NONE]
    metric, paper = comparison.metric, format_metric(comparison.metric, comparison.paper)
    if leading is None or leading.partition("/")[0] != metric.partition("/")[0]:
        paper += f" [{metric}]"
    if comparison.measured is None:
        return [paper, "not comparable: other sample count" if comparison.instead else "not measured"]
    return [paper, difference_text(metric, comparison.measured.mean, comparison.paper)]


def against_dense(experiment: Experiment, figure: Figure | None) -> str:
    """The difference from the same metric at the same step."""
    if experiment.baseline is None or figure is None:
        return NONE
    dense = next((other for other in experiment.baseline.curve(figure.name) if other.step == figure.step), None)
    return difference_text(figure.name, figure.mean, dense.mean) if dense else "no dense figure at this step"


def notes_on(experiment: Experiment, figure: Figure | None) -> list[str]:
    """What the row of an experiment does not show: unfinished runs, missing seeds, other settings."""
    runs, notes = experiment.runs, []
    for run in runs:
        if run.num_steps is not None and not run.is_finished:
            notes.append(f"{run.name} is unfinished, at step {run.step:,} of {run.num_steps:,}")
    if figure is not None and len(figure.values) < len(runs):
        notes.append(f"the figure at step {figure.step:,} is of {len(figure.values)} of {len(runs)} runs")
    elif figure is not None and figure.step != max(run.step for run in runs):
        notes.append(f"the figure is of step {figure.step:,}")
    if len({run.config.get("seed") for run in runs}) < len(runs):
        notes.append("several runs have the same seed, and count as runs of their own in the mean and in ±")
    if runs[0].config.get("init_from"):
        notes.append(f"started from {experiment.identity['init_from']}, whose training is not in the images and hours")
    if experiment.baseline is not None and (keys := other_settings(experiment, experiment.baseline)):
        own, dense = experiment.identity, experiment.baseline.identity
        what = ", ".join(f"{key}={dense.get(key)} instead of {own.get(key)}" for key in keys)
        notes.append(f"its dense runs differ in more than routes: {what}")
    return notes


def steps_text(runs: Sequence[Run]) -> str:
    last = max(run.step for run in runs)
    planned = max((run.num_steps or 0 for run in runs), default=0)
    return f"{last:,} of {planned:,}" if last < planned else f"{last:,}"


def device_hours_text(runs: Sequence[Run]) -> str:
    """Of each run; of several, the lowest and the highest."""
    known = [run.device_hours for run in runs]
    if None not in known:
        return range_text(known)
    hours = [max(run.hours.values()) for run in runs if run.hours]
    return range_text(hours) + ("*" if hours else "")


def commit_text(runs: Sequence[Run]) -> str:
    words = []
    for start in (start for run in runs for start in run.starts):
        commit = start.get("commit")
        words.append(f"{commit[:8]}{' + changes' if start.get('modified') else ''}" if isinstance(commit, str) else "unknown")
    return ", ".join(dict.fromkeys(words)) or "not recorded"


def figures_table(experiments: Sequence[Experiment]) -> Table | None:
    """Every figure at its last step, beside the paper's, with the longer of metrics and experiments as rows."""
    metrics = list(dict.fromkeys(name for experiment in experiments for name in experiment.metrics()))
    if not metrics:
        return None
    rows = []
    for metric in metrics:
        cells = []
        for experiment in experiments:
            paper = [c.paper for c in experiment.comparisons() if c.measured is not None and c.measured.name == metric]
            words = f" [paper {format_metric(metric, paper[0])}]" if paper else ""
            cells.append(figure_text(experiment.figure(metric)) + words)
        rows.append((metric, *cells))
    names = [experiment.label for experiment in experiments]
    caption = "Every figure, at the last step that has it"
    if len(names) <= len(metrics):
        return Table(caption, ("Metric", *names), rows)
    return Table(caption, ("Experiment", *metrics), list(zip(names, *(row[1:] for row in rows))))


def speedup_table(experiments: Sequence[Experiment]) -> Table | None:
    """How much earlier routed runs reach the dense runs' best figure: the paper's 14x, as a number."""
    rows, notes = [], []
    for experiment in experiments:
        metric = compared_metric(experiment)
        if metric is None:
            continue
        if find_metric(metric) is None:
            notes.append(
                f"{experiment.label} is left out: the table of metrics does not say which direction of {metric} is better"
            )
            continue
        result = find_speedup(experiment, metric)
        if result is None:
            continue
        notes += notes_on_dense(experiment, metric)
        at_least = len(result.between) == 1
        if result.step is None:
            reached = f"not reached; best {figure_text(result.best)} at step {result.best.step:,}"
        else:
            reached = f"{'at or before ' if at_least else ''}step {result.step:,.0f}"
            notes.append(f"{experiment.label}: {interpolation_text(metric, result)}")
        target = f"{format_metric(metric, result.target.mean)} at step {result.target.step:,}"
        factors = factor_text(result.in_steps, at_least), factor_text(result.in_hours, at_least)
        rows.append((experiment.label, metric, f"{experiment.baseline.label}: {target}", reached, *factors))
    if rows:
        notes.append("The paper's headline, for DiT-XL/2 on ImageNet-256 against the dense run at 400,000 steps, is 14×.")
    columns = ("Routed", "Metric", "Dense run's best", "Reached", "Speedup in steps", "Speedup in hours")
    return Table("Speedup to the dense run's best figure", columns, rows, list(dict.fromkeys(notes))) if notes else None


def interpolation_text(metric: str, result: Speedup) -> str:
    points = [(format_metric(metric, value), f"at step {step:,}") for step, value in result.between]
    if len(points) == 1:
        figure, where = points[0]
        return f"its first evaluation, {where}, is already {figure}; the speedup is at least this"
    return f"linear interpolation between {' and '.join(map(' '.join, points))}; hours are those of training at that step"


def notes_on_dense(experiment: Experiment, metric: str) -> list[str]:
    """What makes a comparison with the dense runs preliminary or unequal."""
    notes, dense = [], experiment.baseline
    last = dense.curve(metric)[-1].step
    if dense.num_steps is not None and last < dense.num_steps:
        notes.append(f"{dense.label} has been evaluated until step {last:,} of {dense.num_steps:,}: its figures so far")
    own, other = (
        " and ".join(sorted({machine_text(start) for run in one.runs for start in run.starts})) for one in (experiment, dense)
    )
    if own != other and own and other:
        notes.append(f"{experiment.label}: hours on {own} against hours on {other}")
    return notes


def machine_text(start: dict) -> str:
    return f"{start.get('num_processes', '?')} × {start.get('device', 'unknown device')}"


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
        result = compare_at_equal_cost(experiment, metric) if metric else None
        if result is None:
            rows.append((experiment.label, metric or NONE, *[NONE] * 8))
            continue
        routed, dense, hours, in_time = result
        num_routed, num_dense = len(routed.values), len(dense.values)
        rows.append(
            (
                experiment.label,
                metric,
                f"{routed.step:,}",
                figure_text(routed),
                figure_text(dense),
                difference_text(metric, routed.mean, dense.mean),
                range_text([] if hours is None else [hours]),
                f"{figure_text(in_time)} (step {in_time.step:,.0f})" if in_time else NONE,
                difference_text(metric, routed.mean, in_time.mean) if in_time else NONE,
                str(num_routed) if num_routed == num_dense else f"{num_routed} routed, {num_dense} dense",
            )
        )
        notes += notes_on_dense(experiment, metric)
        if in_time and len(in_time.values) < num_dense:
            notes.append(f"{experiment.label}: at equal time of {len(in_time.values)} of {num_dense} dense runs")
    if not rows and not notes:
        return None
    notes.append(
        "Equal steps: the last step at which both have been evaluated. Equal time: the dense figure at the step that took the "
        "dense runs, on average, as many hours of training as the routed runs took to the step of this row; for each seed it is "
        "interpolated linearly between the evaluations before and after, which overstates it where the curve flattens, and "
        f"{NONE} where there are none. Differences are routed minus dense."
    )
    columns = ("Routed", "Metric", "Step", "Routed figure", "Dense, equal steps", "Difference", "Routed hours")
    columns += ("Dense, equal time", "Difference in time", "Seeds")
    return Table("Routed against dense at equal steps and at equal time", columns, rows, list(dict.fromkeys(notes)))


def problems_table(problems: dict[str, list[str]]) -> Table:
    rows = [(path, "; ".join(reasons)) for path, reasons in problems.items()]
    return Table("What could not be read, or not wholly", ("File or folder", "Reason"), rows)


def describe_origin(run: Run) -> list[tuple[str, str, bool]]:
    """(what, text, whether it is a command): the run's state, and every start with its command, machine and commit."""
    planned = "" if run.num_steps is None else f" of {run.num_steps:,}"
    lines = [("State", f"{'finished' if run.is_finished else 'unfinished'}, step {run.step:,}{planned}", False)]
    if not run.starts:
        lines.append(("Command", "not recorded (a run of an earlier version)", False))
    for start in run.starts:
        if "command" in start:
            what = "Command" if start["step"] == 0 else f"Resumed at step {start['step']:,}"
            lines.append((what, str(start["command"]), True))
        commit = str(start.get("commit") or "")
        code = f"commit {commit[:12]}{' with local changes' if start.get('modified') else ''}" if commit else "commit unknown"
        when = start.get("time", "time unknown")
        lines.append(("On", f"{machine_text(start)}, torch {start.get('torch', '?')}, {code}, {when}", False))
    return lines
