"""A Trainer as a client's loop takes the steps that it takes alone, in any process."""

import gc
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainers
from federation import assert_same
from flower_path import Grid
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from trainers import ABSENCES, DESYNCED, EVERY_STEP, RARELY, STEPS, assert_equal
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from flower_desloc import (
    Checkpoint,
    Checkpoints,
    DesLoc,
    DesLocClient,
    FederationError,
    Observer,
    SyncSchedule,
    Worker,
    to_record,
)
from flower_desloc.adapters.transformers import TrainerClient, TrainerSteps

WARMUP, CLIP, MICRO = 3, 0.5, 4

BuildTrainer = Callable[[Any, Context], Trainer]


def model(dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def rows(m: int) -> list[dict[str, Tensor]]:
    """Return data of which an epoch ends within a window, with a smaller last batch."""
    drawn = torch.randint(32, (22, 8), generator=torch.Generator().manual_seed(m))
    return [{"input_ids": row, "labels": row} for row in drawn]


def arguments(folder: Path, **changed: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": WARMUP,
        "max_grad_norm": CLIP,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        **changed,
    }


def builder(folder: Path, *callbacks: TrainerCallback, **changed: Any) -> BuildTrainer:
    def build(config: Any, context: Context) -> Trainer:
        m = int(context.node_config["partition-id"])
        args = TrainingArguments(**arguments(folder, **changed))
        evaluated = rows(9) if args.eval_strategy != "no" else None
        return Trainer(
            model(), args, train_dataset=rows(m), eval_dataset=evaluated, callbacks=[*callbacks]
        )

    return build


def alone(build: BuildTrainer) -> dict[str, dict[str, Tensor]]:
    """Return the streams after the Trainer's own run, without a federation."""
    trainer = build({}, Context(0, 0, {"partition-id": 0}, RecordDict(), {}))
    trainer.train()
    params = {k: p for k, p in trainer.model.named_parameters() if p.requires_grad}
    states = {k: trainer.optimizer.state[p] for k, p in params.items()}
    moments = {n: {k: state[n] for k, state in states.items()} for n in ("exp_avg", "exp_avg_sq")}
    return {"params": params, **moments}


def federated(
    app: Any, folder: Path, periods: dict[str, int], start: nn.Module | None = None, **options: Any
) -> dict[str, dict[str, Tensor]]:
    return trainers.federated(app, folder, periods, start or model(), **options)


def new_process(build: BuildTrainer) -> Callable[[Message, Context], Message]:
    """Answer every message as a process of its own would."""
    return lambda message, context: TrainerClient(build)(message, context)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    return alone(builder(tmp_path_factory.mktemp("alone"), eval_strategy="steps", eval_steps=2))


def test_one_client_ends_as_its_trainer_alone_bit_for_bit(expected, tmp_path):
    """With warm-up, clipping, accumulated gradients, dropout, and evaluations of its own."""
    build = builder(tmp_path, eval_strategy="steps", eval_steps=2)
    assert_equal(federated(TrainerClient(build), tmp_path, EVERY_STEP), expected)


def test_so_it_does_with_a_process_for_each_message(expected, tmp_path):
    build = builder(tmp_path, eval_strategy="steps", eval_steps=2)
    assert_equal(federated(new_process(build), tmp_path, RARELY), expected)


def test_and_has_the_same_order_where_it_is_drawn_from_the_global_generator(tmp_path):
    build = builder(tmp_path, train_sampling_strategy="group_by_length")
    assert_equal(federated(new_process(build), tmp_path, RARELY), alone(build))


class Growing(TrainerCallback, ExportableState):  # type: ignore[misc]
    def __init__(self) -> None:
        self.decay = 0.0

    def on_step_begin(self, *_: Any, optimizer: Any, **_more: Any) -> None:
        self.decay += 0.1
        for group in optimizer.param_groups:
            group["weight_decay"] += self.decay

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"decay": self.decay}}


@pytest.mark.parametrize("restores", [False, True])
def test_every_setting_of_the_optimizer_goes_on_in_a_new_process(restores, tmp_path):
    """Betas that a scheduler changes, and what a callback with a state changes."""

    def build(config: Any, context: Context) -> Trainer:
        trained = model()
        args = arguments(tmp_path, restore_callback_states_from_checkpoint=restores)
        optimizer = torch.optim.AdamW(trained.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS)
        return Trainer(
            trained,
            TrainingArguments(**args),
            train_dataset=rows(0),
            callbacks=[Growing()],
            optimizers=(optimizer, schedule),
        )

    assert_equal(federated(new_process(build), tmp_path, RARELY), alone(build))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Data without a length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(rows(0))


