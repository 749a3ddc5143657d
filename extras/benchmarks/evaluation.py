"""Time and memory of the evaluation suite, from random features and a random network: nothing is downloaded.

    python -m extras.benchmarks.evaluation                                        # metrics, 50,000 samples against 10,000
    python -m extras.benchmarks.evaluation num_samples=5000 num_references=5000 threads=1
    python -m extras.benchmarks.evaluation part=detector device=cuda batch_size=64 compile=true

It prints a JSON line per measurement, with the machine and the versions in the first.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

from configs import command_line as cli
from configs.schema import Precision
from configs.settings import Count, Settings, Whole
from evaluations import metrics
from evaluations.features import Features, extract
from evaluations.inception import LAYER_SIZES, InceptionDetector
from evaluations.metrics import statistics_of
from evaluations.suite import evaluate
from extras.benchmarks.harness import choose_device, describe_machine, emit, time_ms


class TimingSettings(Settings):
    part: Literal["metrics", "detector"] = "metrics"
    num_samples: Count = 50000
    num_references: Count = 10000
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Whole = 0  # of the CPU; 0: torch's choice
    batch_size: Count = 64
    num_batches: Count = 5  # timed, after two to warm up
    image_size: Count = 256
    precision: Precision = "fp32"
    compile: bool = False


def main(arguments: Sequence[str]) -> None:
    settings = cli.parse_arguments(arguments, TimingSettings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = choose_device(settings.device)
    emit(describe_machine(device, settings))
    {"metrics": measure_metrics, "detector": measure_detector}[settings.part](settings, device)


def measure(what: str, action: Callable[[], object], device: torch.device, num_images: int = 0, repeats: int = 1) -> None:
    """Time `repeats` calls together and print the line."""
    sec = sum(time_ms(action, repeats, device)) / 1000
    line = {"what": what, "sec": round(sec, 3)}
    if resource is not None:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        line["peak_memory_gib"] = round(peak_bytes / 2**30, 2)
    if num_images:
        line["images_per_sec"] = round(num_images / sec, 1)
    if device.type == "cuda":
        line["peak_device_memory_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    emit(line)


def measure_metrics(settings: TimingSettings, device: torch.device) -> None:
    """Each metric alone, then all five as a run computes them. The statistics of a reference are cached: not in the time."""
    reference, samples = random_features(settings.num_references, 0), random_features(settings.num_samples, 1)
    known = {layer: statistics_of(getattr(reference, layer)) for layer in LAYER_SIZES}
    reference = Features("inception", reference.pool, reference.logits, reference.spatial, known)
    measurements = {
        "fid from statistics": lambda: metrics.frechet_distance(known["pool"], known["pool"]),
        "statistics of the samples' pool features": lambda: statistics_of(samples.pool),
        "inception score": lambda: metrics.inception_score(samples.logits),
        "precision and recall": lambda: metrics.precision_recall(reference.pool.to(device), samples.pool.to(device)),
        "all five metrics": lambda: evaluate(reference, samples, device=device),
    }
    for what, action in measurements.items():
        measure(what, action, device)


def random_features(num: int, seed: int) -> Features:
    """Normal features, about as large as Inception's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(dim: int) -> torch.Tensor:
        return torch.randn(num, dim, generator=generator).mul_(0.4)

    return Features("inception", pool=normal(LAYER_SIZES["pool"]), spatial=normal(LAYER_SIZES["spatial"]), logits=normal(1008))


def measure_detector(settings: TimingSettings, device: torch.device) -> None:
    """Batches through the network alone, and through extract(), which adds the way from NumPy and back."""
    with tempfile.TemporaryDirectory() as folder:
        weights = random_weights(Path(folder) / "random.pth")
        detector = InceptionDetector(weights, device, settings.precision, compile=settings.compile)
    size, num_batches, num_images = settings.image_size, settings.num_batches, settings.num_batches * settings.batch_size
    images = np.random.default_rng(0).integers(0, 256, (settings.batch_size, size, size, 3), dtype=np.uint8)
    on_device = torch.from_numpy(images).to(device)
    for _ in range(2):
        detector.features(on_device)
    measure("network alone", lambda: detector.features(on_device), device, num_images, num_batches)
    measure("extract", lambda: extract([detector], (images for _ in range(num_batches))), device, num_images)
    if settings.precision == "fp32":
        exact = detector.features(on_device).pool
        detector.precision = "bf16"
        moved = (detector.features(on_device).pool - exact).norm() / exact.norm()
        emit({"what": "relative change of the pooled features by bf16, random weights", "value": moved.item()})


def random_weights(file: Path) -> Path:
    """Inception's layout with random numbers, of a size that keeps features near 1."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    torch.save({}, file)
    torch.manual_seed(0)
    with mock.patch.object(FeatureExtractorInceptionV3, "load_state_dict"):  # keep the initial weights
        net = FeatureExtractorInceptionV3("random", ["2048"], feature_extractor_weights_path=file)
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(net.state_dict(), file)
    return file


if __name__ == "__main__":
    cli.guard(lambda: main(sys.argv[1:]))
