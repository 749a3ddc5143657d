"""EDM (Karras et al., arXiv 2206.00364): preconditioning, loss and the Heun sampler. Written from the paper's equations."""

from edm.diffusion import EDM

__all__ = ["EDM"]