def stop_epoch(control: Any) -> None:
    control.should_epoch_stop = True


@pytest.mark.parametrize("ends", ["data", "callback"])
def test_a_new_process_does_not_begin_anew_with_data_of_which_an_epoch_ended_early(ends, tmp_path):
    def build(config: Any, context: Context) -> Trainer:
        args = TrainingArguments(**arguments(tmp_path, max_steps=STEPS + 3))
        callbacks = [Events(stop_epoch, at=4)] if ends == "callback" else []
        data = Stream() if ends == "data" else rows(0)
        return Trainer(model(), args, train_dataset=data, callbacks=callbacks)

    federated(TrainerClient(build), tmp_path / "one", RARELY)
    with pytest.raises(FederationError, match="cannot find its place in the data"):
        federated(new_process(build), tmp_path / "new", RARELY)


def test_a_trainer_that_replaces_its_optimizer_is_refused(tmp_path):
    class Replacing(Trainer):  # type: ignore[misc]  # transformers is not followed
        def create_optimizer(self) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            return self.optimizer

    def build(config: Any, context: Context) -> Trainer:
        return Replacing(model(), TrainingArguments(**arguments(tmp_path)), train_dataset=rows(0))

    with pytest.raises(FederationError, match="another optimizer than the one it had before"):
        federated(TrainerClient(build), tmp_path, EVERY_STEP)


def plain_client(folder: Path) -> ClientApp:
    """The same steps in a loop that a user would write, with batches drawn from the step."""

    def build(config: Any, context: Context) -> Worker:
        trainer = Trainer(model(0.0), TrainingArguments(**arguments(folder)))
        return Worker(module=trainer.model, optimizer=trainer.create_optimizer(), num_examples=22)

    client = DesLocClient(build)

    @client.train()
    def train(message: Message, context: Context) -> Message:
        data = rows(int(context.node_config["partition-id"]))
        batches = [torch.stack([r["labels"] for r in data[i : i + MICRO]]) for i in range(0, 22, 4)]
        with client.window(message, context) as window:
            module, optimizer = window.worker.module, window.worker.optimizer
            for step in window:
                micro = [batches[(2 * step + i) % len(batches)] for i in range(2)]
                number = sum(part.numel() for part in micro)
                for part in micro:
                    module(input_ids=part, labels=part, num_items_in_batch=number).loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), CLIP)
                done = max(0.0, (step - WARMUP) / (STEPS - WARMUP))
                rate = min(step / WARMUP, 0.5 * (1 + math.cos(math.pi * done)))
                for group in optimizer.param_groups:
                    group["lr"] = 1e-2 * rate
                optimizer.step()
        return window.reply

    return client


@pytest.mark.parametrize("who", ABSENCES)
def test_trainers_end_as_loops_of_ones_own(who, tmp_path):
    """Two; and three, where one is away for a window and one joins later."""

    def build(config: Any, context: Context) -> Trainer:
        args = arguments(tmp_path, train_sampling_strategy="sequential")
        data = rows(int(context.node_config["partition-id"]))
        return Trainer(model(0.0), TrainingArguments(**args), train_dataset=data)

    options: dict[str, Any] = {"absent": ABSENCES[who], "num_clients": 3, "num_steps": 8}
    one = federated(TrainerClient(build), tmp_path / "trainer", DESYNCED, **options)
    other = federated(plain_client(tmp_path), tmp_path / "loop", DESYNCED, **options)
    assert_equal(one, other)


