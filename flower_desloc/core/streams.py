"""Read the streams of a module and its optimizer as views, and write them in place.

Streams have PyTorch's names, tensors their parameters': ``{"exp_avg": {"lm_head.weight": ...}}``.
Tied weights appear once. Parameters that the optimizer does not train are in no stream. A compiled
module's tensors have the names of the module that was compiled.

Every parameter has its states and the run's step count from the start, also before its first
gradient. PyTorch creates both at the first gradient: for an expert that is first used after many
steps, its Adam would correct the bias of moments that have just begun, which is not done here.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flower_desloc.core.errors import NotFiniteError, SetupError
from flower_desloc.core.multi import parts_of
from flower_desloc.core.schedule import BUFFERS, PARAMS
from flower_desloc.core.types import Stream

STEP: Final = "step"
"""PyTorch's name of the step count; it is set, never averaged."""
_TRIAL = 12  # steps; some optimizers do something else after ten
_COMPILED = "_orig_mod."  # in the names of the tensors of what torch.compile(module) returns


def prime(optimizer: Optimizer, *, checked: bool = True) -> None:
    """Create every optimizer state as it is before the first step, with ``step`` at 0.

    Optimizers create their states in the first step, but a worker that joins needs tensors to
    write the federation's states into. A step on zero gradients creates them in any optimizer.
    The parameters are zero during that step, or weight decay would change the moments.

    Raises ``ValueError`` for an optimizer whose states do not start at zero, such as NAdam or an
    average of the parameters, and for one that takes no step on gradients of zeros, such as
    SparseAdam. With ``checked=False`` states that begin with the parameters are accepted: they are
    then to be written.
    """
    params = trained_by(optimizer)
    if not optimizer.state and _has_alike_states(optimizer):
        with _small(params):
            _create_states(optimizer)
        if _grow_states(optimizer, params):
            return
        optimizer.state.clear()
    kept = [p.detach().clone() for p in params]
    is_new = not optimizer.state  # an optimizer may create its states itself, which is not tried
    try:
        _create_states(optimizer, tried=is_new and checked)
    finally:
        with torch.no_grad():
            for p, x in zip(params, kept, strict=True):
                p.copy_(x)


@torch.no_grad()
def _create_states(optimizer: Optimizer, *, tried: bool = False) -> None:
    what = type(optimizer).__name__
    try:
        _step_on(optimizer, 0.0, 0.0)
        changed = [name for name, state in _tensors_of(optimizer) if state.any()]
        if changed and not _first_step_is_from_zeros(optimizer):
            raise ValueError(f"{changed[0]!r} of {what} is not zero before the first step")
        if tried and not _first_step_is_from_zeros(optimizer, 1.0):
            raise ValueError(
                f"the first step of {what} is not one from states of zero: they begin with the "
                "parameters, or it remembers more than its step count"
            )
    except RuntimeError as error:
        why = f"{what} takes no step on gradients of zeros, which creates its states"
        raise ValueError(f"{why}: {error}") from error
    optimizer.zero_grad(set_to_none=True)
    _zero_states(optimizer)


def _has_alike_states(optimizer: Optimizer) -> bool:
    """Return whether small parameters have the states that large ones have, and no step compiles.

    Optimizers of other packages may represent the states of large parameters differently.
    """
    return all(
        type(part).__module__.startswith(("torch.optim.", "flower_desloc.optim."))
        and not getattr(part, "compiled", False)
        for part in parts_of(optimizer)
    ) and all(type(p.data) is Tensor for p in trained_by(optimizer))


def _small_shape(p: Tensor) -> torch.Size:
    return torch.Size(range(2, 2 + p.dim()))


