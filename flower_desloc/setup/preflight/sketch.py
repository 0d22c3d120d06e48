"""A run's model without its memory: how large it is, and what a step of it takes.

The tensors are fake: they have shapes and types but no values. A forward and backward pass through
them makes and drops what a real one would, whatever the model, and every byte of that is counted.
"""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flower_desloc.config import Config
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import BUFFERS
from flower_desloc.setup.build import build_schedule
from flower_desloc.tasks import Batch, Site, Task, build_task

TEXT = "causal_lm"
_LENGTH = 512  # tokens


class Sketch:
    """The model of a run, with no memory for it.

    Where ``model.vocab_size`` says what the tokenizer would, none is loaded, and nothing comes from
    the network. Raises ``ValueError`` when the model cannot be built.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps: dict[int, int] = {}
        # Not at once: to draw fake weights, some models look at what they have drawn.
        try:
            with torch.device("meta"):
                self.model = offline_task(config).build_model()
        except Exception:  # one that must have values to be built
            self.model = _built(config)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            _have_values(self.model)

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def num_embeddings(self) -> int:
        """Number of those that are rows of tables."""
        tables = [m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)]
        return sum({id(table): table.numel() for table in tables}.values())

    @property
    def weights(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def gradients(self) -> int:
        """Bytes of the gradients."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def streams(self) -> dict[str, Stream]:
        """Every stream of the run, as meta tensors; states of the shapes of what they are of."""
        trained = {k: _meta(p) for k, p in self.model.named_parameters() if p.requires_grad}
        saved = self.model.state_dict().keys()
        buffers = {
            k: _meta(b)
            for k, b in self.model.named_buffers()
            if k in saved and b.is_floating_point()
        }
        names = dict.fromkeys([*build_schedule(self._config).periods, PARAMS])
        return {name: buffers if name == BUFFERS else trained for name in names}

    def step_bytes(self, micro_batch: int) -> int:
        """Return the most bytes that a step takes beside the model: gradients and activations.

        ``micro_batch`` examples go through the model at once. Raises ``ValueError`` where it cannot
        be known, as of a model whose course depends on values.
        """
        if micro_batch in self._steps:
            return self._steps[micro_batch]
        # The second part meets the first one's gradients; a third would meet the same.
        whole = min(2 * micro_batch, self._config.data.batch_size)
        cuts, config = _cut(self._config)
        task, batch = sample(config, whole * cuts, micro_batch * cuts)
        try:
            with self._mode, _Living(self.model) as living:
                task.loss(self.model, batch).backward()
        except Exception as error:
            raise ValueError(" ".join(str(error).split())) from error
        finally:
            self.model.zero_grad(set_to_none=True)
        return self._steps.setdefault(micro_batch, living.most)


def _built(config: Config) -> nn.Module:
    try:
        return offline_task(config).build_model()
    except Exception as error:  # a task may be anybody's
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"the model cannot be built ({what})") from error


def offline_task(config: Config) -> Task:
    """Return the task, without a tokenizer where ``model.vocab_size`` is stated."""
    data, model = config.data, replace(config.model, compile=False)
    if config.task == TEXT and (model.vocab_size is not None or model.config):
        data = replace(data, tokenizer="bytes")
    return build_task(replace(config, model=model, data=data))


def _cut(config: Config) -> tuple[int, Config]:
    """Return ``config`` with its sequences cut in so many parts.

    Attention takes memory by tokens, whichever sequence they are of (PyTorch's does; what takes it
    by their square is underestimated). But with fake tensors transformers builds a mask that with
    real ones it leaves out, as large as a sequence's square.
    """
    cuts = -(-config.data.seq_len // _LENGTH) if config.task == TEXT else 1
    length = -(-config.data.seq_len // cuts)
    return cuts, replace(config, data=replace(config.data, seq_len=length))


def sample(config: Config, rows: int, micro_batch: int) -> tuple[Task, Batch]:
    """Return the task as it computes a batch of ``rows`` examples in parts, and such a batch.

    Of a text's batch the shape is enough; any other is the first of the first client.
    """
    data = replace(config.data, batch_size=rows, micro_batch_size=micro_batch)
    config = replace(config, data=data)
    task = offline_task(config)
    if config.task != TEXT:
        return task, task.client_data(Site(0, config.federation.num_clients)).train_batch(0)
    # Imported when asked for: transformers takes seconds.
    from flower_desloc.tasks.causal_lm import TextBatch

    # All rows are one: the batch may be one that would not fit.
    tokens = torch.zeros(1, data.seq_len + 1, dtype=torch.int64).expand(rows, -1)
    return task, TextBatch(tokens, num_bytes=0)


class _Living(TorchDispatchMode):
    """Counts the bytes of what operations have made and somebody still has, but for ``model``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._now = 0
        self._sizes = {_storage(t)._cdata: 0 for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(_storage(tensor))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:  # a view, or in place
            return
        self._sizes[key] = storage.nbytes()
        self._now += storage.nbytes()
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def _have_values(model: nn.Module) -> None:
    """Put ``model`` from the meta device on the CPU; what it has twice it still has twice."""
    known: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, p in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            trained = nn.Parameter(torch.empty_like(p, device="cpu"), requires_grad=p.requires_grad)
            setattr(module, name, known.setdefault(id(p), (p, trained))[1])
        for name, b in [*module.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(
                module, name, known.setdefault(id(b), (b, torch.empty_like(b, device="cpu")))[1]
            )


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
