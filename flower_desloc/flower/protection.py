"""A site that protects its data: which app carries that out, and what its errors may say.

A SuperNode imports this, and no PyTorch.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from logging import ERROR
from typing import Final

from flwr.app import Context

from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.flower.failures import with_text
from flower_desloc.flower.internals import log

OF_THE_APP: Final = ("epsilon", "delta", "require", "audit-log")
"""Keys of a node config that protect a site, and that its app must carry out."""
ACCEPT_APP: Final = "accept-app"
"""Key of a node config that ``desloc supernode`` carries out, and no other SuperNode."""
APPS_COMPARED: Final = "DESLOC_APPS_COMPARED"
"""Environment variable: set by ``desloc supernode``, for the processes of its ClientApps."""
SECURE_KEYS: Final = "DESLOC_SECURE_KEYS"
"""Environment variable: the folder of keys of clients whose node config has no secure-keys."""
HIDDEN: Final = "an error of this site, which may quote its data; its own log has the text"


def require_carried_out(context: Context, carried_out: Collection[str]) -> None:
    """Raise ``SiteRefusedError`` if the node config has a key that its app or SuperNode ignores."""
    if ACCEPT_APP in context.node_config and not os.environ.get(APPS_COMPARED):
        raise SiteRefusedError(
            f"{ACCEPT_APP} in the node config: this SuperNode does not carry it out, and would run "
            "every app; start it by `desloc supernode`, whose SuperExec is its own, or leave it out"
        )
    ignored = {*OF_THE_APP} - {*carried_out}
    if keys := sorted(ignored & context.node_config.keys()):
        raise SiteRefusedError(
            f"{', '.join(keys)} in the node config: this app does not carry it out, and would not "
            "protect the site; use the app of `desloc`, or leave it out"
        )


@contextmanager
def errors_stay(
    context: Context,
    is_private: Callable[[], bool],
    sent: type[Exception] = SiteRefusedError,
) -> Iterator[None]:
    """Keep the text of an error, which may quote data, in the log of a site that protects them.

    The text of a ``sent`` one is sent, without its notes, and of others the type, as far as the
    server asks.
    """
    try:
        with exits_as_errors():
            yield
    except sent:
        raise
    except Exception as error:
        if str(error) == HIDDEN or not (_is_protected(context) or is_private()):
            raise
        log(ERROR, "%s: %s", type(error).__name__, error, exc_info=True)
        raise with_text(error, HIDDEN) from None


def _is_protected(context: Context) -> bool:
    keys = {"epsilon", "delta", "secure-keys"} & context.node_config.keys()
    return bool(keys) or SECURE_KEYS in os.environ
