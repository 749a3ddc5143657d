"""Save checkpoints in a background thread during training, and load checkpoints into a trainer."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError
from common.progress import log_if_slow
from runtime.processes import on_main
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)

LABEL_TABLE = "y_embedder.embedding_table.weight"


class CheckpointHook(Hook):
    """A hook that writes checkpoints on the main process while training continues. Each save waits for the previous save.

    Raises:
        UserError: On every process, if the run has diverged, the weights are not finite, or a checkpoint could not be written.
    """

    def __init__(self, run: RunFolder, every: int, keep_last: int, keep_every: int):
        self.run, self.every, self.keep = run, every, (keep_last, keep_every)
        self.saved_step: int | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # set only on the main process

    def __call__(self, trainer: Trainer) -> None:
        if trainer.step in (self.saved_step, trainer.first_step):
            return
        self.check(wait=True)
        trainer.reduce_losses()  # the checkpoint stores loss sums that are averaged over all processes
        norm = torch.nn.utils.get_total_norm([p.detach() for p in trainer.parameters])
        if not norm.isfinite():
            raise UserError(f"weights are not finite after step {trainer.step}; earlier checkpoints are intact")
        self.saved_step = trainer.step
        if not trainer.accelerator.is_main_process:
            return
        states = {"model": trainer.net.state_dict(), "optimizer": trainer.optimizer.state_dict(), **trainer.ema.states()}
        if trainer.alignment is not None:
            states["projector"] = trainer.alignment.projector.state_dict()
        states = recursively_apply(copy_to_host, states)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        state = {
            "data": trainer.dataset.fingerprint,
            "ema_num_updates": trainer.ema.num_updates_before + trainer.step,
            "loss_sums": trainer.loss_sums.tolist(),
            "loss_count": trainer.step - trainer.last_logged_step,
            "bin_sums": trainer.bin_sums.tolist(),
            "encoder_hash": None if trainer.alignment is None else trainer.alignment.encoder_hash,
        }
        checkpoint = store.Checkpoint(trainer.step, **states, state=state, config=trainer.cfg.model_dump())
        self._writing = self._thread.submit(store.save, self.run.checkpoints, checkpoint, *self.keep)

    def check(self, wait: bool) -> None:
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
        self.check(wait=True)

    def close(self) -> None:
        """Wait for the write in progress, because an error elsewhere must not interrupt the checkpoint."""
        self._thread.shutdown()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory. Copies from CUDA are asynchronous, so synchronize before reading."""
    # Copies to pinned memory are several times faster. torch caches pinned memory, so the next checkpoint reuses the memory.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=True)


def resume(trainer: Trainer, folder: Path) -> None:
    """Resume a run from a verified checkpoint. Raise UserError if the latents, labels or encoder weights differ."""
    checkpoint = store.load(folder)
    if checkpoint.state.get("data") != trainer.dataset.fingerprint:
        raise UserError(
            f"resume: {folder} was trained on other latents or labels ({checkpoint.config['data']['path']}) than data.path="
            f"{trainer.cfg.data.path}. Restore the data, or start another run with name=..."
        )
    _restore(trainer, folder, checkpoint, with_optimizer=True)
    trainer.loss_sums.copy_(torch.tensor(checkpoint.state["loss_sums"]))
    trainer.last_logged_step -= checkpoint.state["loss_count"]
    trainer.bin_sums.copy_(torch.tensor(checkpoint.state["bin_sums"]))
    log.info("resumed from %s", folder)


def init_from(trainer: Trainer, folder: Path, init_state: str) -> None:
    """Load another run's weights and EMA from a verified checkpoint. With init_state=all, also load the optimizer and step."""
    _restore(trainer, folder, store.load(folder), with_optimizer=init_state == "all")
    log.info("weights and EMA from %s%s", folder, f", with optimizer and step {trainer.step}" if init_state == "all" else "")


@torch.no_grad()
def _restore(trainer: Trainer, folder: Path, checkpoint: store.Checkpoint, *, with_optimizer: bool) -> None:
    """Copy a checkpoint into a trainer. The checkpoint is memory-mapped, so its tensors occupy host memory only briefly."""
    own, averages = trainer.net.state_dict(), dict(trainer.ema.averages)
    num_classes, stored_num_classes = (len(side[LABEL_TABLE]) - 1 for side in (own, checkpoint.model))
    num_updates = checkpoint.state["ema_num_updates"]
    if not with_optimizer and num_classes != stored_num_classes:  # `check_initial` allows different class counts
        words = "the label table starts with new weights: %s has %d classes, and the data have %d"
        log.info(words, folder, stored_num_classes, num_classes)
        for tensors in (own, averages, checkpoint.model, checkpoint.ema):
            del tensors[LABEL_TABLE]
        num_updates = 0  # the EMA warms up again, because it would otherwise keep the new table's random start for too long
    store.check_tensors(folder / store.WEIGHTS["raw"], checkpoint.model, own)
    store.check_tensors(folder / store.WEIGHTS["ema"], checkpoint.ema, averages)
    if with_optimizer and trainer.alignment is not None:  # a run with init_state=weights trains a new projector
        if checkpoint.state["encoder_hash"] != trainer.alignment.encoder_hash:
            raise UserError(f"{folder} was aligned with other encoder weights than alignment.encoder_weights")
        projector = trainer.alignment.projector.state_dict()
        store.check_tensors(folder / "projector.safetensors", checkpoint.projector or {}, projector)
        own |= projector
        checkpoint.model |= checkpoint.projector
    for name, value in own.items():
        value.copy_(checkpoint.model[name])
    trainer.ema.load("ema", checkpoint.ema)
    trainer.ema.num_updates_before = num_updates
    if not with_optimizer:
        return
    trainer.step = trainer.first_step = trainer.last_logged_step = checkpoint.step
    trainer.ema.num_updates_before -= trainer.step
    if checkpoint.tracked_ema is not None:
        trainer.ema.load("tracked_ema", checkpoint.tracked_ema)
    moments = checkpoint.optimizer["state"].items()
    state = {i: {key: value.to(trainer.device, copy=True) for key, value in values.items()} for i, values in moments}
    # Use the current configuration's learning rate, betas and weight decay, because the user may change them on a resume.
    trainer.optimizer.load_state_dict({"state": state, "param_groups": trainer.optimizer.state_dict()["param_groups"]})
