"""Which checkpoint a run goes on from, the same answer on every process."""

from __future__ import annotations

import logging
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from errors import UserError
from training import checkpoint as checkpoints
from training.run import RunFolder

log = logging.getLogger(__name__)


def find_resume(run: RunFolder, where: str, accelerator: Accelerator) -> Path | None:
    """The verified checkpoint that `resume=` means; None: the run starts.

    Args:
        where: auto (the newest good one of the run; bad ones after it are set aside) | never | a checkpoint's folder.

    Raises:
        UserError: resume=never in a run with checkpoints; a checkpoint that is missing, bad or older than the run's newest.
    """
    found = None
    if accelerator.is_main_process:
        found = _newest(run) if where == "auto" else _named(run, where)
    return broadcast_object_list([found])[0]


def _newest(run: RunFolder) -> Path | None:
    folder, problems = checkpoints.find_newest(run.checkpoints)
    for bad, problem in problems.items():
        log.warning("%s; set aside as %s", problem, checkpoints.set_aside(bad))
    return folder


def _named(run: RunFolder, where: str) -> Path | None:
    newest = max(checkpoints.list_steps(run.checkpoints), default=None)
    if where == "never":
        if newest is not None:
            raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
        return None
    folder = Path(where)
    checkpoints.verify(folder)
    if newest is not None and newest > checkpoints.step_of(folder):
        raise UserError(
            f"resume={where}, but {run.checkpoints} already holds step {newest}, which going on from there would overwrite; "
            "choose another name=..."
        )
    return folder


def find_initial(run: RunFolder, init_from: str | None, resume: str, accelerator: Accelerator) -> Path | None:
    """The verified checkpoint that `init_from=` means, for a run that starts; a run that goes on has weights of its own.

    Raises:
        UserError: there is none.
    """
    found = None
    if init_from is not None and accelerator.is_main_process:
        if checkpoints.list_steps(run.checkpoints) or resume not in ("auto", "never"):
            log.info("init_from=%s is not read again: the run goes on from a checkpoint of its own", init_from)
        else:
            found = checkpoints.find_checkpoint(Path(init_from), "init_from")
    return broadcast_object_list([found])[0]
