"""ADM's evaluation suite (arXiv 2105.05233) in PyTorch: FID, sFID, Inception Score, precision and recall; FD-DINOv2.

images.py       uint8 images from a folder or an .npz in ADM's format, in batches
inception.py    the detector Inception-v3; vit.py: DINOv2; classifiers.py: small networks for small images
features.py     features that a detector computes from images, and their cache on disk
metrics.py      numbers from features, as pure functions
suite.py        the table of metrics, and all metrics of two sets of features
results.py      evaluated points of fid.py: a file, tables, a plot
"""
