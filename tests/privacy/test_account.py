"""The budget: what Opacus says, counted once, and never forgotten."""

import json
import math
import os
import stat

import pytest

pytest.importorskip("opacus")

from filelock import FileLock
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from flower_desloc.app.config import ConfigError, load
from flower_desloc.core.errors import SiteRefusedError
from flower_desloc.privacy import __main__ as command
from flower_desloc.privacy import accounting
from flower_desloc.privacy.account import MOST_STEPS, Account, BudgetSpentError
from flower_desloc.privacy.accounting import LEAST_DELTA, Budget, Step, epsilon
from flower_desloc.privacy.ledger import Ledger

STEP = Step(1.0, 0.05)


@pytest.fixture
def linear(monkeypatch):
    """Let every step cost its sample rate over its noise, which is quick and easy to follow."""

    def cost(steps, delta):
        return sum(number * step.sample_rate / step.noise_multiplier for step, number in steps)

    monkeypatch.setattr(accounting, "_epsilon", cost)


def account(folder, run="run", steps=10, of_run=None, of_site=None):
    def budget(value):
        return None if value is None else Budget(value, 1e-5)

    ledger = Ledger(folder, "site")
    return Account(ledger, run, steps, of_run=budget(of_run), of_site=budget(of_site))


def test_epsilon_is_that_of_a_direct_call_of_the_accountant():
    theirs = PRVAccountant()
    for _ in range(30):
        theirs.step(noise_multiplier=1.0, sample_rate=0.05)
    for _ in range(20):
        theirs.step(noise_multiplier=2.0, sample_rate=0.1)
    ours = epsilon({STEP: 30, Step(2.0, 0.1): 20}, 1e-5)
    assert ours == theirs.get_epsilon(delta=1e-5)
    bound = RDPAccountant()
    bound.history = theirs.history
    assert 0 < ours < bound.get_epsilon(delta=1e-5)
    assert epsilon({}, 1e-5) == 0


@pytest.mark.filterwarnings("error")
def test_a_budget_of_very_noisy_steps_is_computed_without_a_warning_of_opacus():
    steps = {Step(30.0, 0.01): 10}
    theirs = RDPAccountant()
    theirs.history = [(30.0, 0.01, 10)]
    with pytest.warns(UserWarning, match="Optimal order"):
        bound = theirs.get_epsilon(delta=1e-5)
    assert 0 < epsilon(steps, 1e-5) < bound


def test_the_noise_is_about_the_least_with_which_all_steps_fit(tmp_path):
    noise = account(tmp_path, steps=50, of_run=1.0).noise_multiplier(0.05)
    assert 0.97 < epsilon({Step(noise, 0.05): 50}, 1e-5) <= 1.0


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(("budget", "noise"), [(0.5, 1.0), (0.01, 50.0), (2.0, 0.25)])
def test_the_noise_is_found_above_and_below_one(tmp_path, budget, noise):
    found = account(tmp_path, of_site=budget).noise_multiplier(0.05)
    assert noise <= found <= 1.011 * noise


@pytest.mark.usefixtures("linear")
def test_a_query_is_charged_once_over_processes(tmp_path):
    for _ in range(3):
        mine = account(tmp_path, of_run=0.5)
        for query in ("a", "b"):
            mine.charge(query, "", STEP)
    assert Ledger(tmp_path, "site").steps() == {STEP: 2}


@pytest.mark.usefixtures("linear")
def test_a_spent_budget_refuses_further_queries_and_answers_known_ones(tmp_path):
    mine = account(tmp_path, of_run=0.5)
    for query in range(10):
        mine.charge(str(query), "", STEP)
    with pytest.raises(BudgetSpentError, match=r"in this run, epsilon=0.5 .* is spent") as told:
        mine.charge("10", "", STEP)
    assert told.value.__notes__ == ["10 steps took epsilon=0.5"]
    mine.charge("3", "", STEP)
    again = account(tmp_path, of_run=0.5)
    with pytest.raises(BudgetSpentError, match="is raised"):
        again.charge("10", "", STEP)
    account(tmp_path, run="other", of_run=0.5).charge("10", "", STEP)


