"""ADM's evaluation suite (arXiv 2105.05233) in PyTorch: FID, sFID, Inception Score, precision and recall; FD-DINOv2.

images.py       uint8 images of a folder, in batches; npz.py: of ADM's file format
features.py     what a detector makes of images
inception.py    the detector Inception-v3; vit.py: DINOv2; classifiers.py: small networks for small pictures
reference.py    the features of a reference, cached beside it
metrics.py      numbers from features, as pure functions
suite.py        the table of metrics, and all metrics of two sets of features
"""
