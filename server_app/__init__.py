"""The ServerApp: configuration -> strategy -> training -> the run's folder."""

import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from flower_desloc.app.config import Config, ConfigError, dump, load_run_config
from flower_desloc.app.config.check import why_not_evaluated
from flower_desloc.app.config.user_code import user_modules
from flower_desloc.app.runs import RunFolder, RunRecorder
from flower_desloc.app.runs.best import KeepBest
from flower_desloc.app.runs.resume import to_resume
from flower_desloc.app.runs.roster import Governed, Roster, inherit
from flower_desloc.app.runs.tracking import require_installed
from flower_desloc.app.setup.build import (
    build_flower_strategy,
    build_optimizer,
    build_outer,
)
from flower_desloc.app.setup.initial import OF_MODEL_CONFIG, initial, with_init_from
from flower_desloc.app.setup.machine import default_device
from flower_desloc.app.setup.meta_model import task_errors
from flower_desloc.app.setup.param_groups import param_groups
from flower_desloc.app.setup.preflight import Preflight
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.tasks import Sums, Task, build_task
from flower_desloc.app.tasks.alike import required_alike
from flower_desloc.core.exits import exits_as_errors
from flower_desloc.core.kinds import Kinds
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.core.schedule import BUFFERS, NEVER, PARAMS, SyncSchedule
from flower_desloc.core.states import states_by_group
from flower_desloc.core.streams import check_like, digest, named_tensors
from flower_desloc.core.types import Stream
from flower_desloc.flower.arrays import from_record, plain_numbers, to_record
from flower_desloc.flower.baselines.data_parallel import DataParallel
from flower_desloc.flower.baselines.flower_strategies import FlowerStrategy
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.fingerprint import code_of
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.internals import log
from flower_desloc.flower.metrics import part_of
from flower_desloc.flower.rounds import RoundHook
from flower_desloc.flower.simulation import end_busy_clients
from flower_desloc.flower.strategy import DesLoc, EvaluateFn
from flower_desloc.optim.bounds import moment_ratios

app = ServerApp()


@app.main()
@exits_as_errors()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy as the run config says; an exception is the run's failure."""
    try:
        _run(grid, context)
    finally:
        end_busy_clients(grid)


def _run(grid: Grid, context: Context) -> None:
    run_config = context.run_config
    config = with_init_from(load_run_config(run_config))
    require_installed(config)
    if config.model.config:
        log(INFO, OF_MODEL_CONFIG)
    configured = RunStreams(config)
    configured.check()  # `flwr run` has checked nothing
    task = build_task(config)
    model = task.build_model()
    streams = configured.initial(model)
    params = streams.pop(PARAMS)
    _check_buffers(config, streams)
    schedule = configured.schedule_of([PARAMS, *streams])
    _warn_if_unbounded(config, model)
    _begin_with(initial(config), params, streams)
    output_dir = Path(str(run_config["output-dir"]))
    if not isinstance(grid, InProcessGrid) and not output_dir.expanduser().is_absolute():
        log(
            INFO,
            "output-dir=%s is relative to the folder where the SuperLink was started: the run is "
            "written to %s; an absolute path is independent of it",
            output_dir,
            output_dir.resolve(),
        )
    with (
        _folder(config, output_dir) as (folder, checkpoint),
        RunRecorder(config, folder, resumed=checkpoint) as recorder,
        exits_as_errors(),  # before the recorder takes it for the signal that stopped the run
    ):
        context.state["run"] = ConfigRecord({"folder": str(folder.path)})
        strategy = _strategy(
            config,
            schedule,
            configured.kinds,
            outer=build_outer(config, model),
            templates=streams,
            metrics=task.metrics,
            # The folder's name is unique here, the suffix makes it unique elsewhere.
            run_key=f"{folder.path.name}-{secrets.token_hex(4)}",
            checkpoints=Checkpoints(folder.checkpoints, config.run.checkpoint_every, dump(config)),
            resume=checkpoint,
            code=code_of(user_modules(config)),
        )

        def save(path: Path) -> None:
            with _having(model, strategy.state.model()):
                task.save(model, path)

        strategy.start(
            grid,
            _moved(model, params),
            train_config=ConfigRecord({"settings": dump(config), **required_alike(task, model)}),
            evaluate_fn=_evaluate_fn(config, task, model) if config.evaluation.central else None,
            observer=recorder,
            hooks=[*_hooks(config, grid, folder, strategy, save)],
        )
        failed = f"all steps are done, but the save of task={config.task} failed"
        with task_errors(failed):
            folder.write_final(save)
        recorder.finish("completed", digest(from_record(strategy.state.averages[PARAMS])))


