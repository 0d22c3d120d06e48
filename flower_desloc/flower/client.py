"""The client: the Flower app that answers the server, one message after the other."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from logging import ERROR
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_desloc.core.exits import exits_as_errors
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.core.streams import check_trainable
from flower_desloc.core.worker import Worker
from flower_desloc.flower.ahead import StepsAhead, delayed_window
from flower_desloc.flower.client_info import Greeting
from flower_desloc.flower.client_state import (
    LaterWrites,
    StateFiles,
    client_name,
    state_files,
)
from flower_desloc.flower.failures import code_of
from flower_desloc.flower.fingerprint import require_same_code
from flower_desloc.flower.flight.at_site import arrays_by_flight
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import (
    ARE_YOU_THERE,
    CLIENT_INFO,
    GOODBYE,
    HELLO,
    RUN_KEY,
    Settings,
    WindowRequest,
)
from flower_desloc.flower.model_names import ModelNames
from flower_desloc.flower.protection import errors_stay, require_carried_out
from flower_desloc.flower.secure.mod import no_keys, secure_sums
from flower_desloc.flower.secure.record import ASK
from flower_desloc.flower.window import (
    ClientWindow,
    evaluate_average,
    open_window,
    window_gradient,
)

Build = Callable[[Settings, Context], Worker]
_Call = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, _Call], Message]


class DesLocClient(ClientApp):
    """A Flower ClientApp that answers everything but a request to train.

    ``client_app`` answers these too. Otherwise register a function for them, with a training loop
    of your own::

        client = DesLocClient(build)

        @client.train()
        def train(message, context):
            with client.window(message, context) as window:
                for step in window:
                    ...  # the gradients of a batch, and optimizer.step()
            return window.reply

    Parameters
    ----------
    build : Callable
        Returns a client's ``Worker``. It is called for every message, with the ``train_config``
        given to ``DesLoc.start`` (single values: strings, numbers, booleans), to which ``run-key``
        is added, the run's name over restarts, and Flower's context.
        All that outlives the message is in the client's state file: in ``~/.flwr/desloc``, or
        ``state-dir`` of the node's config.
    mods : Sequence, optional
        Flower mods around every message, which see its arrays however they travel. The texts of
        their own errors are sent.
    carries_out : Collection, optional
        The keys of ``protection.OF_THE_APP`` that ``build`` and ``mods`` carry out. A site whose
        node config has others of them refuses every message.
    is_private : Callable, optional
        Says whether the run of the last message has differential privacy without such keys.

    """

    def __init__(
        self,
        build: Build,
        mods: Sequence[Mod] = (),
        *,
        carries_out: Collection[str] = (),
        is_private: Callable[[], bool] = lambda: False,
    ) -> None:
        around = (_errors_have_codes, _exits_are_errors, arrays_by_flight, *mods)
        super().__init__(mods=[*around, self._secure_sums, self._protected])
        self._build, self._carries_out, self._is_private = build, carries_out, is_private
        self._ahead, self._later = StepsAhead(), LaterWrites()
        self.evaluate()(self._evaluate)
        for name, answer in (
            (HELLO, self._hello),
            (ARE_YOU_THERE, self._is_there),
            (GOODBYE, self._goodbye),
            (ASK, no_keys),
        ):
            self.query(name.partition(".")[2])(answer)

    @contextmanager
    def window(self, message: Message, context: Context) -> Iterator[ClientWindow]:
        """Open the window that a message asks for; after it, ``window.reply`` is the reply.

        A loop over the window takes its local steps. Raises ``ValueError`` for the averaged
        gradients of ``DataParallel``, which need ``Worker.loss_at``.
        """
        request, worker, files = self._receive(message, context)
        if request.due == {GRADIENTS}:
            raise ValueError("to average gradients, give the Worker a loss_at, and use client_app")
        bundles = request.bundles
        opened = self._opened(request, worker, files)
        del request  # free its tensors before the reply, which is as large
        with opened as window:
            yield window
        window.reply = Message(window.answer.to_content(bundles=bundles), reply_to=message)

    def outlive_messages(self) -> None:
        """Let ``write_state`` and ``take_steps_ahead`` be called after each reply."""
        self._later.is_on = True

    def write_state(self) -> None:
        """Write the client's state, if no resume looks for it: it was not written before the reply.

        What fails is raised while the next message is answered.
        """
        self._later.run()

    def take_steps_ahead(self) -> None:
        """Take the steps of the next window that may be taken while the last reply travels.

        These are allowed under ``sync_delay``. They change the tensors that ``write_state`` writes.
        """
        self.write_state()
        self._ahead.take()

    def _secure_sums(self, message: Message, context: Context, call: _Call) -> Message:
        require_carried_out(context, self._carries_out)
        # Their own refusals are ValueErrors that quote nothing; an OSError would tell a path.
        with errors_stay(context, self._is_private, sent=ValueError):
            return secure_sums(message, context, call)

    def _protected(self, message: Message, context: Context, call: _Call) -> Message:
        with errors_stay(context, self._is_private):
            return call(message, context)

    def _receive(
        self, message: Message, context: Context
    ) -> tuple[WindowRequest, Worker, StateFiles]:
        self._later.settle()
        request = WindowRequest.from_content(message.content)
        worker = self._worker(request, context)
        message.content.clear()  # only the request references its tensors now
        return request, worker, state_files(context, request.run_key, self._later)

    def _opened(
        self, request: WindowRequest, worker: Worker, files: StateFiles
    ) -> AbstractContextManager[ClientWindow]:
        if request.is_delayed:
            return delayed_window(worker, request, files, self._ahead)
        return open_window(worker, request, files)

    def _worker(self, request: WindowRequest, context: Context) -> Worker:
        return self._build({**request.config, RUN_KEY: request.run_key}, context)

    def _train(self, message: Message, context: Context) -> Message:
        """Answer by the worker's ``loss_at``: with the due streams, or with a gradient."""
        request, worker, files = self._receive(message, context)
        bundles, copy = request.bundles, not (request.by_flight and worker.rests)
        if request.due == {GRADIENTS}:
            answer = window_gradient(worker, request, files)
        else:
            with self._opened(request, worker, files) as window:
                window.train()
            answer = window.answer
        del request
        content = answer.to_content(bundles=bundles, copy=copy)
        return Message(content, reply_to=message)

    def _evaluate(self, message: Message, context: Context) -> Message:
        request, worker, files = self._receive(message, context)
        with self._ahead.kept(worker):
            answer = evaluate_average(worker, request, files)
        return Message(answer.to_content(), reply_to=message)

    def _hello(self, message: Message, context: Context) -> Message:
        request = WindowRequest.from_content(message.content)
        require_same_code(request.code, client_name(context))
        worker = self._worker(request, context)
        check_trainable(worker.module, worker.optimizer)
        files = state_files(context, request.run_key)
        files.go_back(request.attempts)
        state = files.at(request.start)
        info = replace(
            worker.info,
            num_examples=worker.num_examples,
            data_version=worker.data_version() if worker.data_version else None,
        )
        versions = state.versions if state else {}
        model = ModelNames.of(worker)
        record = Greeting(client_name(context), info, versions, model).to_config()
        return Message(RecordDict({CLIENT_INFO: record}), reply_to=message)

    @staticmethod
    def _is_there(message: Message, context: Context) -> Message:  # noqa: ARG004
        return Message(RecordDict(), reply_to=message)

    @staticmethod
    def _goodbye(message: Message, context: Context) -> Message:
        state_files(context, WindowRequest.from_content(message.content).run_key).delete()
        return Message(RecordDict(), reply_to=message)


def client_app(build: Build, mods: Sequence[Mod] = (), **protection: Any) -> DesLocClient:
    """Return a ClientApp whose clients are what ``build`` returns, and train by its ``loss_at``.

    The arguments are those of ``DesLocClient``.
    """
    client = DesLocClient(build, mods, **protection)
    client.train()(client._train)
    return client


def _exits_are_errors(message: Message, context: Context, call: _Call) -> Message:
    with exits_as_errors():
        return call(message, context)


def _errors_have_codes(message: Message, context: Context, call: _Call) -> Message:
    """Flower mod: answer an error whose type the server asks for with its code."""
    try:
        return call(message, context)
    except Exception as error:
        if (code := code_of(error)) is None:
            raise
        log(ERROR, "this client cannot go on", exc_info=True)
        return Message(Error(code, f"{type(error).__name__}: {error}"), reply_to=message)