@pytest.mark.usefixtures("linear")
def test_the_budget_of_a_site_is_for_all_its_runs(tmp_path):
    first = account(tmp_path, of_site=0.5, steps=4)
    step = Step(first.noise_multiplier(0.05), 0.05)
    for query in range(4):
        first.charge(str(query), "", step)
    second = account(tmp_path, run="second", of_run=9.0, of_site=0.5)
    with pytest.raises(BudgetSpentError, match=r"of this site, epsilon=0.5 .* in its node config"):
        second.noise_multiplier(0.05)
    with pytest.raises(BudgetSpentError):
        second.charge("x", "", step)


@pytest.mark.usefixtures("linear")
def test_the_noise_of_a_run_stays_when_others_spend_meanwhile(tmp_path):
    noise = account(tmp_path, of_site=1.0).noise_multiplier(0.05)
    account(tmp_path, of_site=1.0).charge("a", "", Step(noise, 0.05))
    account(tmp_path, run="other", of_site=1.0).charge("b", "", Step(9.0, 0.05))
    assert account(tmp_path, of_site=1.0).noise_multiplier(0.05) == noise


@pytest.mark.usefixtures("linear")
def test_other_runs_go_on_while_the_noise_of_one_is_found(tmp_path, monkeypatch):
    mine, lock = account(tmp_path, of_run=0.5), FileLock(tmp_path / "site.lock", timeout=0)
    allows = Budget.allows
    tried = []

    def allows_now(budget, steps):
        with lock:
            tried.append(steps)
        return allows(budget, steps)

    monkeypatch.setattr(Budget, "allows", allows_now)
    mine.noise_multiplier(0.05)
    assert tried


@pytest.mark.usefixtures("linear")
def test_other_runs_go_on_while_the_cost_of_a_step_is_found(tmp_path, monkeypatch):
    mine, lock = account(tmp_path, of_run=0.5), FileLock(tmp_path / "site.lock", timeout=0)
    known, cost = set(), accounting._epsilon

    def costs(steps, delta):
        if steps not in known:  # else the accountant remembers it
            with lock:
                known.add(steps)
        return cost(steps, delta)

    monkeypatch.setattr(accounting, "_epsilon", costs)
    mine.charge("a", "", STEP)
    assert known


@pytest.mark.usefixtures("linear")
def test_the_noise_is_that_of_a_process_which_has_begun_the_run_meanwhile(tmp_path, monkeypatch):
    mine, other, allows = account(tmp_path, of_run=0.5), Ledger(tmp_path, "site"), Budget.allows

    def begun_meanwhile(budget, steps):
        if not other.runs():
            with other.locked():
                other.append("run", "a", "", Step(7.0, 0.05))
        return allows(budget, steps)

    monkeypatch.setattr(Budget, "allows", begun_meanwhile)
    assert mine.noise_multiplier(0.05) == 7.0


@pytest.mark.usefixtures("linear")
def test_more_steps_than_the_accountant_can_do_are_refused(tmp_path):
    with pytest.raises(SiteRefusedError, match=r"at most 100000 steps .* run.steps=100001 is too"):
        account(tmp_path, steps=MOST_STEPS + 1, of_run=1e9).noise_multiplier(0.05)
    assert account(tmp_path, steps=MOST_STEPS, of_site=1e9).noise_multiplier(0.05)
    account(tmp_path, run="other", steps=1, of_run=1e9).charge("a", "", STEP)
    with pytest.raises(SiteRefusedError, match="of all runs together") as told:
        account(tmp_path, steps=MOST_STEPS, of_site=1e9).noise_multiplier(0.05)
    assert told.value.__notes__ == ["they would be 100001"]
    assert account(tmp_path, steps=MOST_STEPS, of_run=1e9).noise_multiplier(0.05)


@pytest.mark.usefixtures("linear")
def test_no_step_is_charged_beyond_these(tmp_path, monkeypatch):
    monkeypatch.setattr("flower_desloc.privacy.account.MOST_STEPS", 3)
    mine = account(tmp_path, of_site=1e9)
    for query in range(3):
        mine.charge(str(query), "", STEP)
    with pytest.raises(SiteRefusedError, match="at most 3 steps"):
        mine.charge("more", "", STEP)


