"""What was handed over stays as it was, and memory is used again once nobody has it."""

import pytest
import torch
from federation import OPTIMIZERS, Quadratic, generator
from flower_path import Run
from torch import nn

from flower_desloc import SyncSchedule
from flower_desloc.core.streams import digest, prime
from flower_desloc.flower.arrays import (
    from_array,
    hand_over,
    is_handed_over,
    is_in_room,
    room,
    to_array,
)
from flower_desloc.flower.client import Worker
from flower_desloc.flower.housing import Rooms, house
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.policy import Policy
from flower_desloc.flower.records import Reply, from_record
from flower_desloc.optim import ADOPT

KINDS = [(torch.float32, torch.Size(shape)) for shape in ((3, 5), (), (0,), (7,))]


def values(seed, dtype=torch.float32):
    return [
        torch.randn(shape, generator=generator(seed, i)).to(dtype)
        for i, (_, shape) in enumerate(KINDS)
    ]


def worker():
    module = nn.ParameterList([nn.Parameter(value) for value in values(0)])
    optimizer = ADOPT(module.parameters())
    prime(optimizer)

    def loss_at(step):
        return sum(((p - step) ** 2).sum() for p in module)

    return Worker(module=module, optimizer=optimizer, loss_at=loss_at, num_examples=1)


def addresses(client, name="params"):
    return [t.data_ptr() for t in client.take([name])[name].values() if t.numel()]


# ------------------------------------------------------------------------------------------- Client


@pytest.mark.parametrize("name", ["params", "exp_avg", "exp_avg_sq"])
def test_a_reply_is_the_model_itself_and_stays_as_it_was_when_the_model_goes_on(name):
    client = worker()
    client.put(client.take(["params", "exp_avg", "exp_avg_sq"]), due={name})
    client.steps(0, 3, 0)
    record = Reply(metrics={}, streams=client.take([name])).to_content()[name]
    assert [from_array(a).data_ptr() for a in record.values() if a.shape != (0,)] == addresses(
        client, name
    )
    before = digest(from_record(record))
    assert before == digest(client.take([name])[name])
    # While the reply is there, who writes to the model writes elsewhere.
    for due in ((), {name}):
        client.put({name: dict(zip("0123", values(9), strict=True))}, due=due)
        client.steps(3, 5, 0)
        assert digest(from_record(record)) == before != digest(client.take([name])[name])


def test_memory_that_was_handed_over_twice_is_kept_as_long_as_either_is_there():
    [tensor] = room([(torch.float32, torch.Size((4,)))])
    for first_goes in (True, False):
        arrays = [hand_over(tensor), hand_over(tensor)]
        arrays.pop(0 if first_goes else 1)
        assert is_handed_over(tensor)
        arrays.clear()
        assert not is_handed_over(tensor)


def test_once_the_reply_is_gone_its_memory_is_the_models_again():
    client = worker()
    client.put(client.take(["params"]), due={"params"})
    first = addresses(client)
    for _ in range(3):
        record = Reply(metrics={}, streams=client.take(["params"])).to_content()["params"]
        assert any(map(is_handed_over, client.module))
        del record
        assert not any(map(is_handed_over, client.module))
        client.put(client.take(["params"]), due={"params"})
        assert addresses(client) == first


