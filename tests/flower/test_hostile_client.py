"""One hostile client of three: it changes nothing for the others except by its admitted share."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from flower_path import Watch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.app import RecordDict as Content
from hypothesis import given
from hypothesis import strategies as st
from test_malformed_replies import TRAINING, of_evaluations, of_greetings

from flower_desloc import DesLoc, SyncSchedule
from flower_desloc.app.runs.figures.partition import draw_partition
from flower_desloc.app.runs.recorder import to_line
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.flower import replies as limits
from flower_desloc.flower.arrays import from_record, to_record
from flower_desloc.flower.bundles import STYPE, bundled, unbundled
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.client_info import from_config, to_config
from flower_desloc.flower.exchange import poll_for_objects_often
from flower_desloc.flower.failures import REASON
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.internals import DecodeError, http_grid
from flower_desloc.flower.json_lines import as_json
from flower_desloc.flower.messages import TENSOR_NAMES
from flower_desloc.flower.metrics import pooled, unusual
from flower_desloc.flower.observer import WindowRecord, client_data
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.replies import ClientEvaluation, client_record

SHAPES = {"matrix": (2, 3), "scalar": ()}
PERIODS = {"params": 2, "exp_avg": 2, "exp_avg_sq": 4}
STEPS = 6
X0 = {key: torch.full(shape, 0.5) for key, shape in SHAPES.items()}
Tree = dict[str, torch.Tensor]
Spoil = Callable[[Content], object]


def drawn(m: int, step: int, name: str) -> Tree:
    """Return what client m adds to, or has in, a stream after ``step`` steps; all are positive."""
    noise = torch.Generator().manual_seed(1000 * m + 10 * step + len(name))
    return {key: 0.5 + torch.rand(shape, generator=noise) for key, shape in SHAPES.items()}


@dataclass
class Federation:
    """Three clients, of which ``hostile`` spoils its replies by type and number of the message."""

    spoil: dict[tuple[str, int], list[Spoil]] = field(default_factory=dict)
    hostile: int = 1
    policy: dict[str, Any] = field(default_factory=dict)
    evaluate: bool = True
    grid: type[InProcessGrid] = InProcessGrid
    clients: int = 3
    sent: dict[tuple[int, int], dict[str, ArrayRecord]] = field(default_factory=dict)
    """By client and step: its streams as they were received."""
    examples: dict[tuple[int, int], Any] = field(default_factory=dict)
    averages: list[dict[str, Tree]] = field(default_factory=list)
    """Of every window."""

    def __call__(self, message: Message, context: Context) -> Message:
        m, kind = int(context.node_config["m"]), message.metadata.message_type
        content, config = self._good(message, m), message.content.config_records["config"]
        step: Any = config["stop-step"]
        if m == self.hostile:
            for spoil in self.spoil.get((kind, step), ()):
                try:
                    spoil(content)
                except (KeyError, ValueError):  # an earlier change has removed what it changes
                    continue
        if kind == "train":
            found = {n: r for n, r in content.items() if isinstance(r, ArrayRecord)}
            self.sent[m, step] = found
            told = content.get("metrics")
            self.examples[m, step] = told.get("num-examples") if told is not None else None
        return Message(content, reply_to=message)

    def _good(self, message: Message, m: int) -> Content:
        config: Any = message.content["config"]
        steps = {"start-step": config["start-step"], "stop-step": config["stop-step"]}
        match message.metadata.message_type:
            case "query.hello":
                about: dict[str, Any] = {"client": f"client-{m}", "num-examples": 10 * (m + 1)}
                return Content({"client-info": ConfigRecord(about)})
            case "train":
                told = {"num-examples": 10 * (m + 1), "train-loss": 1.0, "seconds": 0.1}
                done = config["stop-step"] - config["start-step"]
                share = {
                    "steps": config["steps"] or done,
                    "weights": [1.0] * len(config["streams-due"]),
                }
                content = Content({"metrics": MetricRecord({**told, **steps, **share})})
                for name in config["streams-due"]:
                    content[name] = to_record(drawn(m, config["stop-step"], name))
                return content
            case "evaluate":
                told = {"num-examples": 1, "loss": 2.0, "totals/nats": 4.0, "totals/tokens": 2.0}
                return Content({"metrics": MetricRecord({**told, **steps})})
        return Content()

    def run(self) -> tuple[DesLoc, list[WindowRecord]]:
        strategy = DesLoc(
            SyncSchedule(PERIODS),
            STEPS,
            policy=Policy(**{"on_failure": "continue", **self.policy}),
            templates={
                n: {k: t.to("meta") for k, t in X0.items()} for n in PERIODS if n != "params"
            },
            metrics=lambda totals: {"loss": totals["nats"] / totals["tokens"]},
            eval_every=2,
            evaluate_clients=self.evaluate,
            run_key="run",
        )
        watch = Watch(
            lambda record: self.averages.append(
                {name: strategy.state.average(name) for name in record.streams}
            )
        )
        nodes = [{"m": m} for m in range(self.clients)]
        strategy.start(self.grid(self, nodes), to_record(X0), observer=watch)
        return strategy, watch.records

    def mean(self, record: WindowRecord, weights: dict[str, float]) -> dict[str, Tree]:
        """Return the weighted mean of what the clients of a window have sent."""
        total = sum(weights[name] for name in record.clients)
        means: dict[str, Tree] = {
            n: {k: torch.zeros_like(t) for k, t in X0.items()} for n in PERIODS
        }
        for name in record.clients:
            for stream in record.streams:
                for key, tensor in from_record(
                    self.sent[int(name[-1]), record.step][stream]
                ).items():
                    means[stream][key] += tensor * (weights[name] / total)
        return {name: means[name] for name in record.streams}


# ------------------------------------------------------------------------------- Any reply at all

number = st.one_of(
    st.floats(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([5e-324, 1.7e308, -1.7e308, 1e18, 2**63, 0, 1.6e38, 1e-12]),
)
metric = number | st.lists(st.floats(), max_size=9) | st.lists(st.integers(-9, 9), max_size=9)
text = st.text(max_size=20) | st.sampled_from(["\x1b[2J", "<script>", "a/b", "$x^{", "\ud800"])
NAMES = [
    "num-examples", "train-loss", "start-step", "stop-step", "steps", "losses", "grad-norms",
    "learning-rates", "param-norm", "seconds", "weights", "state-lost", "state-new",
    "loss", "totals/nats", "totals/tokens",
]  # fmt: skip


def told(name: str, value: Any) -> Spoil:
    return lambda content: content["metrics"].update({name: value})


def about(name: str, value: Any) -> Spoil:
    return lambda content: content["client-info"].update({name: value})


def scaled(stream: str, factor: float) -> Spoil:
    def spoil(content: Content) -> None:
        old = from_record(content.array_records[stream])
        with np.errstate(over="ignore"):
            content[stream] = to_record({key: tensor * factor for key, tensor in old.items()})

    return spoil


metrics = st.builds(told, st.sampled_from(NAMES) | text, metric)
scales = st.builds(
    scaled, st.sampled_from(sorted(PERIODS)), st.sampled_from([-1.0, 20.0, 1e5, 1e18, 1.6e38, 1e-9])
)
extra = st.builds(
    lambda name, key, value: lambda content: content.update({name: ConfigRecord({key: value})}),
    text,
    text,
    text | st.binary(max_size=9) | st.integers(0, 9),
)
malformed = {
    "train": TRAINING.map(lambda wrong: wrong[1]),
    "evaluate": of_evaluations().map(lambda wrong: wrong[1]),
    "query.hello": of_greetings().map(lambda wrong: wrong[1]),
}
any_about = st.builds(about, text | st.just("num-examples"), text | number.map(str) | number)
totals = st.dictionaries(
    st.sampled_from(["totals/pairs", "totals/squares"]),
    st.sampled_from([0.0, 2.0, 5e-324, 1e29, 1e308]),
    min_size=1,
).map(lambda more: lambda content: content["metrics"].update(more))
shares = st.builds(told, st.just("num-examples"), st.sampled_from([1, 99, 10**4, 10**15]))
any_reply = {
    # Most replies of the last kind are refused; the others are well-formed.
    "train": st.lists(scales, max_size=2)
    | st.lists(shares | scales, max_size=2)
    | st.lists(metrics | scales | extra | malformed["train"], max_size=3),
    "evaluate": st.lists(totals, max_size=1)
    | st.lists(metrics | extra | malformed["evaluate"], max_size=3),
    "query.hello": st.lists(any_about | extra | malformed["query.hello"], max_size=2),
}


@st.composite
def hostile_runs(draw: st.DrawFn) -> Federation:
    train = {("train", step): draw(any_reply["train"]) for step in (2, 4, 6)}
    evaluate = {("evaluate", step): draw(any_reply["evaluate"]) for step in (0, 2, 4, 6)}
    hello = {("query.hello", 0): draw(any_reply["query.hello"]) if draw(st.booleans()) else []}
    policy = {"weighting": draw(st.sampled_from(["uniform", "examples"]))}
    return Federation({**train, **evaluate, **hello}, draw(st.integers(0, 2)), policy)


@given(run=hostile_runs())
def test_no_reply_changes_anything_but_by_its_admitted_share(run):
    _, records = run.run()
    honest = {f"client-{m}" for m in range(3) if m != run.hostile}
    share = {"uniform": 1 / 2, "examples": 0.9}[run.policy["weighting"]]
    for record in records[1:]:
        assert honest <= record.clients.keys()
        assert record.left_out.keys() <= {f"client-{run.hostile}"}
        if run.policy["weighting"] == "uniform":
            weights = dict.fromkeys(record.clients, 1.0)
        else:
            weights = {n: float(run.examples[int(n[-1]), record.step]) for n in record.clients}
            others = sum(weights[name] for name in honest)
            worst = f"client-{run.hostile}"
            weights |= {worst: min(weights[worst], 9 * others)} if worst in weights else {}
        assert all(weights[n] <= (share + 1e-9) * sum(weights.values()) for n in weights)
        for stream, tree in run.mean(record, weights).items():
            got = run.averages[record.round][stream]
            for key, tensor in tree.items():
                torch.testing.assert_close(got[key], tensor, rtol=1e-4, atol=1e-4)
        for tree in run.mean(record, weights).values():  # an admitted share moves it so far
            assert all(tensor.abs().max() < 30 * 30 * 1.5 for tensor in tree.values())
        line = as_json(to_line(record))
        assert len(line) < 20_000
        assert json.loads(line)["train_loss"] is not None
        assert all(c.isprintable() for name in record.left_out.values() for c in name)


# ----------------------------------------------------------------------------------- Costly replies


def rows(number: int) -> Array:
    """Return a bundle of many arrays of a byte each."""
    index = [[i, f"a{i}", "float32", [1], "numpy.ndarray", 1] for i in range(number)]
    text = json.dumps(index, separators=(",", ":")).encode()
    head = len(text).to_bytes(8, "little") + text
    data = head + bytes(-len(head) % 64) + (b"x" + bytes(63)) * number
    return Array("uint8", (len(data),), STYPE, data)


def nested(size: int) -> Array:
    data = size.to_bytes(8, "little") + b"[" * size + bytes(64)
    return Array("uint8", (len(data),), STYPE, data)


BYTE = Array("float32", (1,), "numpy.ndarray", b"x")
EVALUATION = {"num-examples": 1, "totals/nats": 4.0, "totals/tokens": 2.0}


def in_metrics(more: Callable[[], dict[str, Any]]) -> Spoil:
    return lambda content: content["metrics"].update(more())


def records(number: int, make: Callable[[], Any]) -> Spoil:
    return lambda content: content.update({f"r{i}": make() for i in range(number)})


def array(make: Callable[[], Array], name: str = "params") -> Spoil:
    return lambda content: content.update({name: ArrayRecord({"matrix": make()})})


# Sizes at which the reply took seconds to minutes, or gigabytes, where it is cheap to make here.
COSTLY: list[tuple[str, str, Spoil]] = [
    ("train", "more than .* values", in_metrics(lambda: {"losses": [1.0] * 1_000_000})),
    ("train", "more than .* values", in_metrics(lambda: {f"m{i}": 1.0 for i in range(9_000)})),
    ("train", "name 'x+'... has more", in_metrics(lambda: {"x" * 10**7: 1.0})),
    ("train", "more than .* records", records(9_000, lambda: ConfigRecord({"a": 1}))),
    ("train", "more than .* records", records(9_000, lambda: ArrayRecord({"a": BYTE}))),
    ("train", "text 'a' has more", records(1, lambda: ConfigRecord({"a": bytes(10**9)}))),
    ("train", "has the stream 'r'", array(lambda: Array("f", (1,), "raw", bytes(10**9)), "r")),
    ("train", "more than 2 arrays", array(lambda: rows(3))),
    ("train", "more than .* bytes", array(lambda: rows(4_000))),
    ("train", "more than .* bytes", array(lambda: Array("f", (1,), "", bytes(10**9)))),
    ("train", "cannot be read", array(lambda: nested(9_000))),
    ("train", "type or a shape", array(lambda: Array("f" * 10**7, (1,), "", b""))),
    ("train", "type or a shape", array(lambda: Array("f", (1,) * 10**6, "", b""))),
    ("query.hello", "text 'device' has more", about("device", "x" * 10**8)),
    ("query.hello", "characters of text", about("device", ["x" * 4000] * 300)),
    ("query.hello", "more than .* values", about("device", ["x"] * 20_000)),
]


@pytest.mark.parametrize(
    ("kind", "words", "spoil"), COSTLY, ids=lambda it: it if isinstance(it, str) else ""
)
def test_a_costly_reply_is_left_out_before_it_is_decoded(kind, words, spoil):
    step = 2 if kind == "train" else 0
    run = Federation({(kind, step): [spoil]}, evaluate=False)
    began = time.process_time()  # a busy machine takes none of it
    _, seen = run.run()
    assert time.process_time() - began < 5
    reasons = seen[1].left_out if kind == "train" else {e.client: e.what for e in seen[0].events}
    [(client, reason)] = reasons.items()
    assert client == ("client-1" if kind == "train" else "node 2")
    assert re.search(words, reason)
    assert len(reason) <= REASON
    assert set(seen[1].clients) == {"client-0", "client-2"}


def test_a_bundle_has_at_most_4096_arrays():
    assert len(unbundled(ArrayRecord({"params": rows(4096)}))) == 4096
    with pytest.raises(ValueError, match="at most 4096"):
        unbundled(ArrayRecord({"params": rows(4097)}))


def test_a_long_error_is_cut_off():
    class Raising(Federation):
        def __call__(self, message: Message, context: Context) -> Message:
            if context.node_config["m"] == 1 and message.metadata.message_type == "train":
                return Message(Error(2, "begin\x1b[2J" + "y" * 10**7 + "end"), reply_to=message)
            return super().__call__(message, context)

    _, seen = Raising().run()
    reason = seen[1].left_out["client-1"]
    assert reason.startswith("begin\N{REPLACEMENT CHARACTER}[2J")
    assert len(reason) < REASON + 100


def test_a_reply_that_flower_cannot_decode_is_left_out():
    class Undecodable(InProcessGrid):
        def _answer(self, message: Message) -> Message:
            if message.metadata.dst_node_id == 2 and message.metadata.message_type == "train":
                raise DecodeError("Error parsing message")
            return super()._answer(message)

    run = Federation()
    run.grid = Undecodable
    _, seen = run.run()
    assert "Flower cannot decode its reply" in seen[1].left_out["client-1"]
    assert [event.kind for event in seen[1].events] == ["refused"]


def test_a_reply_of_too_many_objects_is_not_downloaded(monkeypatch):
    of_flower: Any = http_grid  # which imports the function
    monkeypatch.setattr(of_flower, "pull_objects", of_flower.pull_objects)  # restored afterwards
    poll_for_objects_often(lambda: 2)
    got = of_flower.pull_objects(object_ids=["a", "b"], pull_object_fn=str.encode)
    assert got == {"a": b"a", "b": b"b"}
    with pytest.raises(ValueError, match="3 objects, expected at most 2"):
        of_flower.pull_objects(object_ids=["a", "b", "c"], pull_object_fn=str.encode)
    assert limits.most_objects({"params": X0}) == limits.OBJECTS + 4


def test_the_largest_honest_reply_is_within_the_limits():
    """Of a window of one step, with small arrays in bundles, and 1000 labels in the greeting."""
    like = {"params": {f"layers.{i}.weight": torch.ones(i % 3 + 1) for i in range(3000)}}
    record = to_record(like["params"])
    sent = Content({"params": bundled(record), "metrics": MetricRecord({"losses": [1.0]})})
    limits.Limits.of(["params"], 1, like).check(sent)
    assert len(sent["params"]) == 1
    sizes = {f"a long name of a label, number {i}": i for i in range(9000)}
    hello = ConfigRecord({**to_config(ClientInfo(data=sizes))})
    limits.Limits.of([], 0, like).check(Content({"client-info": hello}))
    read = from_config(hello).data
    assert (len(read), sum(read.values())) == (1001, sum(sizes.values()))


PRINTABLE = st.characters(exclude_categories=["C", "Z"])
COUNT = st.integers(0, 10**15 - 1)
INFOS = st.builds(
    ClientInfo,
    **dict.fromkeys(["device", "device_name", "data_version"], st.none() | st.text(PRINTABLE)),
    **dict.fromkeys(
        ["memory_total", "memory_free", "micro_batch", "num_examples"], COUNT | st.none()
    ),
    data=st.dictionaries(st.text(PRINTABLE), COUNT),
)


@given(info=INFOS)
def test_a_client_is_to_the_server_what_it_says_of_itself(info):
    assert from_config(ConfigRecord({**to_config(info)})) == info


@pytest.mark.parametrize("number", [-1, 10**15, 2**64, True, 1.0, "1", b"1", [1]])
def test_a_number_of_itself_that_a_client_cannot_mean_is_not_stated(number):
    names = ["memory-total", "memory-free", "micro-batch", "num-examples", "data/a"]
    assert from_config(ConfigRecord(dict.fromkeys(names, number))) == ClientInfo()


@pytest.mark.parametrize("hostile", range(3))
@pytest.mark.parametrize("honest_state_theirs", [False, True])
@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("lists", [[["other"], [], [], []], [[*SHAPES], ["statistics"], [], []]])
def test_the_model_of_one_client_does_not_end_the_run(lists, clients, honest_state_theirs, hostile):
    def states(names: list[list[str]]) -> Spoil:
        named = dict(zip(TENSOR_NAMES, names, strict=True))
        return lambda content: content.config_records["client-info"].update(named)

    class Stating(Federation):
        def _good(self, message: Message, m: int) -> Content:
            content = super()._good(message, m)
            if honest_state_theirs and message.metadata.message_type == "query.hello":
                states([[*SHAPES], [], [], []])(content)
            return content

    run = Stating({("query.hello", 0): [states(lists)]}, hostile, evaluate=False, clients=clients)
    _, seen = run.run()
    assert all(len(record.clients) == clients for record in seen[1:])


def test_no_client_states_the_evaluation_of_another():
    def reply(**told: float) -> ClientEvaluation:
        return ClientEvaluation.measured({"num-examples": 1, **told}, None)

    false = {"client-0/loss": 9.0, "other/loss": 9.0}
    evaluations = {"client-1": reply(loss=2.0, **false), "client-2": reply(loss=4.0)}
    assert pooled(evaluations, None) == {"loss": 3.0, "client-1/loss": 2.0, "client-2/loss": 4.0}
    top = {"loss": 2.0, "top/1": 0.5}  # a name of one's own may contain a slash
    assert pooled({"client-1": reply(**top)}, None) == {
        **top,
        **{f"client-1/{name}": value for name, value in top.items()},
    }


# ------------------------------------------------------------------------------- Silent poisoning


@pytest.mark.parametrize("hostile", range(3))
@pytest.mark.parametrize("stream", sorted(PERIODS))
def test_one_reply_of_1e5_is_left_out_by_default(stream, hostile):
    for step in (4, 6) if stream != "exp_avg_sq" else (4,):  # also in the first window of a stream
        spoil = scaled(stream, 1e5)
        run = Federation({("train", step): [spoil]}, hostile, evaluate=False)
        _, seen = run.run()
        (record,) = (each for each in seen if each.step == step)
        assert "federation.norm_bound=30" in record.left_out[f"client-{hostile}"]
        assert [event.kind for event in record.events] == ["outlier"]


@pytest.mark.parametrize("hostile", range(3))
def test_the_bound_survives_a_resume(hostile, tmp_path):
    """The second start knows how long updates were, and no reply has to be held for it."""

    def run(steps: int, **options: Any) -> DesLoc:
        strategy = DesLoc(
            SyncSchedule(PERIODS), 6, policy=Policy(on_failure="continue"), run_key="run",
            evaluate_clients=False, checkpoints=Checkpoints(tmp_path), **options,
        )  # fmt: skip
        federation = Federation({("train", 4): [scaled("params", 1e5)]}, hostile)
        grid = InProcessGrid(federation, [{"m": m} for m in range(3)])
        strategy.start(grid, to_record(X0))
        return strategy

    whole = run(6)
    checkpoint = Checkpoint.read(Checkpoints(tmp_path).all()[0])
    assert checkpoint.step == 4
    assert checkpoint.lengths.keys() == PERIODS.keys()
    resumed = run(6, resume=checkpoint)
    assert resumed.state.lengths == whole.state.lengths
    for name in PERIODS:
        for key, tensor in whole.state.average(name).items():
            assert torch.equal(resumed.state.average(name)[key], tensor)


def test_a_reply_of_another_window_is_left_out_also_if_it_does_not_say_so():
    def silent(content: Content) -> None:
        del content["metrics"]["start-step"]

    _, seen = Federation({("train", 4): [silent], ("evaluate", 4): [silent]}).run()
    assert "is for the steps (None, 4)" in seen[2].left_out["client-1"]


def test_values_whose_squares_overflow_are_left_out():
    _, seen = Federation({("train", 2): [scaled("params", 1.6e38)]}, evaluate=False).run()
    assert "too large to be averaged" in seen[1].left_out["client-1"]


def test_a_share_of_the_examples_is_capped_and_said():
    spoil = told("num-examples", 10**15)
    run = Federation({("train", 2): [spoil], ("train", 4): [spoil]}, 2, {"weighting": "examples"})
    _, seen = run.run()
    [event] = [event for record in seen for event in record.events]  # once
    assert (event.kind, event.client) == ("capped", "client-2")
    assert event.what == "its 1e+15 examples count as 270; federation.max_share=0.9"
    got = run.mean(seen[1], {"client-0": 10.0, "client-1": 20.0, "client-2": 270.0})
    strategy, _ = Federation(dict(run.spoil), 2, run.policy).run()
    assert strategy.policy.max_share == 0.9
    assert got.keys() == {"params", "exp_avg"}
    _, seen = Federation({("train", 2): [told("num-examples", 10**18)]}, 2, run.policy).run()
    assert "num-examples is 10" in seen[1].left_out["client-2"]


def test_honest_shares_within_the_cap_are_the_stated_ones():
    run = Federation(policy={"weighting": "examples"})
    strategy, seen = run.run()
    assert not any(record.events for record in seen)
    expected = run.mean(seen[3], {"client-0": 10.0, "client-1": 20.0, "client-2": 30.0})
    for name, tree in expected.items():
        for key, tensor in tree.items():
            torch.testing.assert_close(strategy.state.average(name)[key], tensor)


# --------------------------------------------------------------------------- What is only shown


def reply(metrics: Any = None, **figures: Any) -> ClientEvaluation:
    more = {k.replace("_", "/", 1): v for k, v in figures.items()}
    return ClientEvaluation.measured({**EVALUATION, **more}, metrics or ratio)


def ratio(totals: Any) -> dict[str, float]:
    return {"loss": totals["nats"] / totals["tokens"]}


@pytest.mark.parametrize(
    "totals",
    [
        {"totals/nats": 1e300, "totals/tokens": 1e300},
        {"totals/tokens": 1e18},
        {"totals/nats": 1e29, "totals/tokens": 2.0},
        {"totals/nats": 1e308},
        {"num-examples": 10**18},
        {"num-examples": 10**14},
    ],
)
def test_an_evaluation_that_outweighs_all_others_is_left_out(totals):
    spoil = [told(name, value) for name, value in totals.items()]
    _, seen = Federation({("evaluate", step): spoil for step in (0, 2, 4, 6)}).run()
    assert "client-1" in [event.client for event in seen[-1].events if event.evaluation]
    assert not seen[-1].left_out
    assert seen[-1].federated is not None
    assert seen[-1].federated.overall == {"loss": 2.0}
    assert seen[-1].federated.parts.keys() == {"client-0", "client-2"}


def test_a_client_that_is_left_out_of_the_averages_and_of_the_evaluation_has_both_reasons():
    spoil = {
        ("train", 6): [told("num-examples", -1)],
        ("evaluate", 6): [told("totals/nats", 1e308)],
    }
    _, seen = Federation(spoil).run()
    assert "num-examples is -1" in seen[-1].left_out["client-1"]
    reasons = {event.evaluation: event.what for event in seen[-1].events}
    assert "num-examples is -1" in reasons[False]
    assert "total of nats" in reasons[True]


@pytest.mark.parametrize(
    ("totals", "loss"),
    [
        # The others have 4 nats and 2 tokens each, and it counts as nine times these 12 together.
        ({"totals/tokens": 1.9e6}, 8 / (4 + 108)),
        ({"totals/nats": 3e6, "totals/tokens": 1e6}, (8 + 0.75 * 108) / (4 + 0.25 * 108)),
    ],
)
def test_an_evaluation_above_the_largest_share_counts_as_that_and_is_named(totals, loss):
    spoil = [told(name, value) for name, value in totals.items()]
    _, seen = Federation({("evaluate", step): spoil for step in (0, 2, 4, 6)}).run()
    [event] = [event for record in seen for event in record.events]  # once
    assert (event.kind, event.client) == ("capped", "client-1")
    assert event.what.endswith("all others'; it counts as 9 times; federation.max_share=0.9")
    for record in seen:
        assert record.federated is not None
        assert record.federated.overall["loss"] == pytest.approx(loss, rel=1e-4)
        assert record.federated.parts["client-0"] == {"loss": 2.0}


def test_an_evaluation_by_examples_is_capped_too():
    run = Federation(policy={"max_share": 0.5})
    strategy, _ = run.run()
    strategy.metrics = None
    figures = {"client-0": (10, 2.0), "client-1": (10**6, 1e-12), "client-2": (20, 2.0)}
    said = {
        client: ClientEvaluation.measured({"num-examples": examples, "loss": nats}, None)
        for client, (examples, nats) in figures.items()
    }
    counted = strategy.weighting.of_evaluations(said)
    found = pooled(counted, None)
    assert found is not None
    assert found["loss"] == pytest.approx(1.0)
    assert counted["client-0"] is said["client-0"]


def test_a_clients_metrics_are_computed_from_its_totals():
    """A stated loss, or a metric of its own, is in no record."""
    found = pooled({"client-0": reply(loss=1e-12, boast=1.0), "client-1": reply()}, ratio)
    assert found == {"loss": 2.0, "client-0/loss": 2.0, "client-1/loss": 2.0}


def test_honest_evaluations_of_unequal_size_are_usual():
    sizes = [1.0, 10.0, 3000.0, 0.0, 50_000.0]
    replies = {
        f"client-{i}": reply(dict, totals_tokens=n, totals_nats=n / 9) for i, n in enumerate(sizes)
    }
    assert not unusual(replies)


@pytest.mark.parametrize("seconds", [5e-324, 1.7e308, np.nan, np.inf, -1.0])
def test_a_time_that_cannot_be_is_not_stated(seconds):
    record = client_record(
        {"num-examples": 1, "train-loss": 1.0, "seconds": seconds, "steps": 2}, 2
    )
    assert (record.seconds, record.steps) == (0.0, 2)
    assert client_record({"num-examples": 1, "train-loss": 1.0, "steps": 10**18}, 2).steps == 0
    policy = {"min_steps": 0.5, "weighting": "uniform"}
    spoil = [told("seconds", seconds), told("steps", 2)]
    _, seen = Federation({("train", 2): spoil}, policy=policy, evaluate=False).run()
    assert len(seen) == 4


def test_a_loss_that_is_no_number_is_not_in_the_mean():
    for loss in (np.nan, np.inf, 1.7e308, 1e29):
        _, seen = Federation({("train", 2): [told("train-loss", loss)]}, evaluate=False).run()
        assert seen[1].train_loss == 1.0
        assert len(seen[1].clients) == 3


def test_names_of_clients_cannot_act_on_a_terminal_or_a_figure(tmp_path):
    spoil = [about("data/$x^{\x1b[2J<b>", 7), about("device", "\x1b]0;title\x07")]
    watch = Watch()
    federation = Federation({("query.hello", 0): spoil})
    DesLoc(SyncSchedule(PERIODS), 2, evaluate_clients=False, run_key="run").start(
        InProcessGrid(federation, [{"m": m} for m in range(3)]), to_record(X0), observer=watch
    )
    assert watch.run is not None
    info = watch.run.clients["client-1"]
    assert info.device == "\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}"
    assert all(name.isprintable() for name in info.data)
    data = client_data(watch.run)
    draw_partition(data, tmp_path / "partition.png", task="causal_lm", title="t")
    assert (tmp_path / "partition.png").exists()
