"""Hugging Face's ``Trainer``, and those built on it such as TRL's, as a client's training loop.

One call of ``trainer.train()`` lasts for all windows that a process serves. It runs in a thread of
its own (``flower_desloc.adapters.turns``) that waits in ``on_step_begin`` until the client goes on,
so that optimizer, scheduler, gradient scaler, data loader and trackers stay as they are. At the end
of each window the client's state file gets what the streams do not hold: the settings of the
optimizer's groups, and the states of scheduler, scaler, callbacks, random generators and
``TrainerState``. A Trainer that is not at the step of a window, in a new process or after other
clients', is resumed there by ``train(resume_from_checkpoint=...)``.
"""

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import Context
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flower_desloc.adapters.loop import LoopClient, packed, unpacked
from flower_desloc.adapters.random_state import get_random_state, set_random_state
from flower_desloc.adapters.turns import Ended, Turns
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.extras import to_install
from flower_desloc.core.worker import Worker
from flower_desloc.flower.messages import Settings

try:
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState
    from transformers.utils import SAFE_WEIGHTS_NAME
except ImportError as error:
    raise ImportError(f"{error}; {to_install('transformers')}") from error

BuildTrainer = Callable[[Settings, Context], Trainer]

_SPEEDS = ("_runtime", "_per_second", "_time")
"""Ends of the names of what an evaluation measures of the machine."""


class TrainerClient(LoopClient):
    """A Flower ClientApp whose clients train by a ``transformers.Trainer`` of the user's.

    ``build`` is what a script does before ``trainer.train()``, and returns the Trainer instead::

        def build(config, context):
            data = my_data(context.node_config["partition-id"])
            return Trainer(my_model(), TrainingArguments(max_steps=1000), train_dataset=data)

        app = TrainerClient(build)

    A step is one of the optimizer, after its gradient accumulation. Learning rate, clipping and
    precision are the Trainer's. Its model's trainable parameters are the streams. The server's
    evaluations call ``trainer.evaluate()``. The loss of a window is what the Trainer logs, which it
    does at the end of each window too.

    The order of the data is that of ``train`` alone, also in a new process. What a collator or a
    dataset draws at random for the first step there, such as masks, begins anew.

    Parameters
    ----------
    build : Callable
        Returns the Trainer of a client. It is called with the ``train_config`` given to
        ``DesLoc.start`` and Flower's context. A process has the Trainer of one client at a time,
        and calls it again for another client.

    """

    def __init__(self, build: BuildTrainer) -> None:
        super().__init__(lambda config, context: TrainerSteps(build(config, context)))


