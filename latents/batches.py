"""Determine the order of training batches. It depends only on the seed, so checkpoints store no data-loader state."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor


@dataclass
class BatchOrder:
    """Order of the items in a training run. Iterating yields the items and flips of each micro-batch of this process.

    Every epoch is a random permutation of all items, drawn from (seed, epoch).

    Entry j of the i-th global batch has position k = images_seen + i * batch_size + j in the sequence of epochs. The item at
    position k is permutation(seed, k // num_items)[k % num_items]. Each process reads its slices of every global batch, so the
    order does not depend on the number of processes.
    """

    num_items: int
    batch_size: int  # number of items per step, summed over all processes
    seed: int  # random seed of the run
    images_seen: int  # number of images that the run has trained on before
    num_batches: int  # number of global batches to load
    slices: list[slice]  # parts of each global batch that this process reads, with one slice per micro-batch
    with_flips: bool  # whether to flip each item with probability 1/2, independently in every epoch

    def global_batch(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the item indices, int64 [batch_size], and the flips, bool [batch_size], of the i-th global batch."""
        start = self.images_seen + i * self.batch_size
        parts = []  # the items and flips from each epoch
        epochs, positions = np.divmod(np.arange(start, start + self.batch_size), self.num_items)
        for epoch in np.unique(epochs).tolist():
            drawn = _draw_epoch(self.num_items, self.seed, epoch, self.with_flips)
            parts.append([values[positions[epochs == epoch]] for values in drawn])
        return tuple(map(np.concatenate, zip(*parts)))

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for i in range(self.num_batches):
            indices, flips = self.global_batch(i)
            for part in self.slices:
                yield indices[part], flips[part]


@functools.lru_cache(maxsize=2)  # a batch may span two epochs
def _draw_epoch(num_items: int, seed: int, epoch: int, with_flips: bool) -> tuple[np.ndarray, np.ndarray]:
    """Draw the item order of an epoch, int64 [num_items], and whether to flip each item, bool [num_items]."""
    rng = np.random.default_rng([seed, epoch])
    permutation = rng.permutation(num_items)
    return permutation, rng.random(num_items) < 0.5 if with_flips else np.zeros(num_items, dtype=bool)


# Function that loads a batch's tensors given the item indices and flips, such as `LatentDataset.fetch`.
Fetch = Callable[[np.ndarray, np.ndarray], tuple[Tensor, ...]]
T = TypeVar("T")
R = TypeVar("R")
CALLS_AHEAD = 2  # number of calls that each thread makes before the caller needs the results


def map_ahead(function: Callable[[T], R], items: Iterable[T], num_threads: int) -> Iterator[R]:
    """Yield `function(item)` for each item in order, while threads already compute the next results.

    Threads suffice for reading files and for Pillow, which release the GIL. Passing a batch of latents between processes takes
    several times as long as reading the batch. With num_threads=0, the caller computes each result when it is needed.
    """
    if num_threads == 0:
        yield from map(function, items)
        return
    ahead: deque[Future[R]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read") as pool:
        try:
            for item in items:
                ahead.append(pool.submit(function, item))
                if len(ahead) > num_threads * CALLS_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def read_batches(fetch: Fetch, order: BatchOrder, num_workers: int, pin_memory: bool) -> Iterator[tuple[Tensor, ...]]:
    """Load micro-batches with `fetch` and yield them in the given order, which does not depend on the number of workers.

    Args:
        num_workers: Number of threads that prefetch batches. With 0, the caller reads each batch when it is needed.
        pin_memory: Whether to copy batches to pinned memory, so that transfers to a GPU do not block.
    """

    def read(batch: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, ...]:
        tensors = fetch(*batch)
        return tuple(tensor.pin_memory() for tensor in tensors) if pin_memory else tensors

    yield from map_ahead(read, order, num_workers)
