"""Metrics as pure functions of features.

Shapes use N for samples, D for features and C for classes. Frechet distances and scores are computed in float64, and nearest
neighbours in the precision of the features. All features must be finite, which `features.extract_features` checks.
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
    """Mean and covariance of a Gaussian that is fitted to features."""

    mu: Tensor  # mean [D], float64
    sigma: Tensor  # covariance [D, D], float64, normalised by N - 1 like np.cov

    def to(self, device: torch.device | str) -> Statistics:
        return Statistics(self.mu.to(device), self.sigma.to(device))

    @functools.cached_property
    def root(self) -> Tensor:
        """Return A [D, D] such that sigma = A A^T. The result is cached because many sample sets share one reference."""
        values, vectors = torch.linalg.eigh(_symmetric(self.sigma))
        return vectors * values.clamp(min=0).sqrt()  # eigenvalues are negative only because of rounding errors


def statistics_of(features: Tensor, chunk_size: int = 4096) -> Statistics:
    """Compute the statistics of features [N, D] in float64. Chunks are converted one at a time to save memory.

    The mean is subtracted first, because summing x x^T loses precision if the mean is much larger than the standard deviation.
    """
    chunks = features.split(chunk_size)
    mean = sum(chunk.double().sum(0) for chunk in chunks) / len(features)
    scatter = mean.new_zeros(len(mean), len(mean))  # sum of (x - mean)(x - mean)^T
    for chunk in chunks:
        x = chunk.double() - mean
        scatter.addmm_(x.T, x)
    return Statistics(mean, _symmetric(scatter / (len(features) - 1)))


def frechet_distance(first: Statistics | Tensor, second: Statistics | Tensor) -> float:
    """Compute the Frechet distance between two Gaussians, which are given as statistics or fitted to samples [N, D] with N > 1.

    The distance is |mu1 - mu2|^2 + tr sigma1 + tr sigma2 - 2 tr (sigma1 sigma2)^(1/2) (Heusel et al. 2017, eq. 6).
    The trace of the square root is computed without complex numbers or the square root of a non-symmetric matrix:

    - If sigma1 = A A^T, then sigma1 sigma2 has the same eigenvalues as the symmetric matrix A^T sigma2 A.
    - If there are N <= D samples, the covariance is singular, and rounding errors in its zero eigenvalues would change the
      distance by about 1e-5. Let X1 be the centred samples divided by sqrt(N - 1). Then sigma1 sigma2 and X1 sigma2 X1^T have the
      same nonzero eigenvalues.
    - If both arguments have N <= D samples, the trace of the square root is the nuclear norm of X1 X2^T.
    """
    first, second = (statistics_of(x) if isinstance(x, Tensor) and len(x) > x.shape[1] else x for x in (first, second))
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        (mu1, x1), (mu2, x2) = _centred(first), _centred(second)
        return _combine(mu1, x1.square().sum(), mu2, x2.square().sum(), torch.linalg.svdvals(x1 @ x2.T).sum())
    samples, gaussian = (first, second) if isinstance(first, Tensor) else (second, first)
    if isinstance(samples, Tensor):
        mu, x = _centred(samples)
        roots = _roots_of_eigenvalues(x @ gaussian.sigma @ x.T)[1:]  # centring makes the smallest eigenvalue zero
        return _combine(mu, x.square().sum(), gaussian.mu, gaussian.sigma.trace(), roots.sum())
    roots = _roots_of_eigenvalues(first.root.T @ second.sigma @ first.root)
    return _combine(first.mu, first.sigma.trace(), second.mu, second.sigma.trace(), roots.sum())


def _combine(mu1: Tensor, trace1: Tensor, mu2: Tensor, trace2: Tensor, trace_of_root: Tensor) -> float:
    distance = (mu1 - mu2).square().sum() + trace1 + trace2 - 2 * trace_of_root
    return max(distance.item(), 0.0)  # rounding errors can make the distance slightly negative


def _symmetric(x: Tensor) -> Tensor:
    return (x + x.T) / 2


def _roots_of_eigenvalues(x: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(_symmetric(x)).clamp(min=0).sqrt()


def _centred(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [D] and a matrix X [N, D] such that X^T X is the covariance. Both are float64."""
    x = features.double()
    mu = x.mean(0)
    return mu, (x - mu) / (len(x) - 1) ** 0.5


def inception_score(logits: Tensor, split_size: int = 5000) -> float:
    """Compute the Inception Score, exp(mean KL(p(y|x) || p(y))), averaged over consecutive splits (Salimans et al. 2016).

    As in ADM's evaluator, a shorter last split has the same weight as the other splits.
    `logits` [N, C] must be in sample order, and Inception logits must omit the bias of the last layer.
    """
    scores = []
    for split in logits.split(split_size):
        log_p = split.double().log_softmax(dim=1)  # remains finite where softmax underflows to zero
        p = log_p.exp()
        marginal = p.mean(0)
        entropy_of_marginal = -torch.special.xlogy(marginal, marginal).sum()
        mean_entropy = -(p * log_p).sum(1).mean()
        scores.append((entropy_of_marginal - mean_entropy).exp())
    return torch.stack(scores).mean().item()


