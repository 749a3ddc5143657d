"""A small classifier as the detector of the embedded digits: evaluation runs offline on a CPU, in seconds.

    python -m evaluations.digits_detector     # train it again on digits_reference.npz and write digits_detector.safetensors

Its distance is `fd_digits`: the Frechet distance of other features than Inception's, on another scale than FID.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from common.files import write_file
from evaluations.small_detector import ClassifierDetector, fit, split

log = logging.getLogger(__name__)

WEIGHTS_FILE = Path(__file__).with_name("digits_detector.safetensors")
REFERENCE_FILE = Path(__file__).with_name("digits_reference.npz")  # the images of latents/digits.safetensors, in ADM's format
NUM_FEATURES = 64
NUM_CLASSES = 10


class DigitsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.pool = nn.Linear(32 * 4 * 4, NUM_FEATURES)
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 1, 8, 8], -1 to 1 -> features [N, 64], logits [N, 10]."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        # Features are taken before the ReLU: after it, some are zero for all images and the covariance is singular.
        features = self.pool(x.flatten(1))
        return features, self.head(F.relu(features))


def to_input(images: Tensor) -> Tensor:
    """uint8 [N, 8, 8, 3] -> [N, 1, 8, 8], -1 to 1, the mean of the channels."""
    return images.float().mean(3)[:, None] / 127.5 - 1


class DigitsDetector(ClassifierDetector):
    """Features [N, 64] and class logits [N, 10] of 8x8 images of digits."""

    name = "digits"

    def __init__(self, device: torch.device | str = "cpu", weights: str | Path = WEIGHTS_FILE):
        super().__init__(DigitsNet(), 8, to_input, weights, device, "python -m evaluations.digits_detector")


def load_digits() -> tuple[Tensor, Tensor]:
    """The embedded digits: uint8 [1797, 8, 8, 3], labels [1797]."""
    with np.load(REFERENCE_FILE) as reference:
        return torch.from_numpy(reference["arr_0"]), torch.from_numpy(reference["labels"])


def train(num_epochs: int = 40) -> tuple[DigitsNet, float]:
    """The classifier and its accuracy on the images held out; the same on every run on one machine."""
    images, labels = load_digits()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = DigitsNet()
    return net, fit(net, to_input, images, labels, *split(len(images)), num_epochs=num_epochs)


def write_classifier(file: Path, net: nn.Module, held_out_accuracy: float) -> None:
    write_file(file, save(net.state_dict(), metadata={"held_out_accuracy": f"{held_out_accuracy:.4f}"}))
    log.info("%s: %.2f%% of the held-out digits are classified correctly", file, 100 * held_out_accuracy)


def main() -> None:
    torch.set_num_threads(1)  # the order of sums depends on the number, and the network is too small to use more
    write_classifier(WEIGHTS_FILE, *train())


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    main()
