"""The checkpoint that a run starts from or resumes. The main process chooses it; all processes must see the same files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError
from runtime.processes import check_shared, on_main

log = logging.getLogger(__name__)


def find_resume(run: RunFolder, where: str) -> Path | None:
    """The verified checkpoint that `resume=` names; None: the run starts at step 0.

    Args:
        where: auto (the newest intact checkpoint of the run; newer damaged ones are renamed) | never | the folder of a
            checkpoint, or of a run for its newest. The checkpoint of another run is used until this run has its own.

    Raises:
        UserError: all checkpoints are damaged; resume=never in a run with checkpoints; the named checkpoint is missing,
            damaged, imported, or older than this run's newest one; a node does not see it.
    """

    def decide() -> Path | None:
        newest_step = max(store.list_steps(run.checkpoints), default=-1)
        if where == "never":
            if newest_step >= 0:
                raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
            return None
        is_auto = where == "auto"
        if not is_auto and newest_step >= 0 and run.path.resolve() not in (Path(where).resolve(), *Path(where).resolve().parents):
            log.info("resume=%s is not read again: the run resumes from its own checkpoint", where)
            is_auto = True
        found = find_newest_of_run(run) if is_auto else store.find_checkpoint(Path(where), "resume")
        if found is None:
            return None
        if not is_auto and newest_step > store.read_step(found):
            raise UserError(
                f"resume={where}, but {run.checkpoints} already holds step {newest_step}, which would be overwritten; choose "
                "another name=..."
            )
        if source := store.imported_from(found):
            raise UserError(
                f"{found} was imported from {source}: it has no optimizer to resume with; start another run from its weights: "
                f"name=<another> init_from={store.find_run(found) or found}"
            )
        return found

    return _see_together(decide, "output_dir" if where == "auto" else "resume")


def find_newest_of_run(run: RunFolder) -> Path | None:
    """The newest intact checkpoint of a run, or None; newer damaged ones are renamed. UserError if all are damaged."""
    found, problems = store.find_newest(run.checkpoints)
    if found is None and problems:
        raise UserError(
            f"no checkpoint below {run.checkpoints} is intact, and training does not silently start over: "
            f"{'; '.join(problems.values())}. Restore one, or start a run under another name=..."
        )
    for folder, problem in problems.items():
        log.warning("%s; renamed to %s", problem, store.rename_damaged(folder))
    return found


def find_initial(run: RunFolder, init_from: str | None, resume: str) -> Path | None:
    """The verified checkpoint that `init_from=` names; None without that key, or if the run has its own checkpoints.

    Raises UserError also if `resume=` names a folder that does not exist: this runs before the run's folder is made.
    """
    if resume not in ("auto", "never") and not on_main(Path(resume).exists):
        raise UserError(f"resume={resume} does not exist; give auto, never, or the folder of a checkpoint or of a run")

    def decide() -> Path | None:
        if store.list_steps(run.checkpoints):
            log.info("init_from=%s is not read again: the run resumes from its own checkpoint", init_from)
        if store.list_steps(run.checkpoints) or resume not in ("auto", "never"):
            return None
        return store.find_checkpoint(Path(init_from), "init_from")

    return None if init_from is None else _see_together(decide, "init_from")


def find_checkpoint_together(path: str, key: str) -> Path:
    """`store.find_checkpoint` on rank 0, for all ranks: while a run trains, they could find different newest checkpoints."""
    return _see_together(lambda: store.find_checkpoint(Path(path), key), key)


def _see_together(decide: Callable[[], Path | None], key: str) -> Path | None:
    folder = on_main(decide)
    if folder is not None:
        check_shared(folder / store.MANIFEST, key)
    return folder
