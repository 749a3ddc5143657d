"""Save checkpoints in a background thread during training."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import Diverged
from common.progress import log_if_slow
from configs.settings import Settings
from runtime.processes import on_main
from training import optimizers
from training.trainer import Trainer

log = logging.getLogger(__name__)


class TrainerState(Settings):
    """The trainer's state in a checkpoint's state.json, besides the step."""

    data: str  # hash of the training latents and labels
    ema_num_updates: int
    loss_sums: list[float]  # one sum for each loss of `Trainer.loss_meter`
    loss_count: int
    bin_sums: list[list[float]]  # summed over all processes
    encoder_hash: str | None  # hash of the alignment encoder's weights
    image_offset: int  # images seen beyond step * batch_size
    class_names: list[str] | None = None  # names of the classes of the training latents, or None if they are unknown


class CheckpointWriter:
    """Writes checkpoints on the main process while training continues. Each save waits for the previous save.

    Raises:
        UserError: On every process, if the run has diverged, the weights are not finite, or a checkpoint could not be written.
    """

    def __init__(self, run: RunFolder, keep_last: int, keep_every: int):
        self.run = run
        self.keep = (keep_last, keep_every)
        self.saved_step: int | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None  # set only on the main process

    def save(self, trainer: Trainer) -> None:
        """Save a checkpoint, unless this step has one or no step has been trained. Every process must call this method."""
        if trainer.step in (self.saved_step, trainer.first_step):
            return
        self.raise_write_error(wait=True)
        trainer.merge_losses()  # the checkpoint stores the losses of all processes
        norm = torch.nn.utils.get_total_norm([p.detach() for p in trainer.parameters.values()])
        if not norm.isfinite():
            raise Diverged(f"weights are not finite after step {trainer.step}; earlier checkpoints are intact")
        self.saved_step = trainer.step
        if not trainer.accelerator.is_main_process:
            return
        moments = optimizers.get_state(trainer.optimizers, trainer.parameters)
        tensors = recursively_apply(copy_to_host, {**trainer.tensors(), "optimizer": {"state": moments}})
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        state = TrainerState(
            data=trainer.dataset.hash,
            ema_num_updates=trainer.ema.num_updates_before + trainer.step,
            **trainer.loss_meter.state(),
            encoder_hash=None if trainer.alignment is None else trainer.alignment.encoder_hash,
            image_offset=trainer.images_seen - trainer.step * trainer.cfg.train.batch_size,
            class_names=trainer.dataset.class_names,
        )
        contents = tensors, state.model_dump(), trainer.cfg.model_dump()
        self._writing = self._thread.submit(store.save, self.run.checkpoints, trainer.step, *contents, *self.keep)

    def raise_write_error(self, wait: bool = False) -> None:
        """Raise UserError on every process if a checkpoint could not be written. Every process must call this method.

        If `wait` is False, the error of an unfinished write surfaces in a later call.
        """

        def result() -> None:
            if self._writing is not None and (wait or self._writing.done()):
                with log_if_slow(log, "waiting until the checkpoint is written"):
                    self._writing.result()

        on_main(result)

    def close(self) -> None:
        """Wait for the write in progress, so that an error elsewhere does not interrupt it."""
        self._thread.shutdown()


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory. Copies from CUDA are asynchronous, so synchronize before reading."""
    # Copies to pinned memory are several times faster. torch caches pinned memory, so the next checkpoint reuses the memory.
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)
