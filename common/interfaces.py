"""What the trainer and the samplers expect of parts that they do not import, because a key selects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:  # configs/schema.py imports this module, and torch takes seconds to import
    import numpy as np
    from torch import Tensor, nn

    from common.randomness import SampleRandom


class Sampler(Protocol):
    """A solver that generates latents, such as `edm.sampler.HeunSampler`. Its attributes are the keys of the group sampler."""

    num_steps: int

    def evaluated_levels(self) -> list[float]:
        """Return the noise levels at which the sampler calls the denoiser, in descending order."""
        ...

    def __call__(self, denoiser: Callable[..., Tensor], noise: Tensor, y: Tensor, random: SampleRandom | None = None) -> Tensor:
        """Generate latents from standard normal noise, both (B, C, H, W)."""
        ...


class Diffusion(Protocol):
    """A noise process, its denoiser and its loss, such as `edm.EDM`. Its attributes are the keys of the group diffusion.

    Attributes:
        name: The choice diffusion=<name>.
        Sampler: Class of the sampler.
    """

    name: str
    Sampler: ClassVar[type]

    def denoise(self, net: Callable[..., Tensor], x: Tensor, level: Tensor | float, y: Tensor, /, **net_kwargs: Any) -> Tensor:
        """Return the estimate of the clean latents (see `edm.EDM.denoise`)."""
        ...

    # Diffusions that only sample have none of the following methods.

    def draw_levels(self, random: SampleRandom) -> tuple[Tensor, Tensor]:
        """Draw the noise levels (B,) of a training step. Also return their quantiles (B,) in [0, 1], to sort losses by level."""
        ...

    def levels_at(self, quantiles: Tensor) -> Tensor:
        """Return the noise levels (B,) at quantiles (B,) of the distribution that training draws from."""
        ...

    def loss(
        self,
        net: Callable[..., Tensor],
        x: Tensor,
        y: Tensor,
        random: SampleRandom,
        levels: Tensor | None = None,
        **net_kwargs: Any,
    ) -> Tensor:
        """Return the loss of each sample, (B,), at noise levels (B,), which it draws itself if None (see `edm.EDM.loss`)."""
        ...


class TokenAlignment(Protocol):
    """A second loss, which aligns the network's tokens with those of an encoder (see `extras.alignment.Alignment`)."""

    projector: nn.Module
    encoder_hash: str

    def fetch(self, items: np.ndarray, flips: np.ndarray, /) -> tuple[Tensor, Tensor, Tensor]:
        """Return stored latents, labels, and images for `encode`, given item indices, int64 [b], and flips, bool [b]."""
        ...

    def encode(self, images: Tensor, /) -> Tensor:
        """Return the encoder's patch tokens, (B, N, E)."""
        ...

    def observe(self, net: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the network, so that `loss` sees its tokens."""
        ...

    def loss(self, projector: Callable[[Tensor], Tensor], net: Callable[..., Tensor], patches: Tensor) -> Tensor:
        """Return the weighted loss, a scalar. `net` is the wrapped network, which was called with the latents of `patches`."""
        ...


class WeightAverage(Protocol):
    """An average of a run's weights that no checkpoint stores (see `extras.posthoc_ema.Average`). `hash` identifies its files."""

    length: float
    hash: str

    def load(self) -> dict[str, Tensor]:
        """Return the averaged weights by name."""
        ...
