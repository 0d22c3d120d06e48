"""A site with keys: what it answers, and what it hides."""

import math
from collections.abc import Callable, Collection, Iterator
from logging import WARNING
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from flower_desloc.core.kinds import Kinds, kind_of
from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.core.streams import digest, starts_at_zero
from flower_desloc.core.types import Streams
from flower_desloc.flower.arrays import records_of, streams_of, to_record
from flower_desloc.flower.bundles import bundled
from flower_desloc.flower.client_info import without_data
from flower_desloc.flower.client_state import ClientState, StateFiles, client_name, state_files
from flower_desloc.flower.internals import log
from flower_desloc.flower.messages import (
    AFRESH,
    ARE_YOU_THERE,
    CLIENT_INFO,
    CONFIG,
    GOODBYE,
    HELLO,
    METRICS,
    RUN_KEY,
    STATE_LOST,
    STATE_NEW,
    WindowRequest,
)
from flower_desloc.flower.secure.record import (
    ASK,
    CONFIRM,
    KEYS,
    SECURE,
    SHARES,
    UNMASK,
    by_name,
    read_by_name,
    record_of,
    request_digest,
)
from flower_desloc.secure.agreement import SumTerms, shapes_digest, stated
from flower_desloc.secure.codes import Codes, encode, largest_of, packed, scale_after, width_of
from flower_desloc.secure.identity import LEAST, Identity
from flower_desloc.secure.site import SiteSum

MASKED_LOSS = "masked-loss"
"""The metric that has two codes: of the window's mean loss, and 1 if there is one."""
LOSS_SCALE = 32

_SHOWN = ("start-step", "stop-step", "steps", "learning-rates", "seconds", STATE_NEW)
"""The metrics of a window that are sent; they say nothing of the data but its size, by the time."""

_PATIENCE = 60.0
"""Seconds that a greeting waits for the end of a window."""

Call = Callable[[Message, Context], Message]


def answer(message: Message, context: Context, call: Call, folder: Path) -> Message:
    """Answer a message at a site whose keys are in ``folder``.

    Raises ``ValueError`` for what the site refuses.
    """
    kind = message.metadata.message_type
    if kind == ARE_YOU_THERE:
        return call(message, context)
    site, files = _site(context, message, folder)  # in a greeting: its keys may be of no use
    if kind == HELLO:
        with site.training(patience=_PATIENCE):  # as it may go back to an earlier state
            return _without_data(call(message, context))
    if kind == ASK:
        return _answer_question(message, site, files)
    if kind == GOODBYE:
        with site.training():
            reply = call(message, context)
            site.forget()
        return reply
    if kind == "train":
        with site.training():
            return _train(message, context, call, site, files)
    if kind.startswith("evaluate"):
        raise ValueError(
            "the metrics of a site's own records would be its own: a site with secure-keys in its "
            "node config has no evaluation; set evaluation.federated=false"
        )
    # Also "train.default", which is the function for "train".
    raise ValueError(f"a site with secure-keys in its node config answers no {kind!r}")


def _site(context: Context, message: Message, folder: Path) -> tuple[SiteSum, StateFiles]:
    least = context.node_config.get("secure-min", LEAST)
    if not isinstance(least, int):
        raise ValueError(f"secure-min={least!r} in the node config: must be a number of sites")
    identity = Identity.read(folder, client_name(context), least)
    config = records_of(ConfigRecord, message.content).get(CONFIG, ConfigRecord())
    run_key = str(config.get(RUN_KEY, ""))
    files = state_files(context, run_key)  # which checks the names
    path = files.folder.parents[1] / SECURE / f"{files.folder.name}.json"
    return SiteSum(identity, path, run_key), files


