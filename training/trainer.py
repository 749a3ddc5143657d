"""The trainer, from top to bottom: one step, the run, metrics, sample grids and evaluation, checkpoints."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from errors import UserError
from evaluations.suite import format_metrics, metric_name
from files import whole_file
from latents.order import BatchOrder, read_batches
from latents.shards import LatentDataset, latents_for_network
from progress import progress_bar, say_if_slow
from randomness import StepRandom
from sampling.evaluator import Evaluator
from sampling.sampler import Diffusion, ImageSampler, labelled_grid
from training import checkpoint as checkpoints
from training.ema import EMA
from training.run import RunFolder
from training.sharding import ddp_settings, distribute_like, full_tensor, gather_state_dict, local_shard, shard_network
from training.speed import attention_kernel, checkpoint_activations, compile_network, resolve_compile, use_float8
from training.stop import StopSignal

log = logging.getLogger(__name__)

_NEVER = 2**62  # the "first bad step" of a run that has none


class TrainingDiverged(UserError):
    """The loss or the weights are no longer finite."""


@dataclass(frozen=True)
class Evaluation:
    """How the EMA is evaluated during training."""

    evaluator: Evaluator
    samplers: dict[float, ImageSampler]  # by guidance scale, each sampling from the EMA's network


class Trainer:
    """One training run.

    Args:
        cfg: the checked configuration of the run (TrainConfig of setup/schema.py).
        ema: of `net`, without updates so far.
        run: the folder for metrics, grids and checkpoints.
        sampler: samples the grids from the EMA's network; None: no grids.
        evaluation: None: no evaluation.

    Attributes:
        net: the plain network, whose weights a checkpoint holds; with train.parallel=fsdp they are sharded.
        model: `net` as accelerate wraps it.
        step: optimizer steps done.
        parts: the rows of the global batch in each of this process's micro-batches.
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
        if not self.is_sharded:  # FSDP moves one block at a time to the device
            self.net.to(self.device)
            self.ema.net.to(self.device)
        if cfg.train.precision == "fp8":
            use_float8(self.net)  # not the EMA, which stays float32
        compile_network(self.net, resolve_compile(cfg.train.compile, self.device))
        checkpoint_activations(self.net, cfg.train.activation_checkpointing)
        if self.is_sharded:
            shard_network(self.net, self.device, accelerator.num_processes, cfg.train)
            self.ema.shard_like(self.net)
            # evaluation_mode: accelerate adds autocast, but no DDP.
            self.model = accelerator.prepare_model(self.net, device_placement=False, evaluation_mode=True)
        else:
            accelerator.ddp_handler = ddp_settings(self.net, cfg.train.gradient_precision)
            self.model = accelerator.prepare(self.net)
        optimizer = torch.optim.AdamW(
            [p for p in self.net.parameters() if p.requires_grad],
            lr=cfg.train.lr,
            betas=tuple(cfg.train.betas),
            weight_decay=cfg.train.weight_decay,
            fused=self.device.type in ("cuda", "cpu", "mps"),
        )
        self.optimizer = accelerator.prepare(optimizer)

        num_micro_batches = cfg.train.grad_accum_steps
        size = cfg.train.batch_size // (accelerator.num_processes * num_micro_batches)
        start = accelerator.process_index * num_micro_batches * size
        self.parts = [slice(start + m * size, start + (m + 1) * size) for m in range(num_micro_batches)]
        self.step = 0
        self.data_fingerprint = dataset.fingerprint()
        # Since the last line of metrics.jsonl; on the device, so that a step does not wait for it.
        self.loss_sum = torch.zeros((), device=self.device)
        self.loss_count = 0
        self.first_bad_step = torch.full((), _NEVER, device=self.device)
        self.grad_norm: Tensor | None = None

    # ------------------------------------------------------------------------------------------------------------------
    # One step.

    def batches(self) -> Iterator[tuple[tuple[Tensor, Tensor], ...]]:
        """This process's share of every global batch from self.step to the end of the run, as `train_step` takes it."""
        cfg, data = self.cfg, self.dataset
        order = BatchOrder(len(data), cfg.train.batch_size, cfg.seed, self.step, cfg.train.num_steps, self.parts, data.has_flips)
        micro_batches = read_batches(data, order, cfg.data.num_workers, pin_memory=self.device.type == "cuda")
        return zip(*[micro_batches] * len(self.parts))  # consecutive ones together

    def train_step(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Forward, backward, optimizer and EMA for one global batch. Nothing here waits for the device.

        Args:
            micro_batches: (stored latents, labels) for each of self.parts.
        """
        loss_of_step = torch.zeros((), device=self.device)
        for m, (part, (stored, labels)) in enumerate(zip(self.parts, micro_batches)):
            # DDP averages the gradients over processes after the last micro-batch. FSDP does it after each one: without, every
            # process would hold the full gradients.
            syncs_gradients = self.is_sharded or m == len(self.parts) - 1
            sync = contextlib.nullcontext() if syncs_gradients else self.accelerator.no_sync(self.model)
            # The backward is inside too: with activation checkpointing it computes attention again.
            with sync, attention_kernel(self.cfg.train.attention):
                loss = self.loss(part, stored, labels) / len(self.parts)
                self.accelerator.backward(loss)
            loss_of_step += loss.detach()
        if self.cfg.train.grad_clip_norm is not None:
            self.grad_norm = full_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), self.cfg.train.grad_clip_norm))
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
        """Train from self.step to the end of the run, or until a signal; log, save, sample and evaluate when due.

        Raises:
            UserError: TrainingDiverged; SaveError; a step does not fit in the memory of the device.
        """
        cfg, is_main = self.cfg, self.accelerator.is_main_process
        batches, clock = self.batches(), _Clock(self.device)
        bar = progress_bar(total=cfg.train.num_steps, initial=self.step, unit="step", disable=not is_main, mininterval=0.5)
        with contextlib.closing(StopSignal()) as stop, bar:
            self._sample_and_evaluate(clock)  # what an interruption after the last checkpoint left undone
            while self.step < cfg.train.num_steps:
                try:
                    self.train_step(next(batches))
                except torch.OutOfMemoryError as e:
                    raise UserError(self._out_of_memory()) from e
                clock.num_steps += 1
                bar.update()
                stopping = stop.requested()
                if self._is_due(cfg.train.log_every):
                    bar.set_postfix(self._log(clock), refresh=False)  # shown when the bar is drawn next
                if self._is_due(cfg.checkpoint.every) or stopping:
                    with clock.paused():
                        self._save()
                if stopping and self.step < cfg.train.num_steps:
                    break
                self._sample_and_evaluate(clock)
            stop.finish()
        if self.step < cfg.train.num_steps and is_main:
            log.warning("stopped by a signal after step %d; the same command goes on from there", self.step)

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and (self.step % every == 0 or self.step == self.cfg.train.num_steps)

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

    # ------------------------------------------------------------------------------------------------------------------
    # Metrics.

    def _log(self, clock: _Clock) -> dict[str, str]:
        """Write a line of metrics; returns what the progress bar shows."""
        loss, steps_per_sec, batch_size = self._mean_loss(), clock.steps_per_sec(), self.cfg.train.batch_size
        record = {
            "step": self.step,
            "loss": loss,
            "lr": self.cfg.train.lr,
            "steps_per_sec": steps_per_sec,
            "images_per_sec": steps_per_sec * batch_size,
            "images_seen": self.step * batch_size,
            "epoch": self.step * batch_size / len(self.dataset),
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

    def _mean_loss(self) -> float:
        """The mean loss over all processes since the last line of metrics. Raises TrainingDiverged if one was not finite."""
        first_bad = int(self.accelerator.gather(self.first_bad_step.reshape(1)).min())
        self.loss_sum = self.accelerator.reduce(self.loss_sum, reduction="mean")
        if first_bad < _NEVER:
            raise self._diverged(first_bad)
        return (self.loss_sum / max(self.loss_count, 1)).item()

    def _diverged(self, first_bad: int) -> TrainingDiverged:
        intact = list(checkpoints.list_steps(self.run.checkpoints).values())
        return TrainingDiverged(
            f"loss or weights are not finite since step {first_bad}; last good checkpoint: {intact[-1] if intact else 'none'}. "
            f"Look for NaN in the latents of {self.dataset.path}, lower train.lr={self.cfg.train.lr}, or set train.grad_clip_norm"
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Sample grids and evaluation, both from the EMA.

    def _sample_and_evaluate(self, clock: _Clock) -> None:
        """Make the grid and the evaluation that are due at this step, unless the run folder has them."""
        if self.sampler is not None and self._is_due(self.cfg.sample.every):
            with clock.paused():
                self._sample_grid()
        if self.evaluation is not None and self._is_due(self.cfg.eval.every):
            with clock.paused():
                self._evaluate()

    def _sample_grid(self) -> None:
        """Write samples/step_N.png. Image i has seed i and class i mod num_classes. The processes share the work."""
        file = self.run.samples / f"{checkpoints.folder_name(self.step)}.png"
        is_main = self.accelerator.is_main_process
        if broadcast_object_list([is_main and file.exists()])[0]:
            return
        num_samples, size = self.cfg.sample.num_samples, self.cfg.sample.batch_size
        labels = [seed % self.sampler.num_classes for seed in range(num_samples)]
        length = -(-num_samples // self.accelerator.num_processes)  # equal shares can be gathered; the last repeat an image
        start = self.accelerator.process_index * length
        seeds = [min(seed, num_samples - 1) for seed in range(start, start + length)]
        with self.ema.full_weights():
            parts = [seeds[i : i + size] for i in range(0, length, size)]
            bar = progress_bar(parts, desc="grid", unit="batch", leave=False, disable=not is_main)
            own = np.concatenate([self.sampler(part, [labels[seed] for seed in part]) for part in bar])
        images = self.accelerator.gather(torch.from_numpy(own).to(self.device))[:num_samples].cpu().numpy()
        if is_main:
            grid = labelled_grid(list(images), labels)
            with whole_file(file) as f:
                grid.save(f, format="PNG")
            for tracker in self.accelerator.trackers:
                if tracker.name == "wandb":
                    tracker.log_images({"samples": [grid]}, step=self.step)
        self.accelerator.wait_for_everyone()

    def _evaluate(self) -> None:
        """Write a line of metrics with the scores of every guidance scale."""
        cfg, is_main = self.cfg.eval, self.accelerator.is_main_process
        if broadcast_object_list([is_main and self.run.has_evaluation(self.step)])[0]:
            return
        num_samples = cfg.num_samples
        if self.step == self.cfg.train.num_steps and cfg.final_num_samples is not None:
            num_samples = cfg.final_num_samples
        record, start_sec = {}, time.perf_counter()
        with self.ema.full_weights():
            for cfg_scale, sampler in self.evaluation.samplers.items():
                scores = self.evaluation.evaluator.of_samples(sampler, num_samples)
                record |= {metric_name(metric, num_samples, cfg_scale): value for metric, value in scores.items()}
        if is_main:
            self.run.log_metrics({"step": self.step, **record, "evaluation_sec": time.perf_counter() - start_sec})
            log.info("step %d: %s", self.step, format_metrics(record))
        self.accelerator.log(record, step=self.step)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints.

    def _save(self) -> None:
        """Write a checkpoint from the main process. Every process raises if it failed, or if weights are not finite."""
        self._mean_loss()
        finite = torch.stack([local_shard(p).isfinite().all() for p in self.net.parameters()]).all()
        if not self.accelerator.gather(finite.reshape(1)).all().item():
            raise self._diverged(self.step)
        is_main, error = self.accelerator.is_main_process, None
        # Every process helps to gather sharded tensors; the main process receives them.
        checkpoint = checkpoints.Checkpoint(
            step=self.step,
            model=gather_state_dict(self.net.state_dict(), keep=is_main),
            ema=gather_state_dict(self.ema.averages, keep=is_main),
            optimizer=gather_state_dict(self.optimizer.state_dict(), keep=is_main),
            state={
                "images_seen": self.step * self.cfg.train.batch_size,
                "data_fingerprint": self.data_fingerprint,
                "ema_num_updates": self.ema.num_updates_before + self.step,
                "loss_sum": self.loss_sum.item(),
                "loss_count": self.loss_count,
            },
            config=self.cfg.model_dump(),
        )
        if is_main:
            try:
                with say_if_slow(log, "writing the checkpoint of step %d", self.step):
                    keep = self.cfg.checkpoint
                    checkpoints.save(self.run.checkpoints, checkpoint, keep.keep_last, keep.keep_every)
            except checkpoints.SaveError as e:
                error = e
        failed = self.accelerator.reduce(torch.tensor(float(error is not None), device=self.device)).item()
        if failed:
            raise error or checkpoints.SaveError("the main process could not write the checkpoint")

    def resume(self, folder: Path) -> None:
        """Continue this run from one of its checkpoints. Raises UserError if it was trained on other latents."""
        checkpoint = checkpoints.load(folder)
        if checkpoint.state["data_fingerprint"] != self.data_fingerprint:
            trained_on = checkpoint.config["data"]["path"]
            raise UserError(
                f"resume: {folder} cannot go on: data: other latents or labels: {trained_on!r} -> {self.cfg.data.path!r}. "
                "Restore the data, or start another run with name=..."
            )
        self._load(checkpoint, with_optimizer=True)
        self.loss_sum.fill_(checkpoint.state["loss_sum"])
        self.loss_count = checkpoint.state["loss_count"]
        log.info("resumed from %s", folder)

    def init_from(self, folder: Path, init_state: str) -> None:
        """Start from another run's weights and EMA, with init_state=all also from its optimizer and step."""
        self._load(checkpoints.load(folder), with_optimizer=init_state == "all")
        log.info("weights and EMA from %s%s", folder, f", with optimiser and step {self.step}" if init_state == "all" else "")

    def _load(self, checkpoint: checkpoints.Checkpoint, *, with_optimizer: bool) -> None:
        own = self.net.state_dict()
        self.net.load_state_dict({name: distribute_like(value, own[name]) for name, value in checkpoint.model.items()})
        self.ema.load(checkpoint.ema)
        # The EMA continues without a new warm-up. Checkpoints of versions without init_from do not count its updates.
        self.ema.num_updates_before = checkpoint.state.get("ema_num_updates", checkpoint.step)
        if not with_optimizer:
            return
        self.step = checkpoint.step
        self.ema.num_updates_before -= self.step
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            i: {key: distribute_like(value, parameters[i]) if key != "step" else value for key, value in values.items()}
            for i, values in checkpoint.optimizer["state"].items()
        }
        self.optimizer.load_state_dict(checkpoint.optimizer | {"state": state})
        for group in self.optimizer.param_groups:  # a resume may change these
            group["lr"], group["betas"] = self.cfg.train.lr, tuple(self.cfg.train.betas)
            group["weight_decay"] = self.cfg.train.weight_decay


class _Clock:
    """Training speed since the last restart, without the time spent in pauses (checkpoints, grids, evaluation)."""

    def __init__(self, device: torch.device):
        self.device = device
        self.restart()

    def restart(self) -> None:
        self.num_steps, self._paused_sec, self._start_sec = 0, 0.0, time.perf_counter()

    def steps_per_sec(self) -> float:
        return self.num_steps / max(time.perf_counter() - self._start_sec - self._paused_sec, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the steps so far count as training
        start_sec = time.perf_counter()
        yield
        self._paused_sec += time.perf_counter() - start_sec
