"""Save checkpoints in a background thread during training, and load checkpoints into a trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from checkpoints import store
from checkpoints.checkpoint import Checkpoint
from checkpoints.run import RunFolder
from common.errors import Diverged, UserError
from common.images import differing_class
from common.progress import log_if_slow
from configs.settings import Settings, read_stored
from runtime.processes import on_main
from training import optimizers
from training.trainer import Hook, Trainer, learning_rate

log = logging.getLogger(__name__)

LABEL_TABLE = "y_embedder.embedding_table.weight"


class TrainerState(Settings):
    """The trainer's state in a checkpoint's state.json, besides the step."""

    data: str  # hash of the training latents and labels
    ema_num_updates: int
    loss_sums: list[float]  # one sum for each loss of `Trainer.loss_meter`
    loss_count: int
    bin_sums: list[list[float]]  # summed over all processes
    encoder_hash: str | None  # hash of the alignment encoder's weights
    image_offset: int
    class_names: list[str] | None = None  # names of the classes of the training latents, or None if they are unknown


class CheckpointHook(Hook):
    """A hook that writes checkpoints on the main process while training continues. Each save waits for the previous save.

    Raises:
        UserError: On every process, if the run has diverged, the weights are not finite, or a checkpoint could not be written.
    """

    def __init__(self, run: RunFolder, every: int, keep_last: int, keep_every: int):
        self.run = run
        self.every = every
        self.keep = (keep_last, keep_every)
        self.saved_step: int | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # set only on the main process

    def __call__(self, trainer: Trainer) -> None:
        if trainer.step in (self.saved_step, trainer.first_step):
            return
        self.raise_write_error(wait=True)
        trainer.reduce_losses()  # the checkpoint stores the losses of all processes
        norm = torch.nn.utils.get_total_norm([p.detach() for p in trainer.parameters.values()])
        if not norm.isfinite():
            raise Diverged(f"weights are not finite after step {trainer.step}; earlier checkpoints are intact")
        self.saved_step = trainer.step
        if not trainer.accelerator.is_main_process:
            return
        moments = optimizers.get_state(trainer.optimizers, trainer.parameters)
        states = {"model": trainer.net.state_dict(), "optimizer": {"state": moments}, **trainer.ema.states()}
        if trainer.alignment is not None:
            states["projector"] = trainer.alignment.projector.state_dict()
        states = recursively_apply(copy_to_host, states)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        state = TrainerState(
            data=trainer.dataset.hash,
            ema_num_updates=trainer.ema.num_updates_before + trainer.step,
            loss_sums=trainer.loss_meter.sums.tolist(),
            loss_count=trainer.loss_meter.num_steps,
            bin_sums=trainer.loss_meter.bin_sums.tolist(),
            encoder_hash=None if trainer.alignment is None else trainer.alignment.encoder_hash,
            image_offset=trainer.image_offset,
            class_names=trainer.dataset.class_names,
        )
        contents = store.CheckpointTensors(**states), state.model_dump(), trainer.cfg.model_dump()
        self._writing = self._thread.submit(self._save, trainer.step, *contents)

    def _save(self, step: int, tensors: store.CheckpointTensors, state: dict, config: dict) -> None:
        store.save(self.run.checkpoints, step, tensors, state, config, *self.keep)
        with contextlib.suppress(OSError):  # the disk may be full now
            self.run.saved_mark.touch()

    def raise_write_error(self, wait: bool = False) -> None:
        """Raise UserError on every process if a checkpoint could not be written. Every process must call this method.

        If `wait` is False, the error of an unfinished write surfaces in a later call.
        """

        def result() -> None:
            if self._writing is not None and (wait or self._writing.done()):
                with log_if_slow(log, "waiting until the checkpoint is written"):
                    self._writing.result()

        on_main(result)

    def finish(self, trainer: Trainer) -> None:
        self(trainer)
        self.raise_write_error(wait=True)

    def close(self) -> None:
        """Wait for the write in progress, so that an error elsewhere does not interrupt it."""
        self._thread.shutdown()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory. Copies from CUDA are asynchronous, so synchronize before reading."""
    # Copies to pinned memory are several times faster. torch caches pinned memory, so the next checkpoint reuses the memory.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


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
    meter.sums.copy_(sums["loss_sums"])
    meter.num_steps = state.loss_count
    if trainer.accelerator.is_main_process:  # the sums on the other processes stay zero, as after `LossMeter.reduce`
        meter.bin_sums.copy_(sums["bin_sums"])
    set_counters(trainer, checkpoint.step, state.ema_num_updates, state.image_offset)
    log.info("resumed from %s", folder)
    before, now = (learning_rate(train, checkpoint.step) for train in (checkpoint.config.train, trainer.cfg.train))
    if before != now:
        message = "the learning rate of step %d is %.3g; with the settings of the checkpoint, it was %.3g"
        log.warning(message, checkpoint.step, now, before)


def load_initial(trainer: Trainer, checkpoint: Checkpoint, init_state: str, class_names: list[str] | None) -> None:
    """Load another run's weights and EMA from its checkpoint. With init_state=all, also load the optimizer and step.

    `class_names` are the names of the classes of the other run, or None if they are unknown.
    """
    folder, step = checkpoint.path, checkpoint.step
    tensors = store.load(folder) if init_state == "all" else store.load_weights_and_ema(folder)
    sides = (trainer.net.state_dict(), tensors.model)
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
    differing = differing_class(class_names, trainer.dataset.class_names)
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
def restore_weights(trainer: Trainer, folder: Path, tensors: store.CheckpointTensors, *, without: str | None = None) -> None:
    """Copy the weights and the EMA of the checkpoint `folder` into a trainer, except the parameter `without`.

    The tensors are memory-mapped, so they occupy host memory only briefly.
    """

    def select(side: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in side.items() if name != without}

    weights, model, ema = select(trainer.net.state_dict()), select(tensors.model), select(tensors.ema)
    store.check_tensors(folder / store.WEIGHTS["raw"], model, weights)
    store.check_tensors(folder / store.WEIGHTS["ema"], ema, select(trainer.ema.averages))
    for name, value in weights.items():
        value.copy_(model[name])
    trainer.ema.load("ema", ema)


@torch.no_grad()
def restore_tensors(trainer: Trainer, folder: Path, tensors: store.CheckpointTensors) -> None:
    """Copy the weights, the EMA, the optimizer and, if the run has them, the projector and the tracked averages into a trainer.

    Raises UserError if a file of the checkpoint `folder` does not fit.
    """
    restore_weights(trainer, folder, tensors)
    for name, like in trainer.ema.states().items():
        store.check_tensors(folder / f"{name}.safetensors", getattr(tensors, name) or {}, like)
    state = tensors.optimizer.get("state", {})
    optimizers.check_state(folder / "optimizer.pt", state, trainer.cfg.train, trainer.parameters)
    if trainer.alignment is not None:
        projector = trainer.alignment.projector.state_dict()
        store.check_tensors(folder / "projector.safetensors", tensors.projector or {}, projector)
        for name, value in projector.items():
            value.copy_(tensors.projector[name])
    if tensors.tracked_ema is not None:
        trainer.ema.load("tracked_ema", tensors.tracked_ema)
    optimizers.load_state(trainer.optimizers, trainer.parameters, state)
