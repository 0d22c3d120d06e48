"""Options that exclude each other: one table for the library and the configuration."""

import re
from functools import partial

import pytest
import torch
from flwr.serverapp.strategy import FedAdam

from flower_desloc import DesLoc, Policy, SyncSchedule
from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.config.schema import Config
from flower_desloc.core.outer import OuterOptimizer
from flower_desloc.flower.baselines.data_parallel import DataParallel
from flower_desloc.flower.baselines.flower_strategies import FlowerStrategy
from flower_desloc.flower.fields import default_of
from flower_desloc.flower.options import EXCLUSIONS, Options
from flower_desloc.flower.secure.at_server import SecureDesLoc

OUTER = OuterOptimizer(partial(torch.optim.SGD, lr=1.0))
RESETS = SyncSchedule({"params": 4, "exp_avg": "reset", "exp_avg_sq": "reset"})
fedadam = partial(FlowerStrategy, partial(FedAdam, eta=0.1), RESETS, 14)
data_parallel = partial(DataParallel, 14, OUTER)
secure = partial(SecureDesLoc, SyncSchedule({"params": 4}), 14)


@pytest.mark.parametrize("key", sorted({key for each in EXCLUSIONS for key in each.keys}))
def test_an_option_has_the_default_of_its_setting(key):
    assert default_of(Options, key) == default_of(Config, key)


@pytest.mark.parametrize(
    ("preset", "settings", "strategy"),
    [
        ("favg_reset_opt", "sync_delay=2", lambda: DesLoc(RESETS, 14, sync_delay=2)),
        ("ddp", "sync_delay=2", lambda: data_parallel(sync_delay=2)),
        ("ddp", "federation.min_steps=0.5", lambda: data_parallel(policy=Policy(min_steps=0.5))),
        ("ddp", "federation.norm_bound=4", lambda: data_parallel(policy=Policy(norm_bound=4.0))),
        (
            "quickstart",
            "privacy.secure_aggregation=true sync_delay=2",
            lambda: secure(sync_delay=2),
        ),
        (
            "quickstart",
            "privacy.secure_aggregation=true federation.average=median",
            lambda: secure(policy=Policy(average="median")),
        ),
    ],
)
def test_the_library_and_the_configuration_say_the_same(preset, settings, strategy):
    with pytest.raises(ConfigError) as configured:
        load(preset, settings)
    with pytest.raises(ValueError, match=f"^{re.escape(str(configured.value))}$"):
        strategy()


@pytest.mark.parametrize(
    "options",
    [
        {"policy": Policy(average="median")},
        {"policy": Policy(norm_bound=4.0)},
        {"sync_delay": 2},
        {"outer": OUTER},
        {"formats": {"params": "int8"}},
    ],
)
def test_what_flowers_own_strategies_ignore_is_refused(options):
    with pytest.raises(ValueError, match="only strategy=desloc has it, and strategy=FedAdam is"):
        fedadam(**options)
