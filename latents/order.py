"""The order of training batches. It depends only on (seed, step), so checkpoints store no data-loader state."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass
class BatchOrder:
    """The batches of a run, shuffled exactly: every epoch is a permutation of all items, drawn from (seed, epoch).

    Entry j of the global batch of step s has position k = s * batch_size + j in the sequence of epochs. It is item
    permutation(seed, k // num_items)[k % num_items]. Each process reads its slices of every global batch, so the order does not
    depend on the number of processes.
    """

    num_items: int
    batch_size: int  # number of items per step over all processes
    seed: int  # seed of the run
    start_step: int  # first step to read
    num_steps: int  # number of steps of the run, the last of which is num_steps - 1
    slices: list[slice]  # parts of each global batch that this process reads, one slice per micro-batch
    with_flips: bool  # True flips each item with probability 1/2, drawn anew in every epoch

    def global_batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices [batch_size] int64, flips [batch_size] bool) of a step."""
        start, parts = step * self.batch_size, []
        epochs, positions = np.divmod(np.arange(start, start + self.batch_size), self.num_items)
        for epoch in np.unique(epochs).tolist():
            drawn = _draw_epoch(self.num_items, self.seed, epoch, self.with_flips)
            parts.append([values[positions[epochs == epoch]] for values in drawn])
        indices, flips = map(np.concatenate, zip(*parts))
        return indices, flips

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for step in range(self.start_step, self.num_steps):
            indices, flips = self.global_batch(step)
            for part in self.slices:
                yield indices[part], flips[part]


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def _draw_epoch(num_items: int, seed: int, epoch: int, with_flips: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw the order of the items in an epoch, [num_items] int64, and whether each of them is flipped, [num_items] bool."""
    rng = np.random.default_rng([seed, epoch])
    permutation = rng.permutation(num_items)
    return permutation, rng.random(num_items) < 0.5 if with_flips else np.zeros(num_items, dtype=bool)


# A function from (indices, flips) of a batch to its tensors, such as `LatentDataset.fetch`.
Fetch = Callable[[np.ndarray, np.ndarray], tuple[Tensor, ...]]
BATCHES_AHEAD = 2  # number of batches that each thread reads before training needs them


def read_batches(fetch: Fetch, order: BatchOrder, num_workers: int, pin_memory: bool) -> Iterator[tuple[Tensor, ...]]:
    """Yield micro-batches (latents, labels) in the given order, which does not depend on the number of workers.

    Workers are threads, because reads release the GIL. Passing a batch between processes takes several times as long as reading
    it.

    Args:
        num_workers: number of threads that read ahead. 0 reads each batch when it is needed.
        pin_memory: whether to put batches into pinned memory, so that copies to a GPU do not block.
    """

    def read(batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, ...]:
        tensors = fetch(*batch)
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
