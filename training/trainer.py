"""The training loop: one step, and what happens around it."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from tqdm import tqdm

from errors import UserError
from evaluations.suite import format_metrics, metric_name
from latents.order import BatchOrder, read_batches
from latents.shards import LatentDataset, latents_for_network
from randomness import StepRandom
from sampling.evaluator import Evaluator
from sampling.sampler import Diffusion, ImageSampler, labelled_grid
from training import checkpoint as checkpoints
from training.ema import EMA
from training.run import RunFolder, naming_file
from training.sharding import all_parts, gathered, local, part_like, shard
from training.speed import attention_kernel, checkpoint_activations, compile_network, use_float8
from training.stop import StopSignal

log = logging.getLogger(__name__)

_NEVER = 2**62  # the "first bad step" of a run that has none


class TrainingDiverged(UserError):
    """The loss or the weights are no longer finite."""


@dataclass(frozen=True)
class Evaluation:
    """What judges the EMA weights during training.

    Attributes:
        samplers: by guidance scale, each sampling from the EMA's network.
    """

    evaluator: Evaluator
    samplers: dict[float, ImageSampler]


def part_of_batch(batch_size: int, num_parts: int, part: int) -> slice:
    """The rows of the global batch that part `part` of `num_parts` equal parts holds."""
    size = batch_size // num_parts
    return slice(part * size, (part + 1) * size)


class Trainer:
    """One run: the network, its EMA, the optimiser and the place in the run, and how they go forward.

    Attributes:
        net: the plain network, its weights sharded with train.parallel=fsdp; they are what a checkpoint holds.
        model: the same as accelerate wraps it.
        step: optimiser steps done.

    Args:
        cfg: the checked configuration of the run (setup/schema.py: TrainConfig).
        ema: of `net`, new.
        sampler: makes the sample grids, from the EMA's network; None makes none.
        evaluation: judges the EMA weights; None does not.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        cfg,
        net: nn.Module,
        ema: EMA,
        diffusion: Diffusion,
        dataset: LatentDataset,
        run: RunFolder,
        sampler: ImageSampler | None = None,
        evaluation: Evaluation | None = None,
    ):
        self.accelerator, self.cfg, self.diffusion, self.dataset, self.run = accelerator, cfg, diffusion, dataset, run
        self.net, self.ema, self.sampler, self.evaluation = net.train(), ema, sampler, evaluation
        self.device = accelerator.device
        self.is_sharded = cfg.train.parallel == "fsdp"
        if not self.is_sharded:  # `shard` moves one block at a time
            self.net.to(self.device)
            self.ema.net.to(self.device)
        if cfg.train.precision == "fp8":
            use_float8(self.net)  # the EMA was copied before: it is float32, and evaluated as such
        compile_network(self.net, cfg.train.compile)
        checkpoint_activations(self.net, cfg.train.activation_checkpointing)
        if self.is_sharded:
            shard(self.net, self.device, accelerator.num_processes, cfg.train.precision)
            self.ema.shard_like(self.net)
            # `evaluation_mode`: autocast, and no DDP around it.
            self.model = accelerator.prepare_model(self.net, device_placement=False, evaluation_mode=True)
        else:
            self.model = accelerator.prepare(self.net)
        # One pass over all parameters instead of one per tensor, where the device has it.
        fused = self.device.type in ("cuda", "cpu", "mps")
        optimizer = torch.optim.AdamW(
            [p for p in self.net.parameters() if p.requires_grad],
            lr=cfg.train.lr,
            betas=tuple(cfg.train.betas),
            weight_decay=cfg.train.weight_decay,
            fused=fused,
        )
        self.optimizer = accelerator.prepare(optimizer)

        num_parts = accelerator.num_processes * cfg.train.grad_accum_steps
        first_part = accelerator.process_index * cfg.train.grad_accum_steps
        self.parts = [part_of_batch(cfg.train.batch_size, num_parts, first_part + m) for m in range(cfg.train.grad_accum_steps)]
        self.step = 0
        # Since the last line of metrics.jsonl; on the device, so that nobody waits for a step to end.
        self.loss_sum = torch.zeros((), device=self.device)
        self.loss_count = 0
        self.first_bad_step = torch.full((), _NEVER, device=self.device)
        self.grad_norm: Tensor | None = None
        self.data_fingerprint = dataset.fingerprint()

    # ------------------------------------------------------------------------------------------------------------------
    # One step.

    def batches(self) -> Iterator[tuple[tuple[Tensor, Tensor], ...]]:
        """This process's share of every global batch from self.step to the end of the run: what `train_step` takes."""
        cfg, size = self.cfg, len(self.dataset)
        order = BatchOrder(
            size, cfg.train.batch_size, cfg.seed, self.step, cfg.train.num_steps, self.parts, self.dataset.has_flips
        )
        batches = read_batches(self.dataset, order, cfg.data.num_workers, pin_memory=self.device.type == "cuda")
        return zip(*[batches] * len(self.parts))  # consecutive micro-batches

    def train_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Forward, backward, optimiser and EMA for one global batch. Nothing here waits for the device.

        Args:
            micro_batches: this process's share, (stored latents, labels) for each of self.parts.
        """
        loss_of_step = torch.zeros((), device=self.device)
        for m, (part, (stored, labels)) in enumerate(zip(self.parts, micro_batches)):
            # Gradients are averaged over the processes with the last micro-batch; sharded, with each, since until then every
            # process would hold all of them and not its part alone.
            averages_gradients = self.is_sharded or m == len(self.parts) - 1
            exchange = contextlib.nullcontext() if averages_gradients else self.accelerator.no_sync(self.model)
            # The kernel is named for the backward too, which may compute the forward again.
            with exchange, attention_kernel(self.cfg.train.attention):
                loss = self.loss(part, stored, labels) / len(self.parts)
                self.accelerator.backward(loss)
            loss_of_step += loss.detach()
        if self.cfg.train.grad_clip_norm is not None:
            self.grad_norm = all_parts(self.accelerator.clip_grad_norm_(self.model.parameters(), self.cfg.train.grad_clip_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.step)

        self.loss_sum += loss_of_step
        self.loss_count += 1
        self.first_bad_step.clamp_(max=torch.where(loss_of_step.isfinite(), _NEVER, self.step + 1))
        self.step += 1

    def loss(self, part: slice, stored: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of one micro-batch. Every random number depends on (seed, step, row of the global batch) alone."""

        def random(stream: str) -> StepRandom:
            return StepRandom(self.cfg.seed, self.step, stream, self.cfg.train.batch_size, part, self.device)

        stored, labels = stored.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        x = latents_for_network(stored, self.dataset.info, random("latents"))
        draws = {"drop_labels": random("labels").rand() < self.net.class_dropout}
        if self.net.router.routes:
            draws["route_scores"] = random("routes").rand(len(self.net.router.routes), self.net.num_tokens)
        return self.diffusion.loss(self.model, x, labels, random("diffusion"), **draws).mean()

    # ------------------------------------------------------------------------------------------------------------------
    # The run.

    def train(self) -> None:
        """From self.step to the end of the run, or to a signal, with checkpoints, grids and metrics on the way.

        Raises:
            TrainingDiverged: loss or weights are not finite.
            UserError: a step does not fit in the memory of the device.
            SaveError: a checkpoint could not be written.
        """
        cfg, accelerator = self.cfg, self.accelerator
        batches = self.batches()
        stop = StopSignal()
        clock = _Clock()
        bar = tqdm(
            total=cfg.train.num_steps,
            initial=self.step,
            unit="step",
            dynamic_ncols=True,
            disable=not accelerator.is_main_process,
            mininterval=0.5,
        )
        try:
            saved_step = self._steps(batches, stop, clock, bar)
        finally:
            bar.close()
            stop.close()
        if saved_step < cfg.train.num_steps and accelerator.is_main_process:
            log.warning("stopped by a signal after step %d; the same command goes on from there", self.step)

    def _steps(self, batches: Iterator, stop: StopSignal, clock: _Clock, bar: tqdm) -> int:
        """The loop itself. Returns the step that was saved last."""
        cfg, saved_step = self.cfg, self.step
        with clock.paused(self.device):
            self._look_at_samples()  # what an interruption after the last checkpoint left undone
        while self.step < cfg.train.num_steps:
            try:
                self.train_step(next(batches))
            except torch.OutOfMemoryError as e:
                raise UserError(self._out_of_memory()) from e
            clock.num_steps += 1
            bar.update()
            is_last = self.step == cfg.train.num_steps
            stopping = stop.requested()
            if self.step % cfg.train.log_every == 0 or is_last:
                bar.set_postfix(self._log(clock))
            if self.step % cfg.checkpoint.every == 0 or is_last or stopping:
                with clock.paused(self.device):
                    self._save()
                saved_step = self.step
            if stopping and not is_last:
                break
            with clock.paused(self.device):
                self._look_at_samples()
        stop.finish()
        return saved_step

    def _out_of_memory(self) -> str:
        """The size of the step, and what lowers it."""
        train, num_processes = self.cfg.train, self.accelerator.num_processes
        num_images = train.batch_size // num_processes // train.grad_accum_steps
        return (
            f"out of memory in step {self.step + 1}: {self.cfg.model.backbone} on {num_images} images of {self.net.num_tokens} "
            f"tokens at once in each process (train.batch_size={train.batch_size} / {num_processes} processes / "
            f"train.grad_accum_steps={train.grad_accum_steps}), {train.precision}. Any of these lowers it: "
            f"train.grad_accum_steps={2 * train.grad_accum_steps}, train.activation_checkpointing=blocks, "
            f"train.batch_size={max(train.batch_size // 2, 1)}"
            + (", train.parallel=fsdp" if num_processes > 1 and not self.is_sharded else "")
        )

    def _mean_over_processes(self) -> tuple[float, int]:
        """(mean loss since the last line, first step whose loss was not finite). Waits for the device."""
        first_bad = self.accelerator.gather(self.first_bad_step.reshape(1)).min().item()
        self.loss_sum = self.accelerator.reduce(self.loss_sum, reduction="mean")
        return (self.loss_sum / max(self.loss_count, 1)).item(), first_bad

    def _check_finite(self, first_bad: int) -> None:
        if first_bad == _NEVER:
            return
        intact = [str(p) for p in checkpoints.list_steps(self.run.checkpoints).values()]
        raise TrainingDiverged(
            f"loss or weights are not finite since step {first_bad}; last good checkpoint: {intact[-1] if intact else 'none'}. "
            f"Look for NaN in the latents of {self.dataset.path}, lower train.lr={self.cfg.train.lr}, or set train.grad_clip_norm"
        )

    def _log(self, clock: _Clock) -> dict[str, str]:
        """Write a line of metrics; returns what the progress bar shows."""
        cfg = self.cfg
        loss, first_bad = self._mean_over_processes()
        self._check_finite(first_bad)
        steps_per_sec = clock.steps_per_sec()
        record = {
            "step": self.step,
            "loss": loss,
            "lr": cfg.train.lr,
            "steps_per_sec": steps_per_sec,
            "images_per_sec": steps_per_sec * cfg.train.batch_size,
            "images_seen": self.step * cfg.train.batch_size,
            "epoch": self.step * cfg.train.batch_size / len(self.dataset),
        }
        if self.grad_norm is not None:
            record["grad_norm"] = float(self.grad_norm)
        if self.device.type == "cuda":
            record["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        if self.accelerator.is_main_process:
            self.run.log_metrics(record)
        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=self.step)
        self.loss_sum, self.loss_count = torch.zeros_like(self.loss_sum), 0
        clock.restart()
        return {"loss": f"{loss:.4f}", "images/s": f"{record['images_per_sec']:.0f}"}

    def _look_at_samples(self) -> None:
        """The grid and the evaluation of this step, where they are due and not there yet."""
        cfg, is_last = self.cfg, self.step == self.cfg.train.num_steps
        if self.sampler is not None and self.step > 0 and (self.step % cfg.sample.every == 0 or is_last):
            self._sample_grid()
        if self.evaluation is not None and self.step > 0 and (self.step % cfg.eval.every == 0 or is_last):
            self._evaluate()

    def _sample_grid(self) -> None:
        """samples/step_N.png, from the EMA weights: image i has seed i and class i mod num_classes."""
        file = self.run.samples / f"{checkpoints.folder_name(self.step)}.png"
        is_main = self.accelerator.is_main_process
        if broadcast_object_list([is_main and file.exists()])[0]:
            return
        with self.ema.whole(here=is_main):
            if is_main:
                self._write_grid(file)
        self.accelerator.wait_for_everyone()

    def _write_grid(self, file: Path) -> None:
        cfg = self.cfg.sample
        seeds = list(range(cfg.num_samples))
        labels = [seed % self.sampler.num_classes for seed in seeds]
        images = []
        for i in range(0, len(seeds), cfg.batch_size):
            images.extend(self.sampler(seeds[i : i + cfg.batch_size], labels[i : i + cfg.batch_size]))
        grid = labelled_grid(images, labels)
        with naming_file(file):
            grid.save(file)
        for tracker in self.accelerator.trackers:
            if tracker.name == "wandb":
                tracker.log_images({"samples": [grid]}, step=self.step)

    def _evaluate(self) -> None:
        """A line of metrics with the evaluation of this step, for every guidance scale."""
        cfg = self.cfg.eval
        if broadcast_object_list([self.accelerator.is_main_process and self.run.has_evaluation(self.step)])[0]:
            return
        is_last = self.step == self.cfg.train.num_steps
        num_samples = cfg.final_num_samples if is_last and cfg.final_num_samples is not None else cfg.num_samples
        record, start_sec = {}, time.perf_counter()
        with self.ema.whole(here=True):
            for cfg_scale, sampler in self.evaluation.samplers.items():
                result = self.evaluation.evaluator.of_samples(sampler, num_samples)
                record |= {metric_name(metric, num_samples, cfg_scale): value for metric, value in result.items()}
        if self.accelerator.is_main_process:
            self.run.log_metrics({"step": self.step, **record, "evaluation_sec": time.perf_counter() - start_sec})
            tqdm.write(f"step {self.step}: {format_metrics(record)}", file=sys.stderr)
        self.accelerator.log(record, step=self.step)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints.

    def _save(self) -> None:
        """Write a checkpoint, from the main process; all processes learn whether it worked."""
        loss, first_bad = self._mean_over_processes()
        self._check_finite(first_bad)
        finite = torch.stack([local(p).isfinite().all() for p in self.net.parameters()]).all()
        if not self.accelerator.gather(finite.reshape(1)).all().item():
            self._check_finite(self.step)
        checkpoint, error = self._checkpoint(), None
        if self.accelerator.is_main_process:
            try:
                checkpoints.save(self.run.checkpoints, checkpoint, self.cfg.checkpoint.keep_last, self.cfg.checkpoint.keep_every)
            except checkpoints.SaveError as e:
                error = e
        failed = self.accelerator.reduce(torch.tensor(float(error is not None), device=self.device)).item()
        if failed:
            raise error or checkpoints.SaveError("the main process could not write the checkpoint")

    def _checkpoint(self) -> checkpoints.Checkpoint:
        """What is to be written. All processes have to ask for it: of sharded tensors the main process gets all parts."""
        is_main = self.accelerator.is_main_process
        return checkpoints.Checkpoint(
            step=self.step,
            model=gathered(self.net.state_dict(), keep=is_main),
            ema=gathered(self.ema.averages, keep=is_main),
            optimizer=gathered(self.optimizer.state_dict(), keep=is_main),
            state={
                "images_seen": self.step * self.cfg.train.batch_size,
                "data_fingerprint": self.data_fingerprint,
                "ema_num_updates": self.ema.num_updates_before + self.step,
                "loss_sum": self.loss_sum.item(),
                "loss_count": self.loss_count,
            },
            config=self.cfg.model_dump(),
        )

    def init_from(self, folder: Path, init_state: str) -> None:
        """Start from the weights of another run, whose architecture was compared.

        Args:
            folder: a verified checkpoint.
            init_state: `weights` takes weights and EMA, `all` the optimiser's state and the step too.
        """
        checkpoint = checkpoints.load(folder)
        self._load_weights(checkpoint)
        # The average goes on: a warm-up would forget it within a few steps.
        self.ema.num_updates_before = ema_num_updates(checkpoint)
        if init_state == "all":
            self._load_optimizer(checkpoint)
            self.step = checkpoint.step
            self.ema.num_updates_before -= self.step
        log.info("weights and EMA from %s%s", folder, f", with optimiser and step {self.step}" if init_state == "all" else "")

    def _load_weights(self, checkpoint: checkpoints.Checkpoint) -> None:
        own = self.net.state_dict()
        self.net.load_state_dict({name: part_like(value, own[name]) for name, value in checkpoint.model.items()})
        self.ema.load(checkpoint.ema)

    def _load_optimizer(self, checkpoint: checkpoints.Checkpoint) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = {
            i: {key: part_like(value, parameters[i]) if key != "step" else value for key, value in state.items()}
            for i, state in checkpoint.optimizer["state"].items()
        }
        self.optimizer.load_state_dict(checkpoint.optimizer | {"state": states})
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"] = self.cfg.train.lr, tuple(self.cfg.train.betas)
            group["weight_decay"] = self.cfg.train.weight_decay

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint of the same run.

        Raises:
            UserError: it is not whole, or the latents are not those that it was trained on.
        """
        checkpoint = checkpoints.load(folder)
        if checkpoint.state["data_fingerprint"] != self.data_fingerprint:
            trained_on = checkpoint.config["data"]["path"]
            raise UserError(
                f"resume: {folder} cannot go on: data: other latents or labels: {trained_on!r} -> {self.cfg.data.path!r}. "
                "Restore the data, or start another run with name=..."
            )
        self._load_weights(checkpoint)
        self._load_optimizer(checkpoint)
        self.step = checkpoint.step
        self.ema.num_updates_before = ema_num_updates(checkpoint) - self.step
        self.loss_sum.fill_(checkpoint.state["loss_sum"])
        self.loss_count = checkpoint.state["loss_count"]
        log.info("resumed from %s", folder)


def ema_num_updates(checkpoint: checkpoints.Checkpoint) -> int:
    """The updates that the average of a checkpoint has seen, those of the run that it started from included."""
    return checkpoint.state.get("ema_num_updates", checkpoint.step)


class _Clock:
    """Training speed since the last restart, without the time spent in pauses (checkpoints, grids)."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.num_steps, self._paused_sec, self._start_sec = 0, 0.0, time.perf_counter()

    def steps_per_sec(self) -> float:
        return self.num_steps / max(time.perf_counter() - self._start_sec - self._paused_sec, 1e-9)

    @contextlib.contextmanager
    def paused(self, device: torch.device):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the steps so far belong to training
        start_sec = time.perf_counter()
        yield
        self._paused_sec += time.perf_counter() - start_sec
