"""The gaps of presets to Local, as `python benchmarks/ladder.py draw` writes them."""

from typing import Final

# The fields of evidence.MeasuredGap.
GAPS: Final = (
    ("desloc_adam", "adam", "iid", 41120, 256, 3072, 3, 0.662, 0.108, 1.216),
    ("desloc_adam", "adam", "iid", 213440, 1024, 2048, 3, 1.844, -0.384, 4.071),
    ("lean", "adam", "iid", 213440, 1024, 2048, 3, 0.090, -0.749, 0.928),
    ("desloc_adam", "adam", "by_domain", 41120, 256, 512, 5, 0.120, -0.564, 0.803),
    ("lean", "adam", "by_domain", 41120, 256, 512, 5, -0.120, -0.388, 0.148),
    ("desloc_adam", "adam", "by_domain", 41120, 1024, 512, 5, 0.154, -0.743, 1.052),
    ("desloc_adam", "adam", "by_domain", 41120, 4096, 512, 3, -0.530, -2.417, 1.356),
    ("desloc_adopt", "adopt", "by_domain", 41120, 256, 512, 5, 0.023, -0.949, 0.995),
    ("desloc_adam", "adam", "iid", 41120, 256, 512, 7, 0.404, 0.279, 0.529),
    ("lean", "adam", "iid", 41120, 256, 512, 5, -0.058, -0.194, 0.078),
    ("desloc_adam", "adam", "iid", 41120, 1024, 512, 5, 0.325, 0.110, 0.540),
    ("desloc_adam", "adam", "iid", 41120, 4096, 512, 7, 0.003, -0.405, 0.411),
    ("lean", "adam", "iid", 41120, 4096, 512, 3, -0.339, -1.101, 0.422),
    ("desloc_adopt", "adopt", "iid", 41120, 256, 512, 7, -0.035, -0.540, 0.469),
    ("desloc_adam", "adam", "by_domain", 213440, 1024, 512, 3, 0.145, -0.960, 1.250),
    ("lean", "adam", "by_domain", 213440, 1024, 512, 3, 0.429, -0.146, 1.004),
    ("desloc_adam", "adam", "by_domain", 1082496, 1024, 512, 3, 0.254, -0.182, 0.689),
    ("lean", "adam", "by_domain", 1082496, 1024, 512, 3, 0.168, -0.593, 0.930),
    ("desloc_adam", "adam", "iid", 213440, 1024, 512, 4, 1.985, 1.447, 2.523),
    ("lean", "adam", "iid", 213440, 1024, 512, 7, 0.133, -0.388, 0.654),
    ("desloc_adam", "adam", "iid", 213440, 4096, 512, 3, 0.346, -0.828, 1.521),
    ("lean", "adam", "iid", 213440, 4096, 512, 3, -0.262, -1.062, 0.538),
    ("desloc_adam", "adam", "iid", 1082496, 1024, 512, 3, 1.392, 0.161, 2.623),
    ("lean", "adam", "iid", 1082496, 1024, 512, 3, 0.012, -0.291, 0.316),
    ("desloc_adopt", "adopt", "iid", 213440, 1024, 512, 3, 1.439, 0.761, 2.118),
    ("lean", "adopt", "iid", 213440, 1024, 512, 3, 0.368, -0.916, 1.652),
)
