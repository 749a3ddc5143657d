"""Evaluation of a network: samples by seed -> features -> metrics, shared between the processes, without files in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from tqdm import tqdm

from evaluations.features import Detector, Features, extract
from evaluations.images import ImageSet
from evaluations.reference import features_of_images, load_reference, stored_statistics
from evaluations.suite import evaluate
from randomness import class_of_seed
from sampling.sampler import ImageSampler


@dataclass
class Evaluator:
    """A detector and the features of the reference, ready for any number of evaluations.

    Every process calls it; the work is shared, and every process gets the result.
    """

    accelerator: Accelerator
    detector: Detector
    reference: Features
    batch_size: int

    @classmethod
    def open(cls, accelerator: Accelerator, detector: Detector, reference: ImageSet, batch_size: int) -> Evaluator:
        """Load the reference, from its cache or by computing its features together."""

        def compute(images: ImageSet, detector: Detector, batch_size: int) -> Features:
            return shared_features_of_images(accelerator, images, detector, batch_size, len(images))

        accelerator.wait_for_everyone()  # all processes look for the cache before one of them writes it
        return cls(accelerator, detector, load_reference(reference, detector, batch_size, compute), batch_size)

    def of_samples(self, sampler: ImageSampler, num_samples: int) -> dict[str, float]:
        """Metrics of the images of seeds 0 .. num_samples - 1, each of a random class drawn from its seed."""
        labels = [class_of_seed(seed, sampler.num_classes) for seed in range(num_samples)]

        def compute(seeds: list[int]) -> Features:
            def batches():
                for start in range(0, len(seeds), self.batch_size):
                    batch = seeds[start : start + self.batch_size]
                    yield sampler(batch, [labels[seed] for seed in batch])

            num_batches = -(-len(seeds) // self.batch_size)
            bar = tqdm(
                batches(), "evaluation", num_batches, unit="batch", leave=False, disable=not self.accelerator.is_main_process
            )
            return extract(self.detector, bar)

        return self._metrics(shared_features(self.accelerator, num_samples, compute), torch.tensor(labels))

    def of_images(self, images: ImageSet, num_samples: int) -> dict[str, float]:
        """Metrics of the first num_samples images on disk; class_agreement where the file holds labels.

        As in ADM's evaluator, statistics that the file stores are used, where it is about all of its images.
        """
        features = shared_features_of_images(self.accelerator, images, self.detector, self.batch_size, num_samples)
        if num_samples == len(images):
            features = Features(
                features.detector, features.pool, features.logits, features.spatial, stored_statistics(images, self.detector)
            )
        labels = None if images.labels is None else torch.from_numpy(images.labels[: len(features)])
        return self._metrics(features, labels)

    def _metrics(self, samples: Features, labels: torch.Tensor | None) -> dict[str, float]:
        result = None
        if self.accelerator.is_main_process:
            result = evaluate(self.reference, samples, labels, self.accelerator.device)
        return broadcast_object_list([result])[0]


def shared_features(accelerator: Accelerator, count: int, compute: Callable[[list[int]], Features]) -> Features:
    """Features of items 0 .. count - 1 in order, each computed by one process and gathered by all.

    Args:
        compute: the features of the listed items, in the order of the list.
    """
    num_processes = accelerator.num_processes
    if num_processes == 1:
        return compute(list(range(count)))
    # Gathering needs equally many rows everywhere: the last round is filled up with items that then appear twice.
    num_rounds = -(-count // num_processes)
    mine = [(k * num_processes + accelerator.process_index) % count for k in range(num_rounds)]
    return _gathered(accelerator, compute(mine), torch.tensor(mine))


def shared_features_of_images(
    accelerator: Accelerator, images: ImageSet, detector: Detector, batch_size: int, count: int
) -> Features:
    """Features of images 0 .. count - 1 on disk. Every process reads one stretch of them."""
    num_processes = accelerator.num_processes
    if num_processes == 1 or count < num_processes:
        return features_of_images(images, detector, batch_size, 0, count)
    per_process = -(-count // num_processes)
    # The last stretches start earlier, so that all are equally long; images that appear twice are dropped.
    start = min(accelerator.process_index * per_process, count - per_process)
    part = features_of_images(images, detector, batch_size, start, start + per_process)
    return _gathered(accelerator, part, torch.arange(start, start + per_process))


def _gathered(accelerator: Accelerator, part: Features, indices: torch.Tensor) -> Features:
    """The features of all processes in order; row i of `part` is of item indices[i]."""
    indices = accelerator.gather(indices.to(accelerator.device)).cpu()
    tensors = {name: accelerator.gather(x.to(accelerator.device)).cpu() for name, x in part.tensors().items()}
    return Features(part.detector, **tensors).in_order(indices)
