"""Images that come with scikit-learn: 1797 handwritten digits of 8 x 8 pixels."""

import numpy as np

from flower_desloc.tasks.image_classification.examples import Examples


def digits() -> Examples:
    """Return the digits; their sixteen shades of grey are spread over a byte."""
    # Imported when asked for: it takes a second.
    from sklearn.datasets import load_digits

    bunch = load_digits()
    shades = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    return Examples(shades, [str(name) for name in bunch.target])
