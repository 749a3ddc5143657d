"""What the report says, as tables of text that the page and the Markdown share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.experiments import (
    Comparison,
    Experiment,
    Figure,
    Speedup,
    curve_metric,
    equal,
    leading_metric,
    other_settings,
    speedup,
    starts_alike,
)
from reports.runs import Run

NONE = "—"


@dataclass(frozen=True)
class Table:
    """Attributes:
    rows: one cell for each column; the first names the row.
    notes: what a reader must know about it.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text.


def number_text(value: float | None, like: float | None = None) -> str:
    """Three or four digits; with the decimals that `like` would have."""
    if value is None:
        return NONE
    size = abs(value if like is None else like)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{decimals}f}"


def figure_text(figure: Figure | None) -> str:
    if figure is None:
        return NONE
    return number_text(figure.mean) + (f" ± {number_text(figure.spread, like=figure.mean)}" if figure.spread is not None else "")


def difference_text(difference: float | None, reference: float) -> str:
    if difference is None:
        return NONE
    sign = "+" if difference >= 0 else "−"
    relative = f" ({sign}{abs(difference / reference):.0%})" if reference else ""
    return f"{sign}{number_text(abs(difference), like=reference)}{relative}"


def count_text(value: float | None) -> str:
    """76800 -> 76,800; 102400000 -> 102.4M."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.4g}M"


def factor_text(factor: float | None, at_least: bool) -> str:
    return NONE if factor is None else f"{'≥ ' if at_least else ''}{factor:.3g}×"


def range_text(values: Sequence[float]) -> str:
    """One number, or the lowest and the highest."""
    low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ----------------------------------------------------------------------------------------------------------------------
# The tables.


def results_table(experiments: Sequence[Experiment]) -> Table:
    """One row per experiment: its leading figure beside the paper's and the dense one's, and what it cost."""
    leading = leading_metric(experiments)
    has_baseline = any(experiment.baseline for experiment in experiments)
    has_paper = any(experiment.comparisons() for experiment in experiments)
    columns = ["Experiment", "Seeds", "Measured"] + (["Paper", "Difference"] if has_paper else [])
    columns += ["Against dense"] if has_baseline else []
    columns += ["Steps", "Images seen", "Device hours", "Images/s", "Commit"]
    rows, notes = [], []
    for experiment in experiments:
        comparison = next(iter(experiment.comparisons()), None)
        figure = leading_figure(experiment, comparison, leading)
        measured = figure_text(figure) + (f" [{figure.name}]" if figure and figure.name != leading else "")
        row = [experiment.label, str(len({run.config.get("seed") for run in experiment.runs})), measured]
        row += [paper_text(comparison, leading), comparison_text(comparison)] if has_paper else []
        if has_baseline:
            row.append(against_dense(experiment, figure))
        row += [steps_text(experiment.runs), images_text(experiment.runs), device_hours_text(experiment.runs)]
        speeds = [run.images_per_sec for run in experiment.runs if run.images_per_sec]
        rows.append((*row, range_text(speeds) if speeds else NONE, commit_text(experiment.runs)))
        notes += [f"{experiment.label}: {word}" for word in incomplete(experiment, figure)]
    if any("*" in row[-3] for row in rows):
        notes.append("* Hours of training: these runs did not record the number of devices.")
    if any(len(experiment.runs) > 1 for experiment in experiments):
        notes.append("± is the standard deviation over seeds (n − 1).")
    metric = f", {leading}" if leading else ""
    return Table(f"Results{metric}", tuple(columns), tuple(rows), tuple(notes))


def leading_figure(experiment: Experiment, comparison: Comparison | None, leading: str | None) -> Figure | None:
    if comparison is not None and (comparison.measured or comparison.instead):
        return comparison.measured or comparison.instead
    names = [name for name in (leading, *experiment.metrics()) if name]
    return next((figure for name in names if (figure := experiment.figure(name))), None)


def paper_text(comparison: Comparison | None, leading: str | None) -> str:
    if comparison is None:
        return NONE
    is_leading = leading is not None and leading.partition("/")[0] == comparison.metric.partition("/")[0]
    return number_text(comparison.paper) + ("" if is_leading else f" [{comparison.metric}]")


def comparison_text(comparison: Comparison | None) -> str:
    if comparison is None:
        return NONE
    if comparison.measured is None:
        return "not comparable: other sample count" if comparison.instead else "not measured"
    return difference_text(comparison.difference, comparison.paper)


def against_dense(experiment: Experiment, figure: Figure | None) -> str:
    """The difference of the same metric at the same step."""
    if experiment.baseline is None or figure is None:
        return NONE
    dense = [other for other in experiment.baseline.curve(figure.name) if other.step == figure.step]
    return difference_text(figure.mean - dense[0].mean, dense[0].mean) if dense else "no dense figure at this step"


def incomplete(experiment: Experiment, figure: Figure | None) -> list[str]:
    words = []
    for run in experiment.runs:
        if run.num_steps is not None and not run.is_finished:
            words.append(f"{run.name} is unfinished, at step {run.step:,} of {run.num_steps:,}")
    if figure is not None and len(figure.values) < len(experiment.runs):
        words.append(f"the figure at step {figure.step:,} is of {len(figure.values)} of {len(experiment.runs)} runs")
    elif figure is not None and figure.step != max(run.step for run in experiment.runs):
        words.append(f"the figure is of step {figure.step:,}")
    if len({run.config.get("seed") for run in experiment.runs}) < len(experiment.runs):
        words.append("several runs have the same seed, and count as runs of their own in the mean and in ±")
    if experiment.runs[0].config.get("init_from"):
        words.append(f"started from {experiment.identity['init_from']}, whose training is not in the images and hours")
    if experiment.baseline is not None and (others := other_settings(experiment, experiment.baseline)):
        what = ", ".join(
            f"{key}={experiment.baseline.identity.get(key)} instead of {experiment.identity.get(key)}" for key in others
        )
        words.append(f"its dense runs differ in more than routes: {what}")
    return words


def steps_text(runs: Sequence[Run]) -> str:
    last = max(run.step for run in runs)
    planned = max((run.num_steps or 0 for run in runs), default=0)
    return f"{last:,} of {planned:,}" if last < planned else f"{last:,}"


def images_text(runs: Sequence[Run]) -> str:
    return count_text(max((run.images_seen for run in runs if run.images_seen), default=None))


def device_hours_text(runs: Sequence[Run]) -> str:
    """Of each run; of several, the lowest and the highest."""
    known = [run.device_hours for run in runs]
    if all(hours is not None for hours in known):
        return range_text(known)
    hours = [max(run.hours.values()) for run in runs if run.hours]
    return f"{range_text(hours)}*" if hours else NONE


def commit_text(runs: Sequence[Run]) -> str:
    words = []
    for start in (start for run in runs for start in run.starts):
        commit = start.get("commit")
        words.append(f"{commit[:8]}{' + changes' if start.get('modified') else ''}" if isinstance(commit, str) else "unknown")
    return ", ".join(dict.fromkeys(words)) or "not recorded"


def figures_table(experiments: Sequence[Experiment]) -> Table | None:
    """Every figure of the last step: a row per metric, a column per experiment; the paper's in brackets."""
    metrics = list(dict.fromkeys(name for experiment in experiments for name in experiment.metrics()))
    if not metrics:
        return None
    rows = []
    for metric in metrics:
        cells = []
        for experiment in experiments:
            paper = [c.paper for c in experiment.comparisons() if c.measured is not None and c.measured.name == metric]
            cells.append(figure_text(experiment.figure(metric)) + (f" [paper {number_text(paper[0])}]" if paper else ""))
        rows.append((metric, *cells))
    names = tuple(experiment.label for experiment in experiments)
    caption = "Every figure, at the last step that has it"
    if len(names) <= len(metrics):
        return Table(caption, ("Metric", *names), tuple(rows))
    turned = zip(names, *(row[1:] for row in rows))
    return Table(caption, ("Experiment", *metrics), tuple(turned))