def class_agreement(logits: Tensor, labels: Tensor) -> float:
    """Compute the fraction of samples whose most likely class (logits [N, C]) is the requested class (labels [N], int64).

    Raises UserError if a label is outside the range 0 to C - 1.
    """
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= logits.shape[1]:
        raise UserError(f"labels run from {low} to {high}, outside the detector's {logits.shape[1]} classes")
    return (logits.argmax(dim=1) == labels.to(logits.device)).sum().item() / len(labels)


def standard_error(jackknife: Sequence[float]) -> float:
    """Compute a metric's standard error with the delete-a-group jackknife. Each value leaves out one of several equal groups."""
    return statistics.pstdev(jackknife) * (len(jackknife) - 1) ** 0.5


NUM_NEIGHBOURS = 3  # number of neighbours in improved precision and recall (Kynkaanniemi et al. 2019)


def precision_recall(
    reference: Tensor, samples: Tensor, tile_size: int = 2048, reference_squared_radii: Tensor | None = None
) -> tuple[float, float]:
    """Compute precision, the fraction of samples [N, D] in a ball around any reference [M, D], and recall, with the sets swapped.

    Each ball extends to its point's third nearest neighbour in the same set, inclusive. Distances are computed in tiles, so only
    a centred copy of the features and a few tiles have to fit into memory. Features must be float32 or float64, with N, M > 3.

    `reference_squared_radii` is the result of `squared_radii_of_reference`, if an earlier call has computed it.
    """
    if reference_squared_radii is None:
        reference_squared_radii = squared_radii_of_reference(reference, tile_size)
    # |a|^2 + |b|^2 - 2ab loses precision if the norms are much larger than the distance. Centring reduces the norms.
    centre = reference.mean(0)
    reference, samples = reference - centre, samples - centre
    with full_float32():
        sample_squared_radii = squared_radii(samples, tile_size)
        sample_inside = torch.zeros(len(samples), dtype=torch.bool, device=samples.device)
        reference_inside = torch.zeros(len(reference), dtype=torch.bool, device=samples.device)
        for rows in _tiles(reference, tile_size):
            for columns in _tiles(samples, tile_size):
                distances = _squared_distances(reference[rows], samples[columns])
                sample_inside[columns] |= (distances <= reference_squared_radii[rows, None]).any(dim=0)
                reference_inside[rows] |= (distances <= sample_squared_radii[None, columns]).any(dim=1)
    # Divide Python integers, because MPS does not support float64.
    return sample_inside.sum().item() / len(samples), reference_inside.sum().item() / len(reference)


def squared_radii_of_reference(reference: Tensor, tile_size: int = 2048) -> Tensor:
    """Compute the squared radii [M] of the balls around the reference points [M, D] for `precision_recall`."""
    with full_float32():
        return squared_radii(reference - reference.mean(0), tile_size)


def squared_radii(x: Tensor, tile_size: int) -> Tensor:
    """Compute the squared distance from each point in x [N, D] to its third nearest neighbour. Returns a tensor [N].

    Each is at least the rounding error of a zero distance, so that the ball around a point contains its duplicates.
    """
    nearest = x.new_full((len(x), NUM_NEIGHBOURS), float("inf"))

    def keep_smallest(rows: slice, distances: Tensor) -> None:
        nearest[rows] = torch.cat([nearest[rows], distances], dim=1).topk(NUM_NEIGHBOURS, dim=1, largest=False).values

    # Distances are symmetric, so each tile provides neighbours for its rows and for its columns.
    for rows, columns in combinations_with_replacement(_tiles(x, tile_size), 2):
        distances = _squared_distances(x[rows], x[columns])
        if rows == columns:
            distances.fill_diagonal_(float("inf"))  # a point is not its own neighbour
        else:
            keep_smallest(columns, distances.T)
        keep_smallest(rows, distances)
    rounding = 32 * torch.finfo(x.dtype).eps * x.square().sum(1)
    return nearest[:, -1].maximum(rounding)  # topk sorts in ascending order


def _tiles(x: Tensor, size: int) -> list[slice]:
    return [slice(i, i + size) for i in range(0, len(x), size)]


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute the squared distances [n, m] between the rows of a [n, D] and the rows of b [m, D]."""
    products = torch.addmm(b.square().sum(1), a, b.T, alpha=-2)
    return products.add_(a.square().sum(1, keepdim=True)).clamp_(min=0)


@contextlib.contextmanager
def full_float32():
    """Disable TF32 for float32 matrix products and convolutions. By default, PyTorch allows TF32 in cuDNN convolutions.

    TF32's 10-bit mantissa cannot distinguish close neighbours, and features computed in TF32 would depend on the GPU.
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
