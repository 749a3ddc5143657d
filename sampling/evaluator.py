"""Metrics of a sampler or of images on disk. All processes share the work; no files lie in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from evaluations.features import Detector, Features, extract
from evaluations.images import ImageSet
from evaluations.reference import features_of_images, load_reference, stored_statistics
from evaluations.suite import evaluate
from progress import progress_bar, say_if_slow
from randomness import class_of_seed
from sampling.sampler import ImageSampler

log = logging.getLogger(__name__)

T = TypeVar("T")


class Interrupted(Exception):
    """Sampling was given up because it was asked to stop."""


def until_stopped(batches: Iterable[T], stop: Callable[[], bool]) -> Iterator[T]:
    """The batches. Asks `stop` before each one, and raises Interrupted if it answers yes."""
    for batch in batches:
        if stop():
            raise Interrupted
        yield batch


@dataclass
class Evaluator:
    """A detector and the features of the reference. Every process calls it; they share the work, and each gets the result.

    Attributes:
        reference: None in all but the main process, which alone computes metrics.
    """

    accelerator: Accelerator
    detector: Detector
    reference: Features | None
    batch_size: int

    @classmethod
    def open(cls, accelerator: Accelerator, detector: Detector, reference: ImageSet, batch_size: int) -> Evaluator:
        """Load the features of the reference from its cache, or compute them together, as the main process decides."""

        def agree(is_cached: bool) -> bool:  # on other nodes the folder may be another one
            return broadcast_object_list([is_cached])[0]

        compute = partial(shared_features_of_images, accelerator)
        features = load_reference(reference, detector, batch_size, compute, agree, accelerator.is_main_process)
        return cls(accelerator, detector, features, batch_size)

    def of_samples(self, sampler: ImageSampler, num_samples: int, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Metrics of the images of seeds 0 .. num_samples - 1, each of a random class drawn from its seed.

        Args:
            stop: asked before every batch, equally often on every process, which all must get the same answer.

        Raises:
            Interrupted: `stop` answered yes.
        """
        labels = [class_of_seed(seed, sampler.num_classes) for seed in range(num_samples)]

        def compute(start: int, end: int) -> Features:
            batches = [range(i, min(i + self.batch_size, end)) for i in range(start, end, self.batch_size)]
            is_main = self.accelerator.is_main_process
            bar = progress_bar(batches, desc="evaluation", unit="batch", leave=False, disable=not is_main)
            images = (sampler(list(seeds), [labels[seed] for seed in seeds]) for seeds in until_stopped(bar, stop))
            return extract(self.detector, images)

        return self._metrics(shared_features(self.accelerator, num_samples, compute), torch.tensor(labels))

    def of_images(self, images: ImageSet, num_samples: int) -> dict[str, float]:
        """Metrics of the first num_samples images on disk; class_agreement needs labels in the file.

        As in ADM's evaluator, statistics that the file stores are used, if all of its images are evaluated.
        """
        features = shared_features_of_images(self.accelerator, images, self.detector, self.batch_size, num_samples)
        if num_samples == len(images):
            features = replace(features, statistics=stored_statistics(images, self.detector))
        labels = None if images.labels is None else torch.from_numpy(images.labels[:num_samples])
        return self._metrics(features, labels)

    def _metrics(self, samples: Features, labels: torch.Tensor | None) -> dict[str, float]:
        compute = partial(evaluate, self.reference, samples, labels, self.accelerator.device)
        with say_if_slow(log, "computing the metrics of %d images", len(samples)):
            return broadcast_object_list([compute() if self.accelerator.is_main_process else None])[0]


def shared_features(accelerator: Accelerator, count: int, compute: Callable[[int, int], Features]) -> Features:
    """Features of items 0 .. count - 1 in order, on every process; each process computes one stretch of them.

    Args:
        compute: (start, stop) -> the features of items start .. stop - 1.
    """
    num_processes = accelerator.num_processes
    if num_processes == 1 or count < num_processes:
        return compute(0, count)
    # Gathering needs stretches of one length: the last ones start earlier, and items that appear twice are dropped.
    length = -(-count // num_processes)
    starts = [min(rank * length, count - length) for rank in range(num_processes)]
    own = compute(starts[accelerator.process_index], starts[accelerator.process_index] + length)
    rows = torch.empty(count, dtype=torch.int64)  # of the items in what is gathered
    for rank, start in enumerate(starts):
        rows[start : start + length] = torch.arange(rank * length, (rank + 1) * length)
    tensors = {name: accelerator.gather(x.to(accelerator.device)).cpu()[rows] for name, x in own.tensors().items()}
    return Features(own.detector, **tensors)


def shared_features_of_images(
    accelerator: Accelerator, images: ImageSet, detector: Detector, batch_size: int, count: int | None = None
) -> Features:
    """Features of the first `count` images on disk, by default all, shared between the processes."""
    compute = partial(features_of_images, images, detector, batch_size, show_progress=accelerator.is_main_process)
    return shared_features(accelerator, len(images) if count is None else count, compute)
