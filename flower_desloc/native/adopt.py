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
#include <math.h>
#include <pthread.h>
#include <stdint.h>

typedef struct { double lr, beta1, beta2, eps, clip, decay; } settings;
typedef struct {
    int64_t count; void **xguv; const int64_t *n; const settings *s; int64_t next;
} work;

/* Dealt to the threads as they go: half each would wait for whichever is held up. */
#define PIECE 65536 /* values */
static int64_t pieces(int64_t n) { return (n + PIECE - 1) / PIECE; }

#define STEP(NAME, T, SQRT)                                                                   \
static void NAME##_tensor(T *restrict x, const T *restrict g, T *restrict u, T *restrict v,   \
                          int64_t n, const settings *s) {                                     \
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
/* Pieces of the tensors, as long as there are any. */                                        \
static void *NAME##_pieces(void *argument) {                                                  \
    work *w = argument;                                                                       \
    int64_t k = 0, before = 0; /* a tensor, and the pieces of those before it */              \
    for (;;) {                                                                                \
        int64_t next = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);                     \
        while (k < w->count && next >= before + pieces(w->n[k])) before += pieces(w->n[k++]); \
        if (k == w->count) return 0;                                                          \
        int64_t from = (next - before) * PIECE, left = w->n[k] - from;                        \
        NAME##_tensor((T *)w->xguv[k] + from, (T *)w->xguv[k + w->count] + from,              \
                      (T *)w->xguv[k + 2 * w->count] + from,                                  \
                      (T *)w->xguv[k + 3 * w->count] + from, left < PIECE ? left : PIECE, w->s);\
    }                                                                                         \
}                                                                                             \
void NAME(int64_t count, void **xguv, const int64_t *n, settings s, int64_t threads) {        \
    int64_t started = 0;                                                                      \
    pthread_t thread[threads];                                                                \
    work w = {count, xguv, n, &s, 0};                                                         \
    for (; started < threads - 1; started++)                                                  \
        if (pthread_create(&thread[started], 0, NAME##_pieces, &w)) break;                    \
    NAME##_pieces(&w);                                                                        \
    while (started) pthread_join(thread[--started], 0);                                       \
}

STEP(adopt_float32, float, sqrtf)
STEP(adopt_float64, double, sqrt)
"""

_ELEMENTS_A_THREAD = 1 << 18
"""Fewer are done before another thread has started."""

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
