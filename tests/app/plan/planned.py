"""Planned runs for the tests of the plan."""

from dataclasses import replace

from flower_desloc import PARAMS, SyncSchedule
from flower_desloc.app.plan.from_config import planned_run
from flower_desloc.app.plan.planned_run import PlannedRun, PlannedStream
from flower_desloc.app.plan.wall_clock import Link, Topology
from flower_desloc.core.kinds import Kind, kind_of

STREAMS = (PARAMS, "exp_avg", "exp_avg_sq")
LINK = Link(bandwidth=125e6, latency=0.2)
NON_IID = {"betas": (0.95, 0.95), "partition": "by_domain"}


def by_stream(*values):
    return dict(zip(STREAMS, values, strict=True))


def planned(
    *periods, betas=(0.95, 0.9999), ceiling=1, coins=False, once_at=(), phases=None, **changes
):
    moments = zip(("exp_avg", "exp_avg_sq"), betas, strict=True)
    run = PlannedRun(
        name="one",
        optimizer="adam",
        family="Adam",
        num_params=1e6,
        streams=(
            PlannedStream(name=PARAMS, kind=Kind.PARAMS, num_bytes=4e6),
            *(
                PlannedStream(name=s, kind=kind_of(s), num_bytes=4e6, beta=b, ceiling=ceiling)
                for s, b in moments
            ),
        ),
        schedule=SyncSchedule(
            by_stream(*periods), 0 if coins else None, frozenset(once_at), phases or {}
        ),
        steps=960,
        workers=4,
        tokens=1e5,
        compute=1.0,
        link=Link(bandwidth=125e6, latency=0.01),
        topologies=tuple(Topology),
    )
    return replace(run, **changes)


def run_of(config, **known):
    return planned_run(config, LINK, **{"step_seconds": 1, **known}, flops=1, mfu=1)
