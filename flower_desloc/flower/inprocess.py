"""A Flower Grid whose clients run in the same process."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from flower_desloc.core.exits import exits_as_errors
from flower_desloc.flower.internals import Run, log, set_task

_RAISED = 2  # Flower's code for an exception in a ClientApp


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Compute with as many threads as a simulated client: other sums differ in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class InProcessGrid(Grid):
    """A Grid that calls the ClientApp when a reply is pulled, one node after the other.

    For tests and debugging.

    Parameters
    ----------
    client_app : ClientApp
        The app of every node, or a function in its place.
    nodes : Iterable[Mapping]
        The ``context.node_config`` of each client, such as
        ``{"partition-id": 0, "num-partitions": 2}``.
    run_config : Mapping, optional
        Every client's ``context.run_config``, which Flower reads from the app's ``pyproject.toml``;
        empty by default.
    threads : int (default: 1)
        PyTorch threads of a client, as many as a simulation's
        ``client-resources-num-cpus``. Small models are fastest with one, above all on a busy
        machine; the number changes the last bits of the result.

    """

    def __init__(
        self,
        client_app: Callable[[Message, Context], Message],
        nodes: Iterable[Mapping[str, Any]],
        *,
        run_config: Mapping[str, Any] | None = None,
        threads: int = 1,
    ) -> None:
        self.client_app = client_app
        self.threads = threads
        self.contexts = {
            node_id: Context(1, node_id, dict(config), RecordDict(), dict(run_config or {}))
            for node_id, config in enumerate(nodes, start=1)
        }
        self._waiting: dict[str, Message] = {}
        self._sent = 0
        set_task(run_id=1, node_id=0, task_id=1)

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Run:
        """Refuse: nothing in this grid depends on the run."""
        raise RuntimeError("an in-process grid has no run information")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ARG002
        """Refuse: deprecated by Flower."""
        raise RuntimeError("construct a Message instead")

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes online."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Store messages until their reply is pulled."""
        ids = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = message_id = str(self._sent)
            self._waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the ClientApp on these messages and return each reply once."""
        return [
            self._answer(self._waiting.pop(message_id))
            for message_id in message_ids
            if message_id in self._waiting
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send and receive at once; nothing can be late here."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        context = self.contexts.get(message.metadata.dst_node_id)
        try:
            if context is None:
                raise RuntimeError("the node is not there")
            # Like every Flower runtime, give the app a message of its own.
            own = copy.copy(message)
            own.content = RecordDict({**message.content})
            with exits_as_errors(), num_threads(self.threads):
                return self.client_app(own, context)
        except Exception as error:
            for note in getattr(error, "__notes__", ()):  # what Flower's traceback would show
                log(ERROR, "%s: %s", type(error).__name__, note)
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(_RAISED, reason), reply_to=message)
