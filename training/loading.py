"""Load the checkpoint of a run's start into a trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoints import store
from checkpoints.checkpoint import Checkpoint
from common.errors import UserError
from common.images import differing_class
from configs.settings import read_stored
from training import optimizers
from training.saving import TrainerState
from training.start import RunStart
from training.trainer import Trainer, learning_rate

log = logging.getLogger(__name__)

LABEL_TABLE = "y_embedder.embedding_table.weight"


def load_start(trainer: Trainer, start: RunStart) -> None:
    """Load the checkpoint of a run's start, if there is one."""
    match start.kind:
        case "new":
            pass  # the network keeps its random weights
        case "weights":
            start_from_weights(trainer, start.checkpoint)
        case "all":
            start_from_all(trainer, start.checkpoint)
        case "resume":
            resume(trainer, start.checkpoint)


def start_from_weights(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load the weights and the EMA of another run, and start with step 0. The label table is new for other class counts."""
    folder = checkpoint.path
    stored_num_classes, num_classes = checkpoint.config.data.num_classes, trainer.cfg.data.num_classes
    if num_classes == stored_num_classes:
        restore_weights(trainer, folder)
        set_counters(trainer, step=0, images_seen=0, ema_num_updates=read_ema_num_updates(checkpoint))
        warn_of_other_classes(trainer, checkpoint)
    else:
        message = "the label table starts with new weights: %s has %d classes, and the data have %d"
        log.info(message, folder, stored_num_classes, num_classes)
        restore_weights(trainer, folder, without=LABEL_TABLE)
        # The EMA warms up again, because it would otherwise keep the new table's random start for too long.
        set_counters(trainer, step=0, images_seen=0, ema_num_updates=0)
    log.info("weights and EMA from %s", folder)


def start_from_all(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load the weights, EMA, optimizer and step of another run, but not its losses since its last metrics line."""
    restore(trainer, checkpoint, read_trainer_state(trainer, checkpoint))
    warn_of_other_classes(trainer, checkpoint)
    log.info("weights and EMA from %s, with optimizer and step %d", checkpoint.path, checkpoint.step)


def resume(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load everything that the run stored."""
    folder = checkpoint.path
    state = read_trainer_state(trainer, checkpoint)
    if state.data != trainer.dataset.hash:
        raise UserError(
            f"resume: {folder} was trained on other latents or labels ({checkpoint.config.data.path}) than data.path="
            f"{trainer.cfg.data.path}. Restore the data, or start another run with name=..."
        )
    meter = trainer.loss_meter
    sums = {"loss_sums": torch.tensor(state.loss_sums), "bin_sums": torch.tensor(state.bin_sums)}
    store.check_tensors(folder / "state.json", sums, {"loss_sums": meter.sums, "bin_sums": meter.bin_sums})
    restore(trainer, checkpoint, state)
    meter.load(**sums, loss_count=state.loss_count, is_main_process=trainer.accelerator.is_main_process)
    log.info("resumed from %s", folder)
    before, now = (learning_rate(train, checkpoint.step) for train in (checkpoint.config.train, trainer.cfg.train))
    if before != now:
        message = "the learning rate of step %d is %.3g; with the settings of the checkpoint, it was %.3g"
        log.warning(message, checkpoint.step, now, before)


def warn_of_other_classes(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Warn if a checkpoint of equally many classes was trained on others. They are unknown in checkpoints without names."""
    if differing := differing_class(checkpoint.class_names, trainer.dataset.class_names):
        message = "%s was trained on other classes (%s), and each class starts from the old class of the same number"
        log.warning(message, checkpoint.path, differing)


def images_seen_until(checkpoint: Checkpoint, state: TrainerState) -> int:
    """Return the number of images on which a checkpoint's network was trained."""
    return checkpoint.step * checkpoint.config.train.batch_size + state.image_offset


def set_counters(trainer: Trainer, step: int, images_seen: int, ema_num_updates: int) -> None:
    """Set all counters of a trainer that starts after `step` steps, `images_seen` images and so many updates of the EMA."""
    trainer.step = trainer.first_step = step
    trainer.images_seen = images_seen
    trainer.ema.num_updates_before = ema_num_updates - step


def read_trainer_state(trainer: Trainer, checkpoint: Checkpoint) -> TrainerState:
    """Read a checkpoint's state.json. Raises UserError if the trainer aligns with other encoder weights."""
    stored = {name: value for name, value in checkpoint.state.items() if name != "step"}
    state = read_stored(stored, TrainerState, checkpoint.path / "state.json")
    if trainer.alignment is not None:
        # A hash ends with the encoder's precision, such as -bf16, which may change.
        hashes = {str(encoder_hash).partition("-")[0] for encoder_hash in (state.encoder_hash, trainer.alignment.encoder_hash)}
        if len(hashes) > 1:
            raise UserError(f"{checkpoint.path} was aligned with other encoder weights than alignment.encoder_weights")
    return state


def read_ema_num_updates(checkpoint: Checkpoint) -> int:
    """Return how often a checkpoint's EMA was updated. Imported weights have this number, but no `TrainerState`."""
    num_updates = checkpoint.state.get("ema_num_updates")
    if type(num_updates) is not int:
        file = checkpoint.path / "state.json"
        raise UserError(f"{file}: ema_num_updates={num_updates!r:.100} is not a number of updates")
    return num_updates


@torch.no_grad()
def copy_tensors(folder: Path, stored: store.Tensors, targets: store.Tensors) -> None:
    """Copy the tensors that the checkpoint `folder` stores into a trainer's `targets` (`Trainer.tensors`), by file and name.

    The stored tensors are memory-mapped, so they occupy host memory only briefly. Raises UserError if a file does not fit.
    """
    for file, target in targets.items():
        store.check_tensors(folder / f"{file}.safetensors", stored.get(file, {}), target)
    for file, target in targets.items():
        for name, value in target.items():
            value.copy_(stored[file][name])


def restore(trainer: Trainer, checkpoint: Checkpoint, state: TrainerState) -> None:
    """Copy all tensors of a checkpoint, also those of the optimizer, into a trainer, and set its counters."""
    folder, stored = checkpoint.path, store.load(checkpoint.path)
    moments = stored["optimizer"].get("state", {})
    optimizers.check_state(folder / "optimizer.pt", moments, trainer.cfg.train, trainer.parameters)
    copy_tensors(folder, stored, trainer.tensors())
    optimizers.load_state(trainer.optimizers, trainer.parameters, moments)
    set_counters(trainer, checkpoint.step, images_seen_until(checkpoint, state), state.ema_num_updates)


def restore_weights(trainer: Trainer, folder: Path, *, without: str | None = None) -> None:
    """Copy the weights and the EMA of the checkpoint `folder` into a trainer, except the parameter `without`."""

    def select(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in tensors.items() if name != without}

    targets = trainer.tensors()
    stored = {file: select(tensors) for file, tensors in store.load_weights_and_ema(folder).items()}
    copy_tensors(folder, stored, {file: select(targets[file]) for file in stored})
