"""EDM's preconditioning, loss and Heun sampler (Karras et al., arXiv 2206.00364), based on the paper's equations."""

from edm.diffusion import EDM as EDM
