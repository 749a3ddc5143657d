"""Decide how a command starts its run, and write the start into the run's folder. The main process does both."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from checkpoints import store
from checkpoints.checkpoint import Checkpoint, find_newest, read_config, resolve_checkpoint, warn_of_renamed
from checkpoints.provenance import describe_command
from checkpoints.run import RunFolder
from common.errors import UserError
from common.files import append_line
from configs.differences import Change, differences_by_role
from configs.schema import TrainConfig
from routing_module import num_kept_tokens
from training.trainer import Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunStart:
    """How a command starts its run.

    `decide_start` decides it before any slow work, `training.loading.load_start` loads the checkpoint, and `begin_run`
    writes the start into the run's folder.

    Attributes:
        kind: `resume` continues from the run's newest checkpoint. If that has train.num_steps or more, the run is complete, and
            the command only makes the grids and evaluations due at its step. The others start a run: `new` with random weights,
            and `weights` and `all` from the checkpoint of init_from, as init_state says.
        checkpoint: The checkpoint to load. Only `new` has none.
        damaged: {folder: problem} of damaged checkpoints after the one of `resume`. `begin_run` renames them.
    """

    kind: Literal["new", "weights", "all", "resume"]
    checkpoint: Checkpoint | None = None
    damaged: dict[Path, str] = field(default_factory=dict)


def decide_start(run: RunFolder, cfg: TrainConfig) -> RunStart:
    """Decide how a command starts its run, without writing. The caller has locked the run's folder, if it exists.

    Raises UserError if the run or init_from has a checkpoint that does not fit, or if a route of a new run carries no token.
    """
    newest, damaged = choose_checkpoint_to_resume(run, cfg)
    if newest is None:
        check_routes(cfg)
        if cfg.init_from is None:
            return RunStart("new")
        return RunStart(cfg.init_state, find_initial_checkpoint(run, cfg))
    if cfg.init_from is not None:
        log.info("init_from=%s is ignored, because the run resumes from its own checkpoint", cfg.init_from)
    for change in changes_on_resume(newest.config, cfg):
        log.warning("resumed with a changed setting: %s", change)
    return RunStart("resume", newest, damaged)


def check_routes(cfg: TrainConfig) -> None:
    """Raise UserError if a route of a new run carries no token. Networks of stored runs may have such routes."""
    num_tokens = cfg.num_tokens
    for i, ratio in enumerate(route.selection_ratio for route in cfg.model.routes):
        if ratio > 0 and num_kept_tokens(num_tokens, ratio) == num_tokens:
            accepted = f"use 0, at least 1/{num_tokens}, or smaller patches"
            raise UserError(f"model.routes[{i}].selection_ratio={ratio:g} carries 0 of {num_tokens} tokens: {accepted}")


def choose_checkpoint_to_resume(run: RunFolder, cfg: TrainConfig) -> tuple[Checkpoint | None, dict[Path, str]]:
    """Return the run's newest intact checkpoint, or None if it has none, and damaged newer ones (see `find_newest`).

    Raises UserError if resume=never and the run has checkpoints, if all checkpoints are damaged, or if the newest one has other
    settings or was imported.
    """
    if cfg.resume == "never" and store.list_steps(run.checkpoints):
        raise UserError(f"resume=never, but {run.checkpoints} holds checkpoints; choose another name=..., or resume=auto")
    newest, damaged = find_newest(run.checkpoints, check=partial(check_resume, cfg=cfg))
    warn_of_renamed(run.checkpoints, newest)
    if newest is None and damaged:
        raise UserError(
            f"no checkpoint below {run.checkpoints} is intact, and training does not silently start over: "
            f"{'; '.join(damaged.values())}. Restore one, or start a run under another name=..."
        )
    return newest, damaged


def find_initial_checkpoint(run: RunFolder, cfg: TrainConfig) -> Checkpoint:
    """Return the checked checkpoint that `init_from` names.

    With init_state=weights, only the weights need to exist and are verified. The raw weights may be missing. If `init_from` is a
    run that has newer checkpoints than at an earlier start of this run, the checkpoint of the earlier start is used.
    """
    source = run.earlier_initial_checkpoint(Path(cfg.init_from))
    check = partial(check_initial, cfg=cfg)
    if cfg.init_state == "all":
        return resolve_checkpoint(source, "init_from", check=check)
    checkpoint = resolve_checkpoint(source, "init_from", [store.WEIGHTS["ema"]], check)
    raw = store.WEIGHTS["raw"]
    if (checkpoint.path / raw).exists():
        store.verify(checkpoint.path, [raw])
    else:
        log.warning("init_from=%s has no %s: the raw weights also start from the EMA", cfg.init_from, raw)
    return checkpoint


def check_initial(checkpoint: Checkpoint, cfg: TrainConfig) -> None:
    """Check that a run can start from the checkpoint that init_from names.

    Both models must have the same `module_name`, but their routes may differ. The UserError lists the keys that may not differ.
    With init_state=all, the checkpoint also needs an optimizer, and the run needs steps that remain.
    """
    stored, step, source = checkpoint.config, checkpoint.step, checkpoint.imported_from
    if cfg.init_state == "all" and (source or step >= cfg.train.num_steps):
        reason = f"was imported from {source} without an optimizer" if source else f"is at step {step} already"
        raise UserError(f"init_state=all: init_from={cfg.init_from} {reason}; set init_state=weights, or raise train.num_steps")
    changed = differences_by_role(f"init_{cfg.init_state}", "refuses", stored, cfg)
    if stored.model.module_name != cfg.model.module_name:
        changed.append(Change("model.name", stored.model.name, cfg.model.name))
    if changed:
        remedy = ""
        if any(change.key == "data.scale_factor" for change in changed):
            remedy = f"; `prepare_latents.py encode scale_factor={stored.data.scale_factor:g}` gives new latents this factor"
        raise UserError(f"init_from={cfg.init_from} does not fit this configuration: {'; '.join(map(str, changed))}{remedy}")


def check_resume(checkpoint: Checkpoint, cfg: TrainConfig) -> None:
    """Raise UserError if a run with the configuration `cfg` cannot resume from a checkpoint. It lists the keys that differ."""
    if source := checkpoint.imported_from:
        remedy = f"start another run from its weights: name=<another> init_from={checkpoint.path.parent.parent}"
        raise UserError(f"{checkpoint.path} was imported from {source}: it has no optimizer to resume with; {remedy}")
    stored = checkpoint.config
    fixed, changed = differences_by_role("resume", "refuses", stored, cfg), changes_on_resume(stored, cfg)
    if fixed or (changed and cfg.resume != "changed"):
        problem = f"{checkpoint.path} belongs to a run with different settings: {'; '.join(map(str, [*fixed, *changed]))}"
        remedy = "Restore them, or start another run with name=..." + ("" if fixed else ", or accept them with resume=changed")
        raise UserError(f"resume: {problem}. {remedy}")


def changes_on_resume(stored: TrainConfig, cfg: TrainConfig) -> list[Change]:
    """List the changes from a checkpoint's configuration to `cfg` that only resume=changed accepts."""
    changed = differences_by_role("resume", "asks", stored, cfg)
    before, now = stored.train.num_steps, cfg.train.num_steps
    if before > now or (cfg.train.schedule == "cosine" and before != now):
        changed.append(Change("train.num_steps", before, now))
    return changed