class TrainerSteps(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Takes the steps of a Trainer one at a time.

    Raises ``ValueError`` for one on several GPUs, and for one that replaces its model.
    """

    def __init__(self, trainer: Trainer) -> None:
        _check(trainer)
        self.trainer = trainer
        self.may_skip_steps = trainer.accelerator.scaler is not None
        self.step_count = 0
        """The steps of the federation that the Trainer has taken or skipped."""
        self._first_random = self._random = get_random_state()
        self._epoch_random = self._first_random
        """From which the order of the epoch is drawn."""
        self._is_beginning = self._is_resumed_here = False
        self._has_short_epoch = False
        """Whether an epoch had fewer steps than those from which ``train`` counts epochs."""
        self._first: dict[str, Any] | None = None
        self._turns: Turns | None = None
        self._loop_state: Mapping[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._stop = self._logged = 0  # steps
        self._losses: list[Tensor | float] = []
        # First: after restore_callback_states_from_checkpoint the others come in another order.
        trainer.callback_handler.callbacks.insert(0, self)
        self.worker = _worker_of(trainer)

    def open(self, start: int, stop: int, loop_state: Mapping[str, Any]) -> None:
        """Bring the Trainer to the first of the window's steps (``Steps``)."""
        is_here = self._turns is not None and not self._turns.is_over
        if not is_here or (start, loop_state) != (self.step_count, self._loop_state):
            self._restart(start, loop_state)
        set_random_state(self._random)
        self._stop, self._logged = stop, start
        most = self.trainer.state.max_steps
        if stop > most:
            raise ValueError(
                f"the Trainer ends after {most} steps, and this window after {stop}: set max_steps "
                "of its TrainingArguments to the steps of the run, num_steps of DesLoc"
            )

    def step(self) -> list[Tensor | float]:
        """Take a step; return the losses that were logged, one for each step since the last log.

        Raises ``RuntimeError`` if the Trainer has ended, or has begun anew.
        """
        assert self._turns is not None
        self._turns.next()
        self.step_count += 1
        state = self.trainer.state
        if state.global_step != self.step_count:
            raise RuntimeError(
                f"the Trainer has taken {state.global_step} steps, and the federation "
                f"{self.step_count}; set auto_find_batch_size=False, which lets it begin anew"
            )
        if self._turns.is_over and self.step_count < state.max_steps:
            raise RuntimeError(
                f"a callback of the Trainer, or the end of its data, has ended its training after "
                f"step {self.step_count} of {state.max_steps}; the server decides when a run ends"
            )
        losses, self._losses = self._losses, []
        return losses

    def save(self) -> Mapping[str, Any]:
        """Return what ``open`` needs to resume from here in another process."""
        trainer, self._random = self.trainer, get_random_state()
        fields = {f.name: getattr(trainer.state, f.name) for f in dataclasses.fields(TrainerState)}
        saved = {
            **self._settings(self.step_count),
            "random": self._random,
            "epoch_random": self._epoch_random,
            "has_short_epoch": self._has_short_epoch,
            "state": json.dumps(fields | {"log_history": []}),  # which grows
        }
        self._loop_state = packed(saved)
        return self._loop_state

    def end(self) -> None:
        """End the Trainer's training, if it has begun and not ended."""
        if self._turns is not None:
            self._turns.end()

    # In the Trainer's thread

    def on_train_begin(self, *_: Any, optimizer: Any, **_more: Any) -> None:  # noqa: D102
        if getattr(optimizer, "optimizer", optimizer) is not self.worker.optimizer:
            raise ValueError(
                "the Trainer trains by another optimizer than the one it had before: let its "
                "create_optimizer() return self.optimizer where there is one"
            )

    def on_epoch_begin(self, *_: Any, **_more: Any) -> None:  # noqa: D102
        if self._is_resumed_here and self._resumed:
            set_random_state(self._resumed["epoch_random"])
        self._is_resumed_here = False
        self._epoch_random = get_random_state()

    def on_epoch_end(self, _args: Any, state: Any, *_: Any, **_more: Any) -> None:  # noqa: D102
        if state.epoch % 1 and state.global_step < state.max_steps:
            self._has_short_epoch = True

    def on_step_begin(self, *_: Any, **_more: Any) -> None:  # noqa: D102
        assert self._turns is not None
        if self._is_beginning:  # restore here, where the settings were taken
            self._is_beginning = False
            if self._first is None:
                self._first = deepcopy(self._settings(0))
            self._restore(deepcopy(self._resumed or self._first))
        self._turns.pause()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: D102
        if state.global_step == self._stop:
            control.should_log = True
        return control

    def on_log(self, _args: Any, state: Any, *_: Any, logs: Any, **_more: Any) -> None:  # noqa: D102
        if "loss" in logs:
            count = state.global_step - self._logged
            self._losses += [float(logs["loss"])] * count
            self._logged = state.global_step

    # Beginning anew

    def _restart(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Let the Trainer begin ``train`` again, after ``step`` steps of the federation."""
        self.end()
        self.step_count, self._loop_state, self._is_beginning = step, loop_state, True
        self._resumed = saved = unpacked(loop_state)
        if saved and saved["has_short_epoch"]:
            raise ValueError(
                f"after step {step} a Trainer that begins anew cannot find its place in the data: "
                "an epoch had fewer steps than their length says, or than max_steps where they "
                "have none; let no callback end an epoch, and give an IterableDataset a __len__"
            )
        self._has_short_epoch = False
        self._is_resumed_here = saved is not None and saved["step"] == step
        set_random_state(self._first_random)  # its seed is that of the order of the data
        with TemporaryDirectory() as folder:
            checkpoint = self._checkpoint(Path(folder)) if step else None
            self._turns = Turns(lambda: self._train(checkpoint))
            with _without_warning():
                self._turns.next()
        self._random = saved["random"] if saved else get_random_state()

    def _checkpoint(self, folder: Path) -> str:
        """Write a checkpoint that has the number of steps and no tensors: these are in place."""
        if self._resumed:
            state = TrainerState(**json.loads(self._resumed["state"]))
        else:  # a client that joins now, or has lost its state
            args = self.trainer.args
            state = TrainerState(train_batch_size=args.train_batch_size)
            state.compute_steps(args, args.max_steps)
        state.global_step = self.step_count
        state.save_to_json(str(folder / TRAINER_STATE_NAME))
        save_file({}, folder / SAFE_WEIGHTS_NAME)
        return str(folder)

    def _settings(self, step: int) -> dict[str, Any]:
        """Return what the Trainer's steps change and no stream holds, after ``step`` of them."""
        scaler = self.trainer.accelerator.scaler
        groups = self.worker.optimizer.param_groups
        return {
            "step": step,
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
            "schedule": self.trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "callbacks": [
                (type(each).__name__, each.state().get("attributes", {}))
                for each in self._stateful_callbacks()
            ],
        }

    def _restore(self, settings: dict[str, Any]) -> None:
        """Set what ``_settings`` has returned, and go on to the present step."""
        trainer = self.trainer
        groups = self.worker.optimizer.param_groups
        for group, values in zip(groups, settings["groups"], strict=True):
            group.update(values)
        trainer.lr_scheduler.load_state_dict(settings["schedule"])
        if settings["scaler"]:
            trainer.accelerator.scaler.load_state_dict(settings["scaler"])
        states: dict[str, list[dict[str, Any]]] = {}  # several may be of one class
        for name, attributes in settings["callbacks"]:
            states.setdefault(name, []).append(attributes)
        for each in self._stateful_callbacks():
            if of_class := states.get(type(each).__name__):
                for attribute, value in of_class.pop(0).items():
                    setattr(each, attribute, value)
        _advance(trainer.lr_scheduler, self.step_count - settings["step"])

    def _stateful_callbacks(self) -> list[Any]:
        callbacks = self.trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState)]

    def _train(self, checkpoint: str | None) -> None:
        trainer = self.trainer
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except Ended:
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)


