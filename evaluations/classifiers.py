"""Small classifiers as detectors for small images. The classifiers run on a CPU in seconds and need no internet access.

`digits` is for the bundled 8x8 digits, and `small-<set>` is for a data set of images up to 128x128. One command trains either:

    python prepare_latents.py detector reference=evaluations/digits_reference.npz output=digits.safetensors num_epochs=40

The Frechet distances are called `fd_digits` and `fd_<set>`. These distances differ in scale from FID, which uses Inception.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError, as_user_error
from common.files import hash_file, regular_file, write_atomically
from common.images import hash_pixels
from common.progress import progress_bar
from common.types import MAX_CLASSES
from evaluations.features import Features, to_device
from evaluations.images import ImageSet
from evaluations.metrics import class_agreement, full_float32
from evaluations.suite import small_set

# Weights trained on digits_reference.npz, which contains the images of latents/digits.safetensors in ADM's format.
DIGITS_WEIGHTS = Path(__file__).with_name("digits_detector.safetensors")


class DigitsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.pool = nn.Linear(32 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map uint8 images [N, 8, 8, 3] to features [N, 64] and logits [N, 10]."""
        x = images.float().mean(3)[:, None] / 127.5 - 1
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        # Return features before the ReLU. After the ReLU, some features are zero for all images, so the covariance is singular.
        features = self.pool(x.flatten(1))
        return features, self.head(F.relu(features))