def test_training_in_given_memory_takes_the_same_steps():
    ends = []
    for due in ((), {"params", "exp_avg", "exp_avg_sq"}):
        client = worker()
        start = {
            n: {k: t.clone() for k, t in s.items()}
            for n, s in client.take(["params", "exp_avg", "exp_avg_sq"]).items()
        }
        client.put(start, due=due)
        client.steps(0, 5, 0)
        ends.append(client.take(["params", "exp_avg", "exp_avg_sq"]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


@pytest.mark.parametrize(
    "change",
    [
        lambda ts: [t.to(torch.bfloat16) for t in ts],
        lambda ts: [ts[0].T, *ts[1:]],
        lambda ts: [*ts, ts[0].detach()],
        lambda ts: list(torch.arange(12.0).split(3)),
        lambda ts: [t.share_memory_() for t in ts],
        lambda ts: [t.to("meta") for t in ts],
    ],
    ids=["bf16", "transposed", "twice", "views", "shared", "meta"],
)
def test_what_cannot_be_handed_over_stays_where_it_is(change):
    tensors = change(values(0))
    before = [(t.data_ptr(), t.stride()) for t in tensors]
    house(tensors, [], due=True)
    assert [(t.data_ptr(), t.stride()) for t in tensors] == before
    assert not any(map(is_in_room, tensors))


@pytest.mark.parametrize("where", ["frozen", "buffer", "state"])
def test_what_the_model_ties_stays_tied(where):
    client = worker()
    first = client.module[0]
    if where == "frozen":
        client.module.append(nn.Parameter(first.data, requires_grad=False))
        tied = client.module[-1]
    elif where == "buffer":
        client.module.register_buffer("tied", first.data)
        tied = client.module.tied
    else:
        tied = client.optimizer.state[first]["other"] = first.data
    new = client.take(["params"])["params"]
    client.put({"params": {key: t + 1 for key, t in new.items()}}, due={"params"})
    assert tied.equal(first)
    client.steps(0, 2, 0)
    assert tied.equal(first)


def test_in_one_process_a_client_that_goes_on_does_not_change_its_reply(tmp_path):
    """There, a user's function may write to the model between two messages, past any guard."""
    run = federation(tmp_path, 1, 2, 2)
    replies = []
    answer = InProcessGrid._answer

    def kept(grid, message):
        reply = answer(grid, message)
        replies.append(reply)
        return reply

    InProcessGrid._answer = kept
    try:
        run.start()
    finally:
        InProcessGrid._answer = answer
    arrays = [a for r in replies for rec in r.content.array_records.values() for a in rec.values()]
    assert arrays
    assert all(type(array.data) is bytes for array in arrays)


# ------------------------------------------------------------------------------------------- Server


def test_a_room_is_given_again_once_nothing_of_it_is_handed_over():
    rooms = Rooms()
    first, second = rooms(KINDS), rooms(KINDS)  # two streams of one window
    places = [{t.data_ptr() for t in ts if t.numel()} for ts in (first, second)]
    assert not places[0] & places[1]
    array = hand_over(first[0])
    rooms.take_back()
    again = rooms(KINDS)
    assert {t.data_ptr() for t in again if t.numel()} == places[1]
    third = rooms(KINDS)
    assert not {t.data_ptr() for t in third if t.numel()} & (places[0] | places[1])
    del array
    rooms.take_back()
    found = [{t.data_ptr() for t in rooms(KINDS) if t.numel()} for _ in range(3)]
    assert places[0] in found
    other = rooms([(torch.float64, shape) for _, shape in KINDS])
    assert [t.dtype for t in other] == [torch.float64] * len(KINDS)


def test_a_message_that_is_let_go_meanwhile_makes_no_two_rooms_of_one(monkeypatch):
    rooms = Rooms()
    rooms(KINDS)
    answers = iter([True])  # another thread has it, and a moment later has not
    monkeypatch.setattr(
        "flower_desloc.flower.housing.is_handed_over", lambda _: next(answers, False)
    )
    rooms.take_back()
    rooms(KINDS)
    rooms.take_back()
    first, second = rooms(KINDS), rooms(KINDS)
    assert first[0].data_ptr() != second[0].data_ptr()


def federation(tmp_path, *periods, policy=None):
    case = OPTIMIZERS["adam"]
    schedule = SyncSchedule(case.periods(*periods))
    run = Run(Quadratic(), case, schedule, tmp_path, num_clients=3, num_steps=8, policy=policy)
    run.strategy.eval_every = 1
    return run


def test_an_average_that_somebody_keeps_never_changes(tmp_path):
    run = federation(tmp_path, 1, 2, 2)
    kept = []

    def evaluate(_round, arrays):
        own = run.strategy.globals.averages["params"]
        assert all(type(array.data) is bytes for array in arrays.values())
        assert digest(from_record(arrays)) == digest(from_record(own))
        kept.append((own, digest(from_record(own))))

    run.strategy.start(run.grid, run.initial, evaluate_fn=evaluate)
    assert len({seen for _, seen in kept}) == len(kept) == 9
    assert all(digest(from_record(arrays)) == seen for arrays, seen in kept)


@pytest.mark.parametrize("failing", [(), (3, 4)], ids=["in peace", "with replies refused"])
def test_a_server_works_in_two_rooms_for_a_stream(failing, tmp_path):
    run = federation(tmp_path, 1, "never", "never", policy=Policy(on_failure="continue"))
    rooms = run.strategy._rooms
    places, given = [], []

    def meddle(asked, reply):
        if asked.metadata.message_type != "train" or asked.metadata.dst_node_id != 2:
            return reply
        if asked.content["config"]["server-round"] in failing:
            key, array = next(iter(reply.content["params"].items()))
            bad = torch.full(array.shape, float("nan"), dtype=torch.float64)
            reply.content["params"][key] = to_array(bad)
        return reply

    def evaluate(_round, _arrays):
        run.grid.sent.clear()  # which has the averages as well
        own = from_record(run.strategy.globals.averages["params"])
        places.append(min(t.data_ptr() for t in own.values() if t.numel()))
        given.append(len(rooms._free) + len(rooms._given))

    run.grid.meddle = meddle
    run.strategy.start(run.grid, run.initial, evaluate_fn=evaluate)
    assert len(places) == 9
    assert max(given[-2:]) <= 2
    if not failing:
        assert len(set(places[1:])) == 2
