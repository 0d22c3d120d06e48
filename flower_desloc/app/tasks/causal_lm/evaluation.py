"""The cross entropy of held-out text, without the logits of all tokens at once.

With a vocabulary of 49,152 the logits of a sequence of 2048 tokens fill 400 MB, and their
log-softmax as much again. Here the blocks are computed for whole sequences, and the head for some
positions of all sequences at a time.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

_VALUES = 2**24
"""Logits at a time, 67 MB in fp32."""


def measure(model: nn.Module, tokens: Tensor) -> tuple[float, float | None]:
    """Return the nats of all predicted tokens, and the sum of the norms of the last block's output.

    Norms are Euclidean, and None for a model without a list of blocks. Growing activations are an
    early sign of unstable training.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    nats, norms = [], None
    with _activation_norms(model) as passed:
        for first, logits in _logits(model, inputs):
            norms = norms or [*passed]  # some models may compute their blocks again
            nats.append(_nats(logits, targets[:, first : first + logits.shape[1]]))
    # Read at the end: every read waits for the device.
    total = torch.cat(nats).double().sum().item()
    return total, float(torch.stack(norms).sum()) if norms else None


def _nats(logits: Tensor, targets: Tensor) -> Tensor:
    """Return sums over parts of the tokens; in half precision they are computed in fp32."""
    size = max(1, _VALUES // logits.shape[-1])
    parts = zip(logits.flatten(0, 1).split(size), targets.flatten().split(size), strict=True)
    return torch.stack([cross_entropy(*part, "sum") for part in parts])


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross entropy, in fp32 for logits of half precision."""
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    return functional.cross_entropy(logits, targets, reduction=reduction)


def _logits(model: nn.Module, inputs: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits of consecutive positions of ``inputs``, with the first of these.

    All positions at once if they are few, or if the model has no argument ``logits_to_keep``.
    """
    (rows, length), size = inputs.shape, None
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        size = max(1, _VALUES // (rows * _vocabulary(model)))
    if size is None or size >= length:
        yield 0, model(input_ids=inputs, use_cache=False).logits
        return
    replay = _Replay()
    with replay.of(_with_the_blocks(model)):
        for positions in torch.arange(length, device=inputs.device).split(size):
            part = model(input_ids=inputs, use_cache=False, logits_to_keep=positions)
            replay.start()
            yield int(positions[0]), part.logits


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _with_the_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the parts of ``model`` that hold its blocks; it calls one or several of them."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    parts = names[0].split(".")[:-1] if names else []
    return [model.get_submodule(".".join(parts[: n + 1])) for n in range(len(parts))]


class _Replay:
    """The outputs of modules in a first pass through a model, repeated in all later ones.

    What the model does with them, such as a scale or a cap of the logits, stays the model's own.
    """

    def __init__(self) -> None:
        self._outputs: list[Any] = []
        self._inside = False
        self._repeated: Iterator[Any] | None = None

    @contextmanager
    def of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Record ``modules``, which may hold one another, from now on."""
        with ExitStack() as patches:
            for module in modules:
                recorded = self._recorded(module.forward)
                patches.enter_context(patch.object(module, "forward", recorded))
            yield

    def start(self) -> None:
        """Compute nothing from the next pass on."""
        self._repeated = cycle(self._outputs)

    def _recorded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._repeated is not None:
                return next(self._repeated)
            if self._inside:  # its result is part of an outer module's
                return forward(*args, **kwargs)
            self._inside = True
            try:
                self._outputs.append(forward(*args, **kwargs))
            finally:
                self._inside = False
            return self._outputs[-1]

        return call


@contextmanager
def _activation_norms(model: nn.Module) -> Iterator[list[Tensor]]:
    norms: list[Tensor] = []

    def add(_block: nn.Module, _inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, (tuple, list)) else output
        norms.append(torch.linalg.vector_norm(hidden.float(), dim=-1).sum())

    blocks = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)), None)
    with ExitStack() as hooks:
        if blocks is not None:
            hooks.enter_context(blocks[-1].register_forward_hook(add))
        yield norms
