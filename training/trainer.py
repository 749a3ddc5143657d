"""The trainer, which holds the state of a run and trains a step. `training.loop` calls it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from accelerate import Accelerator
from torch import Tensor

from common.devices import copy_to_device
from common.errors import Diverged
from common.interfaces import TokenAlignment
from common.randomness import SampleRandom, derive_seed
from configs.schema import Train, TrainConfig
from dit import DiT
from latents.batches import BatchOrder, read_batches
from latents.dataset import LatentDataset
from latents.shards import latents_for_network
from training.ema import EMA
from training.losses import LossMeter, sums_by_bin
from training.optimizers import OPTIMIZERS
from training.parallel import prepare_modules
from training.step_graph import StepGraph
from training.stop import StopSignal

# A run has diverged if its mean loss exceeds this limit. With EDM, a network that predicts zero has a loss of at most
# max(1, (std / sigma_data)^2), which is at most 16 for latents of the usual scale. With a far too high learning rate, the loss
# can reach 1e4 and recover.
MAX_LOSS = 1e6


class StepRandom(SampleRandom):
    """Random numbers for one training step, which depend only on the seed, step, stream, position in the global batch and device.

    GPUs with other numbers of multiprocessors draw other numbers, and so do CPUs.

    Every process draws numbers for the global batch on its device and returns those of its micro-batch, the `rows` of the
    global batch. Checkpoints therefore need no random state, and the number of processes or micro-batches does not matter.
    Additional draws from one stream do not change other streams.
    """

    def __init__(self, seed: int, step: int, stream: str, batch_size: int, rows: slice, device: torch.device):
        self.batch_size, self.rows, self.device = batch_size, rows, device
        self.generator = torch.Generator(device).manual_seed(derive_seed(seed, step, stream))

    def draw_with(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        return draw(self.batch_size, *shape, generator=self.generator, device=self.device)[self.rows]


class Trainer:
    """The trainer for a single run.

    Args:
        cfg: The configuration that `training.data.complete_config` returns.
        net: The network without wrappers. Checkpoints store its weights.
        ema: The EMA of `net` before its first update.
        alignment: An `extras.alignment.Alignment`, or None.

    Attributes:
        wrapped: The trained modules, wrapped by accelerate: `net` and, with alignment, `projector`.
        parameters: The trained parameters of these modules by name.
        optimizers: Optimizers of these parameters, wrapped by accelerate (see `training.optimizers`).
        step: Number of completed optimizer steps. Training starts at `first_step`.
        images_seen: Number of images trained on, with those of the run of init_state=all, which may have another batch size.
        micro_batch_slices: Slices of the global batch, one for each micro-batch of this process.
        graph: The CUDA graph of `compute_gradients` (`train.cuda_graphs`), or None.
        loss_meter: The diffusion loss and, with alignment, the alignment loss since the last metrics line.
        stop: The `StopSignal`, which the training loop activates.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        cfg: TrainConfig,
        net: DiT,
        ema: EMA,
        dataset: LatentDataset,
        alignment: TokenAlignment | None = None,
    ):
        self.accelerator = accelerator
        self.device = accelerator.device
        self.cfg = cfg
        self.net = net.train()
        self.ema = ema
        self.dataset = dataset
        self.alignment = alignment
        modules = {"net": net} if alignment is None else {"net": net, "projector": alignment.projector}
        self.wrapped = prepare_modules(accelerator, cfg, modules, ema.net)
        named = [item for module in modules.values() for item in module.named_parameters()]
        self.parameters = {name: p for name, p in named if p.requires_grad}
        optimizers = OPTIMIZERS[cfg.train.optimizer](cfg.train, self.parameters)
        self.optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]

        num_micro_batches = cfg.train.grad_accum_steps
        size = cfg.train.batch_size // (accelerator.num_processes * num_micro_batches)
        start = accelerator.process_index * num_micro_batches * size
        self.micro_batch_slices = [slice(start + m * size, start + (m + 1) * size) for m in range(num_micro_batches)]
        self.graph: StepGraph | None = None
        if cfg.train.cuda_graphs == "step":
            self.graph = StepGraph(self.compute_gradients, self.parameters.values(), num_micro_batches, self.device)
        self.step = self.first_step = self.images_seen = 0
        self.loss_meter = LossMeter(["loss"] if alignment is None else ["loss", "alignment_loss"], self.device)
        self.stop = StopSignal()

    def batches(self) -> Iterator[tuple[tuple[Tensor, ...], ...]]:
        """Yield this process's micro-batches for each remaining step of the run, in the format that `train_step` expects."""
        train, data = self.cfg.train, self.dataset
        order = BatchOrder(
            num_items=len(data),
            batch_size=train.batch_size,
            seed=self.cfg.seed,
            images_seen=self.images_seen,
            num_batches=train.num_steps - self.step,
            slices=self.micro_batch_slices,
            with_flips=data.has_flips,
        )
        fetch = data.fetch if self.alignment is None else self.alignment.fetch
        micro_batches = read_batches(fetch, order, self.cfg.data.num_workers, pin_memory=self.device.type == "cuda")
        return zip(*[micro_batches] * len(self.micro_batch_slices))  # one tuple of micro-batches per step

    def train_step(
        self, micro_batches: Sequence[tuple[Tensor, ...]], metrics: Mapping[str, Callable[[Trainer], Tensor]] | None = None
    ) -> dict[str, Tensor]:
        """Run the forward pass, backward pass, optimizer and EMA for one global batch without waiting for the device.

        Return the values of `metrics`, which are measured before the update, when the gradients are not yet clipped.

        Args:
            micro_batches: (stored latents, labels) for each of `self.micro_batch_slices`. With alignment, each tuple also has
                images.
            metrics: Functions by name, such as `training.step_metrics.STEP_METRICS`.
        """
        cfg = self.cfg
        compute_gradients = self.graph or self.compute_gradients  # the graph replays the same function
        losses_of_step = torch.zeros_like(self.loss_meter.sums)
        for m, (rows, micro_batch) in enumerate(zip(self.micro_batch_slices, micro_batches)):
            is_last = m == len(self.micro_batch_slices) - 1  # DDP averages the gradients over processes in the last backward
            random_for = partial(StepRandom, cfg.seed, self.step, batch_size=cfg.train.batch_size, rows=rows, device=self.device)
            stored, labels, *images = micro_batch
            patches = [self.alignment.encode(x) for x in images]
            with contextlib.ExitStack() as stack:
                for module in () if is_last else self.wrapped.values():
                    stack.enter_context(self.accelerator.no_sync(module))
                losses, bin_sums = compute_gradients(random_for, stored, labels, *patches)
            losses_of_step += losses / len(self.micro_batch_slices)
            self.loss_meter.bin_sums += bin_sums
        measured = {name: metric(self) for name, metric in (metrics or {}).items()}
        self._update_weights()
        self.loss_meter.add_step(losses_of_step)
        self.step += 1
        self.images_seen += cfg.train.batch_size
        return measured

    def _update_weights(self) -> None:
        """Clip the gradients, step the optimizers with the learning rate of this step, remove the gradients, update the EMA."""
        train = self.cfg.train
        if train.grad_clip_norm is not None:
            self.accelerator.clip_grad_norm_(self.parameters.values(), train.grad_clip_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, self.step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.ema.update(self.step)

    def compute_gradients(
        self, random_for: Callable[[str], SampleRandom], stored: Tensor, labels: Tensor, patches: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch to those of the parameters. Return its losses and bin sums without gradients.

        The losses are those that `loss_meter` names, one number each. Their sum, averaged over micro-batches, is minimised. The
        bin sums are those of the diffusion loss (`sums_by_bin`).

        Args:
            random_for: Function that returns the random numbers of a stream for this micro-batch.
            patches: The alignment encoder's patch tokens of the images, or None without alignment.
        """
        stored, labels = copy_to_device(stored, self.device), copy_to_device(labels, self.device)
        x = latents_for_network(stored, self.dataset.info, random_for("latents"))
        net = self.wrapped["net"] if patches is None else self.alignment.observe(self.wrapped["net"])
        random = random_for("diffusion")
        levels, quantiles = self.cfg.diffusion.draw_levels(random)  # [b]
        loss_of_sample = self.cfg.diffusion.loss(net, x, labels, random, levels, **self.net.draw_inputs(random_for))  # [b]
        losses = [loss_of_sample.mean()]
        if patches is not None:
            losses.append(self.alignment.loss(self.wrapped["projector"], net, patches))
        total_loss = sum(losses[1:], losses[0]) / len(self.micro_batch_slices)
        total_loss.backward()
        return torch.stack(losses).detach(), sums_by_bin(loss_of_sample.detach(), quantiles)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return the trainer's own tensors that a checkpoint stores, by file and name, without those of the optimizer."""
        projector = {} if self.alignment is None else {"projector": self.alignment.projector.state_dict()}
        return {"model": self.net.state_dict(), **self.ema.tensors(), **projector}

    def free_graph(self) -> None:
        """Free the memory of the CUDA graph, if there is one. The next step captures the graph again."""
        if self.graph is not None:
            self.graph.reset()

    def merge_losses(self) -> list[float]:
        """Give all processes the losses since the last metrics line, and return their means (`LossMeter.merge_processes`).

        Every process must call this method. Raises Diverged if the run has diverged.
        """
        losses = self.loss_meter.merge_processes(self.accelerator)
        if not all(loss < MAX_LOSS for loss in losses):
            raise Diverged(
                f"the loss became NaN, infinite or above {MAX_LOSS:g} by step {self.step}; earlier checkpoints are intact. "
                f"Check the latents of {self.dataset.path}, lower train.lr={self.cfg.train.lr}, or set train.grad_clip_norm"
            )
        return losses


def learning_rate(train: Train, step: int) -> float:
    """Return the learning rate for step `step`, counted from 0. The schedule has no state, so a resumed run continues it."""
    warmup = train.warmup_steps
    if step < warmup:
        return train.lr * (step + 1) / warmup
    if train.schedule == "cosine":
        return train.lr * (1 + math.cos(math.pi * (step - warmup) / max(train.num_steps - warmup, 1))) / 2
    return train.lr * (math.sqrt(warmup / (step + 1)) if train.schedule == "inverse_sqrt" else 1)
