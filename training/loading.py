"""Load the checkpoint of a run's start into a trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from checkpoints import store
from checkpoints.checkpoint import Checkpoint
from checkpoints.run_start import RunStart
from common.errors import UserError
from common.images import differing_class
from configs.settings import read_stored
from training import optimizers
from training.saving import TrainerState
from training.trainer import Trainer, learning_rate

log = logging.getLogger(__name__)

LABEL_TABLE = "y_embedder.embedding_table.weight"


def load_start(trainer: Trainer, start: RunStart) -> None:
    """Load the checkpoint of a run's start, if there is one."""
    if start.resumes:
        restore(trainer, start.checkpoint)
    elif start.checkpoint is not None:
        load_initial(trainer, start.checkpoint)


def restore(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Resume a run from its checkpoint."""
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
    restore_tensors(trainer, folder, store.load(folder))
    meter.load(**sums, loss_count=state.loss_count, is_main_process=trainer.accelerator.is_main_process)
    set_counters(trainer, checkpoint.step, state.ema_num_updates, state.image_offset)
    log.info("resumed from %s", folder)
    before, now = (learning_rate(train, checkpoint.step) for train in (checkpoint.config.train, trainer.cfg.train))
    if before != now:
        message = "the learning rate of step %d is %.3g; with the settings of the checkpoint, it was %.3g"
        log.warning(message, checkpoint.step, now, before)


def load_initial(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Load another run's weights and EMA from its checkpoint. With init_state=all, also load the optimizer and step."""
    folder, step, init_state = checkpoint.path, checkpoint.step, trainer.cfg.init_state
    tensors = store.load(folder) if init_state == "all" else store.load_weights_and_ema(folder)
    sides = (trainer.net.state_dict(), tensors["model"])
    num_classes, stored_num_classes = (len(side.get(LABEL_TABLE, ())) - 1 for side in sides)
    if init_state == "all":
        state = read_trainer_state(trainer, checkpoint)
        restore_tensors(trainer, folder, tensors)
        images_seen = step * checkpoint.config.train.batch_size + state.image_offset
        image_offset = images_seen - step * trainer.cfg.train.batch_size
        set_counters(trainer, step, state.ema_num_updates, image_offset)
    elif num_classes == stored_num_classes:  # `check_initial` allows different class counts
        restore_weights(trainer, folder, tensors)
        set_counters(trainer, step=0, ema_num_updates=read_ema_num_updates(checkpoint))
    else:
        message = "the label table starts with new weights: %s has %d classes, and the data have %d"
        log.info(message, folder, stored_num_classes, num_classes)
        restore_weights(trainer, folder, tensors, without=LABEL_TABLE)
        # The EMA warms up again, because it would otherwise keep the new table's random start for too long.
        set_counters(trainer, step=0, ema_num_updates=0)
    differing = differing_class(checkpoint.class_names, trainer.dataset.class_names)
    if differing and num_classes == stored_num_classes:
        message = "%s was trained on other classes (%s), and each class starts from the old class of the same number"
        log.warning(message, folder, differing)
    log.info("weights and EMA from %s%s", folder, f", with optimizer and step {step}" if init_state == "all" else "")


def set_counters(trainer: Trainer, step: int, ema_num_updates: int, image_offset: int = 0) -> None:
    """Set all counters of a trainer that starts after `step` steps. The arguments are as in `TrainerState`."""
    trainer.step = trainer.first_step = step
    trainer.image_offset = image_offset
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
def restore_weights(trainer: Trainer, folder: Path, tensors: store.Tensors, *, without: str | None = None) -> None:
    """Copy the weights and the EMA of the checkpoint `folder` into a trainer, except the parameter `without`.

    The tensors are memory-mapped, so they occupy host memory only briefly.
    """

    def select(side: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in side.items() if name != without}

    weights, model, ema = select(trainer.net.state_dict()), select(tensors["model"]), select(tensors["ema"])
    store.check_tensors(folder / store.WEIGHTS["raw"], model, weights)
    store.check_tensors(folder / store.WEIGHTS["ema"], ema, select(trainer.ema.averages))
    for name, value in weights.items():
        value.copy_(model[name])
    trainer.ema.load("ema", ema)


@torch.no_grad()
def restore_tensors(trainer: Trainer, folder: Path, tensors: store.Tensors) -> None:
    """Copy the weights, the EMA, the optimizer and, if the run has them, the projector and the tracked averages into a trainer.

    Raises UserError if a file of the checkpoint `folder` does not fit.
    """
    restore_weights(trainer, folder, tensors)
    for name, like in trainer.ema.states().items():
        store.check_tensors(folder / f"{name}.safetensors", tensors.get(name, {}), like)
    state = tensors["optimizer"].get("state", {})
    optimizers.check_state(folder / "optimizer.pt", state, trainer.cfg.train, trainer.parameters)
    if trainer.alignment is not None:
        projector = trainer.alignment.projector.state_dict()
        store.check_tensors(folder / "projector.safetensors", tensors.get("projector", {}), projector)
        for name, value in projector.items():
            value.copy_(tensors["projector"][name])
    if "tracked_ema" in tensors:
        trainer.ema.load("tracked_ema", tensors["tracked_ema"])
    optimizers.load_state(trainer.optimizers, trainer.parameters, state)
