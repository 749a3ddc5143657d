"""How the entry scripts start: errors that a user can cause become one clear line, everything else keeps its traceback."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

import torch
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException

from training.config import Accepts, unknown_key


def run(main: Callable[[], None], keys: dict[str, Accepts]) -> None:
    """Call a `@hydra.main` function; on an error of the user's print it and exit with 1.

    Args:
        keys: the keys that the script accepts, for the message about one that does not exist.
    """
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR", "0") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    try:
        main()
    except (ValueError, OSError, HydraException) as error:
        if wants_traceback:
            raise
        # Every process meets the same error; one of them says it.
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {_words(error, keys)}\n")
        sys.exit(1)


def _words(error: Exception, keys: dict[str, Accepts]) -> str:
    if isinstance(error, MissingConfigException):  # a choice that a group does not have; Hydra lists those it has
        return " ".join(str(error).split())
    if isinstance(error, ConfigCompositionException):
        text = f"{error} {error.__cause__ or ''}"
        if match := re.search(r"full_key: (\S+)", text):
            return unknown_key(match.group(1), keys)
        if match := re.search(r"Could not override '([^']+)'\. ?\n?No match in the defaults list", text):
            return unknown_key(match.group(1), keys)
    if isinstance(error, HydraException):
        return f"{error} {error.__cause__ or ''}".strip()
    return str(error)


def use_cores(device: torch.device, cpu_threads: int | None) -> None:
    """Let a process that computes on the CPU use its share of the cores.

    `accelerate launch` sets OMP_NUM_THREADS=1 unless told otherwise, which leaves the other cores idle.

    Args:
        cpu_threads: of this process; None: the machine's cores divided by the processes on it.
    """
    if device.type == "cpu":
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(cpu_threads or max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
