"""The model of a run on the meta device: its shapes and types, without memory for its tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flower_desloc.app.config import Config
from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.units import TEXT
from flower_desloc.app.tasks import Task, build_task
from flower_desloc.core.exits import exits_as_errors


def meta_model(config: Config) -> nn.Module:
    """Return the model of a run; its parameters have no memory, unless it needs their values.

    If ``model.vocab_size`` is stated, no tokenizer is loaded and the network is not used.

    Raises ``ValueError`` if the model cannot be built.
    """
    try:
        with exits_as_errors(), _parameters_on_meta():
            return offline_task(config).build_model()
    except Exception:  # a model that needs values to be built
        with task_errors("the model cannot be built"):
            return offline_task(config).build_model()


def offline_task(config: Config) -> Task:
    """Return the task, not compiled, without a tokenizer if ``model.vocab_size`` is stated."""
    data, model = config.data, replace(config.model, compile=False)
    if config.task == TEXT and (model.vocab_size is not None or model.config):
        data = replace(data, tokenizer="bytes")
    return build_task(replace(config, model=model, data=data))


@contextmanager
def task_errors(what: str = "") -> Iterator[None]:
    """Raise every error in the block as ``ValueError``: the task and the optimizer may be anyone's.

    Except that a GPU is out of memory. ``what`` begins the message.
    """
    try:
        with exits_as_errors():
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        named = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        reason = one_line(named)
        raise ValueError(f"{what} ({reason})" if what else reason) from error


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put every parameter on the meta device as soon as a module has it.

    Under ``torch.device("meta")`` the data that a task reads and caches would also lose their
    values, for the run that follows in the same process.
    """
    known: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        del module, name
        # A tensor of a type of its own, as a quantised one, stays what it is.
        if type(param) is not nn.Parameter or param.is_meta:
            return param
        moved = param, nn.Parameter(on_meta(param), param.requires_grad)
        return known.setdefault(id(param), moved)[1]

    # PyTorch's types leave out that a parameter may be None.
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
