"""One pass over memory for each thing that is done with whole streams, in fp32.

A pass waits for memory, and two threads wait for less: it is cut into pieces, and as many threads
as PyTorch has take the next one each. What a pass returns is added in the order of the pieces, so
it is the same bits whatever the number of threads.

Every function does nothing and returns None unless all tensors are contiguous, fp32 and on the
CPU, each pair of one shape, and there is a compiler.
"""

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from flower_desloc.native.compiled import compiled

# Squares of fp32 are exact in double, never infinite, and added by so many lanes at once.
_SOURCE = r"""
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#define LANES 32
#define PIECE 65536 /* values */

typedef struct work {
    void (*piece)(struct work *, float *restrict, const float *restrict, int64_t, double *);
    int64_t count; float **a; float **b; const int64_t *n; float share; double (*found)[2];
    int64_t next;
} work;

static int64_t pieces(int64_t n) { return (n + PIECE - 1) / PIECE; }

static void *take_pieces(void *argument) {
    work *w = argument;
    int64_t k = 0, before = 0; /* a tensor, and the pieces of those before it */
    for (;;) {
        int64_t next = __atomic_fetch_add(&w->next, 1, __ATOMIC_RELAXED);
        while (k < w->count && next >= before + pieces(w->n[k])) before += pieces(w->n[k++]);
        if (k == w->count) return 0;
        int64_t begin = (next - before) * PIECE, left = w->n[k] - begin;
        w->piece(w, w->a[k] + begin, w->b[k] + begin, left < PIECE ? left : PIECE,
                 w->found[next]);
    }
}
static void pass(work *w, int64_t threads) {
    pthread_t thread[threads];
    int64_t started = 0;
    for (; started < threads - 1; started++)
        if (pthread_create(&thread[started], 0, take_pieces, w)) break;
    take_pieces(w);
    while (started) pthread_join(thread[--started], 0);
}

/* DIFFERENCE makes d of the value at i; all of n values, lane by lane. */
#define SQUARES(NAME, DIFFERENCE)                                                             \
static void NAME##_piece(work *w, float *restrict a, const float *restrict b, int64_t n,      \
                         double *found) {                                                     \
    const float share = w->share;                                                             \
    double lanes[LANES] = {0}, sum = 0;                                                       \
    int64_t whole = n - n % LANES;                                                            \
    for (int64_t first = 0; first < whole; first += LANES)                                    \
        for (int k = 0; k < LANES; k++) {                                                     \
            int64_t i = first + k;                                                            \
            DIFFERENCE                                                                        \
            lanes[k] += (double)d * d;                                                        \
        }                                                                                     \
    for (int64_t i = whole; i < n; i++) {                                                     \
        DIFFERENCE                                                                            \
        lanes[i - whole] += (double)d * d;                                                    \
    }                                                                                         \
    for (int k = 0; k < LANES; k++) sum += lanes[k];                                          \
    *found = sum;                                                                             \
    (void)share, (void)b;                                                                     \
}                                                                                             \
void NAME(int64_t count, float **a, float **b, const int64_t *n, float share, double *sum,    \
          double (*found)[2], int64_t threads) {                                              \
    work w = {NAME##_piece, count, a, b, n, share, found, 0};                                 \
    pass(&w, threads);                                                                        \
    *sum = 0;                                                                                 \
    for (int64_t k = 0; k < count; k++)                                                       \
        for (int64_t left = pieces(n[k]); left; left--) *sum += **found++;                    \
}
SQUARES(approach, float d = b[i] - a[i]; a[i] += share * d;)
SQUARES(distance, float d = a[i] - b[i];)
SQUARES(square, float d = a[i];)

static void ends_piece(work *w, float *restrict a, const float *restrict b, int64_t n,
                       double *found) {
    float low[LANES], high[LANES];
    int strange[LANES] = {0}; /* x - x is 0 of finite values alone */
    for (int k = 0; k < LANES; k++) low[k] = high[k] = a[0];
    for (int64_t first = 0; first < n; first += LANES) {
        int here = n - first < LANES ? n - first : LANES;
        for (int k = 0; k < here; k++) {
            float x = a[first + k];
            low[k] = x < low[k] ? x : low[k];
            high[k] = x > high[k] ? x : high[k];
            strange[k] |= x - x != 0;
        }
    }
    found[0] = low[0], found[1] = high[0];
    for (int k = 0; k < LANES; k++) {
        if (low[k] < found[0]) found[0] = low[k];
        if (high[k] > found[1]) found[1] = high[k];
    }
    for (int k = 0; k < LANES; k++)
        if (strange[k]) found[0] = found[1] = NAN;
    (void)w, (void)b;
}
/* Of every tensor, which has values, in result. */
void ends(int64_t count, float **a, const int64_t *n, double (*result)[2],
          double (*found)[2], int64_t threads) {
    work w = {ends_piece, count, a, a, n, 0, found, 0};
    pass(&w, threads);
    for (int64_t k = 0; k < count; k++) {
        double low = found[0][0], high = found[0][1];
        for (int64_t left = pieces(n[k]); left; left--, found++) {
            if (low > (*found)[0] || isnan((*found)[0])) low = (*found)[0];
            if (high < (*found)[1] || isnan((*found)[1])) high = (*found)[1];
        }
        result[k][0] = low, result[k][1] = high;
    }
}
"""

_PIECE = 1 << 16
"""Values, as in C."""


def approach(means: Sequence[Tensor], tensors: Sequence[Tensor], share: float) -> float | None:
    """Move ``means`` that share of the way to ``tensors``, in place; return the way's square."""
    return _squares("approach", means, tensors, share)


def squared_distance(tensors: Sequence[Tensor], origins: Sequence[Tensor] | None) -> float | None:
    """Return ``|tensors - origins|^2``, from zero unless there are origins."""
    if origins is None:
        return _squares("square", tensors, tensors)
    return _squares("distance", tensors, origins)


def ends(tensors: Sequence[Tensor]) -> list[tuple[float, float]] | None:
    """Return the least and the greatest value of every tensor, NaN where not all are finite.

    None has no values.
    """
    result = torch.empty(len(tensors), 2, dtype=torch.float64)
    if not _done("ends", [tensors], _at(result)):
        return None
    return [(low, high) for low, high in result.tolist()]


def _squares(
    name: str, a: Sequence[Tensor], b: Sequence[Tensor], share: float = 0.0
) -> float | None:
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return None
    result = torch.empty(1, dtype=torch.float64)
    if not _done(name, [a, b], ctypes.c_float(share), _at(result)):
        return None
    return result.item()


def _done(name: str, sides: Sequence[Sequence[Tensor]], *more: object) -> bool:
    for t in chain(*sides):
        if not (t.dtype is torch.float32 and t.is_cpu and t.is_contiguous()):
            return False
    if (library := compiled("a pass over a stream", _SOURCE)) is None:
        return False
    sizes = [t.numel() for t in sides[0]]
    pieces = sum(-(-size // _PIECE) for size in sizes)
    found = torch.empty(pieces, 2, dtype=torch.float64)
    count = len(sizes)
    getattr(library, name)(
        ctypes.c_int64(count),
        *((ctypes.c_void_p * count)(*(t.data_ptr() for t in side)) for side in sides),
        (ctypes.c_int64 * count)(*sizes),
        *more,
        _at(found),
        ctypes.c_int64(max(1, min(torch.get_num_threads(), pieces))),
    )
    return True


def _at(room: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(room.data_ptr())
