"""Run the forward and backward pass of a micro-batch as one CUDA graph (`train.cuda_graphs`).

By our count, a step of DiT-XL/2 starts about 1,700 kernels. If the CPU takes longer to start them than the GPU takes to run them,
the GPU waits, and routing saves no time. A graph starts all kernels at once, and is made to compute the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.randomness import SampleRandom
from runtime.cuda_graph import CUDAGraph

RandomFor = Callable[[str], SampleRandom]  # returns the random numbers of a stream for one micro-batch


class StaticRandom(SampleRandom):
    """The random numbers of one stream. They have the same addresses in every micro-batch, as a graph requires."""

    def __init__(self, source: SampleRandom):
        self._source = source
        self._buffers: list[tuple[Callable[..., Tensor], tuple[int, ...], Tensor]] = []  # in the order of their draws

    def refill(self, source: SampleRandom) -> None:
        """Draw the numbers of the next micro-batch from `source`."""
        for draw, shape, buffer in self._buffers:
            buffer.copy_(source.draw_with(draw, shape))

    def rewind(self) -> StaticRandom:
        """Start again with the first number."""
        self._num_drawn = 0
        return self

    def draw_with(self, draw: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        if self._num_drawn == len(self._buffers):  # only in the first micro-batch
            self._buffers.append((draw, shape, self._source.draw_with(draw, shape).clone()))
        self._num_drawn += 1
        return self._buffers[self._num_drawn - 1][2]


class StepGraph:
    """A CUDA graph of `Trainer.compute_gradients`. It is called in the same way and computes the same values.

    The first two steps run without the graph, while kernels are compiled and libraries allocate their workspaces. The third step
    captures the graph. From then on, a call copies its inputs and random numbers to the addresses that the graph reads, and
    replays the graph.

    Args:
        compute: `Trainer.compute_gradients`.
        parameters: Trained parameters, all of which get a gradient in every micro-batch.
        num_micro_batches: Number of micro-batches per step. With one, the graph overwrites the gradients. With several, it adds
            to them.
    """

    def __init__(
        self,
        compute: Callable[..., tuple[Tensor, Tensor]],
        parameters: Iterable[nn.Parameter],
        num_micro_batches: int,
        device: torch.device,
    ):
        self._compute = compute
        self._parameters = list(parameters)
        self._device = device
        self._adds_gradients = num_micro_batches > 1
        self._num_warm_up_calls = 2 * num_micro_batches
        self._graph = CUDAGraph(device)
        self._inputs: list[Tensor] = []
        self._random: dict[str, StaticRandom] = {}  # by stream
        self._gradients: list[Tensor | None] = []
        self._outputs: tuple[Tensor, Tensor] | None = None

    def __call__(self, random_for: RandomFor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of a micro-batch to those of the parameters. The returned tensors are valid until the next call."""
        self._fill(random_for, inputs)
        if self._num_warm_up_calls > 0:
            self._num_warm_up_calls -= 1
            return self._graph.warm_up(self._run)
        is_first = self._parameters[0].grad is None  # Optimizer.zero_grad removes the gradients after each step
        if self._outputs is None:
            self._capture()
        if is_first:
            if self._adds_gradients:
                torch._foreach_zero_(self._gradients)
            for p, gradient in zip(self._parameters, self._gradients):
                p.grad = gradient
        self._graph.replay()
        return self._outputs

    def reset(self) -> None:
        """Free the graph with its activations and gradients. The next call captures the graph again."""
        self._gradients = []
        self._outputs = None
        self._graph.reset()

    def _fill(self, random_for: RandomFor, inputs: tuple[Tensor, ...]) -> None:
        """Copy the inputs and random numbers of a micro-batch to the addresses that the graph reads."""
        self._random_for = random_for
        if not self._inputs:
            self._inputs = [torch.empty_like(x, device=self._device) for x in inputs]
        for static, x in zip(self._inputs, inputs):
            static.copy_(x, non_blocking=True)
        for stream, random in self._random.items():
            random.refill(random_for(stream))

    def _run(self) -> tuple[Tensor, Tensor]:
        return self._compute(self._static_random, *self._inputs)

    def _static_random(self, stream: str) -> StaticRandom:
        if stream not in self._random:  # only in the first micro-batch
            self._random[stream] = StaticRandom(self._random_for(stream))
        return self._random[stream].rewind()

    def _capture(self) -> None:
        if self._adds_gradients:
            for p in self._parameters:
                p.grad = torch.zeros_like(p)
        try:
            self._outputs = self._graph.capture(self._run)
        except UserError as e:
            raise UserError(f"train.cuda_graphs: {e}; set train.cuda_graphs=none") from e
        self._gradients = [p.grad for p in self._parameters]