def _hooks(
    config: Config, grid: Grid, folder: RunFolder, strategy: DesLoc, save: Callable[[Path], None]
) -> Iterator[RoundHook]:
    if not isinstance(grid, InProcessGrid):
        # In one process everything is on this machine, which `desloc run` has checked.
        yield Preflight(config, folder.path)
    yield Governed(Roster(folder.members))
    if config.run.keep_best:
        yield KeepBest(config, folder, save, lambda: strategy.loop.checkpoint)


@contextmanager
def _folder(config: Config, output_dir: Path) -> Iterator[tuple[RunFolder, Checkpoint | None]]:
    """Yield the run's folder, and the checkpoint to resume from if there is one.

    The folder of a new run that is refused before it is recorded is deleted.
    """
    folder, checkpoint = to_resume(config, output_dir) or (
        RunFolder.create(output_dir, config.run.name),
        None,
    )
    inherit(folder, config.run.name)
    try:
        with folder.claimed():
            if checkpoint is not None:
                folder.rewind(checkpoint.round)
            yield folder, checkpoint
    except ConfigError:
        if checkpoint is None and not folder.summary.exists():
            folder.discard()
        raise


def _begin_with(
    other: Mapping[str, Stream] | None,
    params: dict[str, Tensor],
    streams: Mapping[str, dict[str, Tensor]],
) -> None:
    """Copy another model's parameters and buffers over the initial ones."""
    if other is None:
        return
    for name, ours in {PARAMS: params, **streams}.items():
        if name in (PARAMS, BUFFERS) and name in other:
            theirs = other[name]
            try:
                check_like(name, theirs, ours)
            except ValueError as error:
                raise ConfigError(
                    f"run.init_from: its model differs from this one: {error}"
                ) from error
            ours.update({key: tensor.to(ours[key].dtype) for key, tensor in theirs.items()})


def _strategy(
    config: Config,
    schedule: SyncSchedule,
    kinds: Kinds,
    *,
    outer: OuterOptimizer | None,
    checkpoints: Checkpoints,
    resume: Checkpoint | None,
    **options: Any,
) -> DesLoc:
    """Return the strategy that the configuration names."""
    steps = config.run.steps
    options |= {
        "policy": config.federation,
        "seed": config.run.seed,
        "eval_every": config.run.eval_every,
        "evaluate_clients": why_not_evaluated(config, "federated") is None,
    }
    saved: dict[str, Any] = {"checkpoints": checkpoints, "resume": resume}
    match config.strategy:
        case "desloc" if config.averages_gradients:
            assert outer is not None
            return DataParallel(steps, outer, **options, **saved)
        case "desloc":
            options |= {
                "outer": outer,
                "compression": config.compression,
                "kinds": kinds,
            }
            options |= {"sync_delay": config.sync_delay, "sync_bound": config.sync_bound}
            if config.privacy.secure_aggregation:
                # Few runs need its cryptography.
                from flower_desloc.flower.secure.at_server import SecureDesLoc

                return SecureDesLoc(schedule, steps, **options, **saved)
            return DesLoc(schedule, steps, **options, **saved)
    # Flower's own strategies cannot resume.
    return FlowerStrategy(build_flower_strategy(config), schedule, steps, **options)


