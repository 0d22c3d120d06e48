"""The wheel: what it holds, and that it needs no clone."""

import os
import sys
import sysconfig
import tarfile
import venv
from io import BytesIO
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from processes import output_of
from scripts import ROOT, without_environment
from tiny import TINY, summary

import flower_desloc

APP = "flower_desloc/flower_app"
"""The Flower app in a wheel."""
METADATA = f"flower_desloc-{flower_desloc.__version__}.dist-info"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(target, root, folder):
    """Return the wheel or sdist of ``root``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", folder]
    output_of(command, cwd=root)
    (built,) = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    ZipFile(wheel).extractall(folder)
    return folder


def files(folder, *patterns):
    """Return the files of ``folder`` that match, with their contents."""
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_a_wheel_is_the_library_with_the_app_inside(unpacked):
    app = files(
        ROOT,
        *("pyproject.toml", "README.md", "LICENSE", "configs/*.yaml", "studies/*.yaml"),
        *("client_app/**/*.py", "server_app/**/*.py", "examples/toy/**/*.py"),
    )
    library = files(ROOT, *(f"flower_desloc/**/*.{end}" for end in ("py", "yaml", "json", "typed")))
    assert "flower_desloc/py.typed" in library  # type checkers read the annotations
    meant = library | {f"{APP}/{name}": text for name, text in app.items()}
    held = files(unpacked, "**/*")
    assert {name for name in held if name not in meant} == {
        f"{METADATA}/{name}"
        for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    assert {name: held[name] for name in meant} == meant


def test_the_sdist_gives_the_same_wheel(wheel, tmp_path):
    for name in ("sdist", "source", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        safe: dict[str, Any] = (
            {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        )  # since 3.11.4
        archive.extractall(tmp_path / "source", **safe)
    (source,) = (tmp_path / "source").iterdir()
    from_source = build("wheel", source, tmp_path / "wheel")
    assert contents(from_source) == contents(wheel)


def contents(archive):
    return {item.filename: item.CRC for item in ZipFile(archive).infolist()}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of flwr
def test_what_flower_sends_from_a_wheel_lacks_only_the_library(unpacked, tmp_path):
    clone, installed = (
        set(ZipFile(BytesIO(build_fab_from_disk(folder))).namelist())
        for folder in (without_environment(tmp_path), unpacked / APP)
    )
    library = {name for name in clone if name.startswith("flower_desloc/")}
    assert "flower_desloc/core/schedule.py" in library
    assert {"client_app/client.py", "server_app/__init__.py", "LICENSE"} <= installed
    assert clone - library == installed


@pytest.mark.soak
def test_a_run_that_extends_a_preset_completes_without_a_clone(wheel, tmp_path):
    cwd, programs = tmp_path / "cwd", tmp_path / "venv" / "bin"
    cwd.mkdir()
    venv.create(tmp_path / "venv", symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "-q"]
    output_of([*pip, "install", "--no-deps", "--no-index", wheel])
    # Other packages come from here. Of a path in a .pth file the .pth files are not read: a clone
    # installed by `pip install -e` is not seen.
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"))

    (cwd / "mine.yaml").write_text("extends: lean\nrun:\n  steps: 2\n  name: mine\n")
    small = ["run.eval_every=0", "simulation.num_clients=2", *TINY]
    command = [programs / "desloc", "run", "mine.yaml", *small, "--engine", "inprocess"]
    environment = {"HOME": str(tmp_path), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
    output_of(command, cwd=cwd, env=environment)
    run = cwd / "runs" / "mine"
    assert summary(run)["status"] == "completed"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["run"]["steps"], config["compression"]["params"]) == (2, "int8")
