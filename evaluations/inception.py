"""Inception-v3 detector with the weights of 2015-12-05. torch-fidelity's implementation resizes images as TensorFlow 1 does."""

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
from common.errors import UserError, as_user_error, first_line
from common.files import regular_file
from evaluations.features import Features, to_device
from evaluations.metrics import full_float32

log = logging.getLogger(__name__)

WEIGHTS_NAME = "weights-inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS_NAME}"
WEIGHTS_SHA256_PREFIX = "6726825d"  # first digits of the SHA-256 hash, as in the file name
SPATIAL_CHANNELS = 7  # ADM uses the first 7 channels of mixed_6, which give about as many features as pool3


def fetch_weights() -> Path:
    """Return the path of the published weights (96 MB). Download the file to $TORCH_HOME/hub/checkpoints if it is missing.

    If several processes call this function, one process downloads the file while the others wait.
    """
    file = Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_NAME
    if not file.exists():
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(TIMEOUT_SEC)  # torch.hub sets no timeout and could wait forever
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{file}.lock"):
                if not file.exists():
                    torch.hub.download_url_to_file(WEIGHTS_URL, str(file), hash_prefix=WEIGHTS_SHA256_PREFIX)
        except (OSError, RuntimeError) as e:  # a wrong SHA-256 hash raises RuntimeError
            raise UserError(
                f"the Inception weights cannot be downloaded ({first_line(e)}); run `python prepare_latents.py fetch` once "
                f"with a network, or put {WEIGHTS_URL} at {file} ($TORCH_HOME), or set evaluation.detector_weights=<the file>"
            ) from e
        finally:
            socket.setdefaulttimeout(before)
    return file


class InceptionDetector:
    """Computes ADM's pool3 features [N, 2048], spatial features [N, 2023], and logits [N, 1008] without the last layer's bias.

    `weights` is a torch-fidelity or pytorch-fid file.
    """

    name = "inception"

    def __init__(self, weights: str | Path, device: torch.device | str = "cpu"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        self.device = torch.device(device)
        file = Path(weights)
        copy = io.BytesIO()
        with as_user_error(f"{file} (Inception's weights, {WEIGHTS_URL})"):
            # The extractor loads its file with weights_only=False, so we pass a copy of the tensors that was loaded safely.
            torch.save(torch.load(regular_file(file), map_location="cpu", weights_only=True), copy)
            copy.seek(0)
            outputs = ["2048", "logits_unbiased"]
            self._net = FeatureExtractorInceptionV3(self.name, outputs, feature_extractor_weights_path=copy)
        self.weights_hash = sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        self.has_published_weights = sha256.startswith(WEIGHTS_SHA256_PREFIX)
        if not self.has_published_weights:
            log.warning("%s is not the published Inception (SHA-256 %s...): do not compare with papers", file, sha256[:8])
        # TensorFlow's mixed_6/conv is the output (after the ReLU) of the 1x1 branch in the block that PyTorch calls Mixed_6d.
        self._net.Mixed_6d.branch1x1.register_forward_hook(self._store_spatial)
        self._net.to(self.device, memory_format=torch.channels_last if self.device.type == "cuda" else torch.preserve_format)

    def _store_spatial(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._spatial = output[:, :SPATIAL_CHANNELS]  # [N, 7, 17, 17]

    @torch.no_grad()
    def features(self, images: np.ndarray | Tensor) -> Features:
        """Compute features of uint8 images [N, H, W, 3] of any size on the detector's device."""
        with full_float32():
            pool, logits = self._net(to_device(images, self.device).permute(0, 3, 1, 2))
        spatial = self._spatial.permute(0, 2, 3, 1).flatten(1)  # flattened in TensorFlow's NHWC order
        return Features(self.name, pool=pool, logits=logits, spatial=spatial)
