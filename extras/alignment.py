"""Representation alignment (REPA, arXiv 2410.06940): tokens inside the network learn to resemble those of a frozen encoder.

A projector maps the tokens after one block to the width of the encoder's patch tokens. The loss gains

    weight x mean over tokens of -cos(projected token, patch token of the same position)

Only training needs the projector: the network has the same architecture as without alignment.

Shapes: B batch, N tokens, K tokens inside a route, D width of the network, E width of the encoder's tokens.
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

from common.errors import UserError
from configs.schema import TrainConfig
from evaluations.vit import Encoder
from latents.shards import LatentDataset
from routing_module import TokenRouter


class Projector(nn.Sequential):
    """(B, K, width) -> (B, K, out_width), token by token: three linear layers with SiLU between them (REPA, appendix).

    Initialised like DiT's linear layers: Xavier-uniform weights, zero biases.
    """

    def __init__(self, width: int, hidden: int, out_width: int):
        layers = [nn.Linear(width, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, out_width)]
        super().__init__(layers[0], nn.SiLU(), layers[1], nn.SiLU(), layers[2])
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


class ObservedNetwork:
    """A network that stores the tokens after block number `block`, from 1, at each call. A diffusion calls it like a network.

    Attributes:
        tokens: (B, N, D), or inside a route the kept tokens, (B, K, D).
        ids_keep: positions of the kept tokens, (B, K) int64. None outside a route.
    """

    def __init__(self, net: Callable[..., Tensor], block: int):
        self.net, self.block = net, block

    def __call__(self, x: Tensor, t: Tensor, y: Tensor, **inputs) -> Tensor:
        return self.net(x, t, y, observe=self._store, **inputs)

    def _store(self, block: int, tokens: Tensor, ids_keep: Tensor | None) -> None:
        if block == self.block:
            self.tokens, self.ids_keep = tokens, ids_keep


@dataclass(frozen=True)
class Alignment:
    """The parts that a trainer needs to align its network.

    Attributes:
        projector: trained with the network.
        encode: images from `fetch` -> the encoder's patch tokens (B, N, E), without a gradient.
        fetch: (indices, flips) of items -> stored latents, labels, and images for `encode`.
        block: number of the block whose tokens are aligned, from 1.
        encoder: hash of the encoder's weights.
        weight: weight of the alignment in the loss.
    """

    projector: nn.Module
    encode: Callable[[Tensor], Tensor]
    fetch: Callable[[np.ndarray, np.ndarray], tuple[Tensor, Tensor, Tensor]]
    block: int
    encoder: str = ""
    weight: float = 0.5

    def observe(self, net: Callable[..., Tensor]) -> ObservedNetwork:
        return ObservedNetwork(net, self.block)

    def loss(self, projector: Callable[[Tensor], Tensor], net: ObservedNetwork, shown: Tensor) -> Tensor:
        """() float32, weighted, after a call of `net`.

        Args:
            projector: `self.projector` as wrapped by accelerate.
            shown: the images that `fetch` returned with the latents of that call.
        """
        return self.weight * alignment_loss(projector(net.tokens), self.encode(shown), net.ids_keep)


def alignment_loss(projected: Tensor, patches: Tensor, ids_keep: Tensor | None = None) -> Tensor:
    """() float32: minus the cosine between tokens and the patches of their positions, averaged over both axes.

    Args:
        projected: (B, N, E), or (B, K, E) at the positions ids_keep (B, K) int64.
        patches: (B, N, E).

    Raises:
        ValueError: other shapes, which would broadcast.
    """
    if ids_keep is not None:
        patches = TokenRouter.start_route(patches, ids_keep)
    if projected.shape != patches.shape:
        raise ValueError(f"tokens {tuple(projected.shape)} and patches {tuple(patches.shape)} differ in shape")
    return -F.cosine_similarity(projected.float(), patches.float(), dim=-1).mean()


def build(cfg: TrainConfig, dataset: LatentDataset, accelerator: Accelerator) -> Alignment:
    """Build the `Alignment` for alignment=repa, with the encoder on this process's device.

    Raises:
        UserError: the network has no such block, the shards hold no images, the encoder cannot be loaded, or its name does not
            give the size of its patches.
    """
    settings = cfg.alignment
    sizes = cfg.model.sizes
    if settings.block > sizes["depth"]:
        raise UserError(f"alignment.block={settings.block} is beyond the {sizes['depth']} blocks of {cfg.model.backbone}")
    if not dataset.has_images:
        raise UserError(
            f"alignment=repa needs the images of the latents, and {dataset.path} holds none; encode them again with "
            "`prepare_latents.py encode ... keep_images=jpeg`"
        )
    encoder_patch = re.search(r"_patch(\d+)_", settings.encoder)
    if encoder_patch is None:
        raise UserError(f"alignment.encoder={settings.encoder} does not give its patch size (_patch<N>_) in its name")
    size = int(encoder_patch[1]) * (cfg.data.input_size // sizes["patch_size"])  # as many patches as the network has tokens
    try:
        encoder = Encoder(
            settings.encoder, settings.weights, size, accelerator.device, recipe="repa", precision=cfg.train.precision
        )
    except UserError as e:
        raise UserError(f"alignment.encoder, alignment.weights: {e}") from e
    with torch.random.fork_rng(devices=[]):  # building the encoder may have used random numbers
        torch.manual_seed(2**32 + cfg.seed)  # above every run's seed
        projector = Projector(sizes["width"], settings.projector_width, encoder.width)
    return Alignment(
        projector,
        encode=lambda images: encoder.encode(images)[1],
        fetch=dataset.fetch_with_images,
        block=settings.block,
        encoder=encoder.weights_hash,
        weight=settings.weight,
    )
