"""Which items a training step reads: a pure function of (seed, step), so that there is no position to save."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from torch import Tensor

from latents.shards import LatentDataset


class BatchOrder:
    """Exact shuffling: every epoch is a permutation of all items, drawn from (seed, epoch).

    Item j of the global batch of step s has number k = s * batch_size + j in the endless stream of epochs, and is
    permutation(seed, k // num_items)[k % num_items]. A process takes a slice of every global batch, so the stream does
    not depend on the number of processes.

    Args:
        num_items: size of the data set.
        batch_size: of all processes together.
        seed: of the run.
        start_step, num_steps: the steps to yield are start_step .. num_steps - 1.
        slices: the parts of each global batch that this process reads, one per micro-batch.
        with_flips: flip every item of every epoch with probability 1/2; otherwise never.
    """

    def __init__(
        self, num_items: int, batch_size: int, seed: int, start_step: int, num_steps: int, slices: list[slice], with_flips: bool
    ):
        self.num_items, self.batch_size, self.seed = num_items, batch_size, seed
        self.start_step, self.num_steps, self.slices, self.with_flips = start_step, num_steps, slices, with_flips
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            self._epochs = {e: drawn for e, drawn in self._epochs.items() if e == epoch - 1}  # a batch spans two at the seam
            rng = np.random.default_rng([self.seed, epoch])
            permutation = rng.permutation(self.num_items)
            flips = rng.random(self.num_items) < 0.5 if self.with_flips else np.zeros(self.num_items, dtype=bool)
            self._epochs[epoch] = permutation, flips
        return self._epochs[epoch]

    def global_batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(indices [batch_size], flips [batch_size] bool) of a step."""
        numbers = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        indices = np.empty(self.batch_size, dtype=np.int64)
        flips = np.empty(self.batch_size, dtype=bool)
        for epoch in np.unique(numbers // self.num_items):
            of_epoch = numbers // self.num_items == epoch
            position = numbers[of_epoch] % self.num_items
            permutation, epoch_flips = self._epoch(int(epoch))
            indices[of_epoch], flips[of_epoch] = permutation[position], epoch_flips[position]
        return indices, flips

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(self.start_step, self.num_steps):
            indices, flips = self.global_batch(step)
            for part in self.slices:
                yield indices[part], flips[part]

    def __len__(self) -> int:
        return (self.num_steps - self.start_step) * len(self.slices)


# (indices, flips) of a batch -> its tensors, as `LatentDataset.fetch`.
Fetch = Callable[[np.ndarray, np.ndarray], tuple[Tensor, ...]]
BATCHES_AHEAD = 2  # that each thread has read, or is reading, before they are asked for


def read_batches(
    dataset: LatentDataset, order: BatchOrder, num_workers: int, pin_memory: bool, fetch: Fetch | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Micro-batches (latents, labels) in the given order; the same for any number of workers.

    Threads, not processes: reads release the lock, and handing a batch to another process costs several times its read.

    Args:
        num_workers: threads that read ahead; 0 reads a batch when it is asked for.
        pin_memory: have batches in pinned memory, from where a GPU copies without waiting.
        fetch: what reads a batch; None: the data set's `fetch`.
    """

    def read(batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, ...]:
        tensors = (fetch or dataset.fetch)(*batch)
        return tuple(tensor.pin_memory() for tensor in tensors) if pin_memory else tensors

    if num_workers == 0:
        yield from map(read, order)
        return
    ahead: deque[Future] = deque()
    with ThreadPoolExecutor(num_workers, thread_name_prefix="latents") as pool:
        try:
            for batch in order:
                ahead.append(pool.submit(read, batch))
                if len(ahead) > num_workers * BATCHES_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
