"""A Flower Grid whose clients run in the same process."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_desloc.flower.exits import exits_as_errors
from flower_desloc.flower.internals import Run, TaskIdentity

_RAISED = 2  # Flower's code for an exception in a ClientApp


class InProcessGrid(Grid):
    """A Grid that calls the ClientApp when a reply is pulled, one node after the other.

    For tests and debugging. Each of ``nodes`` is what a client finds in ``context.node_config``,
    such as ``{"partition-id": 0, "num-partitions": 2}``.
    """

    def __init__(self, client_app: ClientApp, nodes: Iterable[Mapping[str, Any]]) -> None:
        self.client_app = client_app
        self.contexts = {
            node_id: Context(1, node_id, dict(config), RecordDict(), {})
            for node_id, config in enumerate(nodes, start=1)
        }
        self._waiting: dict[str, Message] = {}
        self._sent = 0
        # Message() reads these; Flower's runtimes set them before they call an app.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1

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
            with exits_as_errors():
                return self.client_app(own, context)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(_RAISED, reason), reply_to=message)
