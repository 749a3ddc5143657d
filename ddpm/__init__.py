"""DDPM (Ho et al., arXiv 2006.11239) as DiT's published weights need it: noise prediction, learned variance, ancestral sampling."""

from ddpm.diffusion import DDPM

__all__ = ["DDPM"]
