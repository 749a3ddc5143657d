"""The training loop. Between steps, it writes metrics and checkpoints and calls hooks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkpoints.run import RunFolder
from common.files import append_line
from common.interruption import Interrupted, until_stopped
from common.progress import progress_bar
from runtime.processes import on_main
from training.hooks import Hook
from training.losses import means_by_bin
from training.saving import CheckpointWriter
from training.step_metrics import STEP_METRICS
from training.tracking import track
from training.trainer import Trainer


def train(trainer: Trainer, run: RunFolder, hooks: Sequence[Hook]) -> bool:
    """Train from trainer.step to the end of the run or until a signal arrives. Return whether the run is complete.

    A signal stops training after the current step or sample batch, and the loop then saves a checkpoint. Raises UserError if the
    run has diverged, a checkpoint could not be written, or another process has ended.
    """
    cfg, num_steps = trainer.cfg, trainer.cfg.train.num_steps
    checkpoints = CheckpointWriter(run, cfg.checkpoint.keep_last, cfg.checkpoint.keep_every)
    clock = Clock(trainer.device)
    is_silent = trainer.step >= num_steps or not trainer.accelerator.is_main_process
    bar = progress_bar(total=num_steps, initial=trainer.step, unit="step", disable=is_silent, mininterval=0.5)
    with bar, trainer.stop, contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        stack.callback(trainer.free_graph)
        is_complete = False
        with contextlib.suppress(Interrupted):
            for hook in hooks:
                if is_due(hook.every, trainer.step, num_steps):
                    hook(trainer)  # a signal may have interrupted it at this step
            clock.start()
            for micro_batches in until_stopped(trainer.batches(), trainer.stop.poll):
                due = partial(is_due, step=trainer.step + 1, num_steps=num_steps)
                is_logged, is_saved = due(cfg.train.log_every), due(cfg.checkpoint.every)
                due_hooks = [hook for hook in hooks if due(hook.every)]
                measured = trainer.train_step(micro_batches, STEP_METRICS if is_logged else None)
                bar.update()
                if not (is_logged or is_saved or due_hooks):
                    continue  # without waiting for the device
                clock.stop()
                if is_logged:
                    checkpoints.raise_write_error()
                    line = collect_metrics(trainer, clock, measured)
                    bar.set_postfix({"loss": f"{line['loss']:.4f}", "images/s": f"{line['images_per_sec']:.0f}"}, refresh=False)
                    on_main(partial(append_line, run.metrics, line))  # a full disk is one line on every process
                    track(trainer.accelerator, line)
                if is_saved:  # after the metrics, because a checkpoint stores the losses since the last metrics line
                    checkpoints.save(trainer)
                if due_hooks:
                    trainer.free_graph()  # its memory is for the activations of the networks that hooks run
                for hook in due_hooks:
                    hook(trainer)
                clock.start()
            is_complete = True
        checkpoints.save(trainer)
        checkpoints.raise_write_error(wait=True)
        trainer.stop.poll()  # a signal during the last save counts, too
    return is_complete


def is_due(every: int, step: int, num_steps: int) -> bool:
    """Return whether something is due after `step` completed steps: every `every` steps and after the last, or never if 0."""
    is_last = step >= num_steps  # above, if resume=changed has lowered num_steps
    return every > 0 and step > 0 and (is_last or step % every == 0)


class Clock:
    """Measures the time and the peak memory of training steps, without what happens between them.

    Attributes:
        sec: Training time since the last metrics line.
        memory: Peak memory of these steps in GiB, by name in metrics.jsonl. It is empty on a CPU.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        self.sec = 0.0
        self.memory: dict[str, float] = {}

    def start(self) -> None:
        self._start_sec = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def stop(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # include the queued steps
            # The peak of allocations does not contain the activations inside a CUDA graph.
            allocated, reserved = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
            for name, num_bytes in (("peak_memory_gib", allocated), ("reserved_memory_gib", reserved)):
                self.memory[name] = max(self.memory.get(name, 0.0), num_bytes / 2**30)
        self.sec += time.perf_counter() - self._start_sec


def collect_metrics(trainer: Trainer, clock: Clock, measured: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a line of metrics.jsonl: losses, speed and peak memory since the last line, and what the last step measured.

    Every process must call this function between steps. It starts the interval of the next line.
    """
    losses, batch_size = trainer.merge_losses(), trainer.cfg.train.batch_size
    meter = trainer.loss_meter
    num_timed = min(meter.num_steps, trainer.step - trainer.first_step)  # without those before a resume
    steps_per_sec = num_timed / max(clock.sec, 1e-9)
    line = {
        "step": trainer.step,
        **dict(zip(meter.names, losses)),
        "loss_by_level": means_by_bin(meter.bin_sums),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "steps_per_sec": steps_per_sec,
        "images_per_sec": steps_per_sec * batch_size,
        "images_seen": trainer.images_seen,
        "epoch": trainer.images_seen / len(trainer.dataset),
        **clock.memory,
    }
    meter.reset()
    clock.reset()
    return line | {name: float(value) for name, value in measured.items()}
