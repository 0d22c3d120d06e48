"""A Lightning Trainer as a client's loop takes the steps that it takes alone, in any process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from federation import assert_same
from flower_path import Grid, Watch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset
from trainers import ABSENCES, DESYNCED, EVERY_STEP, RARELY, STEPS, assert_equal, federated

from flower_desloc import (
    Checkpoint,
    Checkpoints,
    DesLoc,
    DesLocClient,
    FederationError,
    SyncSchedule,
    Worker,
    from_record,
    to_record,
)

pytest.importorskip("lightning")
import lightning.pytorch as pl

from flower_desloc.adapters.lightning import LightningClient, LightningSteps

pytestmark = [  # of what Lightning advises and of what it uses
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
]

LR, CLIP = 1e-2, 0.5
BuildFit = Callable[[Any, Context], tuple[Any, ...]]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """22 rows, of which an epoch has six batches; each is read with ``noise``."""

    def __init__(self, m: int, noise: float = 0.0) -> None:
        self.rows = torch.randn(22, 4, generator=torch.Generator().manual_seed(m))
        self.noise = noise
        self.reads = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        row = self.rows[index]
        return row + self.noise * torch.randn(4) if self.noise else row, row.sum(0, keepdim=True)


UNBOUNDED: dict[str, Any] = {"sync_bound": False}
"""A moment whose beta1 changes, as in one cycle, is not within the bound."""


def one_cycle(optimizer: Any) -> Any:
    return {"scheduler": OneCycleLR(optimizer, 2e-2, total_steps=STEPS), "interval": "step"}


def each_epoch(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, 0.5)


def falling(optimizer: Any) -> Any:
    return {
        "scheduler": LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "interval": "step",
        "frequency": 2,  # batches, so that it is every step
    }


class Net(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, dropout: float = 0.25, scheduler: Callable[[Any], Any] = one_cycle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1)
        )
        self.scheduler = scheduler

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR)
        return [optimizer], [self.scheduler(optimizer)]


def trainer(**changed: Any) -> Any:
    options = {
        "max_steps": STEPS,
        "max_epochs": -1,
        "accelerator": "cpu",
        "devices": 1,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": CLIP,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**options | changed)


def builder(
    dropout: float = 0.25,
    scheduler: Callable[[Any], Any] = one_cycle,
    own_generator: bool = False,
    callbacks: Any = (),
    shuffle: bool = True,
    **changed: Any,
) -> BuildFit:
    def build(config: Any, context: Context) -> tuple[Any, ...]:
        m = int(context.node_config["partition-id"])
        module = Net(dropout, scheduler)  # which sets the seed
        generator = torch.Generator().manual_seed(m) if own_generator else None
        data = Rows(m, noise=0.1 if dropout else 0)
        train = DataLoader(data, 4, shuffle=shuffle, generator=generator)
        return trainer(callbacks=[*callbacks], **changed), module, train, DataLoader(Rows(9), 4)

    return build


def context_of(m: int) -> Context:
    return Context(0, 0, {"partition-id": m}, RecordDict(), {})


def alone(build: BuildFit) -> dict[str, dict[str, Tensor]]:
    """Return the streams after ``fit``, without a federation."""
    trainer, module, *data = build({}, context_of(0))
    trainer.fit(module, *data)
    params = dict(module.named_parameters())
    states = {k: trainer.optimizers[0].state[p] for k, p in params.items()}
    moments = {n: {k: state[n] for k, state in states.items()} for n in ("exp_avg", "exp_avg_sq")}
    return {"params": params, **moments}


def new_process(build: BuildFit) -> Callable[[Message, Context], Message]:
    """Answer every message as a process of its own would."""
    return lambda message, context: LightningClient(build)(message, context)


ROADS: dict[str, dict[str, Any]] = {
    "every batch": {"accumulate_grad_batches": 1},
    "accumulated": {"scheduler": each_epoch, "own_generator": True, "val_check_interval": 2},
}


@pytest.mark.parametrize("road", ROADS)
def test_one_client_ends_as_its_trainer_alone_bit_for_bit(road, tmp_path):
    """With clipping, a scheduler, dropout, noise, shuffled epochs and evaluations of the server."""
    build = builder(**ROADS[road])
    one = federated(LightningClient(build), tmp_path, EVERY_STEP, Net(), eval_every=2, **UNBOUNDED)
    assert_equal(one, alone(build))


@pytest.mark.parametrize("road", ROADS)
def test_so_it_does_with_a_process_for_each_message(road, tmp_path):
    build = builder(**ROADS[road])
    one = federated(new_process(build), tmp_path, RARELY, Net(), eval_every=6, **UNBOUNDED)
    assert_equal(one, alone(build))


class Module(pl.LightningDataModule):  # type: ignore[misc]
    """Data whose loader has a process of its own, and is ahead of the training."""

    def setup(self, stage: str) -> None:
        self.rows = Rows(0)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, 4, shuffle=True, num_workers=1)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows, 4)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_so_it_does_where_a_process_reads_the_data_ahead(tmp_path):
    def build(config: Any, context: Context) -> tuple[Any, ...]:
        return trainer(), Net(), Module()

    one = federated(new_process(build), tmp_path, RARELY, Net(), eval_every=6, **UNBOUNDED)
    assert_equal(one, alone(build))


def test_clients_that_take_turns_in_a_process_end_as_those_in_their_own(tmp_path):
    build = builder()
    apps = [LightningClient(build) for _ in range(2)]

    def own(message: Message, context: Context) -> Message:
        return apps[int(context.node_config["partition-id"])](message, context)

    one = federated(LightningClient(build), tmp_path / "one", RARELY, Net(), num_clients=2)
    assert_equal(one, federated(own, tmp_path / "own", RARELY, Net(), num_clients=2))


def plain_client() -> ClientApp:
    """The same steps in a loop that a user would write, with batches drawn from the step."""

    def build(config: Any, context: Context) -> Worker:
        module = Net(0.0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
        return Worker(module=module, optimizer=optimizer, num_examples=22)

    client = DesLocClient(build)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        batches = [*DataLoader(Rows(int(context.node_config["partition-id"])), 4)]
        with client.window(message, context) as window:
            module, optimizer = window.worker.module, window.worker.optimizer
            assert isinstance(module, Net)
            for step in window:
                for i in range(2):
                    x, y = batches[(2 * step + i) % len(batches)]
                    (nn.functional.mse_loss(module.layers(x), y) / 2).backward()
                nn.utils.clip_grad_norm_(module.parameters(), CLIP)
                for group in optimizer.param_groups:
                    group["lr"] = LR * (1 / (1 + step))
                optimizer.step()
        return window.reply

    return client


@pytest.mark.parametrize("who", ABSENCES)
def test_trainers_end_as_loops_of_ones_own(who, tmp_path):
    """Two; and three, where one is away for a window and one joins later."""
    build = builder(0.0, falling, shuffle=False)
    options: dict[str, Any] = {"absent": ABSENCES[who], "num_clients": 3, "num_steps": 8}
    one = federated(LightningClient(build), tmp_path / "fit", DESYNCED, Net(), **options)
    assert_equal(one, federated(plain_client(), tmp_path / "loop", DESYNCED, Net(), **options))


def test_a_trainer_that_is_ahead_of_its_server_goes_back(tmp_path):
    build = builder()
    app = LightningClient(build)

    def run(**options: Any) -> dict[str, dict[str, Tensor]]:
        written = Checkpoints(tmp_path / "server", every=2)
        last = Checkpoint.read(written.all()[-1]) if written.all() else None
        return federated(
            app,
            tmp_path,
            DESYNCED,
            Net(),
            checkpoints=written,
            resume=last,
            **UNBOUNDED,
            **options,
        )

    def kill(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(after=kill)
    assert_same(run()["params"], alone(build)["params"])


class Events(pl.Callback):  # type: ignore[misc]
    def __init__(self, act: Callable[[Any], object] = lambda trainer: None, at: int = 0) -> None:
        self.seen: list[tuple[str, int]] = []
        self._act, self._at = act, at

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("start", trainer.global_step))

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._at:
            self._act(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("end", trainer.global_step))


@pytest.mark.parametrize("longer", [0, 5])
def test_one_call_of_fit_lasts_for_all_windows_and_ends(longer, tmp_path):
    """Where its max_steps are more than the run's, the end of the run ends it."""
    events = Events()
    build = builder(0.0, each_epoch, callbacks=[events], max_steps=STEPS + longer)
    federated(LightningClient(build), tmp_path, DESYNCED, Net())
    epochs = [("epoch", number) for number in range(4 + bool(longer))]
    assert events.seen == [("start", 0), *epochs, ("end", STEPS)]


