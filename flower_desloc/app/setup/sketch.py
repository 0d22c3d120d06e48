"""A model without memory for its tensors, and the memory that a training step takes.

The tensors are fake: they have shapes and types but no values. A forward and a backward pass
through them allocate and free what a real pass would, and every byte is counted. PyTorch's own
MemTracker is not used: it is private (``torch.distributed._tools``), rounds sizes up to blocks of
CUDA's allocator on any device, and also counts the parameters.
"""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flower_desloc.app.config import Config
from flower_desloc.app.config.errors import one_line
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.config.units import TEXT
from flower_desloc.app.setup.build import build_schedule
from flower_desloc.app.tasks import Batch, Site, Task, build_task
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import BUFFERS, buffers, is_wrapper, parameters, parts

_LENGTH = 512  # tokens
_CACHED = type(cache(int))


class Sketch:
    """The model of a run, without memory for its tensors.

    If ``model.vocab_size`` is stated, no tokenizer is loaded and the network is not used. Raises
    ``ValueError`` if the model cannot be built.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps: dict[int, int] = {}
        self._evaluations: dict[int, int] = {}
        self.model = unallocated_model(config)
        tensors = (*self.model.parameters(), *self.model.buffers())
        self.weights = sum(part.nbytes for tensor in tensors for part in parts(tensor))
        """Bytes of parameters and buffers."""
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            _move_to_cpu(self.model)

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_embeddings(self) -> int:
        """Number of parameters in embeddings."""
        tables = [m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return sum({id(table): table.numel() for table in tables}.values())

    @property
    def gradients(self) -> int:
        """Bytes of the gradients."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def streams(self) -> dict[str, Stream]:
        """Every stream of the run, as meta tensors; states have the shapes of their parameters."""
        trained = {k: _meta(p) for k, p in parameters(self.model).items() if p.requires_grad}
        saved = {k: _meta(b) for k, b in buffers(self.model).items()}
        names = dict.fromkeys([*build_schedule(self._config).periods, PARAMS])
        return {name: saved if name == BUFFERS else trained for name in names}

    def step_bytes(self, micro_batch: int) -> int:
        """Return the peak memory of a step's gradients and activations, in bytes.

        ``micro_batch`` examples go through the model at once. Raises ``ValueError`` if it cannot be
        known, for example because the forward pass depends on values.
        """
        if micro_batch in self._steps:
            return self._steps[micro_batch]
        # The second micro-batch needs memory besides the first one's gradients; a third adds none.
        whole = min(2 * micro_batch, self._config.data.batch_size)
        cuts, config = _cut(self._config)
        try:
            with estimating():
                task, batch = sample(config, whole * cuts, micro_batch * cuts)
                with _caches_cleared(config), self._mode, _PeakMemory(self.model) as memory:
                    task.loss(self.model, batch).backward()
        finally:
            self.model.zero_grad(set_to_none=True)
        return self._steps.setdefault(micro_batch, memory.peak)

    def evaluation_bytes(self, micro_batch: int) -> int:
        """Return the peak memory of an evaluation's activations, in bytes.

        Like ``step_bytes``; numbers that the task reads from tensors are taken to be zero.
        """
        if micro_batch in self._evaluations:
            return self._evaluations[micro_batch]
        cuts, config = _cut(self._config)
        rows = micro_batch * cuts
        with estimating():
            task, batch = sample(config, rows, rows, heldout=True)
            memory = _PeakMemory(self.model, reads=True)
            with _caches_cleared(config), self._mode, memory:
                task.evaluate(self.model, [batch])
        return self._evaluations.setdefault(micro_batch, memory.peak)


def unallocated_model(config: Config) -> nn.Module:
    """Return the model of a run, whose parameters have no memory unless it needs their values.

    Raises ``ValueError`` if the model cannot be built.
    """
    try:
        with _without_values():
            return offline_task(config).build_model()
    except (Exception, SystemExit):  # a model that needs values to be built
        with estimating("the model cannot be built"):
            return offline_task(config).build_model()


