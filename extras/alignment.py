"""Representation alignment (REPA, arXiv 2410.06940), which trains network tokens to resemble the tokens of a frozen encoder.

A projector maps the tokens after one block to the width of the encoder's patch tokens. The trainer adds this term to the loss:

    weight x mean over tokens of -cos(projected token, patch token at the same position)

Only training uses the projector. The network architecture is the same as without alignment.

Shapes: B = batch size, N = number of tokens, K = number of kept tokens, D = network width, E = encoder width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import UserError, prefix_errors
from configs.schema import TrainConfig
from evaluations.vit import Encoder
from latents.dataset import LatentDataset
from routing_module import TokenRouter


class Projector(nn.Sequential):
    """A token-wise MLP with three linear layers and SiLU activations, (B, K, width) -> (B, K, out_width) (REPA, appendix).

    The layers are initialised like DiT's linear layers, with Xavier-uniform weights and zero biases.
    """

    def __init__(self, width: int, hidden: int, out_width: int):
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out_width)]
        super().__init__(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class ObservedNetwork:
    """A network wrapper that stores the tokens after block `block` (counted from 1) in each call. Call it like the network.

    Attributes:
        tokens: Stored tokens, (B, N, D), or only the kept tokens, (B, K, D), if the block is in a route's window.
        ids_keep: Positions of the kept tokens, (B, K) int64. None if the block is outside all windows.
    """

    def __init__(self, net: Callable[..., Tensor], block: int):
        self.net, self.block = net, block

    def __call__(self, x: Tensor, t: Tensor, y: Tensor, **inputs) -> Tensor:
        return self.net(x, t, y, on_block=self._store, **inputs)

    def _store(self, block: int, tokens: Tensor, ids_keep: Tensor | None) -> None:
        if block == self.block:
            self.tokens, self.ids_keep = tokens, ids_keep


@dataclass(frozen=True)
class Alignment:
    """The components that the trainer needs for representation alignment.

    Attributes:
        projector: Projector that is trained together with the network.
        encode: Function that maps images from `fetch` to the encoder's patch tokens (B, N, E), without gradients.
        fetch: Function that maps the indices and flips of items to stored latents, labels, and images for `encode`.
        block: Number of the block whose tokens are aligned, counted from 1.
        encoder_hash: Hash of the encoder's weights.
        weight: Weight of the alignment term in the loss.
    """

    projector: nn.Module
    encode: Callable[[Tensor], Tensor]
    fetch: Callable[[np.ndarray, np.ndarray], tuple[Tensor, Tensor, Tensor]]
    block: int
    encoder_hash: str = ""
    weight: float = 0.5

    def observe(self, net: Callable[..., Tensor]) -> ObservedNetwork:
        return ObservedNetwork(net, self.block)

    def loss(self, projector: Callable[[Tensor], Tensor], net: ObservedNetwork, patches: Tensor) -> Tensor:
        """Return the weighted alignment loss as a float32 scalar. Call `net` first, because the loss uses its stored tokens.

        Args:
            projector: `self.projector`, wrapped by accelerate.
            patches: Result of `encode` for the images that `fetch` returned together with the latents that `net` received.
        """
        return self.weight * alignment_loss(projector(net.tokens), patches, net.ids_keep)


def alignment_loss(projected: Tensor, patches: Tensor, ids_keep: Tensor | None = None) -> Tensor:
    """Return minus the cosine similarity of tokens and patches, averaged over samples and positions, as a float32 scalar.

    Args:
        projected: Projected tokens, (B, N, E), or (B, K, E) at the positions `ids_keep`, (B, K) int64.
        patches: Patch tokens of the encoder, (B, N, E).

    Raises:
        ValueError: If the shapes differ, because they could broadcast silently.
    """
    if ids_keep is not None:
        patches = TokenRouter.start_route(patches, ids_keep)
    if projected.shape != patches.shape:
        raise ValueError(f"tokens {tuple(projected.shape)} and patches {tuple(patches.shape)} differ in shape")
    return -F.cosine_similarity(projected.float(), patches.float(), dim=-1).mean()


def build(cfg: TrainConfig, dataset: LatentDataset, accelerator: Accelerator) -> Alignment:
    """Build the `Alignment` for alignment=repa and load the encoder onto this process's device.

    Raises:
        UserError: If the network has too few blocks, if the shards contain no images, if the encoder cannot be loaded, or if the
            encoder name does not contain the patch size.
    """
    repa, sizes = cfg.alignment, cfg.model.sizes
    if repa.block > sizes["depth"]:
        raise UserError(f"alignment.block={repa.block} is beyond the {sizes['depth']} blocks of {cfg.model.backbone}")
    if not dataset.has_images:
        raise UserError(
            f"alignment=repa needs the images of the latents, and {dataset.path} holds none; encode them again with "
            "`prepare_latents.py encode ... keep_images=jpeg`"
        )
    encoder_patch = re.search(r"_patch(\d+)_", repa.encoder)
    if encoder_patch is None:
        raise UserError(f"alignment.encoder={repa.encoder} does not give its patch size (_patch<N>_) in its name")
    size = int(encoder_patch[1]) * (cfg.data.input_size // sizes["patch_size"])  # image size with one patch per network token
    with prefix_errors("alignment.encoder, alignment.encoder_weights"):
        encoder = Encoder(
            repa.encoder,
            repa.encoder_weights,
            size,
            accelerator.device,
            preprocessing="repa",
            precision=cfg.train.precision,
        )
    with torch.random.fork_rng(devices=[]):  # because building the encoder may have consumed random numbers
        torch.manual_seed(cfg.seed)
        projector = Projector(sizes["width"], repa.projector_width, encoder.width)
    return Alignment(
        projector,
        encode=lambda images: encoder.encode(images)[1],
        fetch=dataset.fetch_with_images,
        block=repa.block,
        encoder_hash=encoder.weights_hash,
        weight=repa.weight,
    )
