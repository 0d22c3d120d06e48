"""The words that every part uses."""

from collections.abc import Callable, Mapping

from torch import Tensor

Stream = Mapping[str, Tensor]
"""Tensors of one stream under their parameters' names."""

Streams = Mapping[str, Stream]
"""Streams by name: ``params``, or an optimizer state under PyTorch's name."""

Weight = float | Mapping[str, Mapping[str, float]]
"""A client's weight in all averages, or by stream that in the average of each tensor."""

Totals = Mapping[str, float]
"""Sums over held-out data, such as nats and tokens, which are added over clients."""

FromTotals = Callable[[Totals], Mapping[str, float]]
"""Returns metrics from totals, such as nats per token."""


class NotFiniteError(ValueError):
    """A stream holds NaN or infinity."""
