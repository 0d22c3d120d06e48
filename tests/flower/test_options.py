"""Options of a strategy that exclude each other, in the library and in a run's configuration."""

from functools import partial

import pytest
import torch
from flwr.serverapp.strategy import FedAdam

from flower_desloc import DesLoc, Policy, SyncSchedule
from flower_desloc.app.config import ConfigError, load
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.flower.baselines.data_parallel import DataParallel
from flower_desloc.flower.baselines.flower_strategies import FlowerStrategy
from flower_desloc.flower.secure.at_server import SecureDesLoc

OUTER = OuterOptimizer(partial(torch.optim.SGD, lr=1.0))
RESETS = SyncSchedule({"params": 4, "exp_avg": "reset", "exp_avg_sq": "reset"})
PARAMS = SyncSchedule({"params": 4})
fedadam = partial(FlowerStrategy, partial(FedAdam, eta=0.1), RESETS, 14)
data_parallel = partial(DataParallel, 14, OUTER)
secure = partial(SecureDesLoc, PARAMS, 14)
SECURE = "privacy.secure_aggregation=true"
MEDIAN = Policy(average="median")


@pytest.mark.parametrize(
    ("preset", "settings", "strategy", "argument"),
    [
        ("favg_reset_opt", "sync_delay=2", lambda: DesLoc(RESETS, 14, sync_delay=2), "sync_delay"),
        ("ddp", "sync_delay=2", lambda: data_parallel(sync_delay=2), "sync_delay"),
        (
            *("ddp", "federation.min_steps=0.5"),
            *(lambda: data_parallel(policy=Policy(min_steps=0.5)), "policy.min_steps"),
        ),
        (
            *("ddp", "federation.norm_bound=4"),
            *(lambda: data_parallel(policy=Policy(norm_bound=4)), "policy.norm_bound"),
        ),
        ("quickstart", f"{SECURE} sync_delay=2", lambda: secure(sync_delay=2), "sync_delay"),
        (
            *("quickstart", f"{SECURE} federation.average=median"),
            *(lambda: secure(policy=MEDIAN), "policy.average"),
        ),
        (
            *("quickstart", f"{SECURE} compression.params=int8"),
            *(lambda: secure(compression={"params": "int8"}), "compression"),
        ),
        ("fedadam", "sync_delay=2", lambda: fedadam(sync_delay=2), "sync_delay"),
        (
            *("fedadam", "federation.average=median"),
            *(lambda: fedadam(policy=MEDIAN), "policy.average"),
        ),
        ("fedadam", "outer.name=sgd", lambda: fedadam(outer=OUTER), "outer"),
        ("fedadam", "run.resume=auto", lambda: fedadam(resume=object()), "resume"),
        (
            *("fedadam", "compression.params=int8"),
            *(lambda: fedadam(compression={"params": "int8"}), "compression"),
        ),
    ],
)
def test_the_library_refuses_what_the_configuration_refuses(preset, settings, strategy, argument):
    with pytest.raises(ConfigError) as refused:
        load(preset, settings)
    with pytest.raises(ValueError, match=f"^{argument}=.*; leave it out$") as constructed:
        strategy()
    why = str(constructed.value).removesuffix("; leave it out").rpartition(": ")[2]
    assert f": {why}; set " in str(refused.value)


def test_what_is_off_may_be_stated():
    off = Policy(norm_bound=None)
    for make in (secure, fedadam, data_parallel):
        make(policy=off)
    for preset, words in (("fedadam", ""), ("ddp", ""), ("quickstart", SECURE)):
        load(preset, f"federation.norm_bound=null {words}".strip())


def test_the_format_of_every_stream_by_default_may_be_stated():
    exact = {"params": "fp32"}
    for make in (secure, fedadam, data_parallel):
        make(compression=exact, templates={"params": {}})
    for words in (("fedadam", ""), ("quickstart", SECURE)):
        load(words[0], f"compression.params=fp32 {words[1]}".strip())
