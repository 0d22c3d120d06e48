"""The model of time of the report: measured compute, and a star for every average."""

from dataclasses import replace

import pytest
from recorded import SIZE, record

from flower_desloc.app.plan.wall_clock import REPORTED, Link, star_seconds
from flower_desloc.app.runs.report import load
from flower_desloc.app.runs.time_model import modelled, seconds_per_step


def test_modelled_time_is_measured_compute_and_a_star_for_every_average(tmp_path):
    # 4 clients, each 3.1 s per window of 16 steps
    loaded = load(record(tmp_path, finish=False).path)
    assert seconds_per_step(loaded) == pytest.approx(3.1 / 16)
    link = Link(bandwidth=1e6, latency=0.25)
    methods = modelled(loaded, link)
    one, two, three = (star_seconds(n * SIZE, 4, link) for n in (1, 2, 3))
    # Params are averaged in each of 12 windows, exp_avg in every third, exp_avg_sq in every sixth.
    assert methods["this run"].communication == pytest.approx(8 * one + 2 * two + 2 * three)
    assert methods["Local Adam"].communication == pytest.approx(12 * three)
    assert methods["DDP"].communication == pytest.approx(192 * one)
    for time in methods.values():
        assert time.compute == pytest.approx(12 * 3.1)
        assert time.steps[-1] == 192
        assert time.seconds[-1] == pytest.approx(time.total)


def test_local_adam_and_ddp_wait_for_the_slowest_of_sites_of_unequal_speed(tmp_path):
    def slow(window):
        """Client 3 takes a quarter of the steps in the same time."""
        steps = window.step - window.start
        clients = {
            name: replace(client, seconds=2.0, steps=steps // 4 if name == "client-3" else steps)
            for name, client in window.clients.items()
        }
        return replace(window, clients=clients)

    run = record(tmp_path, change=slow, finish=False)
    methods = modelled(load(run.path), REPORTED)
    assert methods["this run"].compute == pytest.approx(12 * 2)
    for name in ("Local Adam", "DDP"):
        assert methods[name].compute == pytest.approx(4 * 12 * 2)
