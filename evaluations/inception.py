"""Inception-v3 of 2015-12-05, through torch-fidelity's port, whose resize is TensorFlow 1's."""

from __future__ import annotations

import hashlib
import io
import logging
import socket
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn

from common.downloads import TIMEOUT_SEC
from common.errors import UserError, first_line, reading
from evaluations.features import Features, to_device
from evaluations.metrics import full_float32

log = logging.getLogger(__name__)

WEIGHTS_NAME = "weights-inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS_NAME}"
WEIGHTS_SHA256 = "6726825d"  # its first digits, as in the file's name
SPATIAL_CHANNELS = 7  # of mixed_6's 192: ADM keeps these, to have about as many features as pool3


def fetch_weights() -> Path:
    """The file of the published weights (96 MB), downloaded to $TORCH_HOME/hub/checkpoints if it is not there.

    Of several processes one downloads, the others wait. Raises UserError where it cannot be downloaded.
    """
    file = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_NAME
    if not file.exists():
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT_SEC)  # torch.hub sets none, and would wait for ever
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                if not file.exists():
                    torch.hub.download_url_to_file(WEIGHTS_URL, str(file), hash_prefix=WEIGHTS_SHA256)  # whole or not at all
        except (OSError, RuntimeError) as e:  # RuntimeError: another SHA-256
            raise UserError(
                f"the Inception weights cannot be downloaded ({first_line(e)}); run `python prepare_latents.py fetch` once where "
                f"there is a network, or put {WEIGHTS_URL} at {file} (TORCH_HOME moves it), or set evaluation.weights=<the file>"
            ) from e
        finally:
            socket.setdefaulttimeout(before)
    return file


class InceptionDetector:
    """ADM's features: pool3 [N, 2048], spatial [N, 2023] and logits without bias [N, 1008].

    Args:
        weights: a file, torch-fidelity's or pytorch-fid's.

    Raises:
        UserError: the weights are missing, unreadable or of another network.
    """

    name = "inception"

    def __init__(self, weights: str | Path, device: torch.device | str = "cpu"):
        self.device, file = torch.device(device), Path(weights)
        with reading(f"{file} (Inception's weights, {WEIGHTS_URL})"):
            self._net = _Network(file)
        self.weights_hash = sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        if not sha256.startswith(WEIGHTS_SHA256):
            log.warning("%s is not the published Inception (SHA-256 %s...): its scores compare with no paper's", file, sha256[:8])
        self._net.to(self.device, memory_format=torch.channels_last if self.device.type == "cuda" else torch.preserve_format)

    @torch.no_grad()
    def features(self, images: np.ndarray | Tensor) -> Features:
        """uint8 [N, H, W, 3] of any size -> features on the device."""
        x = to_device(images, self.device).permute(0, 3, 1, 2)
        with full_float32():
            pool, logits, spatial = self._net(x)
        return Features(self.name, pool=pool, logits=logits, spatial=spatial)


class _Network(nn.Module):
    """torch-fidelity's extractor with the spatial features as one more output."""

    def __init__(self, file: Path):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        super().__init__()
        copy = io.BytesIO()  # the extractor unpickles its file with weights_only=False; it gets a copy of what was read safely
        torch.save(torch.load(file, map_location="cpu", weights_only=True), copy)
        copy.seek(0)
        outputs = ["2048", "logits_unbiased"]
        self.extractor = FeatureExtractorInceptionV3("inception", outputs, feature_extractor_weights_path=copy)
        # TensorFlow's mixed_6/conv is the 1x1 branch of the block that PyTorch's ports call 6d, after its ReLU.
        self.extractor.Mixed_6d.branch1x1.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._kept = output  # [N, 192, 17, 17]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [N, 3, H, W] -> pool [N, 2048], logits [N, 1008], spatial [N, 2023]."""
        pool, logits = self.extractor(images)
        spatial = self._kept[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)  # NHWC, as TensorFlow flattens it
        self._kept = None
        return pool, logits, spatial
