"""A site that protects its data: errors do not quote them, and no app ignores its settings."""

import pytest
import torch
from flwr.app import Message
from torch import nn

from flower_desloc import DesLocClient, Worker, client_app
from flower_desloc.core.errors import SetupError, SiteRefusedError
from flower_desloc.flower.failures import DivergedError
from flower_desloc.flower.fingerprint import PACKAGE, fingerprint
from flower_desloc.flower.inprocess import InProcessGrid
from flower_desloc.flower.messages import HELLO, WindowRequest
from flower_desloc.flower.protection import ACCEPT_APP, APPS_COMPARED, HIDDEN, OF_THE_APP
from flower_desloc.flower.secure.record import ASK
from flower_desloc.privacy.account import BudgetSpentError
from flower_desloc.secure.identity import create

RECORD = "Jane Doe, born 1900"
BUDGET = {"epsilon": 1.0, "delta": 1e-5}


def error_of(app, node, kind="train"):
    """Return the error that a site replies."""
    grid = InProcessGrid(app, [node])
    code = {PACKAGE: fingerprint()}
    request = WindowRequest(run_key="run", stop=1, versions={"params": 0}, code=code)
    content = request.to_content(0)
    (reply,) = grid.send_and_receive([Message(content, 1, kind)])
    return reply.error


def raising(error):
    def build(config, context):
        raise error

    return build


def own_loss(step):
    raise KeyError(RECORD)


def of_a_step(config, context):
    module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return Worker(module=module, optimizer=optimizer, loss_at=own_loss, num_examples=1)


@pytest.mark.parametrize("kind", ["train", HELLO, "evaluate"])
@pytest.mark.parametrize("error", [ValueError(RECORD), KeyError(RECORD), SystemExit(RECORD)])
@pytest.mark.parametrize("is_private", [False, True])
def test_the_text_of_an_error_stays_at_a_site_that_protects_its_data(
    error, kind, is_private, caplog
):
    app = client_app(raising(error), carries_out=OF_THE_APP, is_private=lambda: is_private)
    reasons = [error_of(app, node, kind).reason for node in (BUDGET, {})]
    assert [HIDDEN in reason for reason in reasons] == [True, is_private]
    assert [RECORD in reason for reason in reasons] == [False, not is_private]
    assert RECORD in caplog.text


def test_so_does_that_of_a_step(tmp_path):
    app, node = client_app(of_a_step, carries_out=OF_THE_APP), {"state-dir": str(tmp_path)}
    content = WindowRequest(
        run_key="run", stop=1, versions={"params": 0},
        streams={"params": {"weight": torch.ones(1, 1), "bias": torch.ones(1)}},
    ).to_content(0)  # fmt: skip
    for more, told in (({}, True), (BUDGET, False)):
        grid = InProcessGrid(app, [node | more])
        (reply,) = grid.send_and_receive([Message(content, 1, "train")])
        assert (RECORD in str(reply.error.reason)) == told


@pytest.mark.parametrize("error", [DivergedError(RECORD), SetupError(RECORD)])
def test_the_server_is_still_told_the_kinds_of_error_that_it_asks_for(error):
    app = client_app(raising(error), carries_out=OF_THE_APP)
    hidden, plain = error_of(app, BUDGET), error_of(app, {})
    assert hidden.code == plain.code
    assert RECORD not in hidden.reason
    assert RECORD in plain.reason


@pytest.mark.parametrize("refusal", [SiteRefusedError, BudgetSpentError])
def test_a_refusal_says_why(refusal):
    app = client_app(raising(refusal("the budget is spent")), carries_out=OF_THE_APP)
    assert "the budget is spent" in error_of(app, BUDGET).reason


@pytest.mark.parametrize("node", [BUDGET, {}])
def test_the_detail_of_a_refusal_is_in_the_log_of_the_site_alone(node, caplog):
    app = client_app(raising(SiteRefusedError("it is damaged", RECORD)), carries_out=OF_THE_APP)
    reason = error_of(app, node).reason
    assert "it is damaged" in reason
    assert RECORD not in reason
    assert RECORD in caplog.text


def test_neither_peers_nor_paths_of_a_site_with_keys_are_told(tmp_path, caplog):
    (tmp_path / "site-a.key").write_text("00" * 32)
    (tmp_path / "peers").write_text(f"{RECORD}\n")
    app = client_app(of_a_step)
    node = {"name": "site-a", "secure-keys": str(tmp_path), "state-dir": str(tmp_path / "state")}
    told = error_of(app, node).reason
    assert "secure-keys in the node config" in told
    assert RECORD in caplog.text
    (tmp_path / "state").write_text("")  # no folder
    (tmp_path / "peers").write_text(create(tmp_path, "site-a"))
    told += (reason := error_of(app, node).reason)
    assert HIDDEN in reason
    assert not [word for word in (RECORD, str(tmp_path)) if word in told]


def test_a_site_whose_supernode_does_not_compare_apps_is_refused(monkeypatch):
    app, node = client_app(of_a_step), {ACCEPT_APP: "0" * 64}
    monkeypatch.delenv(APPS_COMPARED, raising=False)
    for kind in ("train", HELLO, "evaluate", ASK):
        assert "start it by `desloc supernode`" in error_of(app, node, kind).reason
    monkeypatch.setenv(APPS_COMPARED, "1")
    assert "desloc supernode" not in error_of(app, node, ASK).reason


@pytest.mark.parametrize("key", OF_THE_APP)
@pytest.mark.parametrize("make", [client_app, DesLocClient])
def test_an_app_that_does_not_carry_out_what_protects_a_site_is_refused(make, key):
    reason = error_of(make(of_a_step), {key: "1"}, HELLO).reason
    assert f"{key} in the node config: this app does not carry it out" in reason
