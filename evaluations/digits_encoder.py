"""A small vision transformer as the image encoder of alignment on the embedded digits: runs offline, with no weights to fetch.

    python -m evaluations.digits_encoder     # train it again on digits_reference.npz and write digits_encoder.safetensors

It learns to classify the digits, with other weights than the detector that scores the samples. Unlike DINOv2 it has seen labels.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.errors import UserError
from common.files import hash_file
from evaluations.digits_detector import NUM_CLASSES, load_digits, to_input, write_classifier
from evaluations.metrics import full_float32
from evaluations.small_detector import fit, split

ENCODER_FILE = Path(__file__).with_name("digits_encoder.safetensors")
PATCH_SIZE, GRID, WIDTH, DEPTH, NUM_HEADS = 2, 4, 48, 3, 4


class DigitsTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(1, WIDTH, PATCH_SIZE, stride=PATCH_SIZE)
        self.positions = nn.Parameter(0.02 * torch.randn(1, GRID**2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 2 * WIDTH, dropout=0.0, norm_first=True, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 1, 8, 8], -1 to 1 -> patch tokens [B, 16, 48] after the last norm, logits [B, 10] of their mean."""
        tokens = self.layers(self.embed(x).flatten(2).transpose(1, 2) + self.positions)
        return tokens, self.head(tokens.mean(1))


class DigitsEncoder:
    """With the interface of `evaluations.encoders.Encoder`; the mean of the patch tokens stands for a class token.

    Attributes:
        resolution: pixels along one side of an image.
        grid: patches along it.
        width: of the tokens.
        weights_hash: of the file of weights.
    """

    name, resolution, grid, width = "digits", PATCH_SIZE * GRID, GRID, WIDTH

    def __init__(self, device: torch.device | str = "cpu"):
        self.device, net = torch.device(device), DigitsTransformer()
        net.load_state_dict(load_file(ENCODER_FILE))
        self.weights_hash = hash_file(ENCODER_FILE)
        self.net = net.to(self.device).eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, images: np.ndarray | Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, 8, 8, 3] -> [B, 48], [B, 16, 48], float32 on the encoder's device."""
        x, size = torch.as_tensor(images), self.resolution
        if x.shape[1:] != (size, size, 3):
            raise UserError(f"images are {'x'.join(map(str, x.shape[1:3]))} pixels; encoder=digits takes {size}x{size}")
        with full_float32(), torch.autocast(self.device.type, enabled=False):
            tokens = self.net(to_input(x.to(self.device)))[0]
        return tokens.mean(1), tokens


def main() -> None:
    torch.set_num_threads(1)  # the order of sums depends on the number
    images, labels = load_digits()
    torch.manual_seed(0)
    net = DigitsTransformer()
    write_classifier(ENCODER_FILE, net, fit(net, to_input, images, labels, *split(len(images)), num_epochs=60))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    main()
