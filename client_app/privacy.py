"""Make a client private, as the run's configuration and the site's node config ask for."""

import platform
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import torch
from flwr.app import Context

from client_app.worker import RunParts, site_of
from flower_desloc.app.config import Config, ConfigError
from flower_desloc.app.config.check import check
from flower_desloc.app.config.user_code import user_modules
from flower_desloc.app.sites.multiprocess.parallelism import NodeConfig, Parallelism
from flower_desloc.app.tasks.protocol import HasExamples
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.core.worker import Worker
from flower_desloc.flower.client_state import client_name, state_files, state_folder
from flower_desloc.flower.fingerprint import code_of, digest_of, fingerprint
from flower_desloc.privacy.account import Account
from flower_desloc.privacy.accounting import Budget
from flower_desloc.privacy.ledger import Ledger
from flower_desloc.privacy.worker import Examples, PrivateLoss, private


def private_worker(
    parts: RunParts, context: Context, run: str, parallelism: Parallelism
) -> tuple[Worker, Account]:
    """Return the private worker of a client in the run of that name, and its account.

    Raises ``SiteRefusedError`` for what privacy excludes, and where its budget is spent.
    """
    config, node = parts.config, context.node_config
    stated, of_site = config.privacy, site_budget(node)
    of_run = None if stated.epsilon is None else Budget(stated.epsilon, stated.delta)
    budget = of_run or of_site
    assert budget is not None
    # A site may ask for what the run's configuration does not state. The best model is that of the
    # clients that evaluate.
    asked = replace(stated, epsilon=budget.epsilon)
    try:
        check(replace(config, privacy=asked, run=replace(config.run, keep_best="", patience=None)))
    except ConfigError as error:
        raise SiteRefusedError(str(error)) from error
    if parallelism.processes > 1:
        raise SiteRefusedError(
            f"processes={parallelism.processes} in the node config: a client with differential "
            "privacy has one process"
        )
    if not {"name", "partition-id"} & node.keys():
        raise SiteRefusedError(
            "differential privacy needs the site's name=... in the node config: its ledger bears it"
        )
    site = site_of(node)
    worker, data = parts.single_worker(node), parts.data(site)
    if not isinstance(data, HasExamples):
        raise SiteRefusedError(
            f"task={config.task}: differential privacy draws examples one by one, and its "
            f"{type(data).__name__} has no method examples(numbers); give it one, or for streamed "
            "text set data.max_bytes"
        )
    ledger = _ledger(state_folder(context) / "privacy", client_name(context))
    with ledger.locked():
        is_begun = run in ledger.runs()
    state = None if is_begun else state_files(context, run).last()
    if state is not None and (any(state.steps_since_average.values()) or state.residuals):
        raise SiteRefusedError(
            "this site has taken steps of the run without differential privacy, which its states "
            "are made of; start another run"
        )
    account = Account(ledger, run, config.run.steps, of_run=of_run, of_site=of_site)
    size = config.data.batch_size
    examples = Examples(number=data.num_examples, of=data.examples, batch_size=size)
    account.noise_multiplier(examples.sample_rate)  # so that a greeting finds a spent budget
    loss = PrivateLoss(
        module=worker.module,
        optimizer=worker.optimizer,
        loss=parts.task.loss,
        examples=examples,
        account=account,
        max_grad_norm=stated.max_grad_norm,
        context=repr((run, config.run.seed, site.partition, *_computed_by(config))),
    )
    return private(worker, loss), account


def _computed_by(config: Config) -> tuple[object, ...]:
    """Return what a gradient depends on besides parameters and records.

    With other code the same noise would give away the difference of two gradients.
    """
    own = digest_of(Path(__file__).parent)
    code = fingerprint(), own, *sorted(code_of(user_modules(config)).items())
    machine = version("transformers"), torch.backends.cpu.get_cpu_capability(), _processor()
    return (*code, *machine, config.task, config.task_options, config.model, config.data)


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return what the processor is: others round otherwise."""
    named = ("model name", "CPU implementer", "CPU part")  # on x86, and on ARM
    with suppress(OSError):
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
        if found := {line for line in lines if line.startswith(named)}:
            return repr(sorted(found))
    return repr((platform.machine(), platform.processor()))


def site_budget(node: NodeConfig) -> Budget | None:
    """Return the budget that a node config states; raises ``SiteRefusedError`` for half of one."""
    if not {"epsilon", "delta"} & node.keys():
        return None
    try:
        return Budget(float(node["epsilon"]), float(node["delta"]))
    except (KeyError, ValueError) as error:
        raise SiteRefusedError(
            f"the node config must state both epsilon and delta as numbers, as in 'epsilon=3.0 "
            f"delta=1e-5': {error}"
        ) from error


@lru_cache(maxsize=1024)
def _ledger(folder: Path, client: str) -> Ledger:
    return Ledger(folder, client)
