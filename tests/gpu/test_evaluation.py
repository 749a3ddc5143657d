"""Features and metrics on the device equal those on the CPU. Inception has random weights, so nothing is downloaded."""

import numpy as np
import pytest
import torch

from evaluations.features import Features
from evaluations.inception import InceptionDetector
from evaluations.suite import compute_metrics


def relative_error(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


def test_features_equal_those_of_the_cpu(device, tmp_path):
    from stand_ins import untrained_inception

    untrained_inception(weights := tmp_path / "weights.pth")
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    expected, got = (InceptionDetector(weights, where).features(images) for where in ("cpu", device))
    for layer in ("pool", "spatial", "logits"):
        # The device computes 48 float32 layers and sums in another order. With TF32 the error would be 1e-3.
        assert relative_error(getattr(got, layer), getattr(expected, layer)) < 1e-4


@pytest.mark.parametrize("width", [2048, 40])  # fewer samples than features, then more samples than features
def test_metrics_are_those_of_the_cpu(device, width):
    def features(num, seed):
        g = torch.Generator().manual_seed(seed)
        sizes = {"pool": width, "spatial": width - 1, "logits": 1008}
        return Features("inception", **{name: torch.randn(num, dim, generator=g) for name, dim in sizes.items()})

    reference, samples = features(60, 0), features(50, 1)
    expected, got = (compute_metrics(reference, samples, device=where) for where in (torch.device("cpu"), device))
    assert got.keys() == expected.keys()
    assert all(got[name] == pytest.approx(expected[name], rel=1e-3) for name in expected)