def _answer_question(message: Message, site: SiteSum, files: StateFiles) -> Message:
    record = record_of(message)
    phase = record.get("phase")
    if phase == KEYS:
        terms = SumTerms.of_json(str(record.get("terms")))
        found = {site.name: site.keys(terms, _step_of_state(files.at(terms.start), terms))}
    elif phase == SHARES:
        found = site.shares(read_by_name(record))
    elif phase == CONFIRM:
        found = {site.name: site.confirm(list(read_by_name(record)))}
    elif phase == UNMASK:
        found = site.unmask(read_by_name(record))
    else:
        raise ValueError(f"{phase!r} is no question of a secure sum")
    return Message(RecordDict({SECURE: ConfigRecord(by_name(found))}), reply_to=message)


def _train(
    message: Message, context: Context, call: Call, site: SiteSum, files: StateFiles
) -> Message:
    """Take the steps of a window, and mask what is due."""
    request = WindowRequest.from_content(message.content)
    _require_masks(message, request)
    terms = site.terms()
    # In a fresh window the state stays where a resume looks for it, but nothing is read of it.
    at_start = files.at(terms.start)
    state = None if terms.fresh else at_start
    state_step = _step_of_state(state, terms)
    if _lacks(request, terms, state):
        metrics = MetricRecord({"num-examples": 0, "train-loss": math.nan, STATE_LOST: 1})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)
    _agree(message, site, request, terms, state_step, files.steps())
    if state_step is None and not terms.fresh:
        _begin_alike(files, request)
    records_of(ConfigRecord, message.content)[CONFIG][AFRESH] = terms.fresh
    kinds, bundles = request.kinds, request.bundles
    del request, state, at_start  # its tensors are freed by whoever uses them
    reply = call(message, context)
    metrics = records_of(MetricRecord, reply.content)[METRICS]
    if STATE_LOST in metrics:
        return reply
    if state_step is not None and STATE_NEW in metrics:
        raise ValueError("this site's state is damaged; a window is asked for again with new keys")
    content = RecordDict({METRICS: _shown(metrics)})
    loss = _loss_codes(metrics.get("train-loss"))
    masked = _masked(streams_of(reply.content), terms, kinds, site, loss)
    content[METRICS][MASKED_LOSS] = loss.tolist()
    for name in list(masked):
        record = to_record(masked.pop(name))
        content[name] = bundled(record) if bundles else record
    reply.content = content
    return reply


def _shown(metrics: MetricRecord) -> MetricRecord:
    """Return what is sent of the metrics of a window."""
    shown = MetricRecord({name: metrics[name] for name in _SHOWN if name in metrics})
    shown["num-examples"] = 1
    for hidden in ("train-loss", "param-norm"):
        shown[hidden] = math.nan
    return shown


def _step_of_state(state: ClientState | None, terms: SumTerms) -> int | None:
    """Return the step of a state with local steps that a window goes on from; None: it has none."""
    if state is None:
        return None
    now = terms.versions
    kept = {name: state.versions[name] for name in state.streams}
    goes_on = any(now.get(name, version) == version for name, version in kept.items())
    return state.step if goes_on or state.late or state.loop_state else None


def _lacks(request: WindowRequest, terms: SumTerms, state: ClientState | None) -> bool:
    """Return whether an average was not sent, and is not in the state with the steps since."""
    return any(
        name not in request.streams and not (state is not None and state.has(name, version))
        for name, version in terms.versions.items()
    )


def _begin_alike(files: StateFiles, request: WindowRequest) -> None:
    """Write a state without streams, for a window that begins from the averages alone.

    A site's first window at a later step begins otherwise than that of the others
    (``window_events``), and an old state may have residuals. The server could have one site forget
    its state, repeat the window, and tell that site's part by the difference of the two sums.

    Where some moment was never averaged, none of the sites has one of its own, or it would go on
    from that: then all begin as new clients do.
    """
    are_new = any(
        version == 0 and starts_at_zero(name) and name not in request.resets
        for name, version in request.versions.items()
    )
    state = ClientState(
        step=request.start,
        versions={} if are_new else request.versions,
        streams={},
        attempt=request.attempt,
        checkpoint=request.checkpoint,
    )
    files.write(state)


