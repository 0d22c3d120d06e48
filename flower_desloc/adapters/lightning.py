"""Lightning's ``Trainer`` as a client's training loop.

One call of ``trainer.fit`` lasts for all windows that a process serves. It runs in a thread of its
own (``flower_desloc.adapters.turns``) that waits in the data loader, before the first batch of each
optimizer step, so that optimizer, schedulers, precision, loops and callbacks stay as they are. At
the end of each window the client's state file gets what the streams do not hold: the states of
schedulers, precision, callbacks and random generators, and that from which the epoch's order was
drawn. A client that is not at the step of a window, in a new process or after other clients', is
built again. Its ``fit`` then begins in the middle of an epoch, as after a checkpoint.
"""

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import cached_property
from itertools import islice
from typing import Any, cast

import torch
from flwr.app import Context
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from flower_desloc.adapters.loop import LoopClient, packed, unpacked
from flower_desloc.adapters.random_state import get_random_state, set_random_state
from flower_desloc.adapters.turns import Ended, Turns
from flower_desloc.core.client_info import ClientInfo
from flower_desloc.core.extras import to_install
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client_state import state_files
from flower_desloc.flower.messages import Settings, WindowRequest

try:
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.strategies import SingleDeviceStrategy
except ImportError as error:
    raise ImportError(f"{error}; {to_install('lightning')}") from error

BuildFit = Callable[[Settings, Context], tuple[Any, ...]]

RandomState = dict[str, Any]

_END = object()


class LightningClient(LoopClient):
    """A Flower ClientApp whose clients train by a Lightning ``Trainer`` of the user's.

    ``build`` is what a script does before ``trainer.fit(module, data)``, and returns the Trainer
    and these arguments instead::

        def build(config, context):
            data = DataLoader(my_data(context.node_config["partition-id"]), 32, shuffle=True)
            return Trainer(max_steps=1000), MyModule(), data

        app = LightningClient(build)

    A step is one of the optimizer, after its gradient accumulation. Learning rate, clipping and
    precision are the Trainer's. The module's trained parameters are the streams. The server's
    evaluations call ``validate`` of a second Trainer, without callbacks and loggers, if there is a
    validation loader.

    The order of the data is that of ``fit`` alone, also in a new process. What a loader's worker
    processes draw at random, and means of logged metrics over an epoch, begin anew there.

    Parameters
    ----------
    build : Callable
        Returns the Trainer of a client, the LightningModule, and either the loaders or the
        LightningDataModule, in the order of ``fit``. It is called with the ``train_config`` given
        to ``DesLoc.start`` and Flower's context, for each client and whenever one resumes.

    """

    def __init__(self, build: BuildFit) -> None:
        super().__init__(lambda config, context: LightningSteps(*build(config, context)))

    def _worker(self, request: WindowRequest, context: Context) -> Worker:
        if self._steps is not None:
            state = state_files(context, request.run_key).last()
            place = request.start, state.loop_state if state and not request.afresh else {}
            if not cast(LightningSteps, self._steps).can_open(*place):
                self._end()  # another is built, whose fit has not begun
        return super()._worker(request, context)


