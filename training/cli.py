"""How the entry scripts start: errors that a user can cause become one clear line, everything else keeps its traceback."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

import hydra
import torch
from accelerate import Accelerator
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig

from training.config import CONFIGS, Accepts, unknown_choice, unknown_key


def run(main: Callable[[DictConfig], None], config_name: str, keys: dict[str, Accepts]) -> None:
    """Compose the configuration from the command line and call `main`; print a user's error as one line and exit with 1.

    HYDRA_FULL_ERROR=1 in the environment keeps the tracebacks of these errors too.

    Args:
        config_name: the file in configs/.
        keys: the keys that the script accepts, for the message about one that does not exist.
    """
    if os.environ.get("HYDRA_FULL_ERROR", "0") == "1":
        hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(main)()
        return

    @functools.wraps(main)
    def guarded(cfg: DictConfig) -> None:
        guard(lambda: main(cfg))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # have Hydra raise its errors instead of printing them
    try:
        hydra.main(version_base="1.3", config_path=CONFIGS, config_name=config_name)(guarded)()
    except HydraException as error:
        _exit(_words(error, keys))


def guard(action: Callable[[], None]) -> None:
    """Do it; an error that a user can cause becomes one line, and exit code 1."""
    try:
        action()
    except (ValueError, OSError) as error:
        _exit(str(error))


def _exit(message: str) -> NoReturn:
    rank = os.environ.get("RANK")
    sys.stderr.write(f"error: {message}\n" if rank is None else f"error (process {rank}): {message}\n")
    sys.exit(1)


def _words(error: HydraException, keys: dict[str, Accepts]) -> str:
    if isinstance(error, MissingConfigException):
        choice = error.missing_cfg_file
        if choice and "/" in choice and not choice.startswith("hydra/"):
            return unknown_choice(choice, [option for option in error.options or () if option])
        return " ".join(str(error).split())
    if isinstance(error, ConfigCompositionException):
        text = f"{error} {error.__cause__ or ''}"
        if match := re.search(r"full_key: (\S+)", text):
            return unknown_key(match.group(1), keys)
        if match := re.search(r"Could not override '([^']+)'\. ?\n?No match in the defaults list", text):
            return unknown_key(match.group(1), keys)
    return f"{error} {error.__cause__ or ''}".strip()


def start_accelerator(cpu_threads: int | None, **settings) -> Accelerator:
    """accelerate, with its settings; this process's share of the cores; messages from the main process only."""
    if torch.distributed.is_available():
        # AdamW imports torch's compiler, which imports this, whose functions hold the process group of that moment as a default
        # argument: it would never be freed, and gloo's threads would meet the end of the interpreter, which then may abort.
        importlib.import_module("torch.distributed.nn.functional")
    accelerator = Accelerator(**settings)
    logging.basicConfig(format="%(message)s", level=logging.INFO if accelerator.is_main_process else logging.ERROR)
    use_cores(accelerator.device, cpu_threads)
    return accelerator


def use_cores(device: torch.device, cpu_threads: int | None) -> None:
    """Let a process that computes on the CPU use its share of the cores, and the same memory in every step.

    `accelerate launch` sets OMP_NUM_THREADS=1 unless told otherwise, which leaves the other cores idle.

    Args:
        cpu_threads: of this process; None: the machine's cores divided by the processes on it.
    """
    if device.type == "cpu":
        torch.set_num_threads(cpu_threads or cores_per_process())
        keep_freed_memory()


def cores_per_process() -> int:
    """The machine's cores divided by the processes that accelerate started on it, at least 1."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, num_cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def keep_freed_memory() -> None:
    """Have the C library hand freed memory to the next allocation instead of back to the system.

    Otherwise every large tensor of every step is mapped afresh, and the system clears it page by page: 4 to 12% of a step.
    Only glibc has this setting; elsewhere nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_MAX, 0)
