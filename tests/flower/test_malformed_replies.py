"""Thousands of malformed replies: none stops the server, none changes an average."""

import io
import pickle
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from flower_path import Watch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Result
from hypothesis import given
from hypothesis import strategies as st
from tiny import TINY, summary, train

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.bundles import STYPE
from flower_desloc.flower.failures import FederationError
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.meter import TrafficMeter
from flower_desloc.flower.observer import WindowRecord
from flower_desloc.flower.policy import Policy

EACH = 40
"""Number of malformed replies in one window, besides those of two honest clients."""

SHAPES = {"matrix": (2, 3), "scalar": ()}
STREAMS = ("params", "exp_avg_sq")
ZEROS = {key: torch.zeros(shape, dtype=torch.float32) for key, shape in SHAPES.items()}
X0 = to_record(ZEROS)
Tree = dict[str, torch.Tensor]


@cache
def streams(m: int) -> dict[str, Tree]:
    """Return the streams of the honest client m, without negative values."""
    noise = torch.Generator().manual_seed(m)
    return {
        name: {
            key: torch.rand(shape, dtype=torch.float32, generator=noise)
            for key, shape in SHAPES.items()
        }
        for name in STREAMS
    }


@cache
def arrays(m: int) -> dict[str, ArrayRecord]:
    return {name: to_record(stream) for name, stream in streams(m).items()}


# -------------------------------------------------------------------------------- Malformed replies

# A description, and a function that corrupts the content of a valid reply.

Wrong = tuple[str, Callable[[RecordDict], object]]
Place = tuple[str, str]
"""Stream and tensor."""

stream = st.sampled_from(STREAMS)
place = st.tuples(stream, st.sampled_from(sorted(SHAPES)))
unknown = st.text(max_size=12).filter(lambda name: name not in (*STREAMS, *SHAPES, "metrics"))


def array(content: RecordDict, at: Place) -> np.ndarray:
    record: Any = content[at[0]]
    return record[at[1]].numpy()


def put(content: RecordDict, at: Place, values: np.ndarray) -> None:
    record: Any = content[at[0]]
    record[at[1]] = Array(values)


def is_now(name: str, value: object, record: str = "metrics") -> Wrong:
    return f"{name} is {value}", lambda c: c[record].update({name: value})


def raises(text: str) -> Wrong:
    def spoil(content: RecordDict) -> None:
        raise RuntimeError(text)

    return f"the error {text!r}", spoil


NO_METRICS: Wrong = ("no metrics", lambda c: c.pop("metrics"))
of_errors = st.builds(raises, st.text(max_size=30))
of_steps = st.builds(is_now, st.just("stop-step"), st.integers(7, 99))


def of_records() -> st.SearchStrategy[Wrong]:
    def called(name: str, to: str) -> Wrong:
        return f"{name} is called {to!r}", lambda c: c.update({to: c.pop(name)})

    def twice(name: str, to: str) -> Wrong:
        return f"{to!r} as well", lambda c: c.update({to: c[name]})

    def lost(content: RecordDict) -> None:
        content.metric_records["metrics"].update({"state-lost": 1, "num-examples": 0})
        for name in STREAMS:
            content.pop(name)

    return st.one_of(
        stream.map(lambda s: (f"no {s}", lambda c: c.pop(s))),
        st.builds(called, stream, unknown),
        st.builds(twice, stream, unknown),
        stream.map(lambda s: (f"{s} is empty", lambda c: c.update({s: ArrayRecord()}))),
        stream.map(lambda s: (f"{s} is no array", lambda c: c.update({s: ConfigRecord({"a": 1})}))),
        st.just(("nothing at all", lambda c: c.clear())),
        st.just(NO_METRICS),
        st.just(("the state is lost, always", lost)),
    )


def of_tensors() -> st.SearchStrategy[Wrong]:
    shape = st.lists(st.integers(0, 5), max_size=4).map(tuple)
    dtype = st.sampled_from("?bhilBHILedFDSUMm")

    def renamed(at: Place, to: str) -> Wrong:
        return f"{at} is {to!r}", lambda c: c[at[0]].update({to: c[at[0]].pop(at[1])})

    def added(at: Place, to: str) -> Wrong:
        return f"{to!r} like {at}", lambda c: c[at[0]].update({to: c[at[0]][at[1]]})

    def shaped(at: Place, to: tuple[int, ...]) -> Wrong:
        to = to if to != SHAPES[at[1]] else (*to, 2)
        return f"{at} of shape {to}", lambda c: put(c, at, np.zeros(to))

    def typed(at: Place, to: str) -> Wrong:
        return f"{at} of type {to}", lambda c: put(c, at, np.zeros(SHAPES[at[1]], dtype=to))

    return st.one_of(
        place.map(lambda at: (f"no {at}", lambda c: c[at[0]].pop(at[1]))),
        st.builds(renamed, place, unknown),
        st.builds(added, place, unknown),
        st.builds(shaped, place, shape),
        st.builds(typed, place, dtype),
        place.map(
            lambda at: (f"{at} big-endian", lambda c: put(c, at, array(c, at).astype(">f8")))
        ),
    )


