"""A worker process of a simulation that has died is replaced, and its message answered again."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from flwr.app import Context, Message, RecordDict
from ray.exceptions import ActorDiedError, RayTaskError

from flower_desloc.flower import worker_pool
from flower_desloc.flower.internals import RayBackend, TaskIdentity
from flower_desloc.flower.worker_pool import replace_dead_workers


class Worker:
    """What Ray returns for a process; it is dead once it has answered a message of death."""

    def __init__(self, answer: Callable[[Message], Message]) -> None:
        self.dead, self.answer = False, answer
        self.run = SimpleNamespace(remote=lambda *job: (self, *job))


class Pool:
    """Flower's pool, with workers that run in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.answer: Callable[[Message], Message] = lambda message: Message(
            RecordDict(), reply_to=message
        )
        self.pool: list[Any] = [self.create_actor_fn() for _ in range(size)]
        self.num_actors, self.room = size, size
        self.client_resources: dict[str, float] = {}
        self.killed: list[Worker] = []
        monkeypatch.setattr(ray, "get", self._get)
        monkeypatch.setattr(ray, "kill", self.killed.append)
        monkeypatch.setattr(worker_pool, "pool_size_from_resources", self._room)
        monkeypatch.setattr(RayBackend, "process_message", RayBackend.process_message)
        replace_dead_workers()
        self.backend = SimpleNamespace(pool=self, app_fn=None)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1

    def create_actor_fn(self) -> Worker:
        return Worker(self.answer)

    def ask(self, client: int) -> Message:
        context = Context(1, client, {"partition-id": client}, RecordDict(), {})
        message = Message(RecordDict(), client + 1, "train")
        reply, _ = RayBackend.process_message(self.backend, message, context)  # type: ignore[arg-type]
        return reply

    def _room(self, resources: object) -> int:
        if not self.room:
            raise ValueError("ActorPool is empty")
        return self.room

    def _get(self, future: Any) -> Any:
        worker, _, message, partition, context = future
        if worker.dead:
            raise ActorDiedError
        try:
            return partition, self.answer(message), context
        except ActorDiedError:
            worker.dead = True
            raise


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    return Pool(monkeypatch, 2)


def dies(times: int, answer: Callable[[Message], Message]) -> Callable[[Message], Message]:
    left = [times]

    def die_first(message: Message) -> Message:
        if left[0]:
            left[0] -= 1
            raise ActorDiedError
        return answer(message)

    return die_first


def test_a_worker_that_dies_is_replaced_and_costs_no_client_its_window(pool, caplog):
    pool.answer = dies(1, pool.answer)
    assert [pool.ask(client).has_error() for client in (0, 1, 2)] == [False] * 3
    assert len(pool.pool) == 2
    assert not any(worker.dead for worker in pool.pool)
    assert len(pool.killed) == 1
    assert "the process that simulates client-0 has died" in caplog.text
    assert "a new process repeats the work" in caplog.text


def test_a_worker_that_died_while_it_was_idle_is_no_failure_of_a_client(pool):
    pool.pool[-1].dead = True
    assert not pool.ask(0).has_error()


def test_a_client_that_kills_two_workers_has_failed_and_no_other(pool):
    pool.answer = dies(2, pool.answer)
    with pytest.raises(RuntimeError, match=r"client-0 has died .* as the one before it had"):
        pool.ask(0)
    assert not pool.ask(1).has_error()
    assert len(pool.pool) == 2


def test_an_error_of_the_app_is_neither_repeated_nor_costs_a_worker(pool):
    asked = []

    def fails(message: Message) -> Message:
        asked.append(message)
        raise RayTaskError("run", "no traceback", ValueError("the app's"))

    before, pool.answer = list(pool.pool), fails
    with pytest.raises(RayTaskError):
        pool.ask(0)
    assert len(asked) == 1
    assert pool.pool == before


def test_a_machine_that_left_the_cluster_takes_its_workers_along(pool):
    pool.room, pool.answer = 1, dies(1, pool.answer)
    assert not pool.ask(0).has_error()
    assert (len(pool.pool), pool.num_actors) == (1, 1)
    pool.room, pool.answer = 0, dies(1, pool.answer)
    with pytest.raises(RuntimeError, match="no process is left to simulate clients"):
        pool.ask(0)
