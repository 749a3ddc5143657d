"""Metrics of a sampler or of images on disk. All processes share the work; no files lie in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from common.progress import progress_bar, say_if_slow
from common.randomness import class_of_seed
from evaluations.features import Detector, Features, extract
from evaluations.images import ImageSet
from evaluations.reference import features_of_images, read_cache, stored_statistics, write_cache
from evaluations.suite import evaluate
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
    """Detectors and the features of the reference. Every process calls it; they share the work, and each gets the result.

    Attributes:
        references: by each detector; None in all but the main process, which alone computes metrics.
    """

    accelerator: Accelerator
    detectors: Sequence[Detector]
    references: Sequence[Features | None]
    batch_size: int

    @classmethod
    def open(cls, accelerator: Accelerator, detectors: Sequence[Detector], reference: ImageSet, batch_size: int) -> Evaluator:
        """Load the features of the reference from their caches, or compute them together, as the main process decides."""
        references = [_load_reference(accelerator, reference, detector, batch_size) for detector in detectors]
        return cls(accelerator, detectors, references, batch_size)

    def of_samples(self, sampler: ImageSampler, num_samples: int, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Metrics of the images of seeds 0 .. num_samples - 1, each of a random class drawn from its seed.

        Args:
            stop: asked before every batch, equally often on every process, which all must get the same answer.

        Raises:
            Interrupted: `stop` answered yes.
        """
        labels = [class_of_seed(seed, sampler.data.num_classes) for seed in range(num_samples)]

        def compute(start: int, end: int) -> list[Features]:
            batches = [range(i, min(i + self.batch_size, end)) for i in range(start, end, self.batch_size)]
            is_other = not self.accelerator.is_main_process
            bar = progress_bar(batches, desc="evaluation", unit="batch", leave=False, disable=is_other)
            images = (sampler(list(seeds), [labels[seed] for seed in seeds]) for seeds in until_stopped(bar, stop))
            return extract(self.detectors, images)

        return self._metrics(shared_features(self.accelerator, num_samples, compute), torch.tensor(labels))

    def of_images(self, images: ImageSet, num_samples: int) -> dict[str, float]:
        """Metrics of the first num_samples images on disk; class_agreement needs labels in the file.

        As in ADM's evaluator, statistics that the file stores are used, if all of its images are evaluated.
        """
        features = shared_features_of_images(self.accelerator, images, self.detectors, self.batch_size, num_samples)
        if num_samples == len(images):
            features = [replace(one, statistics=stored_statistics(images, one.detector)) for one in features]
        labels = None if images.labels is None else torch.from_numpy(images.labels[:num_samples])
        return self._metrics(features, labels)

    def _metrics(self, samples: Sequence[Features], labels: torch.Tensor | None) -> dict[str, float]:
        values = {}
        with say_if_slow(log, "computing the metrics of %d images", len(samples[0])):
            if self.accelerator.is_main_process:
                for pair in zip(self.references, samples):
                    values |= evaluate(*pair, labels, self.accelerator.device)
            return broadcast_object_list([values])[0]


def _load_reference(accelerator: Accelerator, images: ImageSet, detector: Detector, batch_size: int) -> Features | None:
    """Features of all images with their statistics, cached or computed by all together; None but on the main process."""
    is_main = accelerator.is_main_process
    features = read_cache(images, detector) if is_main else None
    if broadcast_object_list([features is None])[0]:  # on other nodes the folder may be another one
        (features,) = shared_features_of_images(accelerator, images, [detector], batch_size, len(images))
        if is_main and len(images):
            features = write_cache(images, detector, features)
    return replace(features, statistics=features.statistics | stored_statistics(images, detector.name)) if is_main else None


def shared_features(accelerator: Accelerator, count: int, compute: Callable[[int, int], list[Features]]) -> list[Features]:
    """Features of items 0 .. count - 1 in order, on every process. Each computes one stretch of them: compute(start, stop)."""
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

    def gather(x: torch.Tensor) -> torch.Tensor:
        return accelerator.gather(x.to(accelerator.device)).cpu()[rows]

    return [Features(one.detector, **{name: gather(x) for name, x in one.tensors().items()}) for one in own]


def shared_features_of_images(
    accelerator: Accelerator, images: ImageSet, detectors: Sequence[Detector], batch_size: int, count: int
) -> list[Features]:
    """Features of the first `count` images on disk, shared between the processes."""
    compute = partial(features_of_images, images, detectors, batch_size, show_progress=accelerator.is_main_process)
    return shared_features(accelerator, count, compute)
