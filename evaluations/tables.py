"""Tables and plots of evaluations."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
from collections.abc import Mapping, Sequence

from common.files import write_atomically
from evaluations.metrics import standard_error
from evaluations.record import EvaluationRecord, PlannedEvaluation, Results
from evaluations.result_settings import HASHES
from evaluations.suite import format_metric

ALWAYS_COLUMNS = ("num_samples",)  # a figure of 5,000 samples must not look like one of 50,000


def columns_of(record: PlannedEvaluation) -> dict[str, object]:
    """Return what a record measures, as tables, plots and messages show it."""
    settings = {name: value for name, value in record.settings.items() if name not in HASHES}
    return {name: value for name, value in {"run": record.run, "step": record.step}.items() if value is not None} | settings


def hashes_of(record: EvaluationRecord) -> dict[str, str | None]:
    """Return the hashes that results.csv shows, and the other tables only where lines would look the same."""
    return {"checkpoint": record.checkpoint} | {name: record.settings.get(name) for name in HASHES}


class ResultsTable:
    """Evaluations as rows: settings, metrics with standard errors, and costs.

    Args:
        records: Evaluations of samples or images, in the order of the rows.
        columns: What each record measures (see `columns_of`).
        primary_metric: Metric by which comparable rows are ranked. The lowest value is marked with `*`, and values that do not
            differ significantly from it with `~`. A `?` says that standard errors are missing to tell.
    """

    def __init__(self, records: Sequence[EvaluationRecord], columns: Sequence[Mapping[str, object]], primary_metric: str):
        self.records, self.columns, self.primary_metric = records, [dict(row) for row in columns], primary_metric
        self.metrics = {name for record in records for name in record.metrics}
        ranked: dict[tuple, list[EvaluationRecord]] = {}
        groups = [record.ranking_group for record in records]
        for record, group in zip(records, groups):
            ranked.setdefault(group, []).extend([record] if primary_metric in record.metrics else [])
        self.marks = [self._mark(record, ranked[group]) for record, group in zip(records, groups)]

    def _mark(self, record: EvaluationRecord, ranked: Sequence[EvaluationRecord]) -> str:
        best = min(ranked, key=lambda other: other.metrics[self.primary_metric], default=record)
        if len(ranked) < 2 or record is best:
            return "*" if len(ranked) > 1 else ""
        if self.primary_metric not in record.metrics:
            return ""
        return {True: "", False: "~", None: "?"}[differ_significantly(record, best, self.primary_metric)]

    def csv(self) -> str:
        """Format all settings, figures, standard errors, costs and hashes as CSV."""
        rows = []
        for record, columns, mark in zip(self.records, self.columns, self.marks):
            errors = {f"{name}_error": standard_error(values) for name, values in record.jackknife.items()}
            rows.append(columns | {"best": mark} | record.metrics | record.cost | errors | hashes_of(record))
        text = io.StringIO()
        writer = csv.DictWriter(text, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def cells(self) -> dict[str, list[str]]:
        """Return the columns of the other tables as texts."""
        rows = []
        for record, columns, mark in zip(self.records, self.columns, self.marks):
            errors = {name: standard_error(values) for name, values in record.jackknife.items()}
            row = columns | {"best": mark} | record.metrics | record.cost
            rows.append({name: _format(name, value, errors.get(name)) for name, value in row.items()})
        self._distinguish(rows)
        return {name: [row.get(name, "") for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}

    def _distinguish(self, rows: Sequence[dict[str, str]]) -> None:
        """Add the start of a hash to the rows of records that differ in it, but in no other setting that the tables show."""
        alike: dict[str, list[tuple[dict, dict]]] = {}  # (hashes, row) of the records with the same columns
        for record, columns, row in zip(self.records, self.columns, rows):
            alike.setdefault(json.dumps(columns, sort_keys=True), []).append((hashes_of(record), row))
        for group, name in itertools.product(alike.values(), ("checkpoint", *HASHES)):
            if len({hashes[name] for hashes, _ in group}) > 1:
                for hashes, row in group:
                    row[name] = (hashes[name] or "")[:8]

    def markdown(self) -> str:
        cells = self.cells()
        text = markdown_table(list(cells), list(zip(*cells.values())))
        if any(self.marks):
            text += f"\n`*`: the lowest {self.primary_metric} of equal evaluations; `~`: not significantly above the lowest (95%)"
            text += "; `?`: not known without standard errors, which only fid.py computes\n" if "?" in self.marks else "\n"
        return text

    def terminal(self) -> str:
        """Return a text table with the metrics, the number of samples and the settings that differ between rows."""
        wanted = {*self.metrics, *ALWAYS_COLUMNS}
        cells = self.cells() if self.records else {}
        printed = [[name, *column] for name, column in cells.items() if name in wanted or len(set(column)) > 1]
        padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in printed]
        return "".join("  ".join(row).rstrip() + "\n" for row in zip(*padded))

    def plot(self) -> bytes | None:
        """Plot the metric with standard errors (PNG), or return None if fewer than two records have the metric."""
        found = [(row, r) for row, r in zip(self.columns, self.records) if self.primary_metric in r.metrics]
        if len(found) < 2:
            return None
        rows, records = zip(*found)
        values = [record.metrics[self.primary_metric] for record in records]
        errors = [standard_error(record.jackknife.get(self.primary_metric) or [0.0]) for record in records]
        numbers = sorted({record.settings["num_samples"] for record in records})
        label = f"{self.primary_metric} of {' and '.join(f'{number:,}' for number in numbers)} samples"
        return plot(rows, values, errors, label)


def write_tables(
    results: Results, measured: Sequence[tuple[PlannedEvaluation, Mapping[str, object]]], primary_metric: str
) -> None:
    """Write all evaluations of samples in a folder to results.csv and results.md, and plot those in `measured` in results.png.

    `measured` holds the command's evaluations and what they measure. The tables list them in this order, at the places that their
    records have in results.jsonl. Other records keep their places.
    """

    def write() -> None:
        with results.lock():
            found = [(record, columns) for planned, columns in measured if (record := results.find(planned))]
            records = [record for record in results.records if record.of_samples]
            rows = [(record, columns_of(record)) for record in records]
            places = sorted({records.index(record) for record, _ in found})  # of the command's own records
            for place, row in zip(places, found):
                rows[place] = row
            if not rows:  # a later command would not know whose the files are
                return
            table = ResultsTable(*zip(*rows), primary_metric)
            write_atomically(results.folder / "results.csv", table.csv())
            write_atomically(results.folder / "results.md", table.markdown())
            if picture := ResultsTable(*zip(*found), primary_metric).plot() if found else None:
                write_atomically(results.folder / "results.png", picture)

    results.write_or_warn(write)


def differ_significantly(record: EvaluationRecord, other: EvaluationRecord, metric: str) -> bool | None:
    """Return whether zero is outside the 95% confidence interval of the difference between two results.

    Return None without jackknife values, which need 20 samples, or if one record has fewer of them. Earlier versions left out
    values that are not finite.

    The jackknife is applied to the difference itself, because evaluations with the same seeds share most of their sampling noise.
    """
    from scipy.special import stdtrit  # scipy is slow to import

    groups = [side.jackknife.get(metric, []) for side in (record, other)]
    if not groups[0] or len(groups[0]) != len(groups[1]):
        return None
    error = standard_error([a - b for a, b in zip(*groups)])
    return bool(abs(record.metrics[metric] - other.metrics[metric]) > stdtrit(len(groups[0]) - 1, 0.975) * error)


def _format(name: str, value: object, error: float | None) -> str:
    text = format_metric(name, value) if isinstance(value, float) else str(value)
    return text if error is None else f"{text} ± {format_metric(name, error)}"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table that ends with a newline. Vertical bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def format_settings(settings: dict) -> str:
    """Format settings as text, such as `step 400000, cfg_scale 1.5`."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def plot(rows: Sequence[dict], values: list[float], errors: list[float], label: str) -> bytes:
    """Plot a metric with standard errors against the numeric setting that has the most values, and return the plot as a PNG.

    Each combination of the other settings has a separate curve.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for row in rows for name in row)  # EDM and SiT samplers have different settings
    choices = {name: {row.get(name) for row in rows} for name in names}
    numbers = [name for name, chosen in choices.items() if all(isinstance(value, (int, float)) for value in chosen)]
    axis = max(numbers, key=lambda name: len(choices[name]))
    others = [name for name in choices if name != axis and len(choices[name]) > 1]
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    curves: dict[str, list[tuple]] = {}
    for row, value, error in zip(rows, values, errors):
        curve = format_settings({name: row[name] for name in others if name in row})
        curves.setdefault(curve, []).append((row[axis], value, error))
    for name, curve in curves.items():
        x, y, error = zip(*sorted(curve))
        label_text = name.replace("$", r"\$") or None  # matplotlib interprets $ as the start of a formula
        axes.errorbar(x, y, error, marker="o", capsize=3, label=label_text)
    axes.set(xlabel=axis, ylabel=label)
    axes.grid(alpha=0.3)
    if others:
        axes.legend()
    png = io.BytesIO()
    figure.savefig(png, dpi=150, bbox_inches="tight")
    return png.getvalue()
