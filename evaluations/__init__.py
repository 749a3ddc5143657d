"""PyTorch version of ADM's evaluation suite (FID, sFID, Inception Score, precision and recall; arXiv 2105.05233) and FD-DINOv2.

images.py       Reads batches of uint8 images from a folder or an .npz file in ADM's format.
inception.py    Implements the Inception-v3 detector.
vit.py          Implements the DINOv2 detector and the encoders for alignment.
classifiers.py  Implements and trains detectors for small images.
features.py     Extracts image features with a detector, and caches reference features on disk.
metrics.py      Computes metrics from features with pure functions.
suite.py        Lists all metrics, and computes them for two sets of features.
record.py       Defines the record of an evaluation, and the file that keeps the records of a run.
tables.py       Writes tables and a plot of records.
"""
