"""Metrics as pure functions of features.

N samples, D features, C classes. Frechet distances and scores are computed in float64, the neighbour search in the precision
of the features. Features must be finite; `features.extract` checks this.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from common.errors import UserError


@dataclass(frozen=True)
class Statistics:
    """A Gaussian fitted to features."""

    mu: Tensor  # [D] float64, the mean
    sigma: Tensor  # [D, D] float64, the covariance with N - 1 in the denominator, like np.cov

    def to(self, device: torch.device | str) -> Statistics:
        return Statistics(self.mu.to(device), self.sigma.to(device))

    @functools.cached_property
    def root(self) -> Tensor:
        """Factor sigma as A A^T, A [D, D]. The result is cached, because many sample sets share a reference."""
        values, vectors = torch.linalg.eigh(_symmetric(self.sigma))
        return vectors * values.clamp(min=0).sqrt()  # only rounding makes eigenvalues negative


def statistics_of(features: Tensor, chunk_size: int = 4096) -> Statistics:
    """Compute statistics of features [N, D] in float64. Chunks are converted one at a time, to save memory.

    The mean is computed first: a sum of x x^T would lose digits if the mean is large compared with the standard deviation.
    """
    chunks = features.split(chunk_size)
    mean = sum(chunk.double().sum(0) for chunk in chunks) / len(features)
    scatter = mean.new_zeros(len(mean), len(mean))  # sum of (x - mean)(x - mean)^T
    for chunk in chunks:
        x = chunk.double() - mean
        scatter.addmm_(x.T, x)
    return Statistics(mean, _symmetric(scatter / (len(features) - 1)))


def frechet_distance(first: Statistics | Tensor, second: Statistics | Tensor) -> float:
    """Compute the Frechet distance between two Gaussians, given by statistics or fitted to samples [N, D], N > 1.

    It is |mu1 - mu2|^2 + tr sigma1 + tr sigma2 - 2 tr (sigma1 sigma2)^(1/2) (Heusel et al. 2017, eq. 6).
    The trace of the root is computed without the root of a non-symmetric matrix and without complex numbers:

    - With sigma1 = A A^T, sigma1 sigma2 has the eigenvalues of the symmetric A^T sigma2 A.
    - With N <= D samples the covariance is singular, and the rounding errors of its zero eigenvalues would change the result
      by about 1e-5. Let X1 be the centred samples divided by sqrt(N - 1). Then sigma1 sigma2 has the nonzero eigenvalues of
      X1 sigma2 X1^T.
    - If both sides are N <= D samples, the trace is the nuclear norm of X1 X2^T.
    """
    first, second = (statistics_of(x) if isinstance(x, Tensor) and len(x) > x.shape[1] else x for x in (first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        (mu1, x1), (mu2, x2) = _centred(first), _centred(second)
        return _combine(mu1, x1.square().sum(), mu2, x2.square().sum(), torch.linalg.svdvals(x1 @ x2.T).sum())
    samples, gaussian = (first, second) if isinstance(first, Tensor) else (second, first)
    if isinstance(samples, Tensor):
        mu, x = _centred(samples)
        roots = _roots_of_eigenvalues(x @ gaussian.sigma @ x.T)[1:]  # centring makes the smallest one zero
        return _combine(mu, x.square().sum(), gaussian.mu, gaussian.sigma.trace(), roots.sum())
    roots = _roots_of_eigenvalues(first.root.T @ second.sigma @ first.root)
    return _combine(first.mu, first.sigma.trace(), second.mu, second.sigma.trace(), roots.sum())


def _combine(mu1: Tensor, trace1: Tensor, mu2: Tensor, trace2: Tensor, trace_of_root: Tensor) -> float:
    distance = (mu1 - mu2).square().sum() + trace1 + trace2 - 2 * trace_of_root
    return max(distance.item(), 0.0)  # rounding can make the distance of equal distributions negative


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.T) / 2


def _roots_of_eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(_symmetric(x)).clamp(min=0).sqrt()


def _centred(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [D] and a matrix X [N, D] in float64, such that X^T X is the covariance."""
    x = features.double()
    mu = x.mean(0)
    return mu, (x - mu) / (len(x) - 1) ** 0.5


def inception_score(logits: Tensor, split_size: int = 5000) -> float:
    """Compute exp(mean over samples of KL(p(y|x) || p(y))), averaged over consecutive splits (Salimans et al. 2016).

    As in ADM's evaluator, a short last split counts like the others.
    logits: [N, C] in the order of the samples. Those of Inception must omit the bias of the last layer.
    """
    scores = []
    for split in logits.split(split_size):
        log_p = split.double().log_softmax(dim=1)  # finite where log(softmax) is not
        p = log_p.exp()
        marginal = p.mean(0)
        entropy_of_marginal = -torch.special.xlogy(marginal, marginal).sum()
        mean_entropy = -(p * log_p).sum(1).mean()
        scores.append((entropy_of_marginal - mean_entropy).exp())
    return torch.stack(scores).mean().item()


