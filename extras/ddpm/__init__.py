"""DDPM (Ho et al., arXiv 2006.11239) for DiT's published weights: noise prediction, learned variance, ancestral sampling."""

from extras.ddpm.diffusion import DDPM
from extras.ddpm.sampler import AncestralSampler

__all__ = ["DDPM", "AncestralSampler"]