def of_values() -> st.SearchStrategy[Wrong]:
    # The last two are finite, but their difference is not.
    bad = st.sampled_from([np.nan, np.inf, -np.inf, 3.3e38, -3.3e38])

    def holds(at: Place, index: int, value: float) -> Wrong:
        def spoil(content: RecordDict) -> None:
            values = array(content, at)
            values.reshape(-1)[index % values.size] = value
            put(content, at, values)

        return f"{value} in {at}", spoil

    second_moment = place.map(lambda at: ("exp_avg_sq", at[1]))
    return st.one_of(
        st.builds(holds, place, st.integers(0, 5), bad),
        st.builds(holds, second_moment, st.integers(0, 5), st.floats(-1e30, -1e-30)),
    )


HEADERS = [
    b"{'descr': '<f8', 'fortran_order': False, 'shape': (2, 9223372036854775807), }",
    b"{'descr': '|V0', 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (4,), }",
    b"{'descr': '<f8', 'shape': (4,), }",
    b"(" * 900,
    b"-" * 9000 + b"1",
    b"\xff\xfe",
]


def of_bytes() -> st.SearchStrategy[Wrong]:
    def changed(at: Place, what: str, change: Callable[[bytes], bytes]) -> Wrong:
        def spoil(content: RecordDict) -> None:
            it: Any = content[at[0]][at[1]]
            it.data = change(it.data)

        return f"{at} {what}", spoil

    def is_data(at: Place, data: bytes) -> Wrong:
        return changed(at, f"is {data[:30]!r}", lambda _: data)

    def cut(at: Place, length: int) -> Wrong:
        return changed(at, f"cut, {length}", lambda data: data[: length % len(data)])

    def longer(at: Place, more: bytes) -> Wrong:
        return changed(at, f"with {len(more)} bytes more", lambda data: data + more)

    def is_of(at: Place, stype: str) -> Wrong:
        return f"{at} of stype {stype!r}", lambda c: setattr(c[at[0]][at[1]], "stype", stype)

    def headed(at: Place, header: bytes) -> Wrong:
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(32)
        return is_data(at, data)

    begun = st.binary(max_size=40).map(lambda rest: b"\x93NUMPY" + rest)
    archive = io.BytesIO()
    np.savez(archive, a=np.zeros(4))
    others = st.sampled_from([archive.getvalue(), pickle.dumps({"a": 1})])
    return st.one_of(
        st.builds(is_data, place, st.binary(max_size=60) | begun | others),
        st.builds(cut, place, st.integers(0, 10**6)),
        st.builds(longer, place, st.binary(min_size=1, max_size=99)),
        st.builds(is_of, place, st.text(max_size=9) | st.just(STYPE)),
        st.builds(headed, place, st.sampled_from(HEADERS)),
    )


def of_metrics() -> st.SearchStrategy[Wrong]:
    required = st.sampled_from(["num-examples", "train-loss"])
    lists = st.lists(st.integers(-3, 3), max_size=3)
    other = st.integers(-(2**63), 2**64 - 1).filter(lambda n: n not in (0, 1)) | lists
    floats = st.sampled_from([np.nan, np.inf, -np.inf, 0.5])
    never = [0, -1, -(2**63), 10**15 + 1, 2**64 - 1, 0.0, np.nan, np.inf, -np.inf, -0.5, 1e19]
    return st.one_of(
        required.map(lambda name: (f"no {name}", lambda c: c["metrics"].pop(name))),
        st.builds(is_now, required, lists),
        st.builds(is_now, st.just("num-examples"), st.sampled_from(never)),
        st.sampled_from(["start-step", "stop-step"]).map(
            lambda name: (f"no {name}", lambda c: c["metrics"].pop(name))
        ),
        st.builds(is_now, st.sampled_from(["start-step", "stop-step"]), other | floats),
        # Flower's MetricRecord accepts integers that its wire format cannot represent.
        st.builds(is_now, st.text(max_size=9), st.sampled_from([2**64, -(2**63) - 1, 10**400])),
    )


