"""Where tensors lie, so that a message can have them as they are, and memory is used again.

To copy a model only to have it sent takes as long as to send it, and memory that is new costs more
than the copy. So a client's due tensors, and a server's means, lie where their Array will have
them and are handed over. Nobody writes to them as long as there is the Array: they are given other
memory before.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from flower_desloc.flower.arrays import DESCRIPTIONS, is_handed_over, is_in_room, room


def house(tensors: Collection[Tensor], model: Iterable[Tensor], *, due: bool) -> None:
    """Have ``tensors``, whose values are about to be written, lie where nobody else has them.

    Those that are ``due`` are given memory that can be handed over, if they are on the CPU and
    nothing else of the ``model``, all its tensors, is known to lie where they do.
    """
    full = [t for t in tensors if t.nbytes > 0]
    lent = any(map(is_handed_over, full))
    if lent or (due and not all(map(is_in_room, full)) and _can_move(full, model)):
        for tensor, new in zip(full, room([(t.dtype, t.shape) for t in full]), strict=True):
            tensor.data = new


def _can_move(tensors: Collection[Tensor], model: Iterable[Tensor]) -> bool:
    if not all(
        t.is_cpu
        and t.is_contiguous()
        and t.dtype in DESCRIPTIONS
        and t.untyped_storage().nbytes() == t.nbytes  # or it is a view of something larger
        and not t.is_shared()
        for t in tensors
    ):
        return False
    places = Counter(t.data_ptr() for t in {id(t): t for t in (*tensors, *model)}.values())
    return all(places[t.data_ptr()] == 1 for t in tensors)


class Rooms:
    """What :func:`~flower_desloc.flower.arrays.room` gives, again once nobody has what lay there.

    A server has the last average while it makes the next: two rooms for a stream, in turns.
    """

    def __init__(self) -> None:
        self._free: list[list[Tensor]] = []
        self._given: list[list[Tensor]] = []

    def take_back(self) -> None:
        """Take for free what was given, unless it was handed over and is still there.

        Nothing else may be using it any more. What was free and not wanted since is let go.
        """
        given, self._free, self._given = self._given, [], []
        for tensors in given:
            # Asked once: another thread may let go of a message at any moment.
            lent = any(map(is_handed_over, tensors))
            (self._given if lent else self._free).append(tensors)

    def __call__(self, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
        """Return tensors of those types and shapes, with whatever values."""
        fitting = (
            i for i, free in enumerate(self._free) if [(t.dtype, t.shape) for t in free] == kinds
        )
        index = next(fitting, None)
        tensors = room(kinds) if index is None else self._free.pop(index)
        self._given.append(tensors)
        return tensors
