"""ADM's evaluation suite (arXiv 2105.05233) in PyTorch: FID, sFID, Inception Score, precision and recall.

images.py     uint8 images from a folder or an .npz, in batches
npz.py        ADM's file format
detector.py   images -> features, by Inception-v3; digits_detector.py: by a small classifier, for the embedded digits;
              small_detector.py: by one that is trained for a set of small pictures; dinov2_detector.py: by DINOv2
encoders.py   images -> tokens, by a frozen vision transformer of timm
features.py   what a detector returns, and keeping it for a whole set of images
statistics.py mean and covariance in one pass
metrics.py    the numbers, as pure functions
suite.py      two sets of features -> all numbers, under their names
reference.py  the features of a file, cached beside it
"""
