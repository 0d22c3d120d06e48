"""The server's mean and its squares as one pass over memory each, in fp32."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from flower_desloc.native.compiled import compiled

# Squares of fp32 are exact in double, never infinite, and added by so many lanes at once.
_SOURCE = r"""
#include <stdint.h>
#define LANES 32

/* DIFFERENCE makes d of the value at i; all of n values, lane by lane. */
#define SQUARES(DIFFERENCE)                                                                   \
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
    return sum;

double approach(float *restrict mean, const float *restrict x, int64_t n, double share) {
    const float s = share;
    SQUARES(float d = x[i] - mean[i]; mean[i] += s * d;)
}
double distance(const float *restrict x, const float *restrict origin, int64_t n) {
    SQUARES(float d = x[i] - origin[i];)
}
double square(const float *restrict x, int64_t n) {
    SQUARES(float d = x[i];)
}
"""


def approach_in_one_pass(mean: Tensor, tensor: Tensor, share: float) -> float | None:
    """Move ``mean`` that share of the way to ``tensor``, in place; return the way's square.

    This and :func:`squared_distance_in_one_pass` do nothing and return None unless all tensors are
    contiguous, fp32, of one shape and on the CPU, and there is a compiler.
    """
    return _call("approach", mean, tensor, more=[ctypes.c_double(share)])


def squared_distance_in_one_pass(tensor: Tensor, origin: Tensor | None) -> float | None:
    """Return ``|tensor - origin|^2``, from zero unless there is an origin."""
    if origin is None:
        return _call("square", tensor)
    return _call("distance", tensor, origin)


def _call(name: str, *tensors: Tensor, more: Sequence[ctypes.c_double] = ()) -> float | None:
    shape = tensors[0].shape
    for t in tensors:
        if not (t.dtype is torch.float32 and t.is_cpu and t.is_contiguous() and t.shape == shape):
            return None
    if (library := compiled("the mean over clients", _SOURCE)) is None:
        return None
    act = getattr(library, name)
    act.restype = ctypes.c_double
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    result: float = act(*addresses, ctypes.c_int64(tensors[0].numel()), *more)
    return result
