"""The trainer, from top to bottom: one step, the run, metrics, sample grids and evaluation, checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from common.errors import UserError
from common.files import whole_file
from common.progress import progress_bar, say_if_slow
from common.randomness import StepRandom
from evaluations.suite import display_name, format_metrics
from extras.alignment import Alignment, TappedNetwork
from latents.order import BatchOrder, Fetch, read_batches
from latents.shards import LatentDataset, latents_for_network
from sampling.evaluator import Evaluator, Interrupted, until_stopped
from sampling.sampler import Diffusion, ImageSampler, labelled_grid
from training import checkpoint as checkpoints
from training.ema import EMA
from training.run import RunFolder
from training.sharding import copy_state_dict, ddp_settings, distribute_like, full_tensor, local_shard, shard_network
from training.speed import attention_kernel, checkpoint_activations, compile_network, resolve_compile, use_float8
from training.stop import StopSignal

log = logging.getLogger(__name__)

# The diffusion's, and with alignment its own: name in metrics.jsonl -> name of the sum in state.json.
LOSSES = {"loss": "loss_sum", "alignment_loss": "alignment_sum"}
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
        alignment: None: none.

    Attributes:
        net: the plain network, whose weights a checkpoint holds; with train.parallel=fsdp they are sharded.
        model: `net` as accelerate wraps it.
        modules: what is trained: `net`, and with alignment its projector; `models`: as accelerate wraps them;
            `parameters`: of all of them, also those that are not trained.
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
        alignment: Alignment | None = None,
    ):
        self.accelerator, self.cfg, self.diffusion, self.dataset, self.run = accelerator, cfg, diffusion, dataset, run
        self.net, self.ema, self.sampler, self.evaluation = net.train(), ema, sampler, evaluation
        self.alignment, self.modules = alignment, [net] if alignment is None else [net, alignment.projector]
        self.device = accelerator.device
        self.is_sharded = cfg.train.parallel == "fsdp"
        if not self.is_sharded:  # FSDP moves one block at a time to the device
            for module in self.modules:
                module.to(self.device)
            self.ema.net.to(self.device)
        if cfg.train.precision == "fp8":
            use_float8(self.net)  # not the EMA, which stays float32
        compile_network(self.net, resolve_compile(cfg.train.compile, self.device))
        checkpoint_activations(self.net, cfg.train.activation_checkpointing)
        if self.is_sharded:
            shard_network(self.modules, self.device, accelerator.num_processes, cfg.train)
            self.ema.shard_like(self.net)
            # evaluation_mode: accelerate adds autocast, but no DDP.
            self.models = [accelerator.prepare_model(m, device_placement=False, evaluation_mode=True) for m in self.modules]
        else:
            accelerator.ddp_handler = ddp_settings(self.net, cfg.train.gradient_precision)
            self.models = [accelerator.prepare(module) for module in self.modules]
        self.model = self.models[0]
        self.parameters = [p for module in self.modules for p in module.parameters()]
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters if p.requires_grad],
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
        # Of each of LOSSES since the last line of metrics.jsonl; on the device, so that a step does not wait for it.
        self.loss_sums = torch.zeros(len(self.modules), device=self.device)
        self.loss_count = 0
        self.first_bad_step = torch.full((), _NEVER, device=self.device)
        self.grad_norm: Tensor | None = None
        # On the main process: the checkpoint that is being written, and the memory that holds its tensors.
        self._saving: Future | None = None
        self._snapshot: dict | None = None

    # ------------------------------------------------------------------------------------------------------------------
    # One step.

    def batches(self) -> Iterator[tuple[tuple[Tensor, ...], ...]]:
        """This process's share of every global batch from self.step to the end of the run, as `train_step` takes it."""
        cfg, data, aligned = self.cfg, self.dataset, self.alignment

        def read(start: int, stop: int, fetch: Fetch) -> Iterator[tuple[Tensor, ...]]:
            order = BatchOrder(len(data), cfg.train.batch_size, cfg.seed, start, stop, self.parts, data.has_flips)
            return read_batches(data, order, cfg.data.num_workers, pin_memory=self.device.type == "cuda", fetch=fetch)

        end = 0 if aligned is None else aligned.end_step(cfg.train.num_steps)
        micro_batches = read(max(self.step, end), cfg.train.num_steps, data.fetch)
        if self.step < end:
            micro_batches = itertools.chain(read(self.step, end, aligned.fetch), micro_batches)
        return zip(*[micro_batches] * len(self.parts))  # consecutive ones together

    def train_step(self, micro_batches: Sequence[tuple[Tensor, ...]]) -> None:
        """Forward, backward, optimizer and EMA for one global batch. Nothing here waits for the device.

        Args:
            micro_batches: (stored latents, labels) for each of self.parts; while alignment is on, also what it is shown.
        """
        losses_of_step = torch.zeros_like(self.loss_sums)
        for m, (part, micro_batch) in enumerate(zip(self.parts, micro_batches)):
            # DDP averages the gradients over processes after the last micro-batch. FSDP does it after each one: without, every
            # process would hold the full gradients.
            syncs_gradients = self.is_sharded or m == len(self.parts) - 1
            with contextlib.ExitStack() as stack:
                for model in () if syncs_gradients else self.models:
                    stack.enter_context(self.accelerator.no_sync(model))
                # The backward is inside too: with activation checkpointing it computes attention again.
                stack.enter_context(attention_kernel(self.cfg.train.attention))
                losses = self.losses(part, *micro_batch)
                self.accelerator.backward(sum(losses[1:], losses[0]) / len(self.parts))
            losses_of_step[: len(losses)] += torch.stack(losses).detach() / len(self.parts)
        if self.cfg.train.grad_clip_norm is not None:
            self.grad_norm = full_tensor(self.accelerator.clip_grad_norm_(self.parameters, self.cfg.train.grad_clip_norm))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.step)

        self.loss_sums += losses_of_step
        self.loss_count += 1
        self.first_bad_step.clamp_(max=torch.where(losses_of_step.isfinite().all(), _NEVER, self.step + 1))
        self.step += 1

    def losses(self, part: slice, stored: Tensor, labels: Tensor, shown: Tensor | None = None) -> list[Tensor]:
        """The first one or both of LOSSES, of one micro-batch; their sum is minimised.

        Every random number depends on (seed, step, row of the global batch) alone.

        Args:
            shown: to alignment's encoder (`Alignment.fetch`); None: without alignment.
        """

        def random(stream: str) -> StepRandom:
            return StepRandom(self.cfg.seed, self.step, stream, self.cfg.train.batch_size, part, self.device)

        stored, labels = stored.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        x = latents_for_network(stored, self.dataset.info, random("latents"))
        draws = {"drop_labels": random("labels").rand() < self.net.class_dropout}
        if self.net.router.routes:
            draws["route_scores"] = random("routes").rand(len(self.net.router.routes), self.net.num_tokens)
        if shown is None:
            return [self.diffusion.loss(self.model, x, labels, random("diffusion"), **draws).mean()]
        net, projector = TappedNetwork(self.model, self.alignment.tap), self.models[1]
        loss = self.diffusion.loss(net, x, labels, random("diffusion"), **draws).mean()
        return [loss, self.alignment.loss(projector, net, shown.to(self.device, non_blocking=True))]

    # ------------------------------------------------------------------------------------------------------------------
    # The run.

    def train(self) -> None:
        """Train from self.step to the end of the run, or until a signal; log, save, sample and evaluate when due.

        A signal is obeyed after the step or the batch of samples, with a checkpoint of this step. A grid or an evaluation that
        it cuts short is made at the next start.

        Raises:
            UserError: TrainingDiverged; SaveError; a step does not fit in the memory of the device; another process hangs.
        """
        cfg, is_main = self.cfg, self.accelerator.is_main_process
        batches, clock = self.batches(), _Clock(self.device)
        bar = progress_bar(total=cfg.train.num_steps, initial=self.step, unit="step", disable=not is_main, mininterval=0.5)
        saved_step, is_stopped = self.step, False
        with contextlib.closing(StopSignal()) as stop, bar, ThreadPoolExecutor(1, "checkpoint") as self._writer:
            try:
                self._sample_and_evaluate(clock, stop.requested_now)  # what an interruption left undone
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
                    if self._is_due(cfg.checkpoint.every):
                        with clock.paused():
                            self._save()
                        saved_step = self.step
                    if stopping and self.step < cfg.train.num_steps:
                        raise Interrupted
                    self._sample_and_evaluate(clock, stop.requested_now)
            except Interrupted:
                is_stopped = True
            if self.step != saved_step:
                self._save()
            stop.finish()
            self._check_save(wait=True)
        if is_stopped and is_main:
            log.warning("stopped after step %d, as asked; the same command goes on from there", self.step)

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
        losses, steps_per_sec, batch_size = self._mean_losses(), clock.steps_per_sec(), self.cfg.train.batch_size
        record = {
            "step": self.step,
            **losses,
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
        self.accelerator.log(record)
        self.loss_sums, self.loss_count = torch.zeros_like(self.loss_sums), 0
        self._check_save(wait=False)
        clock.restart()
        return {"loss": f"{losses['loss']:.4f}", "images/s": f"{record['images_per_sec']:.0f}"}

    def _mean_losses(self) -> dict[str, float]:
        """The mean losses over all processes since the last line of metrics. Raises TrainingDiverged if one was not finite."""
        first_bad = int(self.accelerator.gather(self.first_bad_step.reshape(1)).min())
        self.loss_sums = self.accelerator.reduce(self.loss_sums, reduction="mean")
        if first_bad < _NEVER:
            raise self._diverged(first_bad)
        return dict(zip(LOSSES, (self.loss_sums / max(self.loss_count, 1)).tolist()))

    def _diverged(self, first_bad: int) -> TrainingDiverged:
        self._wait_for_save()
        self.accelerator.wait_for_everyone()
        intact = list(checkpoints.list_steps(self.run.checkpoints).values())
        return TrainingDiverged(
            f"loss or weights are not finite since step {first_bad}; last good checkpoint: {intact[-1] if intact else 'none'}. "
            f"Look for NaN in the latents of {self.dataset.path}, lower train.lr={self.cfg.train.lr}, or set train.grad_clip_norm"
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Sample grids and evaluation, both from the EMA.

    def _sample_and_evaluate(self, clock: _Clock, stop: Callable[[], bool]) -> None:
        """Make the grid and the evaluation that are due at this step, unless the run folder has them.

        Args:
            stop: asked before every batch of samples. Raises Interrupted if it answers yes.
        """
        if self.sampler is not None and self._is_due(self.cfg.sample.every):
            with clock.paused():
                self._sample_grid(stop)
        if self.evaluation is not None and self._is_due(self.cfg.eval.every):
            with clock.paused():
                self._evaluate(stop)

    def _sample_grid(self, stop: Callable[[], bool]) -> None:
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
            own = np.concatenate([self.sampler(part, [labels[seed] for seed in part]) for part in until_stopped(bar, stop)])
        images = self.accelerator.gather(torch.from_numpy(own).to(self.device))[:num_samples].cpu().numpy()
        if is_main:
            grid = labelled_grid(list(images), labels)
            with whole_file(file) as f:
                grid.save(f, format="PNG")
            for tracker in self.accelerator.trackers:
                if tracker.name == "wandb":
                    tracker.log_images({"samples": [grid]}, commit=False)
                    tracker.log({"step": self.step})
        self.accelerator.wait_for_everyone()

    def _evaluate(self, stop: Callable[[], bool]) -> None:
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
                scores = self.evaluation.evaluator.of_samples(sampler, num_samples, stop)
                record |= {display_name(metric, num_samples, cfg_scale): value for metric, value in scores.items()}
        if is_main:
            self.run.log_metrics({"step": self.step, **record, "evaluation_sec": time.perf_counter() - start_sec})
            log.info("step %d: %s", self.step, format_metrics(record))
        self.accelerator.log({"step": self.step, **record})

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints.

    def _save(self) -> None:
        """Have the main process write a checkpoint while training goes on; wait for the one before.

        Raises, on every process:
            TrainingDiverged: the loss or weights are not finite.
            SaveError: the one before could not be written.
        """
        self._mean_losses()
        shards = [local_shard(p.detach()) for p in self.parameters]
        # The least and the greatest value; both are NaN where one is. Several times as fast as isfinite() of all of them.
        extremes = [torch.stack(shard.aminmax()) for shard in shards if shard.numel()]
        finite = torch.stack(extremes).isfinite().all()
        if not self.accelerator.gather(finite.reshape(1)).all().item():
            raise self._diverged(self.step)
        self._check_save(wait=True)
        is_main = self.accelerator.is_main_process
        states = {"model": self.net.state_dict(), "ema": self.ema.averages, "optimizer": self.optimizer.state_dict()}
        if self.alignment is not None:
            states["projector"] = self.alignment.projector.state_dict()
        # Every process helps to gather sharded tensors; the main process receives them.
        self._snapshot = copy_state_dict(states, keep=is_main, into=self._snapshot)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        checkpoint = checkpoints.Checkpoint(
            step=self.step,
            **self._snapshot,
            state={
                "images_seen": self.step * self.cfg.train.batch_size,
                "data_fingerprint": self.data_fingerprint,
                "ema_num_updates": self.ema.num_updates_before + self.step,
                **dict(zip(LOSSES.values(), self.loss_sums.tolist())),
                "loss_count": self.loss_count,
                "encoder": None if self.alignment is None else self.alignment.encoder,
            },
            config=self.cfg.model_dump(),
        )
        if is_main:
            self._saving = self._writer.submit(self._write, checkpoint)

    def _write(self, checkpoint: checkpoints.Checkpoint) -> None:
        """In the thread: write a checkpoint. The metrics up to it come first: a resume does not write them again."""
        self.run.flush_metrics()
        keep = self.cfg.checkpoint
        checkpoints.save(self.run.checkpoints, checkpoint, keep.keep_last, keep.keep_every)

    def _check_save(self, wait: bool) -> None:
        """Every process raises if a checkpoint could not be written. Every process must call it.

        Args:
            wait: for the checkpoint that is being written; otherwise its error is raised by a later call.
        """
        is_done = self._saving is not None and self._saving.done()
        error = self._wait_for_save() if wait or is_done else None
        failed = self.accelerator.reduce(torch.tensor(float(error is not None), device=self.device)).item()
        if failed:
            raise error or checkpoints.SaveError("the main process could not write the checkpoint")

    def _wait_for_save(self) -> BaseException | None:
        """The error of the checkpoint that is being written, once it ended; None without one."""
        if self._saving is None:
            return None
        with say_if_slow(log, "waiting until the checkpoint is written"):
            return self._saving.exception()

    def resume(self, folder: Path) -> None:
        """Continue this run from one of its checkpoints, verified. Raises UserError if it was trained on other latents."""
        checkpoint = checkpoints.load(folder)
        sums = dict.fromkeys([*LOSSES.values()][: len(self.loss_sums)], float)
        _check_state(folder, checkpoint, data_fingerprint=str, **sums, loss_count=int)
        if checkpoint.state["data_fingerprint"] != self.data_fingerprint:
            trained_on = checkpoint.config["data"]["path"]
            raise UserError(
                f"resume: {folder} cannot go on: data: other latents or labels: {trained_on!r} -> {self.cfg.data.path!r}. "
                "Restore the data, or start another run with name=..."
            )
        self._load(folder, checkpoint, with_optimizer=True)
        self.loss_sums.copy_(torch.tensor([checkpoint.state[name] for name in sums]))
        self.loss_count = checkpoint.state["loss_count"]
        log.info("resumed from %s", folder)

    def init_from(self, folder: Path, init_state: str) -> None:
        """Start from another run's weights and EMA (a verified checkpoint), with init_state=all also its optimizer and step."""
        self._load(folder, checkpoints.load(folder), with_optimizer=init_state == "all")
        log.info("weights and EMA from %s%s", folder, f", with optimiser and step {self.step}" if init_state == "all" else "")

    @torch.no_grad()
    def _load(self, folder: Path, checkpoint: checkpoints.Checkpoint, *, with_optimizer: bool) -> None:
        """Copy the values of a checkpoint, tensor by tensor: a process never holds more than its own part in its memory."""
        # The EMA continues without a new warm-up. Checkpoints of versions without init_from do not count its updates.
        checkpoint.state.setdefault("ema_num_updates", checkpoint.step)
        _check_state(folder, checkpoint, ema_num_updates=int)
        own, stored = self.net.state_dict(), checkpoint.model
        checkpoints.check_tensors(folder / checkpoints.WEIGHTS["raw"], stored, own)
        checkpoints.check_tensors(folder / checkpoints.WEIGHTS["ema"], checkpoint.ema, self.ema.averages)
        if with_optimizer and self.alignment is not None:  # init_from with init_state=weights starts with a projector of its own
            if checkpoint.state.get("encoder", self.alignment.encoder) != self.alignment.encoder:
                raise UserError(
                    f"{folder} cannot go on: alignment.weights={self.cfg.alignment.weights} are other weights of the encoder "
                    "than those that it was aligned with. Restore that file, or start another run with name=..."
                )
            projector = self.alignment.projector.state_dict()
            checkpoints.check_tensors(folder / checkpoints.PROJECTOR, checkpoint.projector or {}, projector)
            own, stored = own | projector, stored | checkpoint.projector
        if with_optimizer:
            self._check_optimizer_state(folder / "optimizer.pt", checkpoint)
        for name, value in own.items():
            local_shard(value).copy_(local_shard(distribute_like(stored[name], value)))
        self.ema.load(checkpoint.ema)
        self.ema.num_updates_before = checkpoint.state["ema_num_updates"]
        if not with_optimizer:
            return
        self.step = checkpoint.step
        self.ema.num_updates_before -= self.step
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            i: {key: distribute_like(value, parameters[i]) if key != "step" else value.clone() for key, value in values.items()}
            for i, values in checkpoint.optimizer["state"].items()
        }
        # Learning rate, betas and weight decay are this start's: a resume may change them.
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _check_optimizer_state(self, file: Path, checkpoint: checkpoints.Checkpoint) -> None:
        """Raises CheckpointError if AdamW's states do not fit the parameters."""
        trained = [(name, p) for module in self.modules for name, p in module.named_parameters() if p.requires_grad]
        num_of_net = sum(p.requires_grad for p in self.net.parameters())
        with checkpoints.reading(file):
            given = {
                f"{key} of {trained[i][0] if i in range(len(trained)) else i}": value
                for i, values in checkpoint.optimizer["state"].items()
                for key, value in values.items()
            }
            like = {}
            for i, (name, p) in enumerate(trained):
                # A parameter that never had a gradient has no state, and an average that is equal to it. All of the projector
                # have one, or none.
                if i < num_of_net:
                    had_gradient = not torch.equal(checkpoint.model[name], checkpoint.ema[name])
                else:
                    had_gradient = any(j >= num_of_net for j in checkpoint.optimizer["state"])
                if i in checkpoint.optimizer["state"] or had_gradient:
                    like |= {f"step of {name}": torch.zeros(()), f"exp_avg of {name}": p, f"exp_avg_sq of {name}": p}
            checkpoints.check_tensors(file, given, like)


def _check_state(folder: Path, checkpoint: checkpoints.Checkpoint, **types: type) -> None:
    """Raises CheckpointError if a value of state.json is missing, of another type, or no number that a run could have."""
    for key, kind in types.items():
        value = checkpoint.state.get(key)
        if type(value) is not kind or (kind is not str and not 0 <= abs(value) < _NEVER):
            raise checkpoints.CheckpointError(f"{folder / 'state.json'}: {key} is {value!r:.60} instead of a {kind.__name__}")


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