@pytest.mark.parametrize("who", ["all", "server"])
def test_a_killed_run_resumes_to_the_same_bits(who, expected, tmp_path):
    """Where only the server was killed, the Trainer is ahead of it and goes back."""
    build = builder(tmp_path, eval_strategy="steps", eval_steps=2)
    app = TrainerClient(build)

    def run(**options: Any) -> dict[str, dict[str, Tensor]]:
        written = Checkpoints(tmp_path / "server", every=2)
        last = Checkpoint.read(written.all()[-1]) if written.all() else None
        client = app if who == "server" else TrainerClient(build)
        return federated(client, tmp_path, DESYNCED, checkpoints=written, resume=last, **options)

    def kill(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(after=kill)
    steps: list[int] = []
    assert_same(run(after=steps.append)["params"], expected["params"])
    assert steps == [6, 8, 10, 12]


class Events(TrainerCallback):  # type: ignore[misc]
    def __init__(self, begin: Callable[[Any], object] = lambda control: None, at: int = 0) -> None:
        self.begins: list[int] = []
        self.ends: list[int] = []
        self._begin, self._at = begin, at

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.begins.append(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._at:
            self._begin(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append(state.global_step)


@pytest.mark.parametrize("longer", [0, 5])
def test_one_call_of_train_lasts_for_all_windows_and_ends(longer, tmp_path):
    """Where its max_steps are more than the run's, the end of the run ends it."""
    events = Events()
    windows: list[int] = []
    app = TrainerClient(builder(tmp_path, events, max_steps=STEPS + longer))
    federated(app, tmp_path, DESYNCED, after=windows.append)
    assert windows == [0, 2, 4, 6, 8, 10, 12]
    assert (events.begins, events.ends) == ([0], [STEPS])


def test_a_window_has_the_losses_that_the_trainer_logs(tmp_path):
    """Those of three steps, and of the rest of the window, for each of these steps."""
    records: list[Any] = []

    class Watch(Observer):
        def window(self, record: Any) -> None:
            records.extend(record.clients.values())

    build = builder(tmp_path, logging_steps=3)
    strategy = DesLoc(SyncSchedule({"params": 4, "exp_avg": 4, "exp_avg_sq": 4}), STEPS)
    grid = Grid(TrainerClient(build), 1, tmp_path / "state")
    strategy.start(grid, to_record(model().state_dict()), observer=Watch())
    first, second, _ = records
    assert [len({*first.losses[:3]}), len({*first.losses})] == [1, 2]
    assert [len({*second.losses[:2]}), len({*second.losses[2:]})] == [1, 1]
    assert first.learning_rates == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2])


def stop(control: Any) -> None:
    control.should_training_stop = True


def fail(control: Any) -> None:
    raise ArithmeticError("the abacus is broken")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"begin": fail}, "client-0.*ArithmeticError: the abacus is broken"),
        ({"begin": stop}, "a callback .* has ended its training after step 3 of 12"),
        (
            {"max_steps": 5},
            "the Trainer ends after 5 steps, and this window after 6: set max_steps",
        ),
        ({"load_best_model_at_end": True}, "set load_best_model_at_end=False"),
        ({"ignore_data_skip": True}, "set ignore_data_skip=False"),
    ],
    ids=["error", "callback", "max_steps", "best", "skip"],
)
def test_what_a_client_cannot_train_with_is_an_error_that_says_so(change, words, tmp_path):
    begin = change.pop("begin", None)
    callbacks = [Events(begin, at=3)] if begin else []
    if "load_best_model_at_end" in change:
        change |= {"eval_strategy": "steps", "save_strategy": "best"}
        change |= {"metric_for_best_model": "loss"}
    app = TrainerClient(builder(tmp_path, *callbacks, **change))
    with pytest.raises(FederationError, match=words):
        federated(app, tmp_path, DESYNCED)
    assert app._steps is None


def test_several_gpus_are_refused(tmp_path):
    trainer = builder(tmp_path)({}, Context(0, 0, {"partition-id": 0}, RecordDict(), {}))
    trainer.args = SimpleNamespace(n_gpu=2, world_size=1)
    with pytest.raises(ValueError, match="trains on one GPU, and this Trainer on 2"):
        TrainerSteps(trainer)


LIBRARIES_WARN = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")


def lora_builder(folder: Path) -> tuple[Callable[[], nn.Module], BuildTrainer]:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        base = model()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(base, config)

    def build(config: Any, context: Context) -> Trainer:
        args = TrainingArguments(**arguments(folder), label_names=["labels"])
        return Trainer(adapted(), args, train_dataset=rows(0))

    return adapted, build


@LIBRARIES_WARN
def test_of_a_model_with_adapters_only_these_are_averaged(tmp_path):
    adapted, build = lora_builder(tmp_path)
    averages = federated(new_process(build), tmp_path, RARELY, start=adapted())
    assert all("lora_" in key for stream in averages.values() for key in stream)
    assert_equal(averages, alone(build))


@LIBRARIES_WARN
def test_trls_trainer_is_one(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    adapted, _ = lora_builder(tmp_path)
    words = Tokenizer(WordLevel({str(number): number for number in range(32)}, unk_token="0"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0")

    def build(config: Any, context: Context) -> Trainer:
        data = datasets.Dataset.from_list([{"input_ids": r["labels"].tolist()} for r in rows(0)])
        args = trl.SFTConfig(**arguments(tmp_path), bf16=False)
        return trl.SFTTrainer(adapted(), args, train_dataset=data, processing_class=tokens)

    one = federated(new_process(build), tmp_path, RARELY, start=adapted())
    assert_equal(one, alone(build))


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> Iterator[None]:
    """Each ``train()`` collects garbage, for which what was imported need not be looked at."""
    gc.freeze()
    yield
    gc.unfreeze()
