"""Features and metrics on the device. The weights of Inception are random: nothing is downloaded."""

import numpy as np
import pytest
import torch

from evaluations.inception import InceptionDetector
from evaluations.suite import evaluate
from extras.benchmarks.evaluation import random_features, random_weights


def relative_error(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return ((a - b).norm() / b.norm()).item()


def test_features_are_those_of_the_cpu_in_either_memory_format(device, tmp_path):
    pytest.importorskip("torch_fidelity")
    weights = random_weights(tmp_path / "weights.pth")
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    expected = InceptionDetector(weights, "cpu").features(images)
    detector = InceptionDetector(weights, device)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        detector._net.to(memory_format=memory_format)
        got = detector.features(images)
        for layer in ("pool", "spatial", "logits"):
            # 48 layers in float32, summed in another order; TF32 would err by 1e-3.
            assert relative_error(getattr(got, layer), getattr(expected, layer)) < 1e-4


def test_metrics_are_those_of_the_cpu(device):
    reference, samples = random_features(60, 0), random_features(50, 1)
    expected, got = (evaluate(reference, samples, device=where) for where in (torch.device("cpu"), device))
    assert got.keys() == expected.keys()
    assert all(got[name] == pytest.approx(expected[name], rel=1e-3) for name in expected)