@contextmanager
def estimating(what: str = "") -> Iterator[None]:
    """Raise every error in the block as ``ValueError``: the task and the optimizer may be anyone's.

    ``what`` begins the message.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = one_line(error if isinstance(error, ValueError) else _named(error))
        raise ValueError(f"{what} ({reason})" if what else reason) from error


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextmanager
def _without_values() -> Iterator[None]:
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
        return known.setdefault(
            id(param), (param, nn.Parameter(_meta(param), param.requires_grad))
        )[1]

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _caches_cleared(config: Config) -> Iterator[None]:
    """Clear each ``lru_cache`` that the block fills: a run in this process would get fake tensors.

    Only a task of one's own creates tensors in a cached function.
    """
    if not is_path(config.task):
        yield
        return
    before = {id(cached): cached.cache_info().misses for cached in _caches()}
    try:
        yield
    finally:
        for cached in _caches():
            if cached.cache_info().misses > before.get(id(cached), 0):
                cached.cache_clear()


def _caches() -> list[Any]:
    return [found for found in gc.get_objects() if type(found) is _CACHED]


def offline_task(config: Config) -> Task:
    """Return the task, without a tokenizer if ``model.vocab_size`` is stated."""
    data, model = config.data, replace(config.model, compile=False)
    if config.task == TEXT and (model.vocab_size is not None or model.config):
        data = replace(data, tokenizer="bytes")
    return build_task(replace(config, model=model, data=data))


def _cut(config: Config) -> tuple[int, Config]:
    """Return ``config`` with its sequences cut into shorter ones, and into how many.

    The memory of PyTorch's attention is linear in the tokens. With fake tensors, however,
    transformers builds a mask of the square of a sequence, which it omits with real ones. (An
    attention that takes memory by the square is underestimated.)
    """
    cuts = -(-config.data.seq_len // _LENGTH) if config.task == TEXT else 1
    length = -(-config.data.seq_len // cuts)
    return cuts, replace(config, data=replace(config.data, seq_len=length))


def sample(
    config: Config, rows: int, micro_batch: int, *, heldout: bool = False
) -> tuple[Task, Batch]:
    """Return a batch of ``rows`` examples, and the task that computes it in micro-batches.

    A batch of text is all zeros; any other is the first of the first client, of its training or of
    its held-out part.
    """
    data = replace(config.data, batch_size=rows, micro_batch_size=micro_batch)
    config = replace(config, data=data)
    task = offline_task(config)
    if config.task != TEXT:
        shard = task.client_data(Site(0, config.simulation.num_clients))
        return task, next(iter(shard.heldout())) if heldout else shard.train_batch(0)
    # Imported here: transformers takes seconds.
    from flower_desloc.app.tasks.causal_lm import TextBatch

    # All rows share memory: the batch may not fit.
    tokens = torch.zeros(1, data.seq_len + 1, dtype=torch.int64).expand(rows, -1)
    return task, TextBatch(tokens, num_bytes=0)


class _PeakMemory(TorchDispatchMode):
    """Tracks the bytes of all tensors that operations allocate, except those of ``model``.

    With ``reads`` every number that is read from a tensor is zero: a fake one has no values.
    """

    def __init__(self, model: nn.Module, *, reads: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads
        self.peak = 0
        self._now = 0
        kept = (*model.parameters(), *model.buffers())
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in kept}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if self._reads and func is torch.ops.aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        result = func(*args, **(kwargs or {}))
        storages = (t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor))
        for storage in storages:
            key = storage._cdata
            if key in self._sizes:  # a view or an in-place operation
                continue
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._free, key)
        return result

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def _move_to_cpu(model: nn.Module) -> None:
    """Move ``model`` from the meta device to the CPU; shared tensors stay shared.

    A quantised tensor is replaced by one of the type that it is used as.
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            moved = nn.Parameter(_on_cpu(p), requires_grad=p.requires_grad)
            setattr(module, name, known.setdefault(id(p), (p, moved))[1])
        for name, b in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(module, name, known.setdefault(id(b), (b, _on_cpu(b)))[1])


def _on_cpu(tensor: Tensor) -> Tensor:
    if is_wrapper(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.empty_like(tensor, device="cpu")


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