def of_evaluations() -> st.SearchStrategy[Wrong]:
    total = st.sampled_from(["totals/nats", "totals/tokens"])
    bad = st.sampled_from([np.nan, np.inf, -1.0, -(2**63), [1.0], []])
    return st.one_of(
        st.builds(is_now, total | st.just("num-examples"), bad),
        total.map(lambda name: (f"no {name}", lambda c: c["metrics"].pop(name))),
        st.just(is_now("totals/tokens", 0.0)),
        st.builds(is_now, st.just("loss"), st.sampled_from([10**400, 2**64])),
        st.just(NO_METRICS),
        st.just(("a stream", lambda c: c.update(params=to_record(streams(0)["params"])))),
        of_errors,
        of_steps,
    )


def of_greetings() -> st.SearchStrategy[Wrong]:
    names = ["", ".", "../x", "a/b", "x" * 101, "a\n", 7, b"client-3", ["client-3"]]
    lists = st.sampled_from(["streams", "versions"])
    about = st.just("client-info")
    return st.one_of(
        st.builds(is_now, st.just("client"), st.sampled_from(names), about),
        st.just(("no name", lambda c: c["client-info"].pop("client"))),
        st.just(("no about", lambda c: c.pop("client-info"))),
        st.builds(is_now, lists, st.sampled_from([7, "x", [1, 2, 3]]), about),
        of_errors,
    )


TRAINING = st.one_of(
    of_records(),
    of_tensors(),
    of_values(),
    of_bytes(),
    of_metrics(),
    of_steps,
    of_errors,
)

# ------------------------------------------------------------------------------------------ Clients


@dataclass(frozen=True)
class Clients:
    """An honest client, one that corrupts its replies for each of ``wrong``, and an honest one."""

    wrong: Sequence[Wrong] = ()
    asked: str = "train"
    """Type of the messages with corrupted replies."""

    def __call__(self, message: Message, context: Context) -> Message:
        m = int(context.node_config["m"])
        content = good(message, m)
        if message.metadata.message_type == self.asked and 0 < m <= len(self.wrong):
            _, spoil = self.wrong[m - 1]
            spoil(content)
        return Message(content, reply_to=message)

    def run(self, grid: type[InProcessGrid] = InProcessGrid) -> tuple[DesLoc, Result, WindowRecord]:
        """Run one window of one step; return its record as well."""
        strategy = DesLoc(
            SyncSchedule(dict.fromkeys(STREAMS, 1)),
            1,
            policy=Policy(on_failure="continue"),
            templates={"exp_avg_sq": {key: tensor.to("meta") for key, tensor in ZEROS.items()}},
            metrics=lambda totals: {"loss": totals["nats"] / totals["tokens"]},
            evaluate_clients=self.asked == "evaluate",
            run_key="run",
        )
        nodes = [{"m": m} for m in range(len(self.wrong) + 2)]
        watch = Watch()
        result = strategy.start(grid(self, nodes), X0, observer=watch)
        return strategy, result, watch.records[1]


def good(message: Message, m: int) -> RecordDict:
    """Return the reply of the honest client m."""
    match message.metadata.message_type:
        case "train":
            told: dict[str, Any] = {"num-examples": m + 1, "train-loss": 1.0}
            told |= {"start-step": 0, "stop-step": 1}
            content = RecordDict({"metrics": MetricRecord(told)})
            for name, stream in arrays(m).items():
                content[name] = ArrayRecord({key: copy(it) for key, it in stream.items()})
            return content
        case "evaluate":
            told = {"num-examples": 1, "loss": 2.0, "totals/nats": 4.0, "totals/tokens": 2.0}
            step = message.content["config"]["stop-step"]
            told |= {"start-step": step, "stop-step": step}
            return RecordDict({"metrics": MetricRecord(told)})
        case "query.hello":
            lists: dict[str, Any] = {"streams": [], "versions": []}
            return RecordDict({"client-info": ConfigRecord({"client": f"client-{m}", **lists})})
    return RecordDict()


@pytest.fixture(autouse=True)
def _not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # The requests are valid, and counting their bytes takes half of the time.
    monkeypatch.setattr(TrafficMeter, "sent", lambda *_: None)


# -------------------------------------------------------------------------------------- Properties

HONEST = ["client-0", f"client-{EACH + 1}"]
SPOILED = [f"client-{m}" for m in range(1, EACH + 1)]


