"""The report: what runs measured, beside the paper's figures, as one HTML page and a Markdown file.

    python -m extras.report runs/                              # writes runs/report.html and runs/report.md
    python -m extras.report runs/ more_runs/ output=table2.html title="Table 2"
    python -m extras.report runs/ charts=figures             # also each chart as figures/<name>.svg

It reads config.yaml, metrics.jsonl, starts.jsonl, the sample grids and the results of fid.py of every run below the folders. It
changes none of them, and replaces only reports that it wrote itself. The page needs no network and no file beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from common.errors import UserError
from common.files import write_file
from configs import command_line as cli
from configs.settings import Settings, Text
from extras.report.experiments import group
from extras.report.page import render_charts, render_report
from extras.report.runs import read_runs

MARKER = "python -m extras.report"  # at the beginning of every file that this program writes
USAGE = "give the folder of runs: python -m extras.report runs/"


class ReportSettings(Settings):
    output: Text | None = None
    title: Text = "Training report"
    charts: Text | None = None


def main(arguments: Sequence[str]) -> None:
    own = [argument for argument in arguments if argument.startswith("--") or "=" in argument and not Path(argument).exists()]
    for argument in own:
        key, _, value = argument.partition("=")
        if key not in ReportSettings.model_fields and value and Path(value).is_dir():
            raise UserError(f"{argument}: give the folder alone: python -m extras.report {value}")
        if key.removeprefix("--") not in (*ReportSettings.model_fields, "help") and key.startswith("--"):
            raise UserError(f"{key} is not an option; beside folders there are output=<file.html> and title=<text>")
    settings = cli.parse_arguments(own, ReportSettings, "report")
    folders = [Path(argument) for argument in arguments if argument not in own]
    if not folders:
        raise UserError(USAGE)
    for folder in folders:
        if not folder.is_dir():
            inside = f"it is a file; give its folder: python -m extras.report {folder.parent}" if folder.is_file() else USAGE
            raise UserError(f"{folder} is not a folder; {inside}")
    page = Path(settings.output or folders[0] / "report.html")
    if page.is_dir():
        raise UserError(f"output={page} is a folder; use output={page / 'report.html'}")
    if page.suffix not in (".html", ".htm"):
        raise UserError(f"output={page} is not the name of a page; use output={page.with_suffix('.html')}")
    files = (page, page.with_suffix(".md"))
    for file in files:
        check_replaceable(file)
    if settings.charts is not None and Path(settings.charts).exists() and not Path(settings.charts).is_dir():
        raise UserError(f"charts={settings.charts} is a file; give a folder")
    runs, problems = read_runs(folders)
    if not runs:
        reasons = [f"  {path}: {'; '.join(words)}" for path, words in problems.items()]
        inside = [path for one in folders for path in (one, *one.parents) if path.name == "checkpoints"]
        usage = f"give the run's folder: python -m extras.report {inside[0].parent}" if inside else USAGE
        raise UserError(f"no run can be read below {' '.join(map(str, folders))}{'' if reasons else f'; {usage}'}", *reasons)
    tables = group(runs)
    num_runs, num_experiments = counted(len(runs), "run"), counted(sum(map(len, tables.values())), "experiment")
    names = " ".join(folder.name or str(folder) for folder in folders)
    subtitle = f"{num_runs}, {num_experiments}, from {names}; {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    for file, text in zip(files, render_report(MARKER, settings.title, subtitle, tables, problems)):
        write_file(file, text)
    if settings.charts is not None:
        folder = Path(settings.charts)
        charts = render_charts(MARKER, tables)
        for name in charts:
            check_replaceable(folder / name)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in charts.items():
            write_file(folder / name, text)
    sys.stdout.write(f"{num_runs} in {page} and {files[1].name}\n")
    for path, reasons in problems.items():
        sys.stdout.write(f"incomplete or left out: {path}: {'; '.join(reasons)}\n")


def check_replaceable(file: Path) -> None:
    """Raises UserError if the file is another program's, or cannot be read."""
    try:
        beginning = file.read_text(encoding="utf-8", errors="replace")[:600] if file.exists() else MARKER
    except OSError as e:
        raise UserError(f"output={file} cannot be replaced ({e.strerror}); choose another output=<file.html>") from e
    if MARKER not in beginning:
        raise UserError(f"{file} was not written by this program and stays as it is; choose another output=<file.html>")


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
