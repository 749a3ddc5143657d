"""Inception-v3 of 2015-12-05, through torch-fidelity's port, whose resize is TensorFlow 1's."""

from __future__ import annotations

import io
import logging
import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from common.downloads import download
from common.errors import UserError, first_line
from common.progress import say_if_slow
from evaluations.features import Features, check_images, sha256_of_file
from evaluations.metrics import full_float32

log = logging.getLogger(__name__)

WEIGHTS_NAME = "weights-inception-2015-12-05-6726825d.pth"
WEIGHTS_URL = f"https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/{WEIGHTS_NAME}"
WEIGHTS_SHA256 = "6726825d"  # its first digits, as in the file's name
SPATIAL_CHANNELS = 7  # of mixed_6's 192: ADM keeps these, to have about as many features as pool3
LAYER_SIZES = {"pool": 2048, "spatial": 17 * 17 * SPATIAL_CHANNELS}


def cached_weights_file() -> Path:
    """Where the weights are downloaded to: $TORCH_HOME/hub/checkpoints."""
    return Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS_NAME


def fetch_weights(show_progress: bool = True) -> Path:
    """The file of the published weights (96 MB), downloaded to torch.hub's folder if it is not there.

    With several processes on a machine, call it in one of them first. Offline, the UserError says which file to put where.
    """
    file = cached_weights_file()
    if not file.exists():
        try:
            download(WEIGHTS_URL, file, WEIGHTS_SHA256, show_progress)
        except UserError as e:
            raise UserError(
                f"the Inception weights cannot be downloaded ({e}); run `python prepare_latents.py fetch` once where there is a "
                f"network (TORCH_HOME moves the cache), or get {WEIGHTS_URL} elsewhere and put it at {file}, or set "
                "evaluation.weights=<the file> (weights= for prepare_latents.py reference)"
            ) from e
    sha256 = sha256_of_file(file)
    if not sha256.startswith(WEIGHTS_SHA256):
        raise UserError(f"{file} is not the published file (SHA-256 {sha256[:8]}... instead of {WEIGHTS_SHA256}...); delete it")
    return file


class InceptionDetector:
    """ADM's features: pool3 [N, 2048], spatial [N, 2023] and logits without bias [N, 1008].

    Args:
        weights: a local file, torch-fidelity's or pytorch-fid's; None: fetch_weights().
        precision: `fp32`, or `bf16` (mixed): faster, but other features (the pooled ones move by 2 to 12% under random
            weights), so its scores compare only with each other.
        compile: with torch.compile; the first batch of every shape takes a minute.

    Raises:
        UserError: the weights are missing, unreadable or of another network.
    """

    name = "inception"

    def __init__(
        self,
        weights: str | Path | None = None,
        device: torch.device | str = "cpu",
        precision: str = "fp32",
        compile: bool = False,
    ):
        if precision not in ("fp32", "bf16"):
            raise UserError(f"precision={precision!r} must be one of fp32, bf16")
        self.device, self.precision = torch.device(device), precision
        file = fetch_weights() if weights is None else Path(weights)
        if not file.is_file():
            raise UserError(f"evaluation.weights={file} does not exist; put {WEIGHTS_URL} there, or leave it empty")
        sha256 = sha256_of_file(file)
        if not sha256.startswith(WEIGHTS_SHA256):
            log.warning("%s is not the published Inception (SHA-256 %s...): its scores compare with no paper's", file, sha256[:8])
        self.weights_hash = sha256 if precision == "fp32" else f"{sha256}-{precision}"
        with say_if_slow(log, "loading Inception"):
            net = _Network(_build_extractor(file)).to(self.device)
        if self.device.type == "cuda":
            net = net.to(memory_format=torch.channels_last)
        if compile:
            log.info("compiling Inception: the first batch takes about a minute longer, once")
        self._net = torch.compile(net) if compile else net

    @torch.no_grad()
    def features(self, images: np.ndarray | Tensor) -> Features:
        """uint8 [N, H, W, 3] of any size -> features on the device."""
        x = check_images(images)
        if self.device.type == "cuda" and x.device.type == "cpu":
            x = x.pin_memory()  # only from pinned memory does the copy not wait for the batch before it
        x = x.to(self.device, non_blocking=True).permute(0, 3, 1, 2)
        with full_float32(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            pool, logits, spatial = self._net(x)
        return Features(self.name, pool=pool.float(), logits=logits.float(), spatial=spatial.float())


class _Network(nn.Module):
    """torch-fidelity's extractor with the spatial features as one more output."""

    def __init__(self, extractor: nn.Module):
        super().__init__()
        self.extractor = extractor
        # TensorFlow's mixed_6/conv is the 1x1 branch of the block that PyTorch's ports call 6d, after its ReLU.
        extractor.Mixed_6d.branch1x1.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._kept = output  # [N, 192, 17, 17]

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """uint8 [N, 3, H, W] -> pool [N, 2048], logits [N, 1008], spatial [N, 2023]."""
        pool, logits = self.extractor(images)
        spatial = self._kept[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)  # NHWC, as TensorFlow flattens it
        self._kept = None
        return pool, logits, spatial


def _build_extractor(file: Path) -> nn.Module:
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ImportError as e:
        raise UserError("Inception comes with torch-fidelity: pip install 'torch-fidelity>=0.4.0'") from e
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as e:
        reason = first_line(e)
        raise UserError(f"{file} cannot be read as PyTorch weights ({reason}); download {WEIGHTS_URL} again") from e
    # The class unpickles its file with weights_only=False; it gets a copy of what was just read safely.
    copy = io.BytesIO()
    torch.save(weights, copy)
    copy.seek(0)
    try:
        return FeatureExtractorInceptionV3("inception", ["2048", "logits_unbiased"], feature_extractor_weights_path=copy)
    except (RuntimeError, TypeError, AttributeError) as e:
        reason = " ".join(str(e).split())[:200]  # RuntimeError lists every key
        raise UserError(f"{file} holds the weights of another network ({reason}...); download {WEIGHTS_URL}") from e
