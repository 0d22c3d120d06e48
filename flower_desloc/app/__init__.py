"""The app: configuration, tasks, runs, reports, studies and the command line.

It needs the extra ``app``.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError(
        "flower_desloc.app and the command desloc need the extra app: "
        "pip install 'flower-desloc[app]'"
    )
