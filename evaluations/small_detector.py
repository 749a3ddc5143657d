"""A small classifier as the detector of a set of small pictures, 28 to 64 pixels or so: evaluation on a CPU, in seconds.

    python prepare_latents.py detector reference=references/fashion.npz output=detectors/fashion.safetensors
    python train.py evaluation.detector=small-fashion evaluation.weights=detectors/fashion.safetensors ...

Its distance is `fd_<set>`: the Frechet distance of other features than Inception's, on another scale than FID.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError
from common.files import with_sorted_header, write_file
from common.progress import progress_bar
from evaluations.features import Features, check_images, sha256_of_file
from evaluations.images import ImageSet
from evaluations.metrics import class_agreement, full_float32
from evaluations.suite import SMALL, set_of

MAKE = "python prepare_latents.py detector reference=<.npz with labels> output=<set>.safetensors"
WIDTHS = (32, 64, 128)  # of the convolutions
NUM_POOLED = 128


class ClassifierDetector:
    """Pooled features and class logits of square images of one size.

    Args:
        net: [N, C, H, W] -> features [N, D], logits [N, C].
        size: height = width of the images.
        to_input: uint8 [N, H, W, 3] -> what `net` takes.
        weights: safetensors file of `net`.
        make: the command that makes such a file, for the messages.

    Raises:
        UserError: the file cannot be read, or is of another network.
    """

    name: str

    def __init__(self, net: nn.Module, size: int, to_input: Callable[[Tensor], Tensor], weights: str | Path, device, make: str):
        self.device, self._size, self._to_input = torch.device(device), size, to_input
        try:
            net.load_state_dict(load_file(weights))
            self.weights_hash = sha256_of_file(weights)
        except (OSError, RuntimeError, SafetensorError) as e:
            reason = " ".join(str(e).split())[:200]
            raise UserError(f"{weights} is no {self.name} detector ({reason}); make it: {make}") from e
        self._net = net.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def features(self, images: np.ndarray | Tensor) -> Features:
        """uint8 [N, H, W, 3] -> features on the device."""
        x, size = check_images(images), self._size
        if x.shape[1:3] != (size, size):
            raise UserError(
                f"images are {x.shape[2]}x{x.shape[1]} pixels; the {self.name} detector takes {size}x{size} (use Inception for "
                "others)"
            )
        with full_float32():
            pool, logits = self._net(self._to_input(x.to(self.device)))
        return Features(self.name, pool=pool, logits=logits)


class SmallNet(nn.Module):
    """Three convolutions, each of which halves the picture."""

    def __init__(self, num_classes: int):
        super().__init__()
        layers = []
        for channels, width in pairwise((3, *WIDTHS)):
            layers += [nn.Conv2d(channels, width, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.convs = nn.Sequential(*layers)
        self.pool = nn.Linear(WIDTHS[-1] * 4 * 4, NUM_POOLED)
        self.head = nn.Linear(NUM_POOLED, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, 3, H, W], -1 to 1 -> features [N, 128], before their ReLU as in `DigitsNet`, and logits [N, C]."""
        features = self.pool(F.adaptive_avg_pool2d(self.convs(x), 4).flatten(1))
        return features, self.head(F.relu(features))


def to_rgb(images: Tensor) -> Tensor:
    """uint8 [N, H, W, 3] -> [N, 3, H, W], -1 to 1."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1


class SmallDetector(ClassifierDetector):
    """Of the set that evaluation.detector=small-<set> names, from the file that `train_detector` wrote."""

    def __init__(self, name: str, weights: str | Path, device: torch.device | str = "cpu"):
        self.name = name
        try:
            with safe_open(weights, framework="pt") as f:
                about = f.metadata() or {}
            found, size, num_classes = about["detector"], int(about["resolution"]), int(about["num_classes"])
        except (OSError, SafetensorError, KeyError, ValueError) as e:
            raise UserError(f"evaluation.weights={weights} is no detector of small pictures ({e}); make it: {MAKE}") from e
        if found != name:
            raise UserError(
                f"evaluation.weights={weights} is of evaluation.detector={found}, not {name}; set that, or give another file"
            )
        super().__init__(SmallNet(num_classes), size, to_rgb, weights, device, MAKE)


# ----------------------------------------------------------------------------------------------------------------------
# Training.


def split(num_images: int, one_in: int = 5) -> tuple[Tensor, Tensor]:
    """Indices to train on, and those held out (one in `one_in`), always the same."""
    held_out, training = torch.from_numpy(np.random.default_rng(0).permutation(num_images)).tensor_split([num_images // one_in])
    return training, held_out


def fit(
    net: nn.Module,
    to_input: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    training: Tensor,
    held_out: Tensor,
    *,
    num_epochs: int,
    batch_size: int = 64,
    lr: float = 2e-3,
) -> float:
    """Train a classifier in place; returns its accuracy on the images held out.

    The same on every run on one machine with the same number of threads.

    Args:
        images: uint8 [N, H, W, 3]; `labels` are [N] int64.
        training, held_out: their numbers.
    """
    random, device = np.random.default_rng(1), next(net.parameters()).device
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.01)
    num_batches = len(training) // batch_size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * num_batches)
    for _ in progress_bar(range(num_epochs), desc="training the detector", unit="epochs", delay=1, leave=False):
        for batch in training[random.permutation(len(training))][: num_batches * batch_size].split(batch_size):
            loss = F.cross_entropy(net(to_input(images[batch].to(device)))[1], labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        logits = torch.cat([net(to_input(images[batch].to(device)))[1].cpu() for batch in held_out.split(1000)])
    return class_agreement(logits, labels[held_out])


def train_detector(images: ImageSet, output: Path, device: torch.device, num_epochs: int) -> float:
    """Train a classifier on images with labels, a tenth of them held out, and write it to `output`, whose name is the set's.

    Returns the accuracy on those held out, which the file holds as well.

    Raises:
        UserError: `output` exists or has no name of a set; images without labels, too few, too large or not square.
    """
    name = f"{SMALL}{output.stem}"
    if output.suffix != ".safetensors" or set_of(name) is None:
        raise UserError(
            f"output={output} must be named after the set, in small letters without digits: detectors/fashion.safetensors"
        )
    if output.exists():
        raise UserError(f"output={output} exists; remove it, or give another name")
    num_images, height, width, _ = images.shape
    if images.labels is None:
        raise UserError(
            f"reference={images.path} holds no labels; make it with `prepare_latents.py reference` from shards of pixels"
        )
    if height != width or not 16 <= height <= 128 or num_images < 1000:
        raise UserError(
            f"reference={images.path} holds {num_images} images of {width}x{height} pixels; a detector of small pictures needs "
            "1,000 or more, square and of 16 to 128 pixels (use Inception for others)"
        )
    labels, pixels = torch.from_numpy(images.labels), torch.from_numpy(np.concatenate(list(images.batches(1000))))
    num_classes = int(labels.max()) + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = SmallNet(num_classes).to(device)
    accuracy = fit(net, to_rgb, pixels, labels, *split(num_images, one_in=10), num_epochs=num_epochs)
    about = {"detector": name, "resolution": height, "num_classes": num_classes, "num_images": num_images}
    about |= {"num_epochs": num_epochs, "held_out_accuracy": f"{accuracy:.4f}", "trained_on": images.fingerprint()}
    state = {key: x.cpu().contiguous() for key, x in net.state_dict().items()}
    write_file(output, with_sorted_header(save(state, metadata={key: str(value) for key, value in about.items()})))
    return accuracy
