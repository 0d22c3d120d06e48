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
#define LANES 32

typedef struct work {
    /* Do what is to be done with a piece, and tell what was found. */
    void (*take)(const struct work *, const piece *, double *found);
    dealer deck; /* of the tensors in a, in b, and in each of the sides */
    float **a, **b, **sides;
    int64_t many; /* sides */
    const float *shares;
    int64_t begun; /* whether there is something in a to move */
    double *found;
    int64_t each; /* numbers found of a piece */
} work;

static void take_pieces(void *argument) {
    work *w = argument;
    for (piece p = {0}; deal(&w->deck, &p);) w->take(w, &p, w->found + p.number * w->each);
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
    for (int64_t k = 0; k < w->deck.count; k++)
        for (int64_t left = pieces(w->deck.n[k]); left; left--, found += w->each) sum += *found;
    return sum;
}
/* Ask for what lies so many values after p: by itself the processor looks less far ahead. */
#define AHEAD 2048
#define ASK(p)                                                                                \
    __builtin_prefetch((p) + first + AHEAD);                                                  \
    __builtin_prefetch((p) + first + AHEAD + LANES / 2);
/* STATEMENT for the value at i of the n of one and of other, in the lane l. */
#define LANE_BY_LANE(one, other, STATEMENT)                                                   \
    int64_t whole = n - n % LANES;                                                            \
    for (int64_t first = 0; first < whole; first += LANES) {                                  \
        ASK(one) ASK(other)                                                                   \
        for (int l = 0; l < LANES; l++) { int64_t i = first + l; STATEMENT }                  \
    }                                                                                         \
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
        side, m, float x = side[i]; float d = x - m[i];
        m[i] += share * d; squares[l] += (double)d * d; WIDEN(r))
    *ends = r;
    return sum_of(squares);
}
/* Where there is no m to move: the first side. Return 0, or NaN if not all of it is finite. */
static double begin_with(float *restrict m, const float *restrict side, int64_t n, range *ends) {
    double zeros[LANES] = {0};
    range r = *ends;
    LANE_BY_LANE(side, m, float x = side[i]; m[i] = x; zeros[l] += x - x; WIDEN(r))
    *ends = r;
    return sum_of(zeros);
}
static void fold_piece(const work *w, const piece *p, double *found) {
    float *m = w->a[p->k] + p->begin;
    range ends = from_value(w->sides[p->k][p->begin]);
    for (int64_t j = 0; j < w->many; j++) {
        const float *side = w->sides[j * w->deck.count + p->k] + p->begin;
        found[2 + j] = j || w->begun ? move(m, side, p->n, w->shares[j], &ends)
                                     : begin_with(m, side, p->n, &ends);
    }
    tell_ends(&ends, found);
}
/* Into a, which holds something if it is begun; result holds the ends of all sides, and then the
   squares of each way. */
void fold(int64_t count, float **a, float **sides, const int64_t *n, int64_t many,
          const float *shares, int64_t begun, double *result, double *found, int64_t threads) {
    work w = {fold_piece, {count, n, 0}, a, 0, sides, many, shares, begun, found, 2 + many};
    on_threads(take_pieces, &w, threads);
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

static void norms_piece(const work *w, const piece *p, double *found) {
    const float *restrict a = w->a[p->k] + p->begin;
    const float *restrict b = w->b ? w->b[p->k] + p->begin : 0;
    int64_t n = p->n;
    double squares[LANES] = {0}, ways[LANES] = {0};
    if (b) {
        LANE_BY_LANE(a, b, float d = a[i] - b[i]; squares[l] += (double)a[i] * a[i];
                     ways[l] += (double)d * d;)
    } else {
        LANE_BY_LANE(a, a, squares[l] += (double)a[i] * a[i];)
    }
    found[0] = sum_of(squares), found[1] = sum_of(ways);
}
/* |a|^2 and, unless b is null, |a - b|^2. */
void norms(int64_t count, float **a, float **b, const int64_t *n, double *result, double *found,
           int64_t threads) {
    work w = {norms_piece, {count, n, 0}, a, b, 0, 0, 0, 0, found, 2};
    on_threads(take_pieces, &w, threads);
    result[0] = total(&w, 0), result[1] = total(&w, 1);
}

static void ends_piece(const work *w, const piece *p, double *found) {
    const float *restrict a = w->a[p->k] + p->begin;
    int64_t n = p->n;
    range ends = from_value(a[0]);
    int strange[LANES] = {0}; /* x - x is 0 of finite values alone */
    LANE_BY_LANE(a, a, float x = a[i]; WIDEN(ends) strange[l] |= x - x != 0;)
    tell_ends(&ends, found);
    for (int l = 0; l < LANES; l++)
        if (strange[l]) found[0] = found[1] = NAN;
}
/* Of every tensor, which has values, in result. */
void ends(int64_t count, float **a, const int64_t *n, double (*result)[2],
          double *found, int64_t threads) {
    work w = {ends_piece, {count, n, 0}, a, 0, 0, 0, 0, 0, found, 2};
    on_threads(take_pieces, &w, threads);
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