@given(wrong=st.lists(TRAINING, min_size=EACH, max_size=EACH))
def test_a_malformed_reply_is_left_out_with_a_reason_and_changes_nothing(wrong):
    strategy, result, record = Clients(wrong).run()
    assert list(record.clients) == HONEST
    assert set(record.left_out) == set(SPOILED)
    assert all(reason.strip() for reason in record.left_out.values())
    assert result.train_metrics_clientapp[1]["num-examples"] == 1 + EACH + 2
    for name in STREAMS:
        got = from_record(strategy.state.averages[name])
        for key, tensor in got.items():
            ends = streams(0)[name][key], streams(EACH + 1)[name][key]
            torch.testing.assert_close(tensor, (ends[0] + ends[1]) / 2, rtol=0, atol=1e-7)
    # Malformed replies are counted as well, and never as negative bytes.
    size = sum(t.nbytes for t in streams(0)["params"].values())
    assert all(record.traffic.up[name] >= 2 * size for name in STREAMS)
    assert all(count >= 0 for count in record.traffic.up.values())


@given(wrong=st.lists(of_evaluations(), min_size=EACH, max_size=EACH))
def test_a_malformed_evaluation_is_left_out_with_a_reason_and_changes_nothing(wrong):
    _, result, record = Clients(wrong, "evaluate").run()
    told = {event.client: event.what for event in record.events if event.evaluation}
    assert list(told) == SPOILED
    assert all(why.strip() for why in told.values())
    assert not record.left_out
    metrics = {"loss": 2.0, **{f"{client}/loss": 2.0 for client in HONEST}}
    assert dict(result.evaluate_metrics_clientapp[1]) == metrics


@given(wrong=st.lists(of_greetings(), min_size=EACH, max_size=EACH))
def test_a_client_with_a_malformed_greeting_does_not_take_part(wrong):
    _, _, record = Clients(wrong, "query.hello").run()
    assert list(record.clients) == HONEST


def test_a_node_cannot_answer_for_another():
    class Masked(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            reply = super()._answer(message)
            if message.metadata.message_type == "train" and message.metadata.dst_node_id == 2:
                reply.metadata.__dict__["_src_node_id"] = 3
            return reply

    _, _, record = Clients([("", lambda content: None)]).run(Masked)
    assert list(record.clients) == ["client-0", "client-2"]
    assert record.left_out == {"client-1": "node 3 answered in its place"}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex128, torch.uint16])
def test_types_without_a_mean_are_refused_in_an_undescribed_stream(dtype):
    odd = {key: torch.ones(shape).to(dtype) for key, shape in SHAPES.items()}
    clients = Clients([("", lambda content: content.update(exp_avg=to_record(odd)))])
    schedule = SyncSchedule(dict.fromkeys((*STREAMS, "exp_avg"), 1))
    with pytest.raises(FederationError, match="which has no mean"):
        DesLoc(schedule, 1, run_key="run").start(InProcessGrid(clients, [{"m": 1}]), X0)


NONSENSE: list[dict[str, Any]] = [
    {"seconds": np.inf, "train-loss": np.nan, "losses": [np.nan], "grad-norms": [np.inf]},
    {"seconds": np.nan, "update-norm": np.inf, "param-norm": np.nan, "learning-rates": [-1e308]},
    {"seconds": [1.0], "update-norm": [1], "losses": 2**63, "grad-norms": [], "more": []},
    {"seconds": -1.7e308, "losses": [1e308, 1e308], "learning-rates": [], "": 1.0, "a/b": 1.0},
    {"seconds": 1.7e308, "losses": [1.0] * 1000, "grad-norms": 0},
]


class Nonsense(InProcessGrid):
    """Of three clients, the second sends a malformed reply to the greeting and in every window."""

    def _answer(self, message: Message) -> Message:
        reply = super()._answer(message)
        if message.metadata.dst_node_id == 2 and message.metadata.message_type == "train":
            config: Any = message.content["config"]
            window = int(config["server-round"])
            reply.content.metric_records["metrics"].update(NONSENSE[window % len(NONSENSE)])
        if message.metadata.dst_node_id == 2 and message.metadata.message_type == "query.hello":
            reply.content.config_records["client-info"].update(
                {"data/x": "9" * 40, "data/y": 10**15, "data/z": -1, "memory-free": "?"}
            )
        return reply


@pytest.mark.filterwarnings("ignore:constrained_layout:UserWarning")  # from 1e308 next to 6
def test_a_run_completes_whatever_metrics_a_client_reports(tmp_path, monkeypatch):
    monkeypatch.setattr("flower_desloc.app.engines.in_process.InProcessGrid", Nonsense)
    small = ("run.steps=5", "run.eval_every=5", "sync.params=1", "sync.exp_avg=2")
    policy = ("federation.on_failure=continue", "federation.min_clients=1")
    folder = train(tmp_path, *TINY, *small, "sync.exp_avg_sq=4", *policy, clients=3)
    found = summary(folder)
    assert found["status"] == "completed"
    assert found["weights_sha256"]
    split = found["seconds"]
    assert 0 <= split["clients"] <= split["total"]
    assert (folder / "overview.png").exists()
    assert (folder / "report.html").exists()
