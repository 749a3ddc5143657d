"""Compare runs with the configurations of the papers' rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from omegaconf import DictConfig, OmegaConf

from checkpoints import store
from cli.compose import compose_overrides, parse_config
from cli.hydra_setup import CONFIGS, row_names
from common.roles import roles_of
from configs.schema import TrainConfig
from configs.settings import flatten
from extras.report.runs import LOSS, Run, without_seed

# Runs that differ only in these keys repeat one experiment: its seed, and averages that nothing but sampling reads.
REPEATED = ("seed", "train.ema_lengths")


def identity_of(cfg: TrainConfig) -> dict[str, object]:
    """Return the settings that distinguish experiments. These are all keys that affect results, except those in REPEATED."""
    roles, values = roles_of(cfg), flatten(cfg.model_dump())
    identity = {key: x for key, x in values.items() if roles[key].report == "separates" and key not in REPEATED}
    if isinstance(source := identity.get("init_from"), str):
        identity["init_from"] = without_seed(source)
    return identity


def changes_of(run: Run) -> dict[str, tuple[object, object]]:
    """Return (row value, run value) for each key that differs. Skip data.* keys for which the row has no value."""
    row = identity_of(config_of_row(run.row.get("name"), run))
    changed = {key: (row[key], value) for key, value in identity_of(run.cfg).items() if key in row and value != row[key]}
    if is_same_start(*changed.get("init_from", (None, None))):
        del changed["init_from"]
    return {key: values for key, values in changed.items() if not (key.startswith("data.") and values[0] is None)}


def change_words(changes: dict[str, tuple[object, object]]) -> str:
    """Format changes as text, such as `train.batch_size=8 instead of 256`."""
    return ", ".join(f"{key}={new} instead of {old}" for key, (old, new) in changes.items())


def config_of_row(name: str | None, run: Run) -> TrainConfig:
    """Return the configuration of a row with the seed and output folder of a run. Without such a row, return the run's own."""
    if name not in row_names():
        return run.cfg
    composed = OmegaConf.merge(compose_row(name), {"seed": run.cfg.seed, "output_dir": run.cfg.output_dir})
    return parse_config(composed, TrainConfig)


@cache
def compose_row(name: str) -> DictConfig:
    return compose_overrides([f"experiment={name}"])


# Some rows are trained by the run of another row, which passes through their last checkpoint (`checkpoint_of`).


@cache
def served_rows() -> dict[str, str]:
    """Return {row: row whose run passes through its last checkpoint}, from the files, because composing all rows is slow."""
    files = {name: OmegaConf.load(CONFIGS / "experiment" / f"{name}.yaml") for name in row_names()}
    trained = {name: OmegaConf.select(file, "experiment.checkpoint_of") for name, file in files.items()}
    return {name: other for name, other in trained.items() if other}


def runs_of_other_rows(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield a copy of a run for each row whose last checkpoint is a checkpoint of this run (`served_rows`).

    The copy ends at the row's last step and has the row's settings. There is no copy if no other run belongs to the row's table,
    if a run of the row has the same seed, if the run changed settings of its own row, or if it has no score at the last step.
    """
    tables = {run.row.get("table") for run in runs}
    trained = {(run.row.get("name"), run.cfg.seed) for run in runs}
    for run, (name, trained_row) in itertools.product(runs, served_rows().items()):
        if trained_row != run.row.get("name") or (name, run.cfg.seed) in trained or changes_of(run):
            continue
        row = config_of_row(name, run)
        last = row.train.num_steps
        has_score = any(last in curve for measure, curve in run.figures.items() if measure != LOSS)
        if has_score and row.experiment["table"] in tables:
            curves = {measure: {step: x for step, x in curve.items() if step <= last} for measure, curve in run.figures.items()}
            figures = {measure: curve for measure, curve in curves.items() if curve}
            origin = f"these are figures of a run of {trained_row}"
            described = row.experiment | {"differs": "; ".join(filter(None, (row.experiment["differs"], origin)))}
            from_run = {"data": run.cfg.data, "init_from": run.cfg.init_from}  # the latents filled in keys of data
            yield replace(run, cfg=row.model_copy(update={"experiment": described, **from_run}), figures=figures)


def is_same_start(wanted: object, given: object) -> bool:
    """Return whether `given` is the checkpoint of a longer run that equals the end of a row's run `wanted` (`checkpoint_of`)."""
    row = str(wanted).rpartition("/")[2]
    if row not in served_rows():
        return False
    last = store.folder_name(compose_row(row).train.num_steps)
    return str(given).endswith(f"/{served_rows()[row]}/checkpoints/{last}")
