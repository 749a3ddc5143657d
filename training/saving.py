"""Save checkpoints in a background thread during training, and load checkpoints into a trainer."""

from __future__ import annotations

import copy
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from checkpoints import store
from checkpoints.run import RunFolder
from common.errors import UserError, as_user_error
from common.progress import log_if_slow
from configs.settings import Settings, validate
from runtime.processes import on_main
from training.trainer import Hook, Trainer

log = logging.getLogger(__name__)

LABEL_TABLE = "y_embedder.embedding_table.weight"


class TrainerState(Settings):
    """The trainer's state in a checkpoint's state.json, besides the step."""

    data: str  # fingerprint of the latents
    ema_num_updates: int
    loss_sums: list[float]  # one sum for each of `Trainer.modules`
    loss_count: int
    bin_sums: list[list[float]]
    encoder_hash: str | None  # hash of the alignment encoder's weights


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
        state = TrainerState(
            data=trainer.dataset.fingerprint,
            ema_num_updates=trainer.ema.num_updates_before + trainer.step,
            loss_sums=trainer.loss_sums.tolist(),
            loss_count=trainer.step - trainer.last_logged_step,
            bin_sums=trainer.bin_sums.tolist(),
            encoder_hash=None if trainer.alignment is None else trainer.alignment.encoder_hash,
        )
        checkpoint = store.Checkpoint(trainer.step, **states, state=state.model_dump(), config=trainer.cfg.model_dump())
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
    """Resume a run from a verified checkpoint.

    Raise UserError if the latents, labels or encoder weights differ, or if a file does not fit the run.
    """
    checkpoint = store.load(folder)
    state = read_state(folder, checkpoint)
    if state.data != trainer.dataset.fingerprint:
        raise UserError(
            f"resume: {folder} was trained on other latents or labels ({checkpoint.config['data']['path']}) than data.path="
            f"{trainer.cfg.data.path}. Restore the data, or start another run with name=..."
        )
    sums = {"loss_sums": torch.tensor(state.loss_sums), "bin_sums": torch.tensor(state.bin_sums)}
    store.check_tensors(folder / "state.json", sums, {name: getattr(trainer, name) for name in sums})
    _restore(trainer, folder, checkpoint, with_optimizer=True)
    for name, value in sums.items():
        getattr(trainer, name).copy_(value)
    trainer.last_logged_step -= state.loss_count
    log.info("resumed from %s", folder)


def init_from(trainer: Trainer, folder: Path, init_state: str) -> None:
    """Load another run's weights and EMA from a verified checkpoint. With init_state=all, also load the optimizer and step."""
    load, with_optimizer = (store.load, True) if init_state == "all" else (store.load_initial, False)
    _restore(trainer, folder, load(folder), with_optimizer=with_optimizer)
    log.info("weights and EMA from %s%s", folder, f", with optimizer and step {trainer.step}" if init_state == "all" else "")


def read_state(folder: Path, checkpoint: store.Checkpoint) -> TrainerState:
    """Return the trainer's state in a checkpoint. Raise UserError with one line that names all wrong keys."""
    try:
        return validate(checkpoint.state, TrainerState)
    except UserError as e:
        raise UserError(f"{folder / 'state.json'} cannot be read: {'; '.join(str(e).splitlines())}") from e


@torch.no_grad()
def _restore(trainer: Trainer, folder: Path, checkpoint: store.Checkpoint, *, with_optimizer: bool) -> None:
    """Copy a checkpoint into a trainer. The checkpoint is memory-mapped, so its tensors occupy host memory only briefly.

    Raise UserError, before anything is copied, if a file does not fit the trainer.
    """
    own, averages = trainer.net.state_dict(), dict(trainer.ema.averages)
    num_updates = checkpoint.state.get("ema_num_updates")
    if type(num_updates) is not int:
        raise UserError(f"{folder / 'state.json'}: ema_num_updates={num_updates!r:.100} is not a number of updates")
    num_classes, stored_num_classes = (len(side.get(LABEL_TABLE, ())) - 1 for side in (own, checkpoint.model))
    if not with_optimizer and num_classes != stored_num_classes:  # `check_initial` allows different class counts
        words = "the label table starts with new weights: %s has %d classes, and the data have %d"
        log.info(words, folder, stored_num_classes, num_classes)
        for tensors in (own, averages, checkpoint.model, checkpoint.ema):
            tensors.pop(LABEL_TABLE, None)
        num_updates = 0  # the EMA warms up again, because it would otherwise keep the new table's random start for too long
    store.check_tensors(folder / store.WEIGHTS["raw"], checkpoint.model, own)
    store.check_tensors(folder / store.WEIGHTS["ema"], checkpoint.ema, averages)
    moments = {}
    if with_optimizer:
        for name, like in trainer.ema.states().items():
            store.check_tensors(folder / f"{name}.safetensors", getattr(checkpoint, name) or {}, like)
        moments = _check_moments(trainer, folder / "optimizer.pt", checkpoint.optimizer)
    if with_optimizer and trainer.alignment is not None:  # a run with init_state=weights trains a new projector
        if checkpoint.state.get("encoder_hash") != trainer.alignment.encoder_hash:
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
    state = {i: {key: value.to(trainer.device, copy=True) for key, value in values.items()} for i, values in moments.items()}
    # Use the current configuration's learning rate, betas and weight decay, because the user may change them on a resume.
    trainer.optimizer.load_state_dict({"state": state, "param_groups": trainer.optimizer.state_dict()["param_groups"]})


def _check_moments(trainer: Trainer, file: Path, stored: dict) -> dict[int, dict[str, Tensor]]:
    """Return the moments {parameter's index: {name: tensor}} in the optimizer's stored state dict.

    Raise UserError if their names, shapes or types are not those of the trainer's optimizer after a step.
    """
    optimizer = trainer.optimizer.optimizer  # without accelerate's wrapper
    names = {id(p): name for module in trainer.modules for name, p in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Take a step with a copy of the optimizer whose parameters are on the meta device, where tensors have no data.
    with torch.enable_grad():
        twins = [torch.empty_like(p, device="meta", requires_grad=True) for p in parameters]
    twin = copy.deepcopy(optimizer, {id(p): twin for p, twin in zip(parameters, twins)})
    for group in twin.param_groups:
        group |= dict.fromkeys({"fused", "foreach"} & group.keys(), False)  # the state is the same, and meta has no fused step
    for p in twins:
        p.grad = torch.empty_like(p)
    twin.step()

    def by_name(state: dict) -> dict[str, Tensor]:
        found = {}
        for i, values in state.items():
            parameter = names[id(parameters[i])] if i in range(len(parameters)) else "unknown"
            found |= {f"{key} of parameter {i} ({parameter})": value for key, value in values.items()}
        if not all(isinstance(value, Tensor) for value in found.values()):
            raise ValueError("it holds other values than tensors")
        return found

    with as_user_error(file):
        store.check_tensors(file, by_name(stored["state"]), by_name(twin.state_dict()["state"]))
    return stored["state"]
