"""Build the tables of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from evaluations.suite import find_metric, format_mean, format_metric
from evaluations.tables import markdown_table
from extras.report.experiments import Experiment, curve_measure, differences_from
from extras.report.rows import change_words
from extras.report.runs import LOSS, UNGUIDED, Measure

FRACTION = ".3f"  # the format of metrics from 0 to 1 in evaluations.suite.METRICS


@dataclass
class Table:
    """A table whose rows are {column: cell} dictionaries. Empty columns are not printed."""

    caption: str
    rows: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        columns = list(dict.fromkeys(name for row in self.rows for name, cell in row.items() if cell))
        table = markdown_table(columns, [[row.get(name, "") for name in columns] for row in self.rows]) if self.rows else ""
        return f"### {self.caption}\n\n{table}" + "".join(f"\n- {note}" for note in dict.fromkeys(self.notes))


def results_table(experiments: Sequence[Experiment]) -> Table:
    """Compare each experiment's last figures with the paper and the dense runs. Each way of measuring has its own row."""
    table = Table("Results")
    for experiment in experiments:
        rows: dict[tuple, dict[str, str]] = {}
        planned, batch_size = experiment.identity["train.num_steps"], experiment.identity["train.batch_size"]
        for measure in experiment.measures() or [LOSS]:
            step, values = experiment.last_values(measure)
            seeds = ", ".join(sorted(map(str, values)))
            row = {
                "Experiment": experiment.label,
                "Seeds": seeds,
                "Step": f"{step:,} of {planned:,}" if step < planned else f"{step:,}",
                "Images seen": f"{step * batch_size + experiment.longest_runs(measure)[0].image_offset:,}",
                "Hours": f"{experiment.hours_at(step, measure):.3g}",
                "Samples": f"{measure.num_samples:,}" if measure.num_samples else "",
                "Guidance": measure.guidance,
                "Measured with": measure.measured_with,
            }
            rows.setdefault((measure[1:], step, seeds), row)[measure.metric] = figure_text(experiment, measure, step, values)
        table.rows += rows.values()
        notes = []
        if experiment.baseline and (different := differences_from(experiment, experiment.baseline)):
            notes.append(f"its dense runs differ in more than routes: {change_words(different)}")
        if source := experiment.identity.get("init_from"):
            missing = "hours" if experiment.identity["init_state"] == "all" else "steps and hours"
            notes.append(f"started from {source}, whose training is not in the {missing}")
        table.notes += [f"{experiment.label}: {note}" for note in notes]
    return table


def guidance_table(experiments: Sequence[Experiment]) -> Table:
    """Show each experiment without guidance and at its best guidance, if its last step has several guidance settings.

    The best guidance has the best mean of the first metric, over the seeds that have all of these guidance settings. Its figures
    are slightly too good because the same samples select it.
    """
    table = Table("Each experiment at its best guidance")
    for experiment in experiments:
        # Values by seed, for each step and way of measuring, guidance, and metric.
        evaluations: dict[tuple, dict[str, dict[str, dict[int, float]]]] = {}
        for measure in experiment.measures():
            step, values = experiment.last_values(measure)
            key = (step, measure.num_samples, measure.measured_with)
            evaluations.setdefault(key, {}).setdefault(measure.guidance, {})[measure.metric] = values
        for (step, num_samples, measured_with), guidances in evaluations.items():
            leading = next(iter(next(iter(guidances.values()))))
            found = {name: figures for name, figures in guidances.items() if leading in figures}
            if len(found) < 2:
                continue
            seeds = sorted(set.intersection(*({*figures[leading]} for figures in found.values())))
            if not seeds:
                table.notes.append(f"{experiment.label}: no seed has all of {', '.join(found)}")
                continue
            means = {name: fmean(figures[leading][seed] for seed in seeds) for name, figures in found.items()}
            best = min(means, key=lambda name: sign_of(leading) * means[name])
            table.notes.append(f"{experiment.label}: best of {', '.join(means)} by {leading}")
            for name in dict.fromkeys([*({UNGUIDED} & means.keys()), best]):
                row = {"Experiment": experiment.label, "Seeds": ", ".join(map(str, seeds)), "Step": f"{step:,}"}
                row |= {"Samples": f"{num_samples:,}", "Guidance": name}
                figures = {
                    metric: format_mean(metric, [values[seed] for seed in seeds])
                    for metric, values in found[name].items()
                    if {*seeds} <= values.keys()
                }
                table.rows.append(row | figures | {"Measured with": measured_with})
    return table


