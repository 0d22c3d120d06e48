"""A whole run that is killed and resumed, through the app and the command."""

import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from command import refused
from processes import output_of, wait_until
from test_simulation import BIN, SMALL
from tiny import failing_at, summary, train

from flower_desloc.app.config import ConfigError, load
from flower_desloc.app.runs import RunFolder
from flower_desloc.app.runs.folder import read_lines
from flower_desloc.app.runs.record import load as read_run
from flower_desloc.app.runs.report.tables import events
from flower_desloc.app.runs.resume import begun_in, resumable
from flower_desloc.app.tasks.causal_lm.batches import TextShard


def run(output_dir: Path, *overrides: str) -> Path:
    return train(output_dir, *SMALL, *overrides, clients=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def failed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the same run, whose server could not write its fifth window's record."""
    output_dir = tmp_path_factory.mktemp("failed")
    with failing_at(5):
        run(output_dir)
    assert summary(output_dir / "quickstart")["status"] == "failed"
    return output_dir


@pytest.fixture
def cut_off(failed: Path, tmp_path: Path) -> Path:
    """A copy of the failed run, with the files of its clients."""
    return Path(shutil.copytree(failed, tmp_path / "runs")) / "quickstart"


def same(here: Path, there: Path) -> None:
    a, b = summary(here), summary(there)
    for key in ("weights_sha256", "steps", "windows", "syncs", "train_loss", "evaluation"):
        assert a[key] == b[key], key
    for way in ("up", "down"):
        assert a["bytes"]["measured"][way] == b["bytes"]["measured"][way]
    rounds = [line["round"] for line in read_lines(here / "metrics.jsonl")]
    assert rounds == [line["round"] for line in read_lines(there / "metrics.jsonl")]


@pytest.mark.parametrize("how", ["auto", "folder", "file"])
def test_a_failed_run_is_resumed_in_its_folder(how, cut_off, whole):
    what = {"auto": "auto", "folder": cut_off, "file": sorted(cut_off.glob("checkpoints/*"))[-1]}
    folder = run(cut_off.parent, f"run.resume={what[how]}")
    assert folder == cut_off
    same(cut_off, whole)
    (resumed,) = summary(cut_off)["resumed"]
    assert resumed["step"] == 8
    assert "No space left on device" in resumed["ended"]
    rows = events(read_run(cut_off)).rows
    assert [row for row in rows if row[2] == "resumed"] == [
        ["8", "server", "resumed", "1", resumed["ended"]]
    ]
    assert not (cut_off.parent / ".clients").exists()
    with pytest.raises(ConfigError, match=r"is complete; run\.init_from"):
        run(cut_off.parent, f"run.resume={cut_off}")


def test_a_run_that_resumes_on_other_data_names_the_clients(cut_off, monkeypatch):
    """Such as the built-in text after another package was installed."""
    digest = TextShard.data_digest
    monkeypatch.setattr(
        TextShard, "data_digest", lambda data: "new" if data._site.partition == 1 else digest(data)
    )
    folder = run(cut_off.parent, "run.resume=auto")
    [row] = [row for row in events(read_run(folder)).rows if row[2] == "data changed"]
    assert row[1] == "client-1"
    assert re.fullmatch(r"it was (\d+ examples), digest \w+; it is \1, digest new", row[4])


def test_resuming_is_refused_for_other_settings_a_running_run_or_no_checkpoint(cut_off, tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.0042 \(now 0\.5\)"):
        run(cut_off.parent, "run.resume=auto", "optimizer.lr=0.5")
    with pytest.raises(ConfigError, match="no such file or folder"):
        run(cut_off.parent, f"run.resume={tmp_path / 'nowhere'}")
    before, last = sorted(cut_off.glob("checkpoints/*"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=rf"{last} is not a complete .* run\.resume={before}$"):
        run(cut_off.parent, "run.resume=auto")
    last.write_bytes(whole)
    with RunFolder(cut_off).claimed(), pytest.raises(ConfigError, match="still going on"):
        run(cut_off.parent, "run.resume=auto")
    with pytest.raises(ConfigError, match="Flower's own"):
        run(cut_off.parent, "run.resume=auto", "strategy=fedavg")
    # What only says how the run is carried out may change.
    unlike = ("federation.timeout=77", "run.name=quickstart")
    assert run(cut_off.parent, "run.resume=auto", *unlike) == cut_off


@pytest.mark.parametrize("command", ["run", "federate"])
def test_the_command_refuses_to_resume_with_other_settings_before_it_starts_a_run(cut_off, command):
    words = [word for word in SMALL if "num_clients" not in word]
    other = [*words, "optimizer.lr=0.5", "run.resume=auto", "--output-dir", cut_off.parent]
    said = refused(command, "quickstart", *other)
    assert "optimizer.lr=0.0042 (now 0.5)" in said
    assert "resume from" not in said


def test_auto_starts_a_new_run_if_there_is_none_to_resume(whole):
    again = run(whole.parent, "run.resume=auto")
    assert again.name == "quickstart-2"
    assert summary(again)["resumed"] == []


def test_a_run_with_a_numbered_name_is_not_mistaken_for_another_runs_second_start(cut_off):
    other = shutil.copytree(cut_off, cut_off.with_name("quickstart-2"))
    assert resumable(cut_off.parent, "quickstart") == other
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("name: quickstart", "name: quickstart-2"))
    assert resumable(cut_off.parent, "quickstart") == cut_off
    assert resumable(cut_off.parent, "quickstart-2") == other


def test_a_run_is_resumed_where_its_clients_files_are_whatever_the_output_dir(cut_off):
    config = load("quickstart", f"run.resume={cut_off}")
    assert begun_in(config, Path("/elsewhere")) == cut_off.parent
    for other in ("auto", "/nowhere"):
        config = load("quickstart", f"run.resume={other}")
        assert begun_in(config, Path("/elsewhere")) == Path("/elsewhere")


def test_a_run_starts_with_the_model_of_another(whole, tmp_path):
    begun = run(tmp_path, f"run.init_from={whole}")
    first, before = summary(begun)["evaluation"], summary(whole)["evaluation"]
    assert first["central"]["loss"]["first"] == before["central"]["loss"]["final"]
    with pytest.raises(ConfigError, match="differs from this one"):
        run(tmp_path, f"run.init_from={whole}", "model.hidden_size=64")


@pytest.mark.soak
@pytest.mark.timeout(900)  # two runs in Flower's simulation, on a busy machine
def test_a_killed_run_is_resumed_by_one_command(whole, tmp_path):
    """In Flower's simulation, with the same bits as an uninterrupted run in one process."""
    command = [str(BIN / "desloc"), "run", "quickstart", *SMALL, "--workers", "1"]
    place = {"cwd": tmp_path, "env": os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}}
    metrics = tmp_path / "runs" / "quickstart" / "metrics.jsonl"
    log = tmp_path / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, **place
        ) as process,
    ):
        try:
            wait_until(
                lambda: len(list(read_lines(metrics))) >= 4 or process.poll() is not None,
                log.read_text,
                limit=400,
            )
            assert process.poll() is None, log.read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert not (metrics.parent / "summary.json").exists()
    said = output_of([*command, "run.resume=auto"], timeout=400, **place)
    assert "flwr run" in said
    assert "resumed after step" in said
    same(metrics.parent, whole)
