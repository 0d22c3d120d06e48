"""The words that every part uses."""

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

Stream = Mapping[str, Tensor]
"""Tensors of one stream under their parameters' names."""

Streams = Mapping[str, Stream]
"""Streams by name: ``params``, or an optimizer state under PyTorch's name."""

Shares = Mapping[str, Mapping[str, float]]
"""By stream and tensor the part of its weight that a client has in the tensor's average."""

Totals = Mapping[str, float]
"""Sums over held-out data, such as nats and tokens, which are added over clients."""

FromTotals = Callable[[Totals], Mapping[str, float]]
"""Returns metrics from totals, such as nats per token."""


MOST: Final = 10**15
"""Larger numbers of examples or bytes are not exact as floats."""