class SmallNet(nn.Module):
    """A classifier with three convolutions, each of which halves the height and width."""

    def __init__(self, num_classes: int):
        super().__init__()
        layers = []
        for channels, width in pairwise((3, 32, 64, 128)):
            layers += [nn.Conv2d(channels, width, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.convs = nn.Sequential(*layers)
        self.pool = nn.Linear(128 * 4 * 4, 128)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map uint8 images [N, H, W, 3] to features [N, 128] before the ReLU, as in `DigitsNet`, and logits [N, C]."""
        x = images.permute(0, 3, 1, 2).float() / 127.5 - 1
        features = self.pool(F.adaptive_avg_pool2d(self.convs(x), 4).flatten(1))
        return features, self.head(F.relu(features))


def _network(metadata: dict) -> nn.Module:
    return DigitsNet() if metadata["detector"] == "digits" else SmallNet(metadata["num_classes"])


class ClassifierDetector:
    """Computes pooled features and class logits of square images with a fixed size. `train_detector` writes the weights file.

    `name` is `digits` or `small-<set>`.
    """

    def __init__(self, name: str, weights: Path, device: torch.device | str = "cpu"):
        self.name, self.device = name, torch.device(device)
        with as_user_error(f"evaluation.detector_weights={weights}"), safe_open(regular_file(weights), framework="pt") as f:
            metadata = json.loads(f.metadata()["about"])
            if metadata["detector"] != name:
                raise ValueError(f"it belongs to {metadata['detector']}, not to evaluation.detector={name}")
        self._size = metadata["resolution"]
        self._net = _network(metadata)
        self._net.load_state_dict(load_file(weights))
        self._net.to(self.device).eval().requires_grad_(False)
        self.weights_hash = hash_file(weights)
        self.class_names: list[str] | None = metadata.get("class_names")

    @torch.no_grad()
    def features(self, images: np.ndarray | Tensor) -> Features:
        """Compute features of uint8 images [N, H, W, 3] on the detector's device."""
        x, size = to_device(images, self.device), self._size
        if x.shape[1:3] != (size, size):
            raise UserError(f"images are {x.shape[2]}x{x.shape[1]} pixels; the {self.name} detector takes {size}x{size}")
        with full_float32():
            pool, logits = self._net(x)
        return Features(self.name, pool=pool, logits=logits)


def _split(pixels: np.ndarray, num_held_out: int) -> tuple[Tensor, Tensor]:
    """Return the indices of about `num_held_out` random images, and of the others. Equal images are in one of both."""
    shuffled = np.random.default_rng(0).permutation(len(pixels))
    groups = np.unique([hash_pixels(pixels[i]) for i in shuffled], return_index=True, return_inverse=True)[1:]
    is_held_out = groups[0][groups[1]] < num_held_out  # where the first of equal images is
    return torch.from_numpy(shuffled[is_held_out]), torch.from_numpy(shuffled[~is_held_out])


def train_detector(images: ImageSet, output: Path, device: torch.device, num_epochs: int) -> float:
    """Train a classifier on labelled images and write it to `output`, which must be digits.safetensors or <set>.safetensors.

    Returns the accuracy on held-out images, which is also stored in the file. Training on the same machine with the same number
    of threads produces the same file.

    Raises:
        UserError: `output` exists or has another name, or the images have no labels, are too few or of a size that does not fit.
    """
    is_digits = output.name == "digits.safetensors"
    name = "digits" if is_digits else f"small-{output.stem}"
    if output.suffix != ".safetensors" or not (is_digits or small_set(name)) or output.exists():
        form = "<a lower-case letter, then such letters, digits and _>.safetensors"
        raise UserError(f"output={output} must be a new file named after the set: {form}")
    num_images, height, width, _ = images.shape
    fits = height == width == 8 if is_digits else height == width <= 128
    accepted = "digits.safetensors needs 8x8, other names" if is_digits else "a detector needs"
    has_labels = images.labels is not None and len(images.labels) > 0
    lowest, highest = (int(images.labels.min()), int(images.labels.max())) if has_labels else (0, -1)
    num_classes = highest + 1
    invalid_labels = f"its labels run from {lowest} to {highest}; a detector needs labels from 0 to {MAX_CLASSES - 1:,}"
    problems = {
        f"it holds {num_images:,} images; a detector needs at least 1,000": num_images < 1000,
        f"its images have {width}x{height} pixels; {accepted} squares of at most 128": not fits,
        invalid_labels: not 0 <= lowest <= num_classes <= MAX_CLASSES,
        f"it has {num_classes} classes; digits.safetensors needs at most 10": is_digits and num_classes > 10,
        "it holds no labels; make it from labelled shards or from an .npz with `labels`": images.labels is None,
    }
    if reasons := [problem for problem, applies in problems.items() if applies]:
        raise UserError(f"reference={images.path}: {'; '.join(reasons)}")
    labels = torch.from_numpy(images.labels)
    pixels = torch.from_numpy(np.concatenate(list(images.batches(1000))))
    metadata = {"detector": name, "resolution": height, "num_classes": num_classes, "trained_on": images.local_hash()}
    random = np.random.default_rng(1)
    batch_size = 64
    held_out, training = _split(pixels.numpy(), num_images // (5 if is_digits else 10))
    if not len(held_out) or len(training) < batch_size:
        raise UserError(f"reference={images.path}: too many of its {num_images:,} images are equal")
    torch.manual_seed(0)
    net = _network(metadata).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    num_batches = len(training) // batch_size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs * num_batches)
    for _ in progress_bar(range(num_epochs), desc="training the detector", unit="epochs", delay=1, leave=False):
        for batch in training[random.permutation(len(training))][: num_batches * batch_size].split(batch_size):
            loss = F.cross_entropy(net(pixels[batch].to(device))[1], labels[batch].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        logits = torch.cat([net(pixels[batch].to(device))[1].cpu() for batch in held_out.split(1000)])
    accuracy = class_agreement(logits, labels[held_out])
    metadata |= {"num_epochs": num_epochs, "held_out_accuracy": round(accuracy, 4)}
    metadata |= {} if images.class_names is None else {"class_names": images.class_names}
    # safetensors writes metadata keys in arbitrary order. A single key ensures that equal weights produce identical files.
    write_atomically(output, save(net.cpu().state_dict(), metadata={"about": json.dumps(metadata)}))
    return accuracy
