"""Find the checkpoint from which a run starts or resumes. Rank 0 selects the checkpoint. All ranks must see the same files."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError
from runtime.processes import check_shared, on_main

log = logging.getLogger(__name__)


def find_resume(run: RunFolder, resume: str) -> Path | None:
    """Return the run's newest intact checkpoint, or None if the run must start at step 0. Rename newer, damaged checkpoints.

    Raises:
        UserError: If resume=never and the run has checkpoints, if all checkpoints are damaged, or if the checkpoint was imported
            or is not visible on every node.
    """

    def decide() -> Path | None:
        if resume == "never" and store.list_steps(run.checkpoints):
            raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
        found = find_newest_of_run(run)
        if found is not None and (source := store.imported_from(found)):
            raise UserError(
                f"{found} was imported from {source}: it has no optimizer to resume with; start another run from its weights: "
                f"name=<another> init_from={run.path}"
            )
        return found

    return _see_together(decide, "output_dir")


def find_newest_of_run(run: RunFolder) -> Path | None:
    """Return a run's newest intact checkpoint or None. Rename newer, damaged checkpoints. Raise UserError if all are damaged."""
    found, problems = store.find_newest(run.checkpoints)
    if found is None and problems:
        raise UserError(
            f"no checkpoint below {run.checkpoints} is intact, and training does not silently start over: "
            f"{'; '.join(problems.values())}. Restore one, or start a run under another name=..."
        )
    for folder, problem in problems.items():
        log.warning("%s; renamed to %s", problem, store.rename_damaged(folder))
    return found


def find_initial(run: RunFolder, init_from: str | None) -> Path | None:
    """Return the verified checkpoint that `init_from` names, or None if the key is not set or the run has its own checkpoints."""

    def decide() -> Path | None:
        if store.list_steps(run.checkpoints):
            log.info("init_from=%s is not read again: the run resumes from its own checkpoint", init_from)
            return None
        return store.find_checkpoint(Path(init_from), "init_from")

    return None if init_from is None else _see_together(decide, "init_from")


def find_checkpoint_together(path: str, key: str) -> Path:
    """Call `store.find_checkpoint` on rank 0 only, because ranks could find different checkpoints while a run trains."""
    return _see_together(lambda: store.find_checkpoint(Path(path), key), key)


def _see_together(decide: Callable[[], Path | None], key: str) -> Path | None:
    folder = on_main(decide)
    if folder is not None:
        check_shared(folder / store.MANIFEST, key)
    return folder