def speedup_table(experiments: Sequence[Experiment]) -> Table | None:
    """How much earlier routed runs reach the dense run's best figure: the paper's 14x, as a number."""
    rows, notes = [], []
    for experiment in experiments:
        metric = speedup_metric(experiment)
        result = speedup(experiment, metric) if metric else None
        if result is None:
            continue
        goal = f"{number_text(result.target)} at step {result.dense_step:,}"
        notes += dense_notes(experiment, result.metric)
        at_least = len(result.between) == 1
        if result.step is None:
            reached = f"not reached; best {figure_text(result.best)} at step {result.best.step:,}"
        else:
            reached = f"{'at or before ' if at_least else ''}step {result.step:,.0f}"
            notes.append(f"{experiment.label}: {interpolation_words(result)}")
        steps, hours = factor_text(result.in_steps, at_least), factor_text(result.in_hours, at_least)
        rows.append((experiment.label, result.metric, f"{experiment.baseline.label}: {goal}", reached, steps, hours))
    if not rows:
        return None
    notes.append("The paper's headline, for DiT-XL/2 on ImageNet-256 against the dense run at 400,000 steps, is 14×.")
    columns = ("Routed", "Metric", "Dense run's best", "Reached", "Speedup in steps", "Speedup in hours")
    return Table("Speedup to the dense run's best figure", columns, tuple(rows), tuple(dict.fromkeys(notes)))


