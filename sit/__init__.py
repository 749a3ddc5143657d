"""SiT's linear path, velocity prediction, loss and samplers (Ma et al., arXiv 2401.08740), based on the paper's equations."""

from sit.diffusion import SiT as SiT
