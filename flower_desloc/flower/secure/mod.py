"""The Flower mod of every client: a site with keys adds to secure sums, and to nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message

from flower_desloc.flower.protection import SECURE_KEYS
from flower_desloc.flower.secure.record import SECURE


def secure_sums(
    message: Message, context: Context, call: Callable[[Message, Context], Message]
) -> Message:
    """Flower mod: answer what belongs to a secure sum, and hide what a reply says of the site."""
    folder = context.node_config.get("secure-keys", os.environ.get(SECURE_KEYS))
    if folder is not None:
        if not str(folder).strip():
            raise ValueError("secure-keys is empty: name the folder of keys, or leave it out")
        # Imported here: a client without secure aggregation does without.
        from flower_desloc.flower.secure.at_site import answer

        return answer(message, context, call, Path(str(folder)).expanduser())
    if message.has_content() and SECURE in message.content:
        return no_keys(message, context)
    return call(message, context)


def no_keys(message: Message, context: Context) -> Message:
    """Raise ``ValueError``: this client cannot add to a secure sum."""
    del message, context
    raise ValueError(
        "the run has privacy.secure_aggregation=true, and this site has no keys for it; name their "
        "folder by secure-keys in the node config"
    )
