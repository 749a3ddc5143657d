"""Where a run's numbers come from: the command, the commit and the machine of every start."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch
from accelerate import Accelerator

REPOSITORY = Path(__file__).resolve().parent.parent


def describe_start(accelerator: Accelerator, step: int) -> dict[str, object]:
    """What a start adds to starts.jsonl.

    Args:
        step: the step that training goes on from.
    """
    commit, modified = git_commit()
    return {
        "step": step,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": launch_command(),
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
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> tuple[str | None, bool | None]:
    """(commit of this project's working tree, whether tracked files differ from it); (None, None) where that cannot be told."""
    if not (REPOSITORY / ".git").exists():  # a repository further up would not be this project's
        return None, None
    git = ["git", "-C", str(REPOSITORY)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        modified = bool(subprocess.run(status, capture_output=True, text=True, check=True).stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return commit, modified


def launch_command() -> str:
    """The command that started this process, with accelerate's launcher and its arguments where there is one.

    The launcher is the parent process, and Linux tells its arguments; elsewhere the command starts with the script.
    """
    file = Path(f"/proc/{os.getppid()}/cmdline")
    parent = file.read_bytes().decode(errors="replace").rstrip("\0").split("\0") if file.exists() else []
    for i, argument in enumerate(parent):
        if Path(argument).name in ("accelerate", "accelerate-launch"):
            return shlex.join([Path(argument).name, *parent[i + 1 :]])
        if argument == "accelerate.commands.launch":
            return shlex.join(["accelerate", "launch", *parent[i + 1 :]])
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