def _check_buffers(config: Config, streams: Container[str]) -> None:
    """Warn where the model's buffers stay local; raises ``ConfigError`` where they cannot."""
    if BUFFERS not in streams:
        return
    if config.averages_gradients:
        raise ConfigError(
            "sync.gradients=1: the model has buffers (such as BatchNorm's statistics), which are "
            "not sent with gradients; choose a model without, or average params"
        )
    if BUFFERS not in config.sync:
        log(
            WARNING,
            "the model has buffers (such as BatchNorm's statistics), which stay local; the "
            "averaged model keeps their initial values; set sync.buffers to average them",
        )


def _warn_if_unbounded(config: Config, model: nn.Module) -> None:
    """Warn where ``sync_bound`` would apply to the optimizer, and its betas have no bound."""
    if not config.is_desloc or not config.sync_bound:
        return
    optimizer = build_optimizer(config, param_groups(config, model))
    by_group = states_by_group(optimizer)
    for first, ratios in moment_ratios(optimizer).items():
        second = next(by_group[index][first].divided_by for index in ratios)
        if None in ratios.values() and config.sync.get(first, NEVER) != config.sync.get(
            second, NEVER
        ):
            log(
                WARNING,
                "%s has no bound%s, as the square of its decay is not below the decay of %s: "
                "sync_bound does nothing for it, and the run can spike after an average of %s",
                first,
                " in some of optimizer.groups" if any(ratios.values()) else "",
                second,
                first,
            )


def _moved(model: nn.Module, params: dict[str, Tensor]) -> ArrayRecord:
    """Return the model's parameters; the model has none until ``_having``."""
    record = to_record(params)
    params.clear()
    _empty(model, record)
    return record


@contextmanager
def _having(model: nn.Module, arrays: ArrayRecord) -> Iterator[None]:
    """Let the model have these tensors inside the block, and no memory for them outside it."""
    own = named_tensors(model)
    for key, tensor in from_record(arrays).items():
        own[key].data = tensor.clone()
    try:
        yield
    finally:
        _empty(model, arrays)


def _empty(model: nn.Module, names: Iterable[str]) -> None:
    own = named_tensors(model)
    for key in names:
        own[key].data = own[key].new_empty([0] * own[key].ndim)  # groups may ask its dimensions


def _evaluate_fn(config: Config, task: Task, model: nn.Module) -> EvaluateFn:
    device = default_device()

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        nonlocal device
        del server_round
        with _having(model, arrays):
            while (by_domain := _totals(task, model, device)) is None:
                log(
                    WARNING,
                    "the model is evaluated on the CPU: the server's GPU has too little memory",
                )
                device = torch.device("cpu")
        metrics: dict[str, float] = {}
        together: dict[str, float] = {}
        for domain, totals in by_domain.items():
            of_domain = plain_numbers(task.metrics(totals))
            metrics |= {f"{domain}/{name}": value for name, value in of_domain.items()}
            together = {name: together.get(name, 0.0) + v for name, v in totals.items()}
        overall = plain_numbers(task.metrics(together))
        for name in overall:
            part, metric = part_of(name, overall)
            if part:
                raise ConfigError(
                    f"task={config.task}: its metric {name!r} reads as {metric!r} of a part; give "
                    "it a name whose end is not another metric's name"
                )
        return MetricRecord({**overall, **metrics})

    return evaluate


def _totals(task: Task, model: nn.Module, device: torch.device) -> dict[str, Sums] | None:
    """Return the totals of every domain; None if ``device`` is a GPU with too little memory.

    In a simulation clients train on the same GPU, so the model leaves it afterwards.
    """
    try:
        model.to(device)
        heldout = task.heldout()
        return {domain: task.evaluate(model, batches) for domain, batches in heldout.items()}
    except torch.OutOfMemoryError:  # of the GPU; the CPU's is another error
        return None
    finally:
        model.to("cpu")
        if device.type == "cuda":
            torch.cuda.empty_cache()
