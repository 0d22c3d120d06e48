"""A site, a resumed run and a study notice that the code of a task of one's own has changed."""

import shutil
from importlib import invalidate_caches
from pathlib import Path

import pytest
from scripts import ROOT

from flower_desloc.flower.fingerprint import code_of, differing, digest_of

FILES = {
    "task_of_mine.py": "import os\nimport near\n\ndef late():\n    from parts.data import rows\n",
    "near.py": "from numpy import array\n",
    "not_imported.py": "",
    "parts/__init__.py": "",
    "parts/data.py": "from . import words\nfrom .deep.end import x\nfrom .. import nothing\n",
    "parts/words.py": "import parts.deep\n",
    "parts/deep/__init__.py": "from ..more import y\n",
    "parts/deep/end.py": "x = 1\n",
    "parts/more.py": "y = 1\n",
    "parts/unused.py": "",
    "client_app/__init__.py": "",  # of the app, which Flower sends
}
IMPORTED = sorted(FILES.keys() - {"not_imported.py", "parts/unused.py", "client_app/__init__.py"})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written(tmp_path, FILES, monkeypatch)


def written(folder: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    invalidate_caches()
    return folder


def test_code_is_a_module_with_what_it_imports_from_its_folder(folder):
    assert [*code_of(["task_of_mine"])] == IMPORTED
    assert [*code_of(["parts.deep.end"])] == sorted(
        name for name in IMPORTED if name.startswith("parts/deep/") or name.endswith("more.py")
        or name == "parts/__init__.py"
    )  # fmt: skip


@pytest.mark.parametrize("name", IMPORTED)
def test_a_changed_or_missing_file_is_named(name, folder):
    code = code_of(["task_of_mine"])
    assert differing(code) == {}
    (folder / name).write_text("z = 2\n")
    assert differing(code) == {name: folder / name}
    (folder / name).unlink()
    # A module that cannot be found at all is left to its import, which says so.
    alone = name in ("task_of_mine.py", "near.py")
    invalidate_caches()
    assert differing(code) == ({} if alone else {name: folder / name})


def test_ends_of_lines_do_not_count(folder):
    code = code_of(["task_of_mine"])
    file = folder / "task_of_mine.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert differing(code) == {}


def test_an_installed_task_is_compared_as_a_package(tmp_path, monkeypatch):
    files = {
        "mytask/__init__.py": "import elsewhere\nfrom mytask import model\n",
        "mytask/model.py": "",
        "elsewhere.py": "",
    }
    written(tmp_path / "site-packages", files, monkeypatch)
    assert [*code_of(["mytask"])] == ["mytask/__init__.py", "mytask/model.py"]


def test_the_servers_files_are_compared_wherever_a_site_has_them(tmp_path, monkeypatch):
    """Here in a folder with a helper, there installed: the same files, so the same code."""
    files = {"task_of_mine.py": "import near\n", "near.py": ""}
    with monkeypatch.context() as patch:
        written(tmp_path / "server", files, patch)
        code = code_of(["task_of_mine"])
    written(tmp_path / "site-packages", files, monkeypatch)
    assert differing(code) == {}
    (tmp_path / "site-packages" / "near.py").write_text("x = 1")
    assert [*differing(code)] == ["near.py"]


def test_code_that_python_cannot_read_is_left_to_its_import(tmp_path, monkeypatch):
    written(tmp_path, {"broken_task.py": "def\n"}, monkeypatch)
    assert [*code_of(["broken_task", "no_such_task"])] == ["broken_task.py"]


@pytest.mark.parametrize(
    "name", ["numpy/../../secret.py", "/etc/passwd", "numpy/data.npy", "numpy/../x/y.py", "numpy"]
)
def test_a_server_learns_nothing_of_files_that_are_no_modules(name):
    with pytest.raises(ValueError, match="which is no module"):
        differing({name: "0" * 16})


def test_the_digest_of_the_package_is_of_every_file_and_the_same_in_a_wheel(tmp_path):
    before = digest_of(package := shutil.copytree(ROOT / "flower_desloc", tmp_path / "package"))
    app = package / "flower_app" / "client_app" / "client.py"  # only a wheel has it
    app.parent.mkdir(parents=True)
    app.write_text("app = None\n")
    assert digest_of(package) == before
    one_of_each_folder = {file.parent: file for file in package.rglob("*.py") if file != app}
    for file in one_of_each_folder.values():
        source = file.read_bytes()
        file.write_bytes(source + b"\n# changed\n")
        assert digest_of(package) != before, file
        file.write_bytes(source)
