"""How often a classifier of the embedded digits sees in a sample the class that was asked for.

    python -m benchmarks.digits_agreement runs/digits_tread/generated/<folder>/samples_0-999.npz

The classifier is a support vector machine on the pixels (scikit-learn). Its own accuracy is printed beside the figure: five-fold
cross-validation on the shipped digits.
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC


def main(path: str) -> None:
    with np.load(path) as file:
        images, labels = file["arr_0"], file["labels"]
    digits = load_digits()
    classifier = SVC(gamma=0.001, C=10)
    accuracy = cross_val_score(classifier, digits.data, digits.target, cv=5).mean()
    classifier.fit(digits.data, digits.target)
    pixels = images[..., 0].reshape(len(images), -1) / 255 * 16
    agreement = (classifier.predict(pixels) == labels).mean()
    sys.stdout.write(f"agreement {agreement:.1%} of {len(labels)} samples (classifier's own accuracy {accuracy:.1%})\n")


if __name__ == "__main__":
    main(sys.argv[1])
