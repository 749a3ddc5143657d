"""ADM's evaluation suite (arXiv 2105.05233) in PyTorch: FID, sFID, Inception Score, precision and recall. Also FD-DINOv2.

images.py       uint8 images from a folder or an .npz in ADM's format, in batches
inception.py    the detector Inception-v3
vit.py          the detector DINOv2, and encoders for alignment
classifiers.py  detectors for small images
features.py     features that a detector computes from images, and their cache on disk
metrics.py      pure functions from features to numbers
suite.py        the table of metrics, and their computation for two sets of features
results.py      results of fid.py in a file, tables and a plot
"""
