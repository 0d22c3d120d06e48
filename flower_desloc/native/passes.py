"""One pass over memory for each thing that is done with whole streams, in fp32.

A pass waits for memory, and two threads wait for less: it is cut into pieces, and as many threads
as PyTorch has take the next one each. What a pass returns is added in the order of the pieces, so
it is the same bits whatever the number of threads.

Every pass does nothing and returns None unless all tensors are contiguous, fp32 and on the CPU, of
one shape at each place, and there is a compiler.
"""

import ctypes
import math
from collections.abc import Iterable, Sequence
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
    /* Do what is to be done with n values from begin of tensor k, and tell what was found. */
    void (*piece)(const struct work *, int64_t k, int64_t begin, int64_t n, double *found);
    int64_t count; /* of tensors, in a, in b, and in each of the sides */
    float **a, **b, **sides;
    const int64_t *n;
    int64_t many; /* sides */
    const float *shares;
    int64_t begun; /* whether there is something in a to move */
    double *found;
    int64_t each; /* numbers found of a piece */
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
        w->piece(w, k, begin, left < PIECE ? left : PIECE, w->found + next * w->each);
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

static double sum_of(const double *lanes) {
    double sum = 0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}
/* Add up, piece by piece, the number at that place of what was found. */
static double total(const work *w, int64_t place) {
    double sum = 0;
    const double *found = w->found + place;
    for (int64_t k = 0; k < w->count; k++)
        for (int64_t left = pieces(w->n[k]); left; left--, found += w->each) sum += *found;
    return sum;
}
/* STATEMENT for the value at i of n, in the lane l. */
#define LANE_BY_LANE(STATEMENT)                                                               \
    int64_t whole = n - n % LANES;                                                            \
    for (int64_t first = 0; first < whole; first += LANES)                                    \
        for (int l = 0; l < LANES; l++) { int64_t i = first + l; STATEMENT }                  \
    for (int64_t i = whole; i < n; i++) { int l = i - whole; STATEMENT }
#define WIDEN(r)                                                                              \
    r.low[l] = x < r.low[l] ? x : r.low[l]; r.high[l] = x > r.high[l] ? x : r.high[l];

typedef struct { float low[LANES], high[LANES]; } range;
static range from_value(float x) {
    range r;
    for (int l = 0; l < LANES; l++) r.low[l] = r.high[l] = x;
    return r;
}
static void tell_ends(const range *r, double *found) {
    found[0] = r->low[0], found[1] = r->high[0];
    for (int l = 0; l < LANES; l++) {
        if (r->low[l] < found[0]) found[0] = r->low[l];
        if (r->high[l] > found[1]) found[1] = r->high[l];
    }
}

/* Move m that share of the way to the side; return the sum of the way's squares. */
static double move(float *restrict m, const float *restrict side, int64_t n, float share,
                   range *ends) {
    double squares[LANES] = {0};
    range r = *ends;
    LANE_BY_LANE(
        float x = side[i]; float d = x - m[i];
        m[i] += share * d; squares[l] += (double)d * d; WIDEN(r))
    *ends = r;
    return sum_of(squares);
}
/* Where there is no m to move: the first side. Return 0, or NaN if not all of it is finite. */
static double begin_with(float *restrict m, const float *restrict side, int64_t n, range *ends) {
    double zeros[LANES] = {0};
    range r = *ends;
    LANE_BY_LANE(float x = side[i]; m[i] = x; zeros[l] += x - x; WIDEN(r))
    *ends = r;
    return sum_of(zeros);
}
static void fold_piece(const work *w, int64_t k, int64_t begin, int64_t n, double *found) {
    float *m = w->a[k] + begin;
    range ends = from_value(w->sides[k][begin]);
    for (int64_t j = 0; j < w->many; j++) {
        const float *side = w->sides[j * w->count + k] + begin;
        found[2 + j] = j || w->begun ? move(m, side, n, w->shares[j], &ends)
                                 : begin_with(m, side, n, &ends);
    }
    tell_ends(&ends, found);
}
/* Into a, which holds something if it is begun; result holds the ends of all sides, and then the
   squares of each way. */
void fold(int64_t count, float **a, float **sides, const int64_t *n, int64_t many,
          const float *shares, int64_t begun, double *result, double *found, int64_t threads) {
    work w = {fold_piece, count, a, 0, sides, n, many, shares, begun, found, 2 + many, 0};
    pass(&w, threads);
    int64_t all = 0;
    for (int64_t k = 0; k < count; k++) all += pieces(n[k]);
    result[0] = INFINITY, result[1] = -INFINITY;
    for (int64_t p = 0; p < all; p++) {
        const double *of = found + p * w.each;
        if (of[0] < result[0]) result[0] = of[0];
        if (of[1] > result[1]) result[1] = of[1];
    }
    for (int64_t j = 0; j < many; j++) result[2 + j] = total(&w, 2 + j);
}