@contextmanager
def _small(params: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters have a few elements in the block: a step on the whole costs seconds."""
    kept = [(p, p.data) for p in params]
    try:
        for p, whole in kept:
            p.grad = None
            p.data = whole.new_zeros(_small_shape(p))
        yield
    finally:
        for p, whole in kept:
            p.grad = None
            p.data = whole


def _grow_states(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    """Give the states of small parameters the shapes of the whole; return whether all could."""
    for p in params:
        states = optimizer.state[p]
        for name, state in states.items():
            if name == STEP or not isinstance(state, Tensor) or state.dim() == 0 < p.dim():
                continue
            if state.shape != _small_shape(p):
                return False
            states[name] = torch.zeros_like(p, dtype=state.dtype, device=state.device)
    return True


@torch.no_grad()
def _first_step_is_from_zeros(optimizer: Optimizer, value: float = 0.0) -> bool:
    """Return whether a new optimizer's first step is one from states of zero.

    ``value`` is that of all parameters. A step on zero gradients may change a state that starts at
    zero: QHAdam counts the weights of its averages, Adamax adds its eps to the gradient.
    """
    ends = []
    for begin in (optimizer.state.clear, lambda: _zero_states(optimizer)):
        begin()
        set_step(optimizer, 0)
        _step_on(optimizer, value, 1.0)
        params = [p.clone() for p in trained_by(optimizer)]
        ends.append([*params, *(state.clone() for _, state in _tensors_of(optimizer))])
    return _equal(*ends)


def _step_on(optimizer: Optimizer, value: float, gradient: float) -> None:
    """Take a step with every parameter at one value and every gradient at another."""
    for p in trained_by(optimizer):
        p.fill_(value)
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


def _zero_states(optimizer: Optimizer) -> None:
    set_step(optimizer, 0)
    for _, state in _tensors_of(optimizer):
        state.zero_()


def _tensors_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of every state that is a tensor, without the step count."""
    for states in optimizer.state.values():
        for name, value in states.items():
            if name != STEP and isinstance(value, Tensor):
                yield name, value


def check_optimizer(
    make: Callable[[list[nn.Parameter]], Optimizer], *shape: int
) -> tuple[str, ...]:
    """Return the streams of the optimizer that ``make`` builds for one tensor of that shape.

    Takes some steps twice: with one optimizer, and with a new one for each step that receives the
    streams and the step count of the one before, as another client would. Both must end equal,
    bit for bit.

    Raises ``ValueError`` when they do not: the optimizer has state that would be lost between
    windows.
    """
    whole, expected = _steps(make, shape, range(_TRIAL))
    streams: dict[str, dict[str, Tensor]] = {}
    for step in range(_TRIAL):
        module, optimizer = _steps(make, shape, [step], streams)
        names = stream_names(module, optimizer)
        streams = take(module, optimizer, names)
    ends = [(m.state_dict(), o.state_dict()) for m, o in ((whole, expected), (module, optimizer))]
    if not _equal(*ends):
        raise ValueError(
            f"{type(optimizer).__name__} remembers more than its step count and the states "
            f"{', '.join(names[1:]) or '(none)'}, or does not begin with zeros; what is not a "
            "floating-point tensor of a parameter cannot be kept between windows"
        )
    return names


def set_step(optimizer: Optimizer, step: int) -> None:
    """Set the number of completed steps of every parameter to the federation's ``step``.

    Bias correction and ADOPT's clip depend on it, so a worker that joined late or was away uses
    the server's count, never its own, and so does a parameter without a gradient in some steps.
    """
    # PyTorch counts per parameter, other libraries once per group.
    for memory in (*optimizer.state.values(), *optimizer.param_groups):
        if isinstance(memory.get(STEP), Tensor):
            memory[STEP].fill_(step)
        elif STEP in memory:
            memory[STEP] = step


def stream_names(module: nn.Module, optimizer: Optimizer) -> tuple[str, ...]:
    """Return the streams of a primed optimizer: ``params``, then its states as it names them.

    The last is ``buffers`` if the module has persistent floating-point buffers (BatchNorm's
    statistics).
    """
    return tuple(_streams(module, optimizer))


def starts_at_zero(name: str) -> bool:
    """Return whether a stream is all zeros before the first step, as optimizer states are."""
    return name not in (PARAMS, BUFFERS)


def zeros_like(stream: Stream) -> dict[str, Tensor]:
    """Return zeros of the shapes and types of a stream, expanded from one value: do not write."""
    return {key: t.new_zeros(()).expand_as(t) for key, t in stream.items()}


def take(
    module: nn.Module, optimizer: Optimizer, names: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    """Return the named streams as detached views, not copies.

    Raises ``ValueError`` for a stream the optimizer does not have; prime the optimizer first.
    """
    return {
        name: {key: tensor.detach() for key, tensor in stream.items()}
        for name, stream in _named(module, optimizer, names).items()
    }


@torch.no_grad()
def put(module: nn.Module, optimizer: Optimizer, streams: Mapping[str, Stream]) -> None:
    """Write ``streams`` into the module and the primed optimizer, in place.

    Raises ``ValueError``, with nothing written, when a stream is unknown or its tensors are not
    those of the module by name and shape.
    """
    targets = _named(module, optimizer, streams)
    for name, stream in streams.items():
        check_like(name, stream, targets[name])
    for name, stream in streams.items():
        for key, tensor in stream.items():
            targets[name][key].copy_(tensor)


def trained_by(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters, without frozen ones (``Adam(model.parameters())``)."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name; a tied weight once, under its first name."""
    return {plain_name(key): p for key, p in module.named_parameters()}


def buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent floating-point buffers."""
    saved = module.state_dict().keys()
    named = {k: b for k, b in module.named_buffers() if k in saved and b.is_floating_point()}
    return {plain_name(key): buffer for key, buffer in named.items()}


@torch.no_grad()
def install(module: nn.Module, tensors: Stream) -> None:
    """Copy ``tensors`` into the parameters and buffers of those names."""
    own = named_tensors(module)
    for key, tensor in tensors.items():
        own[key].copy_(tensor)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's parameters and buffers."""
    named_buffers = {plain_name(key): buffer for key, buffer in module.named_buffers()}
    return {**parameters(module), **named_buffers}


def trained(module: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return the module's parameters that the optimizer trains, by name, in the module's order.

    Raises ``SetupError`` if the optimizer trains a tensor that the module does not own.
    """
    ids = {id(p) for p in trained_by(optimizer)}
    params = {key: p for key, p in parameters(module).items() if id(p) in ids}
    if len(params) != len(ids):
        raise SetupError(
            f"the optimizer trains {len(ids)} tensors, of which the module owns {len(params)}; "
            "build it from the module's parameters"
        )
    return params


def group_of(module: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the index in ``optimizer.param_groups`` of each parameter it trains, by name."""
    indices = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {key: indices[id(p)] for key, p in trained(module, optimizer).items()}


def untrained(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of parameters that require a gradient and are not in the optimizer.

    They keep their values; their gradients are neither clipped nor part of the norm.
    """
    ids = {id(p) for p in trained_by(optimizer)}
    return [key for key, p in parameters(module).items() if p.requires_grad and id(p) not in ids]


def check_trainable(module: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``SetupError`` for trained parameters that are complex or have sparse gradients.

    Sparse gradients are known here for PyTorch's embeddings, for others in the first step.
    """
    params = trained(module, optimizer)
    for key, p in params.items():
        if not p.is_floating_point():
            raise SetupError(
                f"parameter {key!r} is of type {p.dtype}, and only real parameters are trained; "
                "keep its real and imaginary parts in one real parameter (torch.view_as_real)"
            )
    sparse = {
        id(m.weight)
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
    }
    for key, p in params.items():
        if id(p) in sparse:
            raise sparse_gradient(key)


def sparse_gradient(key: str) -> SetupError:
    """Return the error for a parameter whose gradient is sparse."""
    return SetupError(
        f"parameter {key!r} has sparse gradients, and only dense ones are trained; leave "
        "sparse=True out of the embedding, and take Adam in place of SparseAdam"
    )


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor only holds others, as a quantised one holds codes and scales."""
    return hasattr(tensor, "__tensor_flatten__")


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the values of ``tensor``: itself, or those in a wrapper."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # is_wrapper
        yield from parts(getattr(tensor, name))


def digest(stream: Stream) -> str:
    """Return the SHA-256 of a stream's names, types, shapes and values."""
    sha = hashlib.sha256()
    for key in sorted(stream):
        sha.update(f"{key} {stream[key].dtype} {tuple(stream[key].shape)}".encode())
        for part in parts(stream[key].detach()):
            tensor = part.cpu().contiguous()
            if tensor.numel() > 0:  # an empty tensor may have strides that no view as bytes has
                sha.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def frozen(module: nn.Module) -> str:
    """Return the SHA-256 of the parameters that are not trained; empty if all are.

    They are never sent, so the server uses it to check that all sites have the same ones.
    """
    stream = {key: p for key, p in parameters(module).items() if not p.requires_grad}
    return digest(stream) if stream else ""


def check_like(name: str, stream: Stream, like: Stream) -> None:
    """Raise ``ValueError`` unless ``stream`` has the tensors of ``like`` by name and shape."""
    if missing := like.keys() - stream.keys():
        raise ValueError(f"stream {name!r} lacks {some(missing)}")
    if unknown := stream.keys() - like.keys():
        raise ValueError(f"stream {name!r} has {some(unknown)}, which the model does not have")
    for key, tensor in stream.items():
        if tensor.shape != like[key].shape:
            raise ValueError(
                f"{key!r} of stream {name!r} has shape {tuple(tensor.shape)}, "
                f"the model's is {tuple(like[key].shape)}"
            )


def check_finite(name: str, stream: Stream) -> None:
    """Raise ``NotFiniteError`` when a tensor of ``stream`` holds NaN or infinity."""
    finite_ends(name, stream)


def finite_ends(name: str, stream: Stream) -> dict[str, tuple[float, float]]:
    """Return the smallest and the largest value of every non-empty tensor, in one pass.

    Complex values count by their real and imaginary parts.

    Raises ``NotFiniteError`` when a tensor holds NaN or infinity.
    """
    ends = {}
    for key, tensor in stream.items():
        if tensor.numel() == 0:
            continue
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        low, high = (float(end) for end in torch.aminmax(values))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NotFiniteError(f"{key!r} of stream {name!r} has values that are not finite")
        ends[key] = low, high
    return ends


def _steps(
    make: Callable[[list[nn.Parameter]], Optimizer],
    shape: tuple[int, ...],
    steps: Iterable[int],
    streams: Mapping[str, Stream] | None = None,
) -> tuple[nn.Module, Optimizer]:
    """Return a small module and its optimizer after ``steps``, begun with ``streams`` if given."""
    numbers = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    module = nn.ParameterDict({"x": nn.Parameter(numbers.cos())})
    optimizer = make(list(module.parameters()))
    for number, step in enumerate(steps):
        if number == 0 and streams is not None:
            prime(optimizer)
            put(module, optimizer, streams)
            set_step(optimizer, step)
        module["x"].grad = (numbers * (step + 1)).sin()
        optimizer.step()
    return module, optimizer


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    try:
        return bool(a == b)
    except Exception:  # arrays, or anything else in an optimizer's state: refused
        return False


def _streams(module: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    params = trained(module, optimizer)
    streams: dict[str, dict[str, Tensor]] = {PARAMS: {**params}}
    for key, p in params.items():
        for name, value in optimizer.state.get(p, {}).items():
            if name != STEP and isinstance(value, Tensor) and value.is_floating_point():
                if name in (PARAMS, BUFFERS):
                    raise ValueError(f"{type(optimizer).__name__} has a state named {name!r}")
                streams.setdefault(name, {})[key] = value
    if saved := buffers(module):
        streams[BUFFERS] = saved
    return streams


def _named(
    module: nn.Module, optimizer: Optimizer, names: Iterable[str]
) -> dict[str, dict[str, Tensor]]:
    streams = _streams(module, optimizer)
    named = {}
    for name in names:
        if name not in streams:
            raise ValueError(
                f"{type(optimizer).__name__} has no stream {name!r}; "
                f"its streams are {', '.join(streams)}"
            )
        named[name] = streams[name]
    return named


def plain_name(name: str) -> str:
    """Return the name that a tensor of a compiled module has without ``torch.compile``."""
    return name.replace(_COMPILED, "")


def some(names: Iterable[str]) -> str:
    """Return the first three names in words, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(map(repr, listed[:3])) + more
