"""The system's folders and proxies: what is not writable is replaced, or named with the remedy."""

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.app import Context, RecordDict

from flower_desloc.app.tasks.caches import cache_error
from flower_desloc.flower import system
from flower_desloc.flower.client_state import STATE_DIR, state_folder

TOO_LONG = "x" * 90


@pytest.fixture
def long_temp(monkeypatch, tmp_path):
    """Return a folder for temporary files whose path is too long for sockets."""
    folder = tmp_path / TOO_LONG
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def homeless(monkeypatch):
    """Let this user have no home folder, as an unknown one of a container."""

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    for name in ("FLWR_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", STATE_DIR):
        monkeypatch.setenv(name, "")  # restored at the end, even if the test sets it
        monkeypatch.delenv(name)


def client(**node_config):
    return Context(1, 1, node_config, RecordDict(), {})


# --- Caches -------------------------------------------------------------------------------------


def test_caches_in_a_home_that_is_not_writable_move_to_the_temporary_folder(tmp_path):
    """In a process of its own: the libraries read the variables when they are imported."""
    (tmp_path / "home").write_text("a file")
    (tmp_path / "temp").mkdir()
    code = (
        "import flower_desloc.app.tasks, datasets, huggingface_hub.constants as hub; "
        "from flower_desloc.flower.system import cache_folder; "
        "print(datasets.config.HF_DATASETS_CACHE, hub.HF_HUB_CACHE, cache_folder(), sep='\\n')"
    )
    unset = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temp")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    caches = tmp_path / "temp" / f"desloc-{os.getuid()}" / "cache"
    assert done.stdout.splitlines() == [
        str(caches / "huggingface" / "datasets"),
        str(caches / "huggingface" / "hub"),
        str(caches / "flower-desloc"),
    ]
    assert f"caches are in {caches}: {tmp_path / 'home'} is not a folder; set HOME" in done.stderr


def test_without_a_home_caches_move_and_models_that_are_cached_are_still_found(
    homeless, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    system.use_writable_caches()
    assert system.cache_folder() == tmp_path / f"desloc-{os.getuid()}" / "cache" / "flower-desloc"
    assert "HF_HUB_CACHE" not in os.environ
    models = tmp_path / "read-only" / "huggingface" / "hub"
    models.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "read-only"))
    monkeypatch.setattr(system, "cannot_write", lambda folder: f"{folder} is not writable")
    system.use_writable_caches()
    assert os.environ["HF_HUB_CACHE"] == str(models)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "{cache}/json"), "HF_DATASETS_CACHE"),
        (OSError(errno.EROFS, "Read-only file system", "{parent}"), "HF_DATASETS_CACHE"),
        (OSError(errno.ENOSPC, "No space left on device"), "free disk space"),
        (PermissionError(errno.EACCES, "Permission denied", "/data/mine.jsonl"), "mine.jsonl"),
        (ValueError("not JSON"), "mine.jsonl"),
    ],
)
def test_the_file_is_not_blamed_for_a_cache_that_is_not_writable(error, said):
    import datasets

    cache = Path(datasets.config.HF_DATASETS_CACHE)
    if getattr(error, "filename", None):
        error.filename = error.filename.format(cache=cache, parent=cache.parent)
    wrapped = RuntimeError("DatasetGenerationError")
    wrapped.__cause__ = error
    found = str(cache_error(wrapped, ValueError("cannot read mine.jsonl")))
    assert said in found
    assert ("mine.jsonl" in found) == ("mine.jsonl" in said)


def test_the_folders_and_proxies_in_use_are_said(monkeypatch, homeless):
    assert system.described().startswith("this user has no home folder: set")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    for name in [each for each in os.environ if each.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "intra.net")
    temporary = tempfile.gettempdir()
    said = f"caches: /caches; temporary files: {temporary}; proxies: none, never for 127.0.0.1"
    assert system.described() == said
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy")
    assert "proxies: https_proxy, never" in system.described()


# --- State --------------------------------------------------------------------------------------


def test_the_folder_of_the_state_needs_no_home_if_it_is_named(homeless, monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no home folder: set the .* HOME"):
        state_folder(client())
    assert state_folder(client(**{"state-dir": str(tmp_path)})) == tmp_path
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert state_folder(client()) == tmp_path / "desloc"
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    assert state_folder(client()) == tmp_path / "state"


# --- Temporary folders --------------------------------------------------------------------------


def test_a_long_temporary_folder_has_a_short_link_and_both_are_removed(long_temp):
    folder = system.new_temporary_folder(20)
    assert len(str(folder)) < 40
    assert folder.is_symlink()
    (folder / "file").write_text("data")
    assert list(long_temp.glob("*/file"))
    system.remove(folder)
    assert not folder.is_symlink()
    assert not any(long_temp.iterdir())


def test_a_short_temporary_folder_is_used_itself():
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        folder = system.new_temporary_folder(len(parent))
        assert not folder.is_symlink()
        system.remove(folder)
        assert not folder.exists()


def test_without_a_short_folder_the_error_names_the_remedy(long_temp, monkeypatch, tmp_path):
    monkeypatch.setattr(system, "_SHORT_FOLDERS", (str(tmp_path / "missing"),))
    with pytest.raises(FileNotFoundError, match=r"at most 20 characters.* set TMPDIR to a shorter"):
        system.new_temporary_folder(20)
    assert not any(long_temp.iterdir())


def test_without_any_temporary_folder_the_error_names_the_remedy(monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(FileNotFoundError, match="full or not writable; set TMPDIR to"):
        system.new_temporary_folder(20)


def test_without_any_temporary_folder_the_command_says_so_before_its_imports():
    code = (
        "import tempfile\ndef none(): raise FileNotFoundError(2, 'none')\n"
        "tempfile._get_default_tempdir = none\nimport flower_desloc.app.cli"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no folder for temporary files: TMPDIR, /tmp,")
    assert done.stderr.endswith("set TMPDIR to a folder with free space\n")


def test_sockets_fit_below_a_long_temporary_folder(long_temp):
    folder = system.socket_folder()
    assert len(str(folder / "0123456789abcdef.sock")) <= 103
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# --- Proxies ------------------------------------------------------------------------------------


def test_loopback_is_never_proxied_and_a_socks_proxy_ends_no_local_run(monkeypatch, caplog):
    given = {
        "ALL_PROXY": "socks5://user:secret@proxy:1080",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "intra.net",
    }
    monkeypatch.setattr(system, "find_spec", lambda name: None)
    assert system.direct_on_loopback(given) == {
        "https_proxy": "http://proxy:3128",
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "intra.net,127.0.0.1,localhost"),
    }
    assert "ALL_PROXY is not used: a SOCKS proxy needs `pip install httpx[socks]`" in caplog.text
    assert "secret" not in caplog.text
    monkeypatch.setattr(system, "find_spec", lambda name: object())
    assert "ALL_PROXY" in system.direct_on_loopback(given)


def test_a_disk_of_temporary_files_that_is_nearly_full_is_named(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=300_000))
    with pytest.raises(OSError, match=r"0 MB free.*set TMPDIR"):
        system.new_temporary_folder(20)
