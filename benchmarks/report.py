"""What all benchmarks share: their settings, the machine, the clock, and files that say how a number came about."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
from omegaconf import OmegaConf

from errors import UserError
from setup.schema import Accepts, check_keys
from training.provenance import device_name, git_commit


def parse_settings(arguments: Sequence[str], defaults: dict[str, object], keys: dict[str, Accepts]) -> dict[str, object]:
    """`key=value` arguments over the defaults, checked; a list may be given as one value.

    Args:
        defaults: of every key; where the default is a list, so is the result.

    Raises:
        UserError: an argument of another form, an unknown key, or a value that is not accepted.
    """
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"{argument!r} is not of the form key=value; the keys are {', '.join(keys)}")
    settings = defaults | OmegaConf.to_container(OmegaConf.from_dotlist(list(arguments)))
    check_keys(settings, keys)
    return {
        key: value if isinstance(value, list) or not isinstance(defaults[key], list) else [value]
        for key, value in settings.items()
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    """Machine, versions, command and date: the first line of every result."""
    on_gpu = device.type == "cuda"
    commit, modified = git_commit()
    return {
        "machine": device_name(device),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "revision": commit and commit[:7] + "+" * modified,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
    }


def command_line() -> str:
    """The command that started this process, as it would be typed in the repository."""
    main = sys.modules["__main__"]
    module = getattr(getattr(main, "__spec__", None), "name", None)
    program = ["-m", module] if module else [Path(sys.argv[0]).name]
    return shlex.join(["python", *program, *sys.argv[1:]])


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def emit(**line: object) -> None:
    """One JSON line on stdout."""
    say(as_json(line))


def as_json(line: dict[str, object]) -> str:
    """Floating-point numbers with five digits: no clock here is better than that."""

    def rounded(value):
        if isinstance(value, dict):
            return {name: rounded(v) for name, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [rounded(v) for v in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return json.dumps(rounded(line))


def say(line: str) -> None:
    sys.stdout.write(line + os.linesep)
    sys.stdout.flush()


def markdown_table(rows: Sequence[dict[str, object]]) -> str:
    """One column for every key of any row; numbers with four digits, absent values empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        values = [row.get(name) for name in names]
        cells = ["" if v is None else f"{v:.4g}" if isinstance(v, float) and abs(v) < 1000 else _cell(v) for v in values]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)


def prepare_output(output: str) -> None:
    """Create the files that `write_report` fills, before the measurement.

    Raises:
        UserError: they cannot be written.
    """
    _write_files(output, "", "")


def write_report(output: str, title: str, machine: dict[str, object], lines: Sequence[dict], sections: Sequence[str]) -> None:
    """`<output>.jsonl` with the machine and every line, `<output>.md` with the machine and the sections."""
    header = "".join(f"- {name}: {f'`{value}`' if name == 'command' else value}\n" for name, value in machine.items())
    _write_files(
        output, "".join(as_json(line) + "\n" for line in [machine, *lines]), "\n".join([f"# {title}\n", header, *sections])
    )


def _write_files(output: str, json_lines: str, markdown: str) -> None:
    file = Path(output)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_name(f"{file.name}.jsonl").write_text(json_lines)
        file.with_name(f"{file.name}.md").write_text(markdown)
    except OSError as e:
        raise UserError(f"output={output}: cannot write {e.filename} ({e.strerror}); choose another output=...") from e
