"""The apps that a site accepts: compared by its SuperNode before anything of one runs."""

import hashlib
from collections.abc import Callable
from logging import ERROR
from typing import Any

from flwr.app import Error, Message

from flower_desloc.app.sites.audit import AUDIT_LOG, note
from flower_desloc.flower.internals import log, start_client_internal
from flower_desloc.flower.protection import ACCEPT_APP


class AppRefusedError(ValueError):
    """A run's app is not among those that the site accepts."""


def accepting(pull: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return Flower's function that takes a message in, which then refuses other apps.

    The app of a run is fetched with its first message. One whose SHA-256 is not in ``accept-app``
    is neither unpacked nor stored, and the message is answered by an error.
    """

    def pull_if_accepted(**given: Any) -> int | None:
        if ACCEPT_APP not in given["node_config"]:
            return pull(**given)
        accepted = str(given["node_config"][ACCEPT_APP]).replace(",", " ").split()
        received: list[Message] = []

        def receive() -> Any:
            got = given["receive"]()
            received[:] = got[:1] if got else []
            return got

        def get_fab(fab_hash: str, run_id: int) -> Any:
            fab = given["get_fab"](fab_hash, run_id)
            if (digest := hashlib.sha256(fab.content).hexdigest()) not in accepted:
                raise AppRefusedError(
                    f"this site does not accept the app with the SHA-256 {digest} ({ACCEPT_APP} "
                    "in its node config)"
                )
            return fab

        try:
            return pull(**given | {"receive": receive, "get_fab": get_fab})
        except AppRefusedError as error:
            log(ERROR, "%s", error)
            (message,) = received
            if AUDIT_LOG in given["node_config"]:
                try:
                    note(given["node_config"], message, "error", {"error": str(error)})
                except OSError as failure:  # nothing of the site is in the answer
                    log(ERROR, "%s", failure, exc_info=True)
            reply = Message(
                Error(start_client_internal.FAB_VERIFICATION_ERROR.code, str(error)),
                reply_to=message,
            )
            start_client_internal._insert_message(reply, given["state"], given["object_store"])
            return message.metadata.run_id

    return pull_if_accepted
