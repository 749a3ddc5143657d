"""The report: what runs measured, beside the paper's figures, as one HTML page and a Markdown table.

    python -m reports runs/                              # writes runs/report.html and runs/report.md
    python -m reports runs/ more_runs/ output=table2.html title="Table 2"

It reads config.yaml, metrics.jsonl, starts.jsonl, sample grids and fid.py's results of every run below the folders, changes
none of them, and replaces only reports that it wrote itself. The page needs no network and nothing beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from errors import UserError
from reports.experiments import group
from reports.markdown import markdown_report
from reports.page import html_report
from reports.runs import read_runs
from training import cli

# Stands at the beginning of every file that this program wrote.
MARKER = "python -m reports"


def main(arguments: Sequence[str]) -> None:
    folders, settings = parse_report_arguments(arguments)
    page = Path(settings.get("output", folders[0] / "report.html"))
    if page.suffix not in (".html", ".htm"):
        raise UserError(f"output={page} is not the name of a page; use output={page.with_suffix('.html')}")
    files = (page, page.with_suffix(".md"))
    for file in files:
        check_replaceable(file)
    runs, problems = read_runs(folders)
    if not runs:
        reasons = "".join(f"\n  {path}: {'; '.join(words)}" for path, words in problems.items())
        raise UserError(
            f"no run can be read below {' '.join(map(str, folders))}{reasons or '; give the folder of runs, runs/ say'}"
        )
    tables = group(runs)
    title = settings.get("title", "Training report")
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    num_experiments = sum(map(len, tables.values()))
    names = " ".join(folder.name or str(folder) for folder in folders)
    subtitle = f"{counted(len(runs), 'run')}, {counted(num_experiments, 'experiment')}, from {names}; {date}"
    html = html_report(MARKER, title, subtitle, tables, problems)
    for file, text in zip(files, (html, markdown_report(MARKER, title, tables, problems))):
        write_atomically(file, text)
    sys.stdout.write(f"{counted(len(runs), 'run')} in {page} and {files[1].name}\n")
    for path, reasons in problems.items():
        sys.stdout.write(f"incomplete or left out: {path}: {'; '.join(reasons)}\n")


def parse_report_arguments(arguments: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """(folders, settings).

    Raises:
        UserError: no folder, one that does not exist, or an unknown key.
    """
    folders, settings = [], {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not Path(argument).exists():
            if key not in ("output", "title"):
                raise UserError(
                    f"{key} is not a setting of the report; it takes folders of runs, output=<file.html> and title=<text>"
                )
            settings[key] = value
        elif not Path(argument).is_dir():
            raise UserError(f"{argument} is not a folder; give the folder of runs: python -m reports runs/")
        else:
            folders.append(Path(argument))
    if not folders:
        raise UserError("give the folder of runs: python -m reports runs/")
    return folders, settings


def check_replaceable(file: Path) -> None:
    """Raises UserError when the file is somebody else's, or cannot be written."""
    try:
        if file.exists() and MARKER not in file.read_text(errors="replace")[:600]:
            raise UserError(f"{file} was not written by this program and stays as it is; choose another output=<file.html>")
    except OSError as e:
        raise UserError(f"output={file} cannot be replaced ({e.strerror}); choose another output=<file.html>") from e


def write_atomically(file: Path, text: str) -> None:
    """Whole or not at all: another file first, then renamed."""
    temporary = file.with_name(f".tmp_{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        os.replace(temporary, file)
    except OSError as e:
        temporary.unlink(missing_ok=True)
        raise UserError(f"output={file} cannot be written ({e.strerror}); choose another output=<file.html>") from e


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