def _require_masks(message: Message, request: WindowRequest) -> None:
    if SECURE not in message.content:
        raise ValueError(
            "this site adds to secure sums only, by secure-keys in its node config, and the server "
            f"asks for {', '.join(sorted(request.due)) or 'nothing'} as they are; set "
            "privacy.secure_aggregation=true"
        )
    if GRADIENTS in request.due:
        raise ValueError("a site with secure-keys in its node config sends no gradients")


def _agree(
    message: Message,
    site: SiteSum,
    request: WindowRequest,
    terms: SumTerms,
    state_step: int | None,
    states: Collection[int],
) -> None:
    """Take the others' shares; raises ``ValueError`` unless the sum is what is asked for."""
    sent = {
        name: stated(request.versions[name], digest(stream), largest_of(stream))
        for name, stream in request.streams.items()
    }
    site.receive(read_by_name(record_of(message)), sent, state_step, states)
    del message.content[SECURE]
    asked = request.run_key, request.start, request.stop, set(request.due)
    if asked != (terms.run, terms.start, terms.stop, set(terms.shapes)) or any(
        request.versions.get(name) != version for name, version in terms.versions.items()
    ):
        raise ValueError(f"the sites agreed on a sum of {terms.window}, not on what is asked for")
    if request_digest(message.content) != terms.request:
        raise ValueError(
            "the settings of this request are not those that all sites of the sum agreed on"
        )
    for name, width in terms.widths.items():
        average = terms.averages.get(name)
        codes = width_of(kind_of(name, request.kinds)), scale_after(average, terms.most, width)
        if codes != (width, terms.scales[name]):
            raise ValueError(f"the codes of {name!r} are not those that follow from its average")


def _masked(
    streams: Streams, terms: SumTerms, kinds: Kinds, site: SiteSum, loss: Codes
) -> dict[str, dict[str, Tensor]]:
    """Return the masked bytes of streams, by tensor, and mask the ``loss`` in place."""
    shapes = {n: shapes_digest({k: t.shape for k, t in s.items()}) for n, s in streams.items()}
    if shapes != terms.shapes:
        raise ValueError("the server's model has other tensors than this site's")
    masked: dict[str, dict[str, Tensor]] = {name: {} for name in streams}

    def coded() -> Iterator[Codes]:
        yield loss
        for name, key in order_of(streams):
            codes = _encoded(name, key, streams[name][key], terms, kinds)
            yield codes  # it has its masks when the next one is asked for
            masked[name][key] = torch.from_numpy(packed(codes, terms.widths[name]))

    site.mask(coded())
    return masked


def order_of(streams: Streams) -> list[tuple[str, str]]:
    """Return the order in which the tensors of streams are masked, after the loss."""
    return [(name, key) for name in sorted(streams) for key in sorted(streams[name])]


def _encoded(name: str, key: str, tensor: Tensor, terms: SumTerms, kinds: Kinds) -> Codes:
    up, width = not kind_of(name, kinds).is_signed, terms.widths[name]
    try:
        return encode(tensor, terms.scales[name], terms.most, width, up=up)
    except ValueError:
        log(WARNING, "%r of stream %r has values that no code holds", key, name)  # here alone
        raise


def _loss_codes(loss: object) -> Codes:
    if not isinstance(loss, float) or not abs(loss) < 2.0**20:  # it is in nobody's mean
        return np.zeros(2, np.int64)
    return np.array([round(loss * 2.0**LOSS_SCALE), 1], np.int64)


def _without_data(reply: Message) -> Message:
    if reply.has_content() and CLIENT_INFO in reply.content:
        info = records_of(ConfigRecord, reply.content)[CLIENT_INFO]
        reply.content[CLIENT_INFO] = without_data(info)
    return reply
