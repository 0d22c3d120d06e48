"""C for this process alone, compiled when first needed; or none, where there is no compiler.

Its threads are PyTorch's own: others would fight for the cores with those, which spin for a while
after each operation, waiting for the next.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

_FLAGS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-shared", "-fPIC",
)  # fmt: skip

# Before every source. `parallel` is OpenMP's: it calls its first argument with its second in each
# of so many threads. Pieces are dealt to them as they go: half each would wait for whichever is
# held up.
_PRELUDE = r"""
#include <math.h>
#include <stdint.h>
#define PIECE 65536 /* values */

void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
static void on_threads(void (*what)(void *), void *with, int64_t threads) {
    if (parallel && threads > 1) parallel(what, with, threads, 0);
    else what(with);
}
static int64_t pieces(int64_t n) { return (n + PIECE - 1) / PIECE; }

/* Those of count tensors of n values each: which is next, and how many are before tensor k. */
typedef struct { int64_t count; const int64_t *n; int64_t next; } dealer;
typedef struct { int64_t number, k, before, begin, n; } piece;
static int deal(dealer *d, piece *p) {
    p->number = __atomic_fetch_add(&d->next, 1, __ATOMIC_RELAXED);
    while (p->k < d->count && p->number >= p->before + pieces(d->n[p->k]))
        p->before += pieces(d->n[p->k++]);
    if (p->k == d->count) return 0;
    p->begin = (p->number - p->before) * PIECE;
    int64_t left = d->n[p->k] - p->begin;
    p->n = left < PIECE ? left : PIECE;
    return 1;
}
"""


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
        file.write_text(_PRELUDE + source, encoding="utf-8")
        command = [*_compiler(), *_FLAGS, str(file), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)  # noqa: S603
        loaded = ctypes.CDLL(str(library))
    parallel = getattr(ctypes.CDLL(torch._C.__file__), "GOMP_parallel", None)
    if parallel is not None:  # a PyTorch without OpenMP has one thread
        place = ctypes.c_void_p.in_dll(loaded, "parallel")
        place.value = ctypes.cast(parallel, ctypes.c_void_p).value
        # OpenMP's threads are not in a child of a fork, which would wait for them.
        os.register_at_fork(after_in_child=lambda: setattr(place, "value", None))
    return loaded


def _compiler() -> list[str]:
    if named := shlex.split(os.environ.get("CC", "")):
        return named
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise OSError("there is no C compiler; install gcc or clang, or name one in CC")
