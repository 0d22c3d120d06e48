"""Tiny forward passes through a new model: that it is causal, and which terms its loss has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flower_desloc.app.config.errors import ConfigError, one_line
from flower_desloc.app.config.schema import Model
from flower_desloc.app.tasks.causal_lm.evaluation import cross_entropy
from flower_desloc.app.tasks.quiet import quiet

REMEDY = "state its whole architecture in model.config, as in a config.json of that type"
_LENGTH = 16
"""Tokens of each of two sequences."""
_SAME = 1e-3
"""Largest difference of equal logits, by their standard deviation."""


def probe(built: PreTrainedModel, model: Model, *, num_tokens: int, seq_len: int) -> None:
    """Check that ``built`` predicts each token from those before it.

    If the architecture adds terms to its loss, such as the balancing loss of a mixture of experts,
    its training loss has them from now on. Neither the model's tensors nor global random generators
    change. A model without values, on the meta device, is not checked.

    Raises ``ConfigError`` if its forward pass fails, if earlier logits depend on later tokens, or
    if its loss cannot be computed.
    """
    if any(p.is_meta for p in built.parameters()):
        return
    length = max(2, min(_LENGTH, seq_len))
    tokens = (torch.arange(2 * length) % num_tokens).view(2, length)
    with _unchanged(built):
        built.eval()
        with _failing(model, f"a forward pass of {length} tokens fails"):
            _check_causal(built, model, tokens, num_tokens)
        built.train()
        with _failing(model, "the loss of its own architecture fails"):
            _add_terms(built, model, tokens)


def training_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the predicted tokens, and the terms that ``probe`` found."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    if getattr(model, "_loss_function", None) is _loss_function:
        own: Tensor = model(input_ids=inputs, labels=targets, use_cache=False).loss
        return own
    return _loss_function(model(input_ids=inputs, use_cache=False).logits, targets)


def _loss_function(logits: Tensor, labels: Tensor, *_: Any, **__: Any) -> Tensor:
    """The cross entropy, in the place of transformers' own, to which a model adds its terms."""
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def _check_causal(built: nn.Module, model: Model, tokens: Tensor, num_tokens: int) -> None:
    kept = tokens.shape[1] // 2
    changed = tokens.clone()
    changed[:, kept:] = (changed[:, kept:] + 1) % num_tokens
    first, second = (
        built(input_ids=each, use_cache=False).logits[:, :kept].float()
        for each in (tokens, changed)
    )
    if (first - second).abs().max() > _SAME * first.std():
        raise ConfigError(
            f"model.type={model.type}: it is not causal: its logits depend on later tokens, which "
            "are to be predicted; choose a causal language model, such as llama"
        )


def _add_terms(built: PreTrainedModel, model: Model, tokens: Tensor) -> None:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
    loss, values, logits = _own_loss(built, lambda logits, _: logits.new_zeros(()), inputs, targets)
    whole = _loss_function(logits, targets)
    if values:
        if loss == 0:
            return
        _, values, _ = _own_loss(built, _loss_function, inputs, targets)
    else:  # some compute their cross entropy themselves, with or without a shift
        shifted = _loss_function(logits[:, :-1], targets[:, 1:])
        if any(torch.isclose(loss, each, rtol=1e-5) for each in (whole, shifted)):
            return
    if not any(torch.isclose(each, whole, rtol=1e-5) for each in values):
        raise ConfigError(
            f"model.type={model.type}: it adds terms to its loss that this task cannot compute; "
            "choose another architecture, or a task of your own"
        )
    built.loss_function = _loss_function


def _own_loss(
    built: PreTrainedModel,
    function: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the loss of ``built``, what ``function`` gave as its cross entropy, and the logits."""
    values: list[Tensor] = []

    def recorded(
        logits: Tensor, labels: Any, *_: Any, shift_labels: Any = None, **__: Any
    ) -> Tensor:
        values.append(function(logits, shift_labels if labels is None else labels))
        return values[-1].clone()  # terms are added in place

    built.loss_function = recorded
    try:
        outputs = built(input_ids=inputs, labels=targets, use_cache=False)
    finally:
        del built._loss_function
    return outputs.loss, values, outputs.logits


@contextmanager
def _failing(model: Model, what: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {one_line(error)[:200]}"
        remedy = "correct model.config" if model.config else REMEDY
        raise ConfigError(f"model.type={model.type}: {what} ({why}); {remedy}") from error


@contextmanager
def _unchanged(built: nn.Module) -> Iterator[None]:
    """Restore the mode and the buffers of ``built``, and the random generator of the CPU."""
    was_training = built.training
    buffers = {name: buffer.clone() for name, buffer in built.named_buffers()}
    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            yield
        finally:
            built.train(was_training)
            for name, buffer in built.named_buffers():
                if name in buffers:
                    buffer.copy_(buffers[name])
