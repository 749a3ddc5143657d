"""ADM's evaluation suite (arXiv 2105.05233) in PyTorch: FID, sFID, Inception Score, precision and recall; FD-DINOv2.

images.py       uint8 images of a folder or of an .npz in ADM's format, in batches
features.py     features that a detector computes from images, and a cache for those of references
inception.py    the detector Inception-v3; vit.py: DINOv2; classifiers.py: small networks for small images
metrics.py      numbers from features, as pure functions
suite.py        the table of metrics, and all metrics of two sets of features
"""
