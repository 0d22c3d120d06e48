"""C for this process alone, compiled when first needed; or none, where there is no compiler."""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC", "-pthread",
)  # fmt: skip


@cache
def compiled(what: str, source: str) -> ctypes.CDLL | None:
    """Return the library made of ``source``; or None, and warn that ``what`` is slower, if none is.

    Not kept for other processes, as it takes a fraction of a second: a kept one could be another
    machine's, and would have to be trusted.
    """
    try:
        return _library(source)
    except (OSError, subprocess.SubprocessError) as error:
        said = " ".join(str(getattr(error, "stderr", None) or error).split())[:200]
        logging.getLogger(__name__).warning(
            "%s runs as PyTorch's operations, several times slower on the CPU: %s", what, said
        )
        return None


def _library(source: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="desloc-") as folder:
        file, library = Path(folder, "a.c"), Path(folder, "a.so")
        file.write_text(source, encoding="utf-8")
        command = [*_compiler(), *_FLAGS, str(file), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)  # noqa: S603
        return ctypes.CDLL(str(library))


def _compiler() -> list[str]:
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise OSError("there is no C compiler; install gcc or clang, or name one in CC")
