"""Which checkpoint a run starts or continues from. Every process gets the answer of the main process."""

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
    """The verified checkpoint that `resume=` names; None: the run starts at step 0.

    Args:
        where: auto (the newest good checkpoint of the run; damaged newer ones are renamed) | never | the folder of a
            checkpoint, or of a run for its newest.

    Raises:
        UserError: all checkpoints are damaged; resume=never in a run with checkpoints; the named checkpoint is missing,
            damaged or older than the run's newest.
    """
    found = None
    if accelerator.is_main_process:
        newest_step = max(checkpoints.list_steps(run.checkpoints), default=None)
        if where == "auto":
            found, problems = checkpoints.find_newest(run.checkpoints)
            if found is None and problems:
                raise checkpoints.CheckpointError(
                    f"no checkpoint below {run.checkpoints} is whole, and training does not silently start over: "
                    f"{'; '.join(problems.values())}. Restore one, or start a run under another name=..."
                )
            for folder, problem in problems.items():
                log.warning("%s; set aside as %s", problem, checkpoints.set_aside(folder))
        elif where != "never":
            found = checkpoints.find_checkpoint(Path(where), "resume")
            if newest_step is not None and newest_step > checkpoints.step_of(found):
                raise UserError(
                    f"resume={where}, but {run.checkpoints} already holds step {newest_step}, which going on from there would "
                    "overwrite; choose another name=..."
                )
        elif newest_step is not None:
            raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
    return broadcast_object_list([found])[0]


def find_initial(run: RunFolder, init_from: str | None, resume: str, accelerator: Accelerator) -> Path | None:
    """The verified checkpoint that `init_from=` names; None without that key, and for a run with checkpoints of its own."""
    found = None
    if init_from is not None and accelerator.is_main_process:
        if checkpoints.list_steps(run.checkpoints) or resume not in ("auto", "never"):
            log.info("init_from=%s is not read again: the run goes on from a checkpoint of its own", init_from)
        else:
            found = checkpoints.find_checkpoint(Path(init_from), "init_from")
    return broadcast_object_list([found])[0]