def _check(trainer: Trainer) -> None:
    args = trainer.args
    if args.n_gpu > 1 or args.world_size > 1:
        number = args.n_gpu * args.world_size
        raise ValueError(
            f"a TrainerClient trains on one GPU, and this Trainer on {number}; set "
            "CUDA_VISIBLE_DEVICES to one, and start no launcher"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("a TrainerClient trains without DeepSpeed and FSDP, which own the states")
    if trainer.model_init is not None:
        raise ValueError("give the Trainer a model in place of model_init, which replaces it")
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ValueError(
            "set bf16_full_eval and fp16_full_eval to False: they convert the model that is trained"
        )
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "set neftune_noise_alpha=None: a Trainer that begins anew would add its noise again"
        )
    if args.ignore_data_skip:
        raise ValueError(
            "set ignore_data_skip=False: a Trainer that begins anew would take the first batches "
            "again"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "set load_best_model_at_end=False: it replaces the model by the best of this client"
        )


def _worker_of(trainer: Trainer) -> Worker:
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, Optimizer)
    data = trainer.train_dataset

    def evaluate() -> dict[str, float]:
        metrics = trainer.evaluate().items()
        return {
            k: float(v) for k, v in metrics if k.startswith("eval_") and not k.endswith(_SPEEDS)
        }

    return Worker(
        module=trainer.model,
        optimizer=optimizer,
        num_examples=len(data) if hasattr(data, "__len__") else 1,
        evaluate=evaluate if trainer.eval_dataset is not None else None,
        info=ClientInfo(
            device=str(trainer.args.device),
            micro_batch=trainer.args.per_device_train_batch_size,
        ),
    )


def _advance(lr_scheduler: Any, steps: int) -> None:
    """Let a scheduler take the steps of which the client has taken no part."""
    if not isinstance(lr_scheduler, ReduceLROnPlateau):  # which needs metrics
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not taken them
            for _ in range(steps):
                lr_scheduler.step()


@contextmanager
def _without_warning() -> Iterator[None]:
    """Silence the line that a checkpoint without tensors causes."""
    logger = logging.getLogger("transformers.trainer")

    def is_other(record: logging.LogRecord) -> bool:
        return "missing keys in the checkpoint" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