def begin_run(trainer: Trainer, run: RunFolder, start: RunStart) -> None:
    """Write config.yaml and starts.jsonl, and delete results of steps that the run will repeat.

    What is in the way is renamed: damaged checkpoints, and the results of a run without checkpoints, because it starts over.

    The main process calls this function. Only here, a new run creates its folder, so that an error before leaves none behind.
    Raises UserError if a new run's folder has been filled meanwhile.
    """
    cfg = trainer.cfg
    if start.kind == "resume":
        for folder, problem in start.damaged.items():
            log.warning("%s; renamed to %s", problem, store.rename_damaged(folder))
    else:
        begin_new_run(run)
    if trainer.step >= cfg.train.num_steps:  # the run is complete
        restore_config(run, start.checkpoint)
    else:
        run.write_config(cfg.model_dump())  # first, because it shows that the folder is a run if the process is killed
        append_line(run.starts, describe_start(trainer, start))
    run.delete_results_after(trainer.step)


def begin_new_run(run: RunFolder) -> None:
    """Create the folder of a new run, or rename the results that it holds."""
    run.open()
    if store.list_steps(run.checkpoints):  # `decide_start` saw none
        raise UserError(f"another process has trained {run.path} meanwhile, or copied a run there; run the same command again")
    run.rename_results()


def describe_start(trainer: Trainer, start: RunStart) -> dict[str, object]:
    """Return the line of starts.jsonl for this start."""
    resumes, checkpoint = start.kind == "resume", start.checkpoint
    line = {"step": trainer.step, "resumed": resumes, **describe_command(trainer.accelerator)}
    if resumes and (changes := changes_on_resume(checkpoint.config, trainer.cfg)):
        line["changed"] = [*map(str, changes)]
    if not resumes and checkpoint:
        line["init_from"] = {"checkpoint": str(checkpoint.path.resolve()), "hash": checkpoint.hash}
    return line


def restore_config(run: RunFolder, newest: Checkpoint) -> None:
    """Give the config.yaml of a complete run the settings of its newest checkpoint, if they determine other weights.

    A start with more steps may have written config.yaml, and have ended before it saved a checkpoint.
    """
    try:
        written = read_config(run.path)
    except UserError:  # the file is missing, or is not a configuration
        return
    if differences_by_role("report", "separates", written, newest.config):
        run.write_config(newest.config.model_dump())
