"""A Flower Grid whose clients run in the same process."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flower_desloc.flower.content import records_of

_RAISED = 2  # Flower's code for an exception in a ClientApp


class InProcessGrid(Grid):
    """A grid whose nodes call a ClientApp when their reply is pulled, one after the other."""

    def __init__(self, client_app: ClientApp, nodes: Iterable[Mapping[str, Any]]) -> None:
        self.client_app = client_app
        self.contexts = {
            node_id: Context(1, node_id, dict(config), RecordDict(), {})
            for node_id, config in enumerate(nodes, start=1)
        }
        self._waiting: dict[str, Message] = {}
        self._sent = 0
        # Messages ask which task makes them; Flower's runtimes set this before they call an app.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Run:
        """Refuse: nothing in this grid depends on the run."""
        raise RuntimeError("an in-process grid has no run information")

    def create_message(self, *args: Any, **kwargs: Any) -> Message:  # noqa: ARG002
        """Refuse: Flower has deprecated this; construct a Message."""
        raise RuntimeError("construct a Message instead")

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes online."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages; they wait until their reply is pulled."""
        ids = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = message_id = str(self._sent)
            self._waiting[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the ClientApp on those messages and return its replies, each once."""
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
            # As from every runtime of Flower's: a message of its own, to do with as it likes.
            own = copy.copy(message)
            own.content = RecordDict({**message.content})
            reply = self.client_app(own, context)
            _let_go(reply)
            return reply
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(_RAISED, reason), reply_to=message)


def _let_go(reply: Message) -> None:
    """Copy what a client has handed over: every other runtime has, once it asks for more."""
    if reply.has_content():
        for record in records_of(ArrayRecord, reply.content).values():
            for array in record.values():
                if not isinstance(array.data, bytes):
                    array.data = bytes(array.data)
