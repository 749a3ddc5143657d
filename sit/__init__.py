"""SiT (Ma et al., arXiv 2401.08740): linear path, velocity prediction, loss and samplers. Written from the paper's equations."""

from sit.diffusion import SiT

__all__ = ["SiT"]
