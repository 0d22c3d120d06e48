"""The gaps of DES-LOC to Local, as `python benchmarks/ladder.py draw` writes them."""

from typing import Final

# The fields of evidence.MeasuredGap.
GAPS: Final = (
    ("adam", "iid", 41120, 256, 3072, 3, 0.662, 0.108, 1.216),
    ("adam", "iid", 213440, 1024, 2048, 3, 1.844, -0.384, 4.071),
    ("adam", "by_domain", 41120, 256, 512, 5, 0.120, -0.564, 0.803),
    ("adam", "by_domain", 41120, 1024, 512, 5, 0.154, -0.743, 1.052),
    ("adam", "by_domain", 41120, 4096, 512, 3, -0.530, -2.417, 1.356),
    ("adopt", "by_domain", 41120, 256, 512, 5, 0.023, -0.949, 0.995),
    ("adam", "iid", 41120, 256, 512, 7, 0.404, 0.279, 0.529),
    ("adam", "iid", 41120, 1024, 512, 5, 0.325, 0.110, 0.540),
    ("adam", "iid", 41120, 4096, 512, 7, 0.003, -0.405, 0.411),
    ("adopt", "iid", 41120, 256, 512, 7, -0.035, -0.540, 0.469),
    ("adam", "iid", 213440, 1024, 512, 4, 1.985, 1.447, 2.523),
)
