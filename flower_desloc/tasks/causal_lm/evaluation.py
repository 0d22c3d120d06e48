"""The cross entropy of held-out text, without the logits of all tokens at once.

With a vocabulary of 49,152 the logits of a sequence of 2048 tokens fill 400 MB, and their
log-softmax as much again. Here the blocks are computed for whole sequences, and the head for some
positions of all sequences at a time.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
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
    with _computed_once(_with_the_blocks(model)):
        for positions in torch.arange(length, device=inputs.device).split(size):
            part = model(input_ids=inputs, use_cache=False, logits_to_keep=positions)
            yield int(positions[0]), part.logits


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _with_the_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the parts of ``model`` that hold its blocks; it calls one or several of them."""
    names = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    parts = names[0].split(".")[:-1] if names else []
    return [model.get_submodule(".".join(parts[: n + 1])) for n in range(len(parts))]


@contextmanager
def _computed_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let every module return the output of its first call in all later ones.

    What the model does with it, such as a scale or a cap of the logits, stays the model's own.
    """
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(patch.object(module, "forward", _once(module.forward)))
        yield


def _once(forward: Callable[..., Any]) -> Callable[..., Any]:
    outputs: list[Any] = []

    @wraps(forward)
    def first(*args: Any, **kwargs: Any) -> Any:
        if not outputs:
            outputs.append(forward(*args, **kwargs))
        return outputs[0]

    return first


@contextmanager
def _activation_norms(model: nn.Module) -> Iterator[list[Tensor]]:
    norms: list[Tensor] = []

    def add(_block: nn.Module, _inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        norms.append(torch.linalg.vector_norm(hidden.float(), dim=-1).sum())

    blocks = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)), None)
    with ExitStack() as hooks:
        if blocks is not None:
            hooks.enter_context(blocks[-1].register_forward_hook(add))
        yield norms