@pytest.mark.usefixtures("linear")
def test_two_processes_see_each_others_lines(tmp_path):
    one, other = (account(tmp_path, of_site=0.5) for _ in range(2))
    for query in range(5):
        one.charge(f"one {query}", "", STEP)
        other.charge(f"other {query}", "", STEP)
    for each in (one, other):
        with pytest.raises(BudgetSpentError):
            each.charge("more", "", STEP)


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize("torn", [b"", b'{"run": "run", "que', b'{"run": "run", "query": "c"}'])
def test_a_line_is_whole_or_absent_after_a_kill(tmp_path, torn):
    mine = account(tmp_path, of_run=0.5)
    mine.charge("a", "", STEP)
    mine.charge("b", "", STEP)
    path = tmp_path / "site.jsonl"
    with path.open("ab") as file:
        file.write(torn)
    again = account(tmp_path, of_run=0.5)
    again.charge("b", "", STEP)
    again.charge("c", "", STEP)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["query"] for line in lines] == ["a", "b", "c"]
    assert Ledger(tmp_path, "site").steps() == {STEP: 3}


@pytest.fixture
def synced(monkeypatch):
    """Return a list of what is put on disk: a file, or folders."""
    handles: list[str] = []
    fsync = os.fsync

    def counted(handle):
        fsync(handle)
        what = "folders" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        handles.extend([what] if [what] != handles[-1:] else [])

    monkeypatch.setattr(os, "fsync", counted)
    return handles


@pytest.mark.usefixtures("linear")
def test_the_line_of_a_killed_process_is_put_on_disk_before_its_answer_is_given(tmp_path, synced):
    account(tmp_path, of_run=0.5).charge("a", "", STEP)
    other = Ledger(tmp_path, "site")
    line = (tmp_path / "site.jsonl").read_text().replace('"query": "a"', '"query": "b"')
    with (tmp_path / "site.jsonl").open("a") as file:
        file.write(line)
    synced.clear()
    with other.locked():
        assert other.answer("b") == ""
        assert synced == ["file"]
    with other.locked():
        assert synced == ["file"]
    synced.clear()
    account(tmp_path, of_run=0.5).charge("b", "", STEP)
    assert synced == ["file", "folders"]


@pytest.mark.usefixtures("linear")
def test_what_could_not_be_put_on_disk_is_written_again(tmp_path, monkeypatch):
    """After an error the system takes the file for written: another fsync alone does nothing."""
    mine, path, fsync = account(tmp_path, of_run=0.5), tmp_path / "site.jsonl", os.fsync
    mine.charge("a", "", STEP)

    def fails(*_):
        os.utime(path, (0, 0))
        raise OSError(5, "Input/output error")

    def written(handle):
        is_file = stat.S_ISREG(os.fstat(handle).st_mode)
        assert not is_file or os.fstat(handle).st_mtime > 0
        fsync(handle)

    line = path.read_text()
    with path.open("a") as file:  # another process, which is killed
        file.write(line.replace('"query": "a"', '"query": "b"'))
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output"):
        mine.charge("b", "", STEP)
    monkeypatch.setattr(os, "fsync", written)
    mine.charge("b", "", STEP)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        patch.setattr(os, "truncate", fails)
        with pytest.raises(OSError, match="Input/output"):
            mine.charge("c", "", STEP)
    mine.charge("c", "", STEP)
    assert Ledger(tmp_path, "site").steps() == {STEP: 3}
    assert path.read_text().startswith(line)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.usefixtures("linear")
