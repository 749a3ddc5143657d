"""The report as Markdown: the tables, the commands and what was left out."""

from __future__ import annotations

import html
from collections.abc import Sequence

from reports.content import Table, equal_table, figures_table, origin_lines, results_table, speedup_table
from reports.experiments import Experiment


def markdown_report(marker: str, title: str, tables: dict[str, list[Experiment]], problems: dict[str, list[str]]) -> str:
    lines = [f"<!-- {marker} -->", f"# {plain(title)}", ""]
    for name, experiments in tables.items():
        lines += [f"## {plain(name)}", ""]
        for make in (results_table, speedup_table, equal_table, figures_table):
            table = make(experiments)
            if table is not None:
                lines += as_markdown(table)
        lines += ["### How these runs were made", ""]
        for experiment in experiments:
            about = [plain(f"{key}: {experiment.about[key]}") for key in ("source", "differs") if experiment.about.get(key)]
            lines += [f"- **{plain(experiment.label)}**{'; '.join(['', *about])}"]
            for run in experiment.runs:
                lines += [f"  - {plain(run.name)}"]
                lines += [
                    f"    - {what}: {f'`{text}`' if 'accelerate' in text else plain(text)}" for what, text in origin_lines(run)
                ]
        lines.append("")
    if problems:
        lines += ["## Incomplete or left out", ""]
        lines += [f"- `{path}`: {plain('; '.join(reasons))}" for path, reasons in problems.items()]
    return "\n".join(lines).rstrip() + "\n"


def plain(text: str) -> str:
    """Text that stays text: Markdown passes HTML on, and names and settings come from files of others."""
    return html.escape(text, quote=False)


def as_markdown(table: Table) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(plain(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    lines = [f"**{plain(table.caption)}**", "", row(table.columns), "|---" * len(table.columns) + "|", *map(row, table.rows), ""]
    return lines + [f"- {plain(note)}" for note in table.notes] + ([""] if table.notes else [])