def test_one_that_resumes_reads_no_batch_that_is_done(tmp_path):
    events, data = Events(), Rows(0)

    def build(config: Any, context: Context) -> tuple[Any, ...]:
        module = Net()
        return trainer(callbacks=[events]), module, DataLoader(data, 4, shuffle=True)

    federated(new_process(build), tmp_path, RARELY, Net())
    assert data.reads == 4 * 22
    resumed = [("start", 0), ("epoch", 0), ("epoch", 1), ("start", 4), ("epoch", 1), ("epoch", 2)]
    assert [each for each in events.seen if each[0] != "end"][:6] == resumed


def test_the_server_gets_losses_rates_and_the_metrics_of_validate(tmp_path):
    watch = Watch()
    grid = Grid(LightningClient(builder(0.0, each_epoch)), 1, tmp_path / "state")
    strategy = DesLoc(SyncSchedule(RARELY), STEPS)
    result = strategy.start(grid, to_record(Net().state_dict()), observer=watch)
    clients = [each for record in watch.records for each in record.clients.values()]
    assert sum(len(each.losses) for each in clients) == STEPS
    assert clients[0].learning_rates == pytest.approx([LR, LR, LR, LR / 2])
    module = Net()
    module.load_state_dict(from_record(result.arrays))
    metrics = trainer().validate(module, DataLoader(Rows(9), 4), verbose=False)
    last = watch.records[-1].federated
    assert last is not None
    assert last.overall == pytest.approx(metrics[0])