def class_agreement(logits: Tensor, labels: Tensor) -> float:
    """Compute the fraction of samples whose most likely class (logits [N, C]) is the requested class (labels [N] int64).

    Raises UserError for labels outside 0 .. C - 1.
    """
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise UserError(f"labels run from {low} to {high}, outside the detector's {logits.shape[1]} classes")
    return (logits.argmax(dim=1) == labels.to(logits.device)).sum().item() / len(labels)


def standard_error(jackknife: Sequence[float]) -> float:
    """Compute a metric's standard error by the delete-a-group jackknife, from its values without each of several equal groups."""
    return statistics.pstdev(jackknife) * (len(jackknife) - 1) ** 0.5


NUM_NEIGHBOURS = 3  # number of neighbours in improved precision and recall (Kynkaanniemi et al. 2019)


def precision_recall(reference: Tensor, samples: Tensor, tile_size: int = 2048) -> tuple[float, float]:
    """Compute precision and recall: the fraction of samples [N, D] in a ball around any reference [M, D], and vice versa.

    The ball of a point reaches to its third nearest neighbour in its own set, border included. Distances are computed in tiles,
    so memory only needs to hold a centred copy of the features and a few tiles. Features are float32 or float64; N, M > 3.
    """
    # |a|^2 + |b|^2 - 2ab loses digits if the norms are large compared with the distance. Centring makes the norms small.
    centre = reference.mean(0)
    reference, samples = reference - centre, samples - centre
    with full_float32():
        radii_reference, radii_samples = neighbour_radii(reference, tile_size), neighbour_radii(samples, tile_size)
        sample_inside = torch.zeros(len(samples), dtype=torch.bool, device=samples.device)
        reference_inside = torch.zeros(len(reference), dtype=torch.bool, device=samples.device)
        for rows in _tiles(reference, tile_size):
            for columns in _tiles(samples, tile_size):
                distances = _squared_distances(reference[rows], samples[columns])
                sample_inside[columns] |= (distances <= radii_reference[rows, None]).any(dim=0)
                reference_inside[rows] |= (distances <= radii_samples[None, columns]).any(dim=1)
    # Python divides, because MPS has no float64.
    return sample_inside.sum().item() / len(samples), reference_inside.sum().item() / len(reference)


def neighbour_radii(x: Tensor, tile_size: int) -> Tensor:
    """Compute squared distances [N] from the points x [N, D] to their third nearest neighbours.

    Distances are at least the rounding error of zero, so that the ball around a point contains duplicates of the point.
    """
    nearest = x.new_full((len(x), NUM_NEIGHBOURS), float("inf"))

    def keep_smallest(rows: slice, distances: Tensor) -> None:
        nearest[rows] = torch.cat([nearest[rows], distances], dim=1).topk(NUM_NEIGHBOURS, dim=1, largest=False).values

    # Distances are symmetric, so each tile gives neighbours of its rows and of its columns.
    for rows, columns in combinations_with_replacement(_tiles(x, tile_size), 2):
        distances = _squared_distances(x[rows], x[columns])
        if rows == columns:
            distances.fill_diagonal_(float("inf"))  # a point is not its own neighbour
        else:
            keep_smallest(columns, distances.T)
        keep_smallest(rows, distances)
    rounding = 32 * torch.finfo(x.dtype).eps * x.square().sum(1)
    return nearest[:, -1].maximum(rounding)  # topk sorts the smallest first


def _tiles(x: Tensor, size: int) -> list[slice]:
    return [slice(i, i + size) for i in range(0, len(x), size)]


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute squared distances [n, m] between a [n, D] and b [m, D]."""
    products = torch.addmm(b.square().sum(1), a, b.T, alpha=-2)
    return products.add_(a.square().sum(1, keepdim=True)).clamp_(min=0)


@contextlib.contextmanager
def full_float32():
    """Compute float32 products and convolutions in float32, even if the caller allows TF32 (cuDNN does by default).

    With TF32's ten bits of mantissa, close neighbours cannot be told apart, and features would depend on the GPU.
    """
    cudnn = torch.backends.cudnn
    matmul_before, cudnn_before = torch.get_float32_matmul_precision(), cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul_before)
        cudnn.allow_tf32 = cudnn_before
