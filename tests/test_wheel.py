"""The wheel: what it holds, and that it needs no clone."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from processes import output_of
from tiny import TINY, summary

import flower_desloc
from flower_desloc.tools.engines.superlink import app_alone

ROOT = Path(__file__).parents[1]
APP = "flower_desloc/app"
"""The Flower app in a wheel."""
METADATA = f"flower_desloc-{flower_desloc.__version__}.dist-info"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(target, root, folder):
    """Return the wheel or sdist of ``root``."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
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


def test_a_wheel_takes_one_top_level_name(unpacked):
    assert {path.name for path in unpacked.iterdir()} == {"flower_desloc", METADATA}


def test_the_sdist_gives_the_same_wheel(wheel, tmp_path):
    for name in ("sdist", "source", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    from_source = build("wheel", source, tmp_path / "wheel")
    assert contents(from_source) == contents(wheel)


def contents(archive):
    return {item.filename: item.CRC for item in ZipFile(archive).infolist()}


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of flwr
def test_what_flower_sends_from_a_wheel_lacks_only_the_library(unpacked):
    clone, installed = (names_in(build_fab_from_disk(at)) for at in (ROOT, unpacked / APP))
    library = {name for name in clone if name.startswith("flower_desloc/")}
    assert "flower_desloc/core/schedule.py" in library
    assert {"client_app/client.py", "server_app/__init__.py", "LICENSE"} <= installed
    assert clone - library == installed


def names_in(fab):
    return set(ZipFile(BytesIO(fab)).namelist())


A_PROJECT = """\
[project]
name = "toy"
version = "1"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.42"]
[tool.flwr.app]
publisher = "us"
fab-format-version = 1
flwr-version-target = "1.41.0"
fab-include = ["/LICENSE", "*.py", "/a/b.json", "a/**/*.md"]
[tool.flwr.app.components]
serverapp = "app:app"
clientapp = "app:app"
"""


@pytest.fixture
def small_app(tmp_path):
    (tmp_path / "small" / "a" / "c").mkdir(parents=True)
    files = (
        "LICENSE",
        "app.py",
        "secret.py",
        "a/b.json",
        "a/c.json",
        "a/c/d.md",
        "a/c/e.py",
        "f.json",
    )
    for name in files:
        (tmp_path / "small" / name).write_text(name)
    (tmp_path / "small" / "pyproject.toml").write_text(A_PROJECT)
    (tmp_path / "small" / ".gitignore").write_text("secret.py\n")
    return tmp_path / "small"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of flwr
def test_an_app_that_is_submitted_alone_is_the_app_that_flower_builds(small_app, tmp_path):
    for app in (ROOT, small_app):
        alone = app_alone(app, tmp_path / "home" / app.name)
        built = build_fab_from_disk(app)
        assert build_fab_from_disk(alone) == built
        left = {file.relative_to(alone).as_posix() for file in alone.rglob("*") if file.is_file()}
        assert left - names_in(built) <= {".gitignore", "secret.py"}


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a function that calls a program of an environment that has only the wheel of ours."""
    folder = tmp_path_factory.mktemp("environment")
    for name in ("home", "cwd"):
        (folder / name).mkdir()
    venv.create(folder / "venv", symlinks=True)
    programs = folder / "venv" / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "-q"]
    output_of([*pip, "install", "--no-deps", "--no-index", wheel])
    # Other packages come from here. Of a path in a .pth file the .pth files are not read: a clone
    # installed by `pip install -e` is not seen.
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib"))

    def call(program, *arguments):
        environment = {"HOME": str(folder / "home"), "PATH": os.defpath, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [programs / program, *arguments],
            cwd=folder / "cwd",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    call.cwd = folder / "cwd"
    return call


def test_the_presets_are_listed(installed):
    listed = installed("desloc", "run")
    assert listed.returncode == 2, listed.stderr
    for preset in (ROOT / "configs").glob("*.yaml"):
        assert f"\n  {preset.stem} " in listed.stderr


def test_a_run_that_extends_a_preset_completes_without_a_clone(installed):
    (installed.cwd / "mine.yaml").write_text("extends: lean\nrun:\n  steps: 2\n  name: mine\n")
    small = ["run.eval_every=0", "federation.num_clients=2", *TINY]
    done = installed("desloc", "run", "mine.yaml", *small, "--engine", "inprocess")
    assert done.returncode == 0, done.stdout + done.stderr
    run = installed.cwd / "runs" / "mine"
    assert summary(run)["status"] == "completed"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["run"]["steps"], config["wire"]["params"]) == (2, "int8")