def sign_of(metric: str) -> int:
    """Return 1 if lower values of a metric are better, otherwise -1. Losses are not in METRICS, and lower losses are better."""
    known = find_metric(metric)
    return -1 if known and known.direction == "higher" else 1


def figure_text(experiment: Experiment, measure: Measure, step: int, by_seed: Mapping[int, float]) -> str:
    """Format the mean and deviation over seeds with comparisons: `12.00 ± 1.41 (paper 21.34, -44%; dense 40.00, -70%)`.

    Metrics from 0 to 1, such as precision, show differences instead of percentages, which would be huge for small values.
    """
    metric, values = find_metric(measure.metric), [*by_seed.values()]

    def reference_text(name: str, reference: float) -> str:
        difference = fmean(values) - reference
        if metric and metric.format == FRACTION:
            relative = f", {difference:+{FRACTION}}"
        else:
            relative = f", {difference / reference:+.0%}" if reference else ""
        return f"{name} {format_metric(measure.metric, reference)}{relative}"

    references = []
    if (paper := experiment.paper(measure)) is not None and experiment.is_measured_like_the_row(measure, step):
        references.append(reference_text("paper", paper))
    # Training losses of routed and dense runs are not comparable.
    if experiment.baseline and measure != LOSS and (dense := experiment.baseline.curve(measure).get(step)):
        references.append(reference_text("dense", fmean(dense.values())))
    return format_mean(measure.metric, values) + (f" ({'; '.join(references)})" if references else "")


def speedup_table(experiments: Sequence[Experiment]) -> Table:
    """Show how much earlier routed runs reach a figure, compared with their dense runs.

    The figure is the best value that both reach, i.e., the worse of their best values. Runs with unequal init_from are skipped.
    """
    table = Table("Speedup to the same figure")
    for routed in experiments:
        dense = routed.baseline
        if dense is None or "init_from" in differences_from(routed, dense) or (measure := curve_measure(dense, routed)) is None:
            continue
        sign = sign_of(measure.metric)
        curves = [{step: sign * fmean(values.values()) for step, values in e.curve(measure).items()} for e in (dense, routed)]
        target = max(min(curve.values()) for curve in curves)
        (dense_step, dense_is_bound), (step, is_bound) = (first_reached(curve, target) for curve in curves)
        bound = "≤ " if dense_is_bound else "≥ " if is_bound else ""
        best = f"{format_metric(measure.metric, sign * target)} ({measure.in_words()})"
        row = {"Routed": routed.label, "Best that both reach": best}
        row["Dense"] = f"{dense.label}, {'at or before ' if dense_is_bound else ''}step {dense_step:,.0f}"
        row["Reached"] = f"{'at or before ' if is_bound else ''}step {step:,.0f}"
        seeds = [{step: sign * x for step, x in sorted(run.figures[measure].items())} for run in routed.longest_runs(measure)]
        reached = [first_reached(curve, target)[0] for curve in seeds if min(curve.values()) <= target]
        if len(seeds) > 1:
            steps = f", at step {min(reached):,.0f} to {max(reached):,.0f}" if reached else ""
            row["Routed seeds"] = f"{len(reached)} of {len(seeds)} reach it{steps}"
        row["Speedup in steps"] = f"{bound}{dense_step / step:.3g}×"
        row["Speedup in hours"] = f"{bound}{dense.hours_at(dense_step, measure) / routed.hours_at(step, measure):.3g}×"
        table.rows.append(row)
        machines = [" and ".join(sorted({machine_of(s) for run in e.runs for s in run.starts})) for e in (routed, dense)]
        if machines[0] != machines[1]:
            table.notes.append(f"{routed.label}: hours on {machines[0]} against hours on {machines[1]}")
    return table


def machine_of(start: dict) -> str:
    return f"{start['num_processes']} × {start['device']}"


def first_reached(curve: Mapping[int, float], target: float) -> tuple[float, bool]:
    """Return the step at which a curve first reaches the target, and whether the first evaluation is already below the target.

    `curve` maps steps to values, and lower values are better. The function interpolates linearly between two steps.
    """
    before = None
    for step, value in curve.items():
        if value <= target:
            break
        before = step, value
    if before is None or value == target:
        return step, value < target
    return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - value), False