class LightningSteps(Callback):  # type: ignore[misc]  # lightning is not followed
    """Takes the steps of a Trainer one at a time.

    Raises ``ValueError`` for a Trainer, module or data that cannot be resumed within an epoch.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *data: Any) -> None:
        _check(trainer, module)
        self.trainer, self.module, self._data = trainer, module, data
        self.may_skip_steps = getattr(trainer.precision_plugin, "scaler", None) is not None
        self.step_count = 0
        """The steps of the federation that the Trainer has taken or skipped."""
        self.order = _Order()
        self.skip: int | None = None
        """Batches of the epoch after which a Trainer that resumes begins."""
        self._has_begun = False
        self._loop_state: Mapping[str, Any] = {}
        self._losses: list[Tensor | float] = []
        self._modes: dict[torch.nn.Module, bool] = {}
        trainer.callbacks.insert(0, self)
        trainer.strategy.process_dataloader = self._resumable
        self._turns = Turns(lambda: trainer.fit(module, *data))
        self._turns.next()  # to on_fit_start, where the optimizer is there
        self._random = self.order.random_state()
        try:
            self.worker = self._worker_of()
        except BaseException:
            self.end()
            raise
        self.order.set_random_state(self._random)

    def can_open(self, start: int, loop_state: Mapping[str, Any]) -> bool:
        """Return whether ``open`` can be called for a window that begins there."""
        return not self._has_begun or (start, loop_state) == (self.step_count, self._loop_state)

    def open(self, start: int, stop: int, loop_state: Mapping[str, Any]) -> None:
        """Bring the Trainer to the first of the window's steps (``Steps``)."""
        assert self.can_open(start, loop_state)
        if not self._has_begun:
            self._begin(start, loop_state)
        most = self.trainer.estimated_stepping_batches
        if stop > most:
            raise ValueError(
                f"the Trainer ends after {most} steps, and this window after {stop}: set its "
                "max_steps to the steps of the run, num_steps of DesLoc, and max_epochs=-1"
            )
        self._require_running()
        self.order.set_random_state(self._random)
        self._modes = {part: part.training for part in self.module.modules()}

    def step(self) -> list[Tensor | float]:
        """Take a step and return its loss.

        Raises ``RuntimeError`` if the Trainer has ended, or has left out batches of an epoch.
        """
        for part, is_training in self._modes.items():  # which the window has set to train
            part.training = is_training
        self._modes = {}
        self._turns.next()
        self.step_count += 1
        if self.trainer.global_step != self.step_count:
            raise RuntimeError(
                f"the Trainer has taken {self.trainer.global_step} steps, and the federation "
                f"{self.step_count}; on_train_batch_start may not end an epoch by returning -1"
            )
        if self.step_count < self.trainer.estimated_stepping_batches:
            self._require_running()
        losses, self._losses = self._losses, []
        if not losses:
            return []
        # Lightning divides them by the number of batches in a step.
        count = self.trainer.accumulate_grad_batches
        return [torch.stack([torch.as_tensor(loss) for loss in losses]).mean() * count]

    def save(self) -> Mapping[str, Any]:
        """Return what ``open`` needs to resume from here in another process."""
        trainer, self._random = self.trainer, self.order.random_state()
        groups = trainer.optimizers[0].param_groups
        self._loop_state = packed(
            {
                "step": self.step_count,
                "random": self._random,
                "order": self.order.began,
                "groups": [{k: v for k, v in g.items() if k != "params"} for g in groups],
                "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
                "precision": trainer.precision_plugin.state_dict(),
                "callbacks": {each.state_key: each.state_dict() for each in self._others()},
                "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
            }
        )
        return self._loop_state

    def end(self) -> None:
        """End the Trainer's training, if it has not ended."""
        self._turns.end()

    # In the Trainer's thread

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:  # noqa: D102
        try:
            self._turns.pause()
        except Ended:  # before its first step
            trainer.limit_train_batches = trainer.num_sanity_val_steps = 0

    def wait(self) -> bool:
        """Wait between two steps; return False to end the training."""
        try:
            self._turns.pause()
        except Ended:
            self.trainer.fit_loop.epoch_loop.max_steps = self.trainer.global_step
            return False
        return True

    def on_train_batch_end(  # noqa: D102
        self, _trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        if outputs and "loss" in outputs:
            self._losses.append(outputs["loss"])

    def _resumable(self, loader: Any) -> Any:
        if not self.trainer.training:  # of a validation
            return loader
        return _Loader(_checked(loader), self)

    # Beginning

    def _begin(self, step: int, loop_state: Mapping[str, Any]) -> None:
        """Let ``fit`` go on to its first batch, after ``step`` steps of the federation."""
        self._has_begun, self.step_count, self._loop_state = True, step, loop_state
        saved = unpacked(loop_state)
        if step:
            self.skip = 0
            self.trainer.fit_loop.setup_data()  # from which its number of batches is known
            self.skip = self._set_counters(is_epoch_begun=False)
            self.trainer.fit_loop.restarting = True
        if saved:
            for each in self._others():
                if state := saved["callbacks"].get(each.state_key):
                    each.load_state_dict(state)
            if saved["datamodule"]:
                self.trainer.datamodule.load_state_dict(saved["datamodule"])
        self.order.set_random_state(self._random)
        with warnings.catch_warnings():  # what it warns of is what _Loader does
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            self._turns.next()
        if step and not self._turns.is_over:
            self._set_counters(is_epoch_begun=True)
            self._restore(saved)
        self._random = saved["random"] if saved else self.order.random_state()

    def _set_counters(self, is_epoch_begun: bool) -> int:
        """Set the loops' counters to the present step; return the batches done of its epoch."""
        loop, batches = self.trainer.fit_loop, self.trainer.num_training_batches
        epoch, steps = divmod(self.step_count, self._steps_of_epoch())
        done = steps * int(self.trainer.accumulate_grad_batches)
        optimizer = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
        for progress, total, current in (
            (loop.epoch_progress, epoch, epoch),
            (loop.epoch_loop.batch_progress, epoch * batches + done, done),
            (optimizer.step, self.step_count, steps),
            (optimizer.zero_grad, self.step_count, steps),
        ):
            for counts, value in ((progress.total, total), (progress.current, current)):
                vars(counts).update(dict.fromkeys(vars(counts), value))
        for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
            counts.ready += 1
            counts.started += is_epoch_begun
        loop.epoch_loop._batches_that_stepped = self.step_count  # the step of loggers
        return done

    def _restore(self, saved: dict[str, Any] | None) -> None:
        """Set what the streams do not hold to what was ``saved``, or to the present step."""
        trainer = self.trainer
        if saved:
            for group, values in zip(
                trainer.optimizers[0].param_groups, saved["groups"], strict=True
            ):
                group.update(values)
            for config, state in zip(
                trainer.lr_scheduler_configs, saved["schedulers"], strict=True
            ):
                config.scheduler.load_state_dict(state)
            if saved["precision"]:
                trainer.precision_plugin.load_state_dict(saved["precision"])
        before = saved["step"] if saved else 0
        epoch = self._steps_of_epoch()
        if saved and before // epoch == self.step_count // epoch:
            self.order.resumed = saved["order"]
        self._advance_schedulers(before)

    def _advance_schedulers(self, before: int) -> None:
        """Let the schedulers take the steps of which the client has taken no part."""
        steps, batches = self._steps_of_epoch(), self.trainer.num_training_batches
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer has not taken them
            for step in range(before, self.step_count):
                epoch, place = divmod(step, steps)
                batch = min((place + 1) * self.trainer.accumulate_grad_batches, batches)
                counts = {"step": batch, "epoch": epoch + 1 if place + 1 == steps else None}
                for config in self.trainer.lr_scheduler_configs:
                    count = counts[config.interval]
                    if count is not None and count % config.frequency == 0:
                        self.module.lr_scheduler_step(config.scheduler, None)

    def _steps_of_epoch(self) -> int:
        batches = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        return math.ceil(float(batches))

    def _others(self) -> list[Callback]:
        return [each for each in self.trainer.callbacks if each is not self]

    def _require_running(self) -> None:
        if self._turns.is_over:
            raise RuntimeError(
                f"a callback of the Trainer has ended its training after step {self.step_count} "
                f"of {self.trainer.estimated_stepping_batches}; the server decides when a run ends"
            )

    # The worker

    def _worker_of(self) -> Worker:
        trainer = self.trainer
        plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
        if plateaus or any(
            isinstance(c.scheduler, ReduceLROnPlateau) for c in trainer.lr_scheduler_configs
        ):
            raise ValueError(
                "a LightningClient trains without ReduceLROnPlateau, whose metrics a new process "
                "does not have; take a scheduler that depends on the step"
            )
        loader = _checked(self._train_loader())
        return Worker(
            module=self.module,
            optimizer=trainer.optimizers[0],
            num_examples=len(cast(Sized, loader.dataset)),
            evaluate=self._evaluate if trainer.enable_validation else None,
            info=ClientInfo(
                device=str(trainer.strategy.root_device), micro_batch=loader.batch_size
            ),
        )

    def _train_loader(self) -> Any:
        first = self._data[0] if self._data else None
        if first is not None and not isinstance(first, LightningDataModule):
            return first
        return (self.trainer.datamodule or self.module).train_dataloader()

    @cached_property
    def _validator(self) -> Trainer:
        """A Trainer of its own, because ``validate`` would reset the loops within ``fit``."""
        trainer, device = self.trainer, self.trainer.strategy.root_device
        return Trainer(
            accelerator=device.type,
            devices=1 if device.index is None else [device.index],
            plugins=[trainer.precision_plugin],
            limit_val_batches=trainer.limit_val_batches,
            inference_mode=False,  # as within fit
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def _evaluate(self) -> dict[str, float]:
        trainer, module, datamodule = self.trainer, self.module, self.trainer.datamodule
        loaders = None if datamodule or len(self._data) < 2 else self._data[1]
        random = self.order.random_state()
        try:
            metrics = self._validator.validate(
                module, loaders, datamodule=datamodule, verbose=False
            )
        finally:
            self.order.set_random_state(random)
            trainer.strategy.model_to_device()  # which validate has moved to the CPU
            module.trainer = trainer
            if datamodule:
                datamodule.trainer = trainer
        return {name: float(value) for each in metrics for name, value in each.items()}


class _Around:
    """Has what another object has, besides its own."""

    _inner: Any

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Order(_Around):
    """The order in which a sampler gives an epoch's batches, which can be drawn again."""

    began: RandomState | None = None
    """The state of the random generators when this epoch's order was drawn, once it is."""
    resumed: RandomState | None = None
    """That state of the epoch that is resumed; None: the order is new."""
    skip = 0
    """Batches to leave out, without loading them."""

    def __init__(self) -> None:
        self._inner: Any = ()
        self._generators: list[torch.Generator] = []

    def of(self, loader: "DataLoader[Any]") -> "DataLoader[Any]":
        """Return a copy of a loader, whose sampler this becomes."""
        ordered = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner = getattr(loader, name)
        owners = (loader, loader.sampler, self._inner, getattr(self._inner, "sampler", None))
        found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g}
        self._generators = list(found.values())
        vars(ordered)[name] = self  # a DataLoader refuses that it is set
        return ordered

    def random_state(self) -> RandomState:
        """Return the states of the global generators and the loader's own."""
        return {**get_random_state(), "generators": [g.get_state() for g in self._generators]}

    def set_random_state(self, state: RandomState) -> None:
        """Set what ``random_state`` has returned."""
        set_random_state(state)
        for generator, own in zip(self._generators, state["generators"], strict=False):
            generator.set_state(own)

    def __iter__(self) -> Iterator[Any]:
        here = self.random_state()
        skip, began = self.skip, self.resumed
        self.skip, self.resumed = 0, None
        if began is not None:
            self.set_random_state(began)
        self.began = began or here
        batches = iter(self._inner)
        first = list(islice(batches, skip, skip + 1))  # a sampler draws when it is asked
        if began is not None:
            self.set_random_state(here)
        yield from first
        yield from batches


class _Loader(_Around):
    """A DataLoader that waits between two steps, and can begin within an epoch."""

    def __init__(self, loader: "DataLoader[Any]", steps: LightningSteps) -> None:
        self._inner, self._steps = steps.order.of(loader), steps

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        if self._steps.skip is not None:  # begin where it resumes, after the first wait
            return self._batches(iter(()))
        self._steps.order.began = None
        return self._batches(iter(self._inner))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        steps, done = self._steps, 0
        while True:
            if done % steps.trainer.accumulate_grad_batches == 0:
                if not steps.wait():
                    return
                if steps.skip is not None:
                    batches, done = self._rest(steps.skip), steps.skip
                    steps.skip = None
            batch = next(batches, _END)
            if batch is _END:
                return
            done += 1
            yield batch

    def _rest(self, skip: int) -> Iterator[Any]:
        order = self._steps.order
        order.began, order.skip = None, skip
        here = order.random_state()
        batches: Iterator[Any] = iter(self._inner)  # which draws a number
        order.set_random_state(here)
        return batches


def _check(trainer: Trainer, module: LightningModule) -> None:
    if trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise ValueError(
            "a LightningClient trains on one device, without a strategy such as DDP, FSDP or "
            f"DeepSpeed, and this Trainer on {trainer.world_size} by "
            f"{type(trainer.strategy).__name__}; set devices=1, and no strategy"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"a LightningClient trains by automatic optimization with one optimizer, and "
            f"{type(module).__name__} sets automatic_optimization=False"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError("training_step has to take a batch, and not dataloader_iter")
    if trainer.reload_dataloaders_every_n_epochs:
        raise ValueError(
            "set reload_dataloaders_every_n_epochs=0: a new process would load others than this"
        )
    if any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks):
        raise ValueError(
            "set accumulate_grad_batches in place of a GradientAccumulationScheduler: the steps "
            "of all epochs must be as many"
        )


def _checked(loader: Any) -> "DataLoader[Any]":
    """Return the loader; raise ``ValueError`` for one that cannot be resumed within an epoch."""
    is_map = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_map or not hasattr(loader.batch_sampler or loader.sampler, "__len__"):
        raise ValueError(
            "a LightningClient trains on one DataLoader of a data set with a length, whose place "
            f"in an epoch a new process can find, and not on {type(loader).__name__}"
            + (f" of {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else "")
        )
    return cast("DataLoader[Any]", loader)