def test_the_names_of_new_folders_are_put_on_disk(tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    folder = tmp_path / "state" / "privacy"
    mine = account(folder, of_run=0.5)
    monkeypatch.setattr(os, "fsync", noted)
    mine.charge("a", "", STEP)
    assert {each.stat().st_ino for each in (folder, folder.parent, tmp_path)} <= synced


@pytest.mark.usefixtures("linear")
def test_a_line_that_cannot_be_put_on_disk_is_taken_back(tmp_path, synced, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    mine = account(tmp_path, of_run=0.5)
    for query in ("a", "b"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space left"):
                mine.charge(query, "", STEP)
        synced.clear()
        mine.charge(query, "", STEP)
        assert synced == (["file", "folders"] if query == "a" else ["file"])
    assert Ledger(tmp_path, "site").steps() == {STEP: 2}
    assert len((tmp_path / "site.jsonl").read_text().splitlines()) == 2


def test_a_ledger_damaged_elsewhere_is_refused(tmp_path):
    (tmp_path / "site.jsonl").write_text('{"run": "run"}\n{"run": "run", "query": "a"}\n')
    with pytest.raises(ValueError, match=r"privacy ledger of .* is damaged, .* restore it") as told:
        Ledger(tmp_path, "site")
    assert not [word for word in (str(tmp_path), '"run"') if word in str(told.value)]
    assert told.value.__notes__ == [f"""{tmp_path / "site.jsonl"}: b'{{"run": "run"}}'"""]


@pytest.mark.usefixtures("linear")
def test_a_ledger_that_is_deleted_meanwhile_is_refused(tmp_path):
    mine = account(tmp_path, of_run=0.5)
    mine.charge("a", "", STEP)
    (tmp_path / "site.jsonl").unlink()
    with pytest.raises(ValueError, match="has lost lines"):
        mine.charge("b", "", STEP)


def test_the_secret_is_the_sites_own_and_stays(tmp_path):
    first = Ledger(tmp_path, "site").secret
    assert len(first) == 32
    assert Ledger(tmp_path, "site").secret == first != Ledger(tmp_path, "other").secret
    assert (tmp_path / "site.secret").stat().st_mode & 0o077 == 0


def test_at_the_least_delta_an_epsilon_of_the_most_steps_is_above_the_exact_one():
    mu = 0.3  # of Gaussian mechanisms together, which are one (Dong et al. 2022)

    def excess(epsilon):
        tail = norm.logcdf(-mu / 2 - epsilon / mu)
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + tail) - LEAST_DELTA

    exact = brentq(excess, 0, 100)
    found = epsilon({Step(MOST_STEPS**0.5 / mu, 1.0): MOST_STEPS}, LEAST_DELTA)
    assert exact <= found < 1.01 * exact


def test_what_the_accountant_cannot_do_is_refused_in_a_sentence():
    with pytest.raises(SiteRefusedError, match=r"no epsilon .* delta=1e-13: .* larger delta, in"):
        epsilon({Step(1.0, 0.01): 10_000}, 1e-13)


def test_the_setting_of_a_run_has_the_least_delta_too():
    with pytest.raises(ConfigError, match=r"privacy\.delta=1e-10"):
        load("quickstart", "privacy.delta=1e-10")
    assert load("quickstart", f"privacy.delta={LEAST_DELTA}").privacy.delta == LEAST_DELTA


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0, 1e-5), (-1, 1e-5), (1, 0), (1, 9e-10), (1, 1), (1, math.nan)]
)
def test_what_is_no_budget_is_refused(epsilon, delta):
    with pytest.raises(ValueError, match="epsilon must be above 0"):
        Budget(epsilon, delta)


def test_a_site_can_print_what_it_has_spent(tmp_path, capsys):
    mine = account(tmp_path, of_run=9.0)
    mine.charge("a", "", STEP)
    command.main(str(tmp_path / "site.jsonl"), "1e-5")
    used = f"epsilon={epsilon({STEP: 1}, 1e-5):.4g} delta=1e-5 after 1 steps"
    assert capsys.readouterr().out.splitlines() == [f"run: {used}", f"all runs: {used}"]
    copy = tmp_path / "audit.txt"
    copy.write_bytes((tmp_path / "site.jsonl").read_bytes())
    before = {*tmp_path.iterdir()}
    command.main(str(copy), "1e-5")
    assert f"all runs: {used}" in capsys.readouterr().out
    assert {*tmp_path.iterdir()} == before
    with pytest.raises(SystemExit, match="delta at least 1e-09 and below 1"):
        command.main(str(copy), "0")
    (tmp_path / "damaged.jsonl").write_text("x\n")
    with pytest.raises(SystemExit, match=r"is damaged.*damaged\.jsonl: b'x'"):
        command.main(str(tmp_path / "damaged.jsonl"), "1e-5")
    with pytest.raises(SystemExit, match="there is no such ledger"):
        command.main(str(tmp_path / "none.jsonl"), "1e-5")
