"""Select and check the checkpoint from which a run starts or resumes. Only the main process calls these functions."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, find_newest, preview_checkpoint, read_config, resolve_checkpoint, warn_of_renamed
from checkpoints.run import RunFolder
from common.errors import UserError
from configs import schema
from configs.differences import Change, differences, differences_by_role
from routing_module import num_kept_tokens

log = logging.getLogger(__name__)


def lock_run_and_find_checkpoint(run: RunFolder, cfg: schema.TrainConfig) -> Checkpoint | None:
    """Open and lock the folder of an existing run. Return the checked checkpoint from which it resumes.

    Return None if the folder does not exist or contains no checkpoint. `open_new_run` then starts the run.

    Raises UserError if the checkpoint does not fit, or if a route of a run without checkpoints carries no token.
    """
    newest = None
    if run.path.exists():
        run.open()
        newest = find_newest_and_rename_damaged(run, cfg)
    if newest is None:
        check_routes(cfg)
    else:
        check_resume(newest, cfg)  # again, because it is not the previewed checkpoint if that one is damaged
        run.saved_mark.touch()  # a save that was killed may have left a checkpoint without this mark
    return newest


def open_new_run(run: RunFolder, cfg: schema.TrainConfig) -> None:
    """Open and lock the folder of a run that starts at its first step, and rename the results of an earlier run.

    A run that was stopped before its first checkpoint has no results to keep, because it repeats its steps. The results of a run
    with other settings, or of one whose checkpoints are gone, are renamed.

    Raises UserError if another process has trained the run since `lock_run_and_find_checkpoint` looked for it.
    """
    run.open()
    if store.list_steps(run.checkpoints):
        raise UserError(f"another process has trained {run.path} meanwhile; run the same command to resume")
    reason = "a run with other settings"
    with contextlib.suppress(UserError):  # the file is not a configuration
        if run.config.exists() and not differences(read_config(run.path), cfg):
            if (last := run.last_step_if_saved()) is None:
                return
            reason = f"a run that reached step {last}, but none of its checkpoints; training starts over"
    if run.has_results():
        run.rename_results(reason)
    run.saved_mark.unlink(missing_ok=True)


def check_routes(cfg: schema.TrainConfig) -> None:
    """Raise UserError if a route of a new run carries no token. Networks of stored runs may have such routes."""
    num_tokens = cfg.num_tokens
    for i, ratio in enumerate(route.selection_ratio for route in cfg.model.routes):
        if ratio > 0 and num_kept_tokens(num_tokens, ratio) == num_tokens:
            accepted = f"use 0, at least 1/{num_tokens}, or smaller patches"
            raise UserError(f"model.routes[{i}].selection_ratio={ratio:g} carries 0 of {num_tokens} tokens: {accepted}")


def find_newest_and_rename_damaged(run: RunFolder, cfg: schema.TrainConfig) -> Checkpoint | None:
    """Return the run's newest intact checkpoint, or None if the run must start at step 0. Rename newer, damaged checkpoints.

    Raises UserError if resume=never and the run has checkpoints, if all checkpoints are damaged, or if the newest one has other
    settings or was imported.
    """
    if cfg.resume == "never" and store.list_steps(run.checkpoints):
        raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
    if (candidate := preview_checkpoint(run.path)) is not None:
        if source := candidate.imported_from:
            remedy = f"start another run from its weights: name=<another> init_from={run.path}"
            raise UserError(f"{candidate.path} was imported from {source}: it has no optimizer to resume with; {remedy}")
        refuse_other_settings(candidate, cfg)
    newest, damaged = find_newest(run.checkpoints)
    warn_of_renamed(run.checkpoints, newest)
    if newest is None and damaged:
        raise UserError(
            f"no checkpoint below {run.checkpoints} is intact, and training does not silently start over: "
            f"{'; '.join(checkpoint.problem for checkpoint in damaged)}. Restore one, or start a run under another name=..."
        )
    for checkpoint in damaged:
        log.warning("%s; renamed to %s", checkpoint.problem, store.rename_damaged(checkpoint.path))
    return newest


def select_initial_checkpoint(run: RunFolder, cfg: schema.TrainConfig) -> Checkpoint | None:
    """Return the checked checkpoint that `init_from` names, or None if the key is not set or the run has its own checkpoints.

    With init_state=weights, only the weights need to exist and are verified. The raw weights may be missing. If `init_from` is a
    run that has newer checkpoints than at an earlier start of this run, the checkpoint of the earlier start is used.
    """
    if cfg.init_from is None:
        return None
    if store.list_steps(run.checkpoints):
        log.info("init_from=%s is ignored, because the run resumes from its own checkpoint", cfg.init_from)
        return None
    source = run.earlier_initial_checkpoint(Path(cfg.init_from))
    raw = store.WEIGHTS["raw"]
    if (candidate := preview_checkpoint(source)) is not None:
        check_initial(candidate, cfg)
    checkpoint = resolve_checkpoint(source, "init_from", None if cfg.init_state == "all" else [store.WEIGHTS["ema"]])
    if cfg.init_state == "weights" and (checkpoint.path / raw).exists():
        store.verify(checkpoint.path, [raw])
    elif cfg.init_state == "weights":
        log.warning("init_from=%s has no %s: the raw weights also start from the EMA", cfg.init_from, raw)
    check_initial(checkpoint, cfg)  # again, because it is not the previewed checkpoint if that one is damaged
    return checkpoint


def check_initial(checkpoint: Checkpoint, cfg: schema.TrainConfig) -> None:
    """Check that a run can start from the checkpoint that init_from names.

    Both models must have the same `module_name`, but their routes may differ. The UserError lists the keys that may not differ.
    With init_state=all, the checkpoint also needs an optimizer, and the run needs steps that remain.
    """
    stored, step, source = checkpoint.config, checkpoint.step, checkpoint.imported_from
    if cfg.init_state == "all" and (source or step >= cfg.train.num_steps):
        reason = f"was imported from {source} without an optimizer" if source else f"is at step {step} already"
        raise UserError(f"init_state=all: init_from={cfg.init_from} {reason}; set init_state=weights, or raise train.num_steps")
    changed = differences_by_role("init_all" if cfg.init_state == "all" else "init_weights", "refuses", stored, cfg)
    if stored.model.module_name != cfg.model.module_name:
        changed.append(Change("model.name", stored.model.name, cfg.model.name))
    if changed:
        remedy = ""
        if any(change.key == "data.scale_factor" for change in changed):
            remedy = f"; `prepare_latents.py encode scale_factor={stored.data.scale_factor:g}` gives new latents this factor"
        raise UserError(f"init_from={cfg.init_from} does not fit this configuration: {'; '.join(map(str, changed))}{remedy}")


def check_resume(checkpoint: Checkpoint, cfg: schema.TrainConfig) -> None:
    """Check that a run with the configuration `cfg` can resume from a checkpoint, and log changes of resume=changed."""
    refuse_other_settings(checkpoint, cfg)
    for change in changes_on_resume(checkpoint.config, cfg):
        log.warning("resumed with a changed setting: %s", change)


def refuse_other_settings(checkpoint: Checkpoint, cfg: schema.TrainConfig) -> None:
    """Raise UserError, which lists the differing keys, if a checkpoint belongs to a run with different settings than `cfg`."""
    stored = checkpoint.config
    fixed, changed = differences_by_role("resume", "refuses", stored, cfg), changes_on_resume(stored, cfg)
    if fixed or (changed and cfg.resume != "changed"):
        problem = f"{checkpoint.path} belongs to a run with different settings: {'; '.join(map(str, [*fixed, *changed]))}"
        remedy = "Restore them, or start another run with name=..." + ("" if fixed else ", or accept them with resume=changed")
        raise UserError(f"resume: {problem}. {remedy}")


def changes_on_resume(stored: schema.TrainConfig, cfg: schema.TrainConfig) -> list[Change]:
    """List the changes from a checkpoint's configuration to `cfg` that only resume=changed accepts."""
    changed = differences_by_role("resume", "asks", stored, cfg)
    before, now = stored.train.num_steps, cfg.train.num_steps
    if before > now or (cfg.train.schedule == "cosine" and before != now):
        changed.append(Change("train.num_steps", before, now))
    return changed
