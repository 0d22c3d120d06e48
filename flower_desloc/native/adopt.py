"""ADOPT's step as one pass over memory.

PyTorch's operations make eight passes where one would do, and its own fused kernels know Adam and
SGD alone. The result is the same bits whatever the number of threads.
"""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from flower_desloc.native.compiled import compiled

_SOURCE = r"""
typedef struct { double lr, beta1, beta2, eps, clip, decay; } settings;
typedef struct { dealer pieces; void **xguv; const settings *s; } work;

#define STEP(NAME, T, SQRT)                                                                   \
static void NAME##_piece(T *restrict x, const T *restrict g, T *restrict u, T *restrict v,    \
                         int64_t n, const settings *s) {                                      \
    const T lr = s->lr, w1 = 1 - s->beta1, beta2 = s->beta2, w2 = 1 - s->beta2,               \
            eps = s->eps, clip = s->clip, decay = s->decay;                                   \
    for (int64_t i = 0; i < n; i++) {                                                         \
        T d = SQRT(v[i]);                                                                     \
        d = d < eps ? eps : d; /* NaN stays NaN, here and below, as in PyTorch's clamp */     \
        T m = g[i] / d;                                                                       \
        m = m < -clip ? -clip : m;                                                            \
        m = m > clip ? clip : m;                                                              \
        m = u[i] + w1 * (m - u[i]);                                                           \
        u[i] = m;                                                                             \
        x[i] = decay * x[i] - lr * m;                                                         \
        v[i] = beta2 * v[i] + w2 * (g[i] * g[i]);                                             \
    }                                                                                         \
}                                                                                             \
static void NAME##_pieces(void *argument) {                                                   \
    work *w = argument;                                                                       \
    int64_t count = w->pieces.count;                                                          \
    for (piece p = {0}; deal(&w->pieces, &p);) {                                              \
        T *x = w->xguv[p.k], *g = w->xguv[p.k + count], *u = w->xguv[p.k + 2 * count],        \
          *v = w->xguv[p.k + 3 * count];                                                      \
        NAME##_piece(x + p.begin, g + p.begin, u + p.begin, v + p.begin, p.n, w->s);          \
    }                                                                                         \
}                                                                                             \
void NAME(int64_t count, void **xguv, const int64_t *n, settings s, int64_t threads) {        \
    work w = {{count, n, 0}, xguv, &s};                                                       \
    on_threads(NAME##_pieces, &w, threads);                                                   \
}

STEP(adopt_float32, float, sqrtf)
STEP(adopt_float64, double, sqrt)
"""

_ELEMENTS_A_THREAD = 1 << 18
"""Fewer are done before another thread has woken."""

_NAMES = {torch.float32: "adopt_float32", torch.float64: "adopt_float64"}


class _Settings(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "eps", "clip", "decay")
    ]


def adopt_step(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    us: Sequence[Tensor],
    vs: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    clip: float | None,
    decay: float = 1.0,
) -> bool:
    """Take ADOPT's step in place, after ``xs`` are multiplied by ``decay``; return whether it was.

    Nothing is done, and False returned, unless all tensors are contiguous, of one type, float32 or
    float64, on the CPU, and there is a compiler.
    """
    dtype = xs[0].dtype
    if (name := _NAMES.get(dtype)) is None:
        return False
    addresses = []
    for t in chain(xs, gs, us, vs):
        if not (t.dtype is dtype and t.is_cpu and t.is_contiguous()):
            return False
        addresses.append(t.data_ptr())
    library = compiled("ADOPT's step", _SOURCE)
    if library is None:
        return False
    count = len(xs)
    sizes = [x.numel() for x in xs]
    getattr(library, name)(
        ctypes.c_int64(count),
        (ctypes.c_void_p * (4 * count))(*addresses),
        (ctypes.c_int64 * count)(*sizes),
        _Settings(lr, *betas, eps, math.inf if clip is None else clip, decay),
        ctypes.c_int64(max(1, min(torch.get_num_threads(), sum(sizes) // _ELEMENTS_A_THREAD))),
    )
    return True