static void norms_piece(const work *w, int64_t k, int64_t begin, int64_t n, double *found) {
    const float *restrict a = w->a[k] + begin, *restrict b = w->b ? w->b[k] + begin : 0;
    double squares[LANES] = {0}, ways[LANES] = {0};
    if (b) {
        LANE_BY_LANE(float d = a[i] - b[i]; squares[l] += (double)a[i] * a[i];
                     ways[l] += (double)d * d;)
    } else {
        LANE_BY_LANE(squares[l] += (double)a[i] * a[i];)
    }
    found[0] = sum_of(squares), found[1] = sum_of(ways);
}
/* |a|^2 and, unless b is null, |a - b|^2. */
void norms(int64_t count, float **a, float **b, const int64_t *n, double *result, double *found,
           int64_t threads) {
    work w = {norms_piece, count, a, b, 0, n, 0, 0, 0, found, 2, 0};
    pass(&w, threads);
    result[0] = total(&w, 0), result[1] = total(&w, 1);
}

static void ends_piece(const work *w, int64_t k, int64_t begin, int64_t n, double *found) {
    const float *restrict a = w->a[k] + begin;
    range ends = from_value(a[0]);
    int strange[LANES] = {0}; /* x - x is 0 of finite values alone */
    LANE_BY_LANE(float x = a[i]; WIDEN(ends) strange[l] |= x - x != 0;)
    tell_ends(&ends, found);
    for (int l = 0; l < LANES; l++)
        if (strange[l]) found[0] = found[1] = NAN;
}
/* Of every tensor, which has values, in result. */
void ends(int64_t count, float **a, const int64_t *n, double (*result)[2],
          double *found, int64_t threads) {
    work w = {ends_piece, count, a, 0, 0, n, 0, 0, 0, found, 2, 0};
    pass(&w, threads);
    for (int64_t k = 0; k < count; k++) {
        double low = found[0], high = found[1];
        for (int64_t left = pieces(n[k]); left; left--, found += 2) {
            if (low > found[0] || isnan(found[0])) low = found[0];
            if (high < found[1] || isnan(found[1])) high = found[1];
        }
        result[k][0] = low, result[k][1] = high;
    }
}
"""

_PIECE = 1 << 16
"""Values, as in C."""


def fold(
    into: Sequence[Tensor],
    sides: Sequence[Sequence[Tensor]],
    shares: Sequence[float],
    *,
    begun: bool,
) -> tuple[tuple[float, float], list[float]] | None:
    """Move ``into`` to each side in turn, a share of the way.

    Unless it is ``begun`` there is nothing in it yet, and it becomes the first side. Return the
    least and the greatest value of all sides, NaN where a value or a way is not finite, and each
    way's square.
    """
    if not _alike([into, *sides]):
        return None
    each = 2 + len(sides)
    more = (
        ctypes.c_int64(len(sides)), (ctypes.c_float * len(shares))(*shares), ctypes.c_int64(begun)
    )  # fmt: skip
    low, high, *squares = _done("fold", [into, list(chain.from_iterable(sides))], more, each, each)
    if not all(map(math.isfinite, squares)):
        low = high = math.nan
    return (low, high), squares


def squared_norms(
    tensors: Sequence[Tensor], origins: Sequence[Tensor] | None
) -> tuple[float, float] | None:
    """Return ``|tensors|^2`` and ``|tensors - origins|^2``, which is 0 where there are none."""
    if not _alike([tensors, tensors if origins is None else origins]):
        return None
    norm, way = _done("norms", [tensors, origins], (), 2, 2)
    return norm, way


def ends(tensors: Sequence[Tensor]) -> list[tuple[float, float]] | None:
    """Return the least and the greatest value of every tensor, NaN where not all are finite.

    None has no values.
    """
    if not can_take(tensors):
        return None
    result = _done("ends", [tensors], (), 2 * len(tensors), 2)
    return list(zip(result[::2], result[1::2], strict=True))


def can_take(tensors: Iterable[Tensor]) -> bool:
    """Return whether C can: all contiguous, fp32 and on the CPU, and there is a compiler."""
    return (
        all(t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() for t in tensors)
        and _library() is not None
    )


def _alike(streams: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether C can take them, and they are of one shape at each place."""
    return can_take(chain.from_iterable(streams)) and all(
        t.shape == tensors[0].shape for tensors in zip(*streams, strict=True) for t in tensors
    )


def _done(
    name: str,
    streams: Sequence[Sequence[Tensor] | None],
    more: Sequence[object],
    numbers: int,
    each: int,
) -> list[float]:
    """Call ``name`` in C, which has so many results, and finds ``each`` numbers of a piece."""
    assert streams[0] is not None
    sizes = [t.numel() for t in streams[0]]
    pieces = sum(-(-size // _PIECE) for size in sizes)
    result = torch.empty(numbers, dtype=torch.float64, device="cpu")
    found = torch.empty(pieces, each, dtype=torch.float64, device="cpu")
    getattr(_library(), name)(
        ctypes.c_int64(len(sizes)),
        *map(_addresses, streams),
        (ctypes.c_int64 * len(sizes))(*sizes),
        *more,
        ctypes.c_void_p(result.data_ptr()),
        ctypes.c_void_p(found.data_ptr()),
        ctypes.c_int64(max(1, min(torch.get_num_threads(), pieces))),
    )
    told: list[float] = result.tolist()
    return told


def _library() -> ctypes.CDLL | None:
    return compiled("a pass over a stream", _SOURCE)


def _addresses(tensors: Sequence[Tensor] | None) -> object:
    if tensors is None:
        return None
    return (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
