"""Describe a command for records: its commit, versions and machine."""

from __future__ import annotations

import platform
import shlex
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from common.files import REPOSITORY
from runtime.job import command_of_run

GIT_TIMEOUT_SEC = 2.0  # the other processes wait meanwhile, and git can hang on a broken file system


def describe_command(accelerator: Accelerator) -> dict[str, Any]:
    """Return the time, the command and the commit, and on which machine and with which versions it runs."""
    commit, modified = git_commit()
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(command_of_run()),
        "commit": commit,
        "modified": modified,
        "device": device_name(accelerator.device),
        "num_processes": accelerator.num_processes,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def git_commit() -> tuple[str | None, bool | None]:
    """Return this repository's commit and whether tracked files were modified, or (None, None) without a repository or git."""
    if not (REPOSITORY / ".git").exists():  # without this check, git might use a parent folder's repository
        return None, None
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        description = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_SEC).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, no commit, or no answer in time
        return None, None
    return description.removesuffix("-dirty"), description.endswith("-dirty")
