"""Kinds of streams: what a stream holds, whatever its name."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from flower_desloc.core.schedule import BUFFERS, GRADIENTS, PARAMS


class Kind(StrEnum):
    """What a stream holds, which decides how it is coded, checked, bounded, planned and drawn."""

    PARAMS = "params"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    FIRST_MOMENT = "first moment"
    """A mean of gradients, or of gradients that were scaled or clipped."""
    SECOND_MOMENT = "second moment"
    """A mean of squares of gradients: never negative, and a divisor."""
    MAXIMUM = "maximum"
    """A maximum of second moments, as in AMSGrad."""
    OTHER = "other"

    @property
    def is_signed(self) -> bool:
        """Whether values may be negative."""
        return self not in (Kind.SECOND_MOMENT, Kind.MAXIMUM)


Kinds = Mapping[str, Kind]
"""Kinds of streams by their names."""

_BY_NAME: Final = {
    PARAMS: Kind.PARAMS,
    BUFFERS: Kind.BUFFERS,
    GRADIENTS: Kind.GRADIENTS,
    # As PyTorch names the states of its optimizers.
    "exp_avg": Kind.FIRST_MOMENT,
    "momentum_buffer": Kind.FIRST_MOMENT,
    "exp_avg_sq": Kind.SECOND_MOMENT,
    "max_exp_avg_sq": Kind.MAXIMUM,
}


def kind_of(name: str, kinds: Kinds = MappingProxyType({})) -> Kind:
    """Return the kind of a stream: that in ``kinds``, otherwise that of PyTorch's names.

    >>> str(kind_of("exp_avg_sq")), str(kind_of("v")), str(kind_of("v", {"v": Kind.MAXIMUM}))
    ('second moment', 'other', 'maximum')
    """
    return kinds.get(name) or _BY_NAME.get(name, Kind.OTHER)