def dense_notes(experiment: Experiment, metric: str) -> list[str]:
    """What a comparison with the dense runs must say of them."""
    notes, dense = [], experiment.baseline
    last = dense.curve(metric)[-1].step
    if dense.num_steps is not None and last < dense.num_steps:
        notes.append(f"{dense.label} has been evaluated until step {last:,} of {dense.num_steps:,}: its figures so far")
    own, other = machines(experiment), machines(dense)
    if own != other and own and other:
        notes.append(f"{experiment.label}: hours on {own} against hours on {other}")
    return notes


def machines(experiment: Experiment) -> str:
    starts = [start for run in experiment.runs for start in run.starts]
    return " and ".join(sorted({f"{s.get('num_processes', '?')} × {s.get('device', 'unknown device')}" for s in starts}))


def equal_table(experiments: Sequence[Experiment]) -> Table | None:
    """Routed against dense, once after as many steps and once after as many hours."""
    rows, notes = [], []
    for experiment in experiments:
        if not experiment.is_routed or experiment.baseline is None:
            continue
        if not starts_alike(experiment):
            notes.append(f"{experiment.label} is left out: it and its dense runs do not start from the same weights")
            continue
        metric = speedup_metric(experiment)
        result = equal(experiment, metric) if metric else None
        if result is None or result.step is None:
            rows.append((experiment.label, metric or NONE, *[NONE] * 8))
            continue
        in_time = result.dense_in_time
        rows.append(
            (
                experiment.label,
                metric,
                f"{result.step:,}",
                figure_text(result.routed),
                figure_text(result.dense),
                difference_text(result.routed.mean - result.dense.mean, result.dense.mean),
                NONE if result.hours is None else range_text([result.hours]),
                figure_text(in_time) + (f" (step {in_time.step:,.0f})" if in_time else ""),
                difference_text(result.routed.mean - in_time.mean, in_time.mean) if in_time else NONE,
                seeds_text(len(result.routed.values), len(result.dense.values)),
            )
        )
        notes += dense_notes(experiment, metric)
        if in_time and len(in_time.values) < len(result.dense.values):
            notes.append(f"{experiment.label}: at equal time of {len(in_time.values)} of {len(result.dense.values)} dense runs")
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
    return Table("Routed against dense at equal steps and at equal time", columns, tuple(rows), tuple(dict.fromkeys(notes)))


def seeds_text(routed: int, dense: int) -> str:
    return str(routed) if routed == dense else f"{routed} routed, {dense} dense"


def speedup_metric(experiment: Experiment) -> str | None:
    """That of the curves, where both have it."""
    metric = curve_metric([experiment, experiment.baseline]) if experiment.baseline else None
    return metric if metric and experiment.curve(metric) and experiment.baseline.curve(metric) else None


def interpolation_words(result: Speedup) -> str:
    if len(result.between) == 1:
        (step, value), *_ = result.between
        return f"its first evaluation, at step {step:,}, is already {number_text(value)}; the speedup is at least this"
    (s0, v0), (s1, v1) = result.between
    return (
        f"linear interpolation between {number_text(v0)} at step {s0:,} and {number_text(v1)} at step {s1:,}; "
        "hours are those of training at that step"
    )


# ----------------------------------------------------------------------------------------------------------------------
# Where the runs come from.


def origin_lines(run: Run) -> list[tuple[str, str]]:
    """(what, text) for a run: its state, and every start with its command."""
    planned = "" if run.num_steps is None else f" of {run.num_steps:,}"
    lines = [("State", f"{'finished' if run.is_finished else 'unfinished'}, step {run.step:,}{planned}")]
    if not run.starts:
        lines.append(("Command", "not recorded (a run of an earlier version)"))
    for start in run.starts:
        if "command" in start:
            lines.append(("Command" if start["step"] == 0 else f"Resumed at step {start['step']:,}", str(start["command"])))
        lines.append(("On", start_text(start)))
    return lines


def start_text(start: dict) -> str:
    commit = str(start.get("commit") or "")
    where = f"{start.get('num_processes', '?')} × {start.get('device', 'unknown device')}"
    code = f"commit {commit[:12]}{' with local changes' if start.get('modified') else ''}" if commit else "commit unknown"
    return f"{where}, torch {start.get('torch', '?')}, {code}, {start.get('time', 'time unknown')}"