def stop(trainer: Any) -> None:
    trainer.should_stop = True


def fail(trainer: Any) -> None:
    raise ArithmeticError("the abacus is broken")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"callbacks": [Events(fail, at=3)]}, "client-0.*ArithmeticError: the abacus is broken"),
        ({"callbacks": [Events(stop, at=3)]}, "has ended its training after step 3 of 12"),
        ({"max_steps": 5}, "ends after 5 steps, and this window after 6: set its max_steps"),
        ({"max_steps": -1, "max_epochs": 2}, "ends after 6 steps, and this window after 8"),
    ],
    ids=["error", "callback", "max_steps", "max_epochs"],
)
def test_what_ends_a_trainer_early_is_an_error_that_says_so(change, words, tmp_path):
    app = LightningClient(builder(0.0, each_epoch, **change))
    with pytest.raises(FederationError, match=words):
        federated(app, tmp_path, DESYNCED, Net())
    assert app._steps is None


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.ones(8, 4))


class Manual(Net):
    automatic_optimization = False


class Several(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=LR) for _ in range(2)]


def plateau(optimizer: Any) -> Any:
    return {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "devices": (lambda: (trainer(devices=2), Net()), "one device, .* on 2 by DDPStrategy"),
    "manual": (lambda: (trainer(), Manual()), "Manual sets automatic_optimization=False"),
    "several": (lambda: (trainer(), Several(), loader()), "multiple optimizers is only supported"),
    "plateau": (lambda: (trainer(), Net(0, plateau), loader()), "without ReduceLROnPlateau"),
    "iterable": (lambda: (trainer(), Net(), DataLoader(Stream(), 4)), "not on DataLoader of Str"),
    "loaders": (lambda: (trainer(), Net(), [loader(), loader()]), "one DataLoader .* not on list"),
    "reload": (
        lambda: (trainer(reload_dataloaders_every_n_epochs=1), Net()),
        "set reload_dataload",
    ),
}


def loader() -> Any:
    return DataLoader(Rows(0), 4)


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_resumed_exactly_is_refused(what):
    arguments, words = REFUSED[what]
    with pytest.raises((ValueError, RuntimeError), match=words):
        LightningSteps(*arguments())
