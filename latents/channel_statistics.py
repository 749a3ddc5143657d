"""Mean and standard deviation of latents."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from latents.shards import Normalized, mean_and_log_variance


@dataclass
class ChannelStatistics:
    """Mean and standard deviation of each latent channel, in the units of the stored latents; of `moments`, of their samples."""

    count: int = 0  # values seen of each channel
    sums: list[float] = field(default_factory=list)  # [C], of these values
    square_sums: list[float] = field(default_factory=list)

    def add(self, latents: Tensor, kind: str) -> None:
        """Take in latents [b, C or 2C, H, W]."""
        x, log_variance = mean_and_log_variance(latents.double(), kind)
        squares = x.square() + (0.0 if log_variance is None else log_variance.exp())
        count = x.shape[0] * x.shape[2] * x.shape[3]
        self.merge(ChannelStatistics(count, x.sum(dim=(0, 2, 3)).tolist(), squares.sum(dim=(0, 2, 3)).tolist()))

    def merge(self, other: ChannelStatistics) -> None:
        if other.count:
            zeros = [0.0] * len(other.sums)
            self.sums = [a + b for a, b in zip(self.sums or zeros, other.sums)]
            self.square_sums = [a + b for a, b in zip(self.square_sums or zeros, other.square_sums)]
            self.count += other.count

    def as_network_sees(self, how: Normalized) -> ChannelStatistics:
        """The statistics of the same latents after `normalize_latents`."""
        means, stds = (how.latents_mean or [0.0] * len(self.sums)), (how.latents_std or [1.0] * len(self.sums))
        factors = [how.scale_factor / std for std in stds]
        of_channels = list(zip(self.sums, self.square_sums, means, factors))
        return ChannelStatistics(
            self.count,
            [(total - self.count * mean) * factor for total, _, mean, factor in of_channels],
            [(square - 2 * mean * total + self.count * mean**2) * factor**2 for total, square, mean, factor in of_channels],
        )

    @property
    def mean(self) -> list[float]:
        return [total / self.count for total in self.sums]

    @property
    def std(self) -> list[float]:
        return [max(square / self.count - mean**2, 0.0) ** 0.5 for square, mean in zip(self.square_sums, self.mean)]

    @property
    def overall_std(self) -> float:
        """Standard deviation of all values of all channels together, as EDM's sigma_data and SD-VAE's 0.18215 mean it.

        EDM (section 5) scales the network's input by the standard deviation of the training data, one number for all its
        values. Latent diffusion's scale factor is 1 / std of all values of a batch of drawn latents (its `scale_by_std`).
        Within channels it would be less where the means of the channels differ, and the network sees these differences.
        """
        overall_mean = sum(self.mean) / len(self.mean)
        return max(sum(self.square_sums) / (self.count * len(self.sums)) - overall_mean**2, 0.0) ** 0.5
