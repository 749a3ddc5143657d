"""Time and memory of the evaluation suite, from random features and a random network: no weights, no network needed.

    python -m benchmarks.evaluation                                        # metrics, 50,000 samples against 10,000
    python -m benchmarks.evaluation num_samples=5000 num_references=5000 threads=1
    python -m benchmarks.evaluation part=detector device=cuda batch_size=64 compile=true

One JSON line a measurement, with the machine and the versions in the first.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.memory import peak_memory_gib
from benchmarks.report import describe_machine, emit, synchronise
from errors import UserError
from evaluations import metrics
from evaluations.detector import LAYER_SIZES, InceptionDetector
from evaluations.features import Features, extract
from evaluations.statistics import statistics_of
from evaluations.suite import evaluate

SETTINGS = {
    "part": "metrics",  # metrics | detector
    "num_samples": "50000",
    "num_references": "10000",
    "device": "cpu",
    "threads": "0",  # of the CPU; 0: torch's choice
    "batch_size": "64",
    "num_batches": "5",  # timed, after two to warm up
    "image_size": "256",
    "precision": "fp32",
    "compile": "false",
}


def main(arguments: list[str]) -> None:
    given = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = given.keys() - SETTINGS.keys()
    if unknown:
        raise UserError(f"unknown {', '.join(sorted(unknown))}; the settings are {', '.join(SETTINGS)}")
    settings = SETTINGS | given
    if int(settings["threads"]):
        torch.set_num_threads(int(settings["threads"]))
    device = torch.device(settings["device"])
    emit(**describe_machine(device), settings=settings)
    if settings["part"] == "metrics":
        measure_metrics(int(settings["num_samples"]), int(settings["num_references"]), device)
    elif settings["part"] == "detector":
        measure_detector(settings, device)
    else:
        raise UserError(f"part={settings['part']} must be metrics or detector")


def measure_metrics(num_samples: int, num_references: int, device: torch.device) -> None:
    """Each metric alone, then all five as a run computes them. The statistics of a reference are cached: not in the time."""
    reference, samples = random_features(num_references, 0), random_features(num_samples, 1)
    known = {layer: statistics_of(getattr(reference, layer)) for layer in LAYER_SIZES}
    reference = Features("inception", reference.pool, reference.logits, reference.spatial, known)
    with timed("fid from statistics", device):
        metrics.frechet_distance(known["pool"], known["pool"])
    with timed("statistics of the samples' pool features", device):
        statistics_of(samples.pool)
    with timed("inception score", device):
        metrics.inception_score(samples.logits)
    with timed("precision and recall", device):
        metrics.precision_recall(reference.pool.to(device), samples.pool.to(device))
    with timed("all five metrics", device):
        evaluate(reference, samples, device=device)


def random_features(num: int, seed: int) -> Features:
    """Normal features, about as large as Inception's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(dim: int) -> torch.Tensor:
        return torch.randn(num, dim, generator=generator).mul_(0.4)

    return Features("inception", pool=normal(LAYER_SIZES["pool"]), spatial=normal(LAYER_SIZES["spatial"]), logits=normal(1008))


def measure_detector(settings: dict[str, str], device: torch.device) -> None:
    """A batch through the network alone, and through extract(), which adds the way from NumPy and back."""
    with tempfile.TemporaryDirectory() as folder:
        weights = random_weights(Path(folder) / "random.pth")
        detector = InceptionDetector(weights, device, settings["precision"], compile=settings["compile"] == "true")
    size, batch_size, num_batches = (int(settings[name]) for name in ("image_size", "batch_size", "num_batches"))
    images = np.random.default_rng(0).integers(0, 256, (batch_size, size, size, 3), dtype=np.uint8)
    on_device = torch.from_numpy(images).to(device)
    for _ in range(2):
        detector.features(on_device)
    with timed("network alone", device, num_images=num_batches * batch_size):
        for _ in range(num_batches):
            detector.features(on_device)
    with timed("extract", device, num_images=num_batches * batch_size):
        extract(detector, (images for _ in range(num_batches)))
    if settings["precision"] == "fp32":
        exact = detector.features(on_device).pool
        detector.precision = "bf16"
        moved = (detector.features(on_device).pool - exact).norm() / exact.norm()
        emit(what="relative change of the pooled features by bf16, random weights", value=moved.item())


def random_weights(file: Path) -> Path:
    """Inception's layout with random numbers, of a size that keeps features near 1."""
    from torch_fidelity import feature_extractor_inceptionv3 as port

    class Untrained(port.FeatureExtractorInceptionV3):
        def load_state_dict(self, state_dict):  # keep the initial weights
            pass

    empty = file.with_name("empty.pth")
    torch.save({}, empty)
    torch.manual_seed(0)
    net = Untrained("random", ["2048"], feature_extractor_weights_path=empty)
    for module in net.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight)
    torch.save(net.state_dict(), file)
    return file


@contextlib.contextmanager
def timed(what: str, device: torch.device, num_images: int = 0):
    synchronise(device)
    start_sec = time.perf_counter()
    yield
    synchronise(device)
    sec = time.perf_counter() - start_sec
    line = {"what": what, "sec": round(sec, 3), "peak_memory_gib": round(peak_memory_gib(), 2)}
    if num_images:
        line["images_per_sec"] = round(num_images / sec, 1)
    if device.type == "cuda":
        line["peak_device_memory_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    emit(**line)


if __name__ == "__main__":
    main(sys.argv[1:])
