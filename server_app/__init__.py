"""The ServerApp: configuration -> strategy -> training -> the run's folder."""

import secrets
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from torch import Tensor, nn

from flower_desloc.config import Config, ConfigError, dump, load
from flower_desloc.core.averaging import Stream
from flower_desloc.core.schedule import GRADIENTS, NEVER, PARAMS
from flower_desloc.core.streams import BUFFERS, check_like, digest, frozen
from flower_desloc.flower.checkpoint import Checkpoint, Checkpoints
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.records import from_record, to_record
from flower_desloc.flower.stock import Stock
from flower_desloc.flower.strategy import DesLoc, EvaluateFn
from flower_desloc.runs import RunFolder, RunRecorder
from flower_desloc.runs.resume import to_resume
from flower_desloc.setup.build import build_outer, build_schedule, build_streams
from flower_desloc.setup.initial import OF_MODEL_CONFIG, initial, settled
from flower_desloc.setup.preflight import Preflight
from flower_desloc.tasks import Task, build_task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the strategy as the run config says; an exception is the run's failure."""
    run_config = context.run_config
    config = settled(load(str(run_config["config"]), str(run_config["overrides"])))
    if config.model.config:
        log(INFO, OF_MODEL_CONFIG)
    task = build_task(config)
    model = task.build_model()
    streams = build_streams(config, model)
    params = streams.pop(PARAMS)
    _leave_buffers_local(config, streams)
    schedule = build_schedule(config)
    schedule.require([PARAMS, *streams], config.optimizer.name)
    _begin_with(initial(config), params, streams)
    output_dir = Path(str(run_config["output-dir"]))
    with (
        _folder(config, output_dir) as (folder, checkpoint),
        RunRecorder(config, schedule, folder, resumed=checkpoint) as recorder,
    ):
        strategy = _strategy(
            config,
            schedule,
            config.run.steps,
            policy=config.federation,
            seed=config.run.seed,
            eval_every=config.run.eval_every,
            states=streams,
            metrics=task.metrics,
            evaluate_clients=config.evaluation.federated,
            # The folder's name is this run's alone here, the rest makes it so elsewhere.
            run_key=f"{folder.path.name}-{secrets.token_hex(4)}",
            checkpoints=Checkpoints(folder.checkpoints, config.run.checkpoint_every, dump(config)),
            resume=checkpoint,
        )
        result = strategy.start(
            grid,
            to_record(params),
            train_config=ConfigRecord({"settings": dump(config), "frozen": frozen(model)}),
            evaluate_fn=_evaluate_fn(task, model, strategy) if config.evaluation.central else None,
            # In one process all is on this machine, and `desloc run` has looked at that.
            observer=recorder
            if isinstance(grid, InProcessGrid)
            else Preflight(config, folder.path, recorder),
        )
        _install(model, strategy)
        folder.write_final(lambda path: task.save(model, path))
        recorder.finish("completed", digest(from_record(result.arrays)))


@contextmanager
def _folder(config: Config, output_dir: Path) -> Iterator[tuple[RunFolder, Checkpoint | None]]:
    """Yield the run's folder, and the checkpoint to go on from if it is gone on with."""
    folder, checkpoint = to_resume(config, output_dir) or (
        RunFolder.create(output_dir, config.run.name),
        None,
    )
    with folder.claimed():
        if checkpoint is not None:
            folder.go_back(checkpoint.round)
        yield folder, checkpoint


def _begin_with(
    other: Mapping[str, Stream] | None,
    params: dict[str, Tensor],
    streams: Mapping[str, dict[str, Tensor]],
) -> None:
    """Replace the model a run begins with by another."""
    if other is None:
        return
    for name, ours in {PARAMS: params, **streams}.items():
        if name in (PARAMS, BUFFERS) and name in other:
            theirs = other[name]
            try:
                check_like(name, theirs, ours)
            except ValueError as error:
                raise ConfigError(f"run.init_from: it is of another model: {error}") from error
            ours.update({key: tensor.to(ours[key].dtype) for key, tensor in theirs.items()})


def _strategy(
    config: Config,
    *args: Any,
    checkpoints: Checkpoints,
    resume: Checkpoint | None,
    **kwargs: Any,
) -> DesLoc | Stock:
    match config.strategy:
        case "desloc":
            outer = build_outer(config)
            return DesLoc(
                *args,
                outer=outer,
                formats=config.wire,
                checkpoints=checkpoints,
                resume=resume,
                **kwargs,
            )
        case "fedavg":  # Flower's own cannot go on in the middle
            return Stock(FedAvg, *args, **kwargs)
        case "fedadam":
            f = config.fedadam
            make = partial(FedAdam, eta=f.lr, beta_1=f.betas[0], beta_2=f.betas[1], tau=f.tau)
            return Stock(make, *args, **kwargs)
    raise AssertionError(config.strategy)


def _leave_buffers_local(config: Config, streams: Container[str]) -> None:
    if BUFFERS in streams and GRADIENTS in config.sync:
        raise ConfigError(
            "sync.gradients=1: the model has buffers (such as BatchNorm's statistics), which do "
            "not travel with gradients; choose a model without, or average params"
        )
    if BUFFERS in streams and BUFFERS not in config.sync:
        config.sync[BUFFERS] = NEVER
        log(
            WARNING,
            "the model has buffers (such as BatchNorm's statistics), which stay local and as they "
            "began in the averaged model; set sync.buffers to average them",
        )


def _evaluate_fn(task: Task, model: nn.Module, strategy: DesLoc | Stock) -> EvaluateFn:
    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        del server_round, arrays  # buffers belong to a model as well
        _install(model, strategy)
        metrics: dict[str, float] = {}
        together: dict[str, float] = {}
        for domain, batches in task.heldout().items():
            totals = task.evaluate(model, batches)
            metrics |= {f"{domain}/{name}": value for name, value in task.metrics(totals).items()}
            together = {name: together.get(name, 0.0) + v for name, v in totals.items()}
        return MetricRecord({**task.metrics(together), **metrics})

    return evaluate


@torch.no_grad()
def _install(model: nn.Module, strategy: DesLoc | Stock) -> None:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in {PARAMS, BUFFERS} & strategy.globals.averages.keys():
        for key, tensor in from_record(strategy.globals.averages[name]).items():
            own[key].copy_(tensor)
