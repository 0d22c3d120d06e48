"""Differential privacy of the records at a site, by noisy sums of clipped gradients (DP-SGD).

``worker.private`` makes a client's ``Worker`` private: its optimizer then sees private gradients
only, so everything that follows from them, parameters and optimizer states included, may be sent
at any time without further cost. ``docs/explanation/privacy.md`` states the theorem, and what is
not protected.
"""

from importlib.util import find_spec

from flower_desloc.core.extras import to_install

for _name in ("cryptography", "filelock", "opacus"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(
            f"differential privacy needs {_name}, which is not installed: {to_install('privacy')}"
        )
