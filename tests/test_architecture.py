"""Laws of the source tree: layers, import cycles, public names, what the core may use."""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FrameType

import pytest
import torch
from flower_path import Run
from flwr.app import Array, ArrayRecord, Message
from flwr.serverapp.strategy import Strategy
from import_graph import cycle, import_graph, imported_names, modules
from processes import output_of

import flower_desloc
from flower_desloc.flower import internals
from flower_desloc.trackers import TRACKERS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flower_desloc"
FILES = modules(ROOT, ["flower_desloc", "client_app", "server_app"])
LAYERS = (
    ("flower_desloc.core",),
    ("flower_desloc.optim",),
    ("flower_desloc.privacy",),
    ("flower_desloc.secure",),
    ("flower_desloc.flower", "flower_desloc"),  # the package itself exports names of these three
    ("flower_desloc.adapters",),
    ("flower_desloc.trackers",),
    ("flower_desloc.app.config", "flower_desloc.app"),
    ("flower_desloc.app.tasks",),
    ("flower_desloc.app.setup",),
    ("flower_desloc.app.plan",),
    ("flower_desloc.app.runs",),
    ("flower_desloc.app.sites",),
    ("client_app", "server_app"),
    ("flower_desloc.app.engines",),
    ("flower_desloc.app.study",),
    ("flower_desloc.app.cli",),
)
"""Innermost first: a package imports its own layer and those before."""
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}

CORE = sorted([*(PACKAGE / "core").glob("*.py"), *(PACKAGE / "optim").glob("*.py")])
# Pure Python that neither reads nor writes: no logging, os, pathlib, json, time, ...
PURE = {
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "math",
    "operator",
    "random",
    "statistics",
    "types",
    "typing",
}


def rank(module: str) -> int | None:
    """Return the number of the layer that a module belongs to."""
    parts = module.split(".")
    length = 1 if parts[0] != PACKAGE.name else 3 if parts[1:2] == ["app"] else 2
    return RANK.get(".".join(parts[:length]))


def outward_imports(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield every import that points to an outer layer, or from or to none."""
    for module, targets in graph.items():
        for target in sorted(targets - {"flower_desloc"}):
            source, goal = rank(module), rank(target)
            if source is None or goal is None or goal > source:
                yield f"{module} -> {target}"


def test_imports_point_inward_lazy_ones_included():
    assert list(outward_imports(import_graph(FILES))) == []


def test_no_two_files_import_each_other():
    assert cycle(import_graph(FILES)) == set()


def test_the_layers_are_those_of_the_architecture_page():
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    stated = [name.strip("` ") for row in rows for name in row.split(",")]
    packages = [name.replace("/", ".") for name in stated if "/" not in name or "." not in name]
    inner = [name for name in RANK if name not in ("flower_desloc", "flower_desloc.app")]
    assert packages[: len(inner)] == inner


def holds_tensors(value: object, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "meta"
    if isinstance(value, Message):
        return False  # handed on; a file that reads it has a record of it
    if isinstance(value, dict | list | tuple):
        values = value.values() if isinstance(value, dict) else value
        return depth > 0 and any(holds_tensors(each, depth - 1) for each in list(values)[:3])
    return isinstance(value, Array | ArrayRecord)


def test_a_tensor_passes_the_files_of_the_architecture_page(tmp_path):
    """Every function that has a tensor of the run as a local variable or returns one."""
    path = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    path = path.partition("## The path of a tensor")[2].partition("On other paths")[0]
    stated = re.findall(r"^\d+\. `([\w/]+\.py)`", path, re.MULTILINE)
    to_the_average = re.findall(r"^\d+\. `", path.partition("And to the next")[0], re.MULTILINE)
    assert len(to_the_average) <= 7
    run, passed = Run("adam", (2,), tmp_path, num_clients=2, num_steps=4), set()

    def profile(frame: FrameType, event: str, result: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "return" or PACKAGE not in file.parents:
            return
        if any(map(holds_tensors, [result, *frame.f_locals.values()])):
            passed.add(file.relative_to(PACKAGE).as_posix())

    sys.setprofile(profile)
    try:
        run.strategy.start(run.grid, run.initial)
    finally:
        sys.setprofile(None)
    # Counts bytes; stands in for Flower.
    assert passed - {"flower/meter.py", "flower/inprocess.py"} == set(stated)


def test_the_package_root_has_at_most_twelve_entries():
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    # py.typed, an empty marker, has its place prescribed (PEP 561).
    entries = {path.relative_to(PACKAGE).parts[0] for path in files} - {"py.typed"}
    assert len(entries) <= 12, sorted(entries)


@pytest.mark.parametrize(
    "lazy",
    [
        "from flower_desloc.app.runs.outer import name",
        "import flower_desloc.app.runs.outer",
        "importlib.import_module('flower_desloc.app.runs.outer')",
        "resolve_name('flower_desloc.app.runs.outer:Outer')",
    ],
)
def test_a_lazy_import_that_points_outward_or_closes_a_cycle_is_found(tmp_path, lazy):
    files = {
        name: tmp_path / name for name in ("flower_desloc.core.a", "flower_desloc.app.runs.outer")
    }
    inner, outer = files
    files[inner].write_text(f"def later():\n    {lazy}\n")
    files[outer].write_text("from flower_desloc.core.a import name\n")
    graph = import_graph(files)
    assert [*outward_imports(graph)] == [f"{inner} -> {outer}"]
    assert cycle(graph) == set(graph)


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_imports_pytorch_pure_python_and_itself(path):
    for name in imported_names(path):
        ours = name.startswith(("flower_desloc.core.", "flower_desloc.optim"))
        assert ours or name.partition(".")[0] in PURE | {"torch"}, (
            f"{path.name} imports {name}; PURE lists what the core may import"
        )


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.stem)
def test_the_core_neither_reads_nor_writes_nor_prints_nor_seeds_global_generators(path):
    text = path.read_text(encoding="utf-8")
    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert not names & {"open", "print", "input", "exec", "eval", "__import__"}
    assert not [
        call for call in ("torch.save", "torch.load", "torch.manual_seed", "warn(") if call in text
    ]


def imported_distributions(names: list[str]) -> set[str]:
    files = modules(ROOT, names)
    imported = {name.partition(".")[0] for path in files.values() for name in imported_names(path)}
    homes = packages_distributions()
    others = {"flower_desloc", "client_app", "server_app", "examples"}
    return {normalised(homes[name][0]) for name in imported & homes.keys() - others}


def test_every_library_that_the_wheel_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    library, flight, app, metrics, privacy = (
        {normalised(re.split(r"[\[<>=]", one)[0]) for one in listed}
        for listed in (
            project["project"]["dependencies"],
            *(extras[name] for name in ("flight", "app", "metrics", "privacy")),
        )
    )
    inner = [f"flower_desloc/{name}" for name in ("core", "optim", "flower")]
    assert imported_distributions(inner) == library | flight
    assert flight <= app
    assert imported_distributions(["flower_desloc/privacy"]) <= library | privacy
    assert imported_distributions(["flower_desloc/secure"]) <= library | app  # which Flower needs
    trackers = imported_distributions(["flower_desloc/trackers"])  # those that are installed
    assert trackers <= {normalised(re.split(r"[\[<>=]", extras[t][0])[0]) for t in TRACKERS}
    everything = ["flower_desloc", "client_app", "server_app", "examples/toy"]
    imported = imported_distributions(everything) - trackers - {"ipython"}  # of a notebook
    assert imported <= library | app | metrics | privacy
    # Flower's `uv sync` of the app installs nothing: docs/reference/dependencies.md.
    assert set(project["tool"]["uv"]["exclude-dependencies"]) == library


def normalised(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")


def test_only_one_file_imports_what_flower_does_not_call_public():
    apps = modules(ROOT, ["examples"]) | modules(ROOT / "hub", ["desloc_quickstart"])
    assert {"examples.toy.runs", "examples.stock_app.stock_app"} <= apps.keys()
    assert "desloc_quickstart.client_app" in apps
    private = {
        module
        for module, path in (FILES | apps).items()
        for name in imported_names(path)
        if name.startswith("flwr.") and not name.startswith(PUBLIC)
    }
    assert private == {"flower_desloc.flower.internals"}


def test_the_strategy_is_one_of_flowers():
    assert issubclass(flower_desloc.DesLoc, Strategy)


def test_what_flower_has_moved_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setitem(internals._MODULES, "Run", "flwr.supercore.walk")
    with pytest.raises(ImportError, match=r"Flower [\d.]+ has no flwr.supercore.walk.Run"):
        internals.Run  # noqa: B018


def test_what_an_import_brings_along():
    """The core PyTorch and nothing of the edge; the root no Flower; the recorder no drawing."""
    core = ", ".join(module for module, path in FILES.items() if path in CORE)
    root = "ADOPT, SGDM, Clipping, OuterOptimizer, SyncSchedule, check_optimizer, take"
    code = (
        f"import json, sys, {core}; inner = [*sys.modules]; from flower_desloc import {root}; "
        "outer = [*sys.modules]; import flower_desloc.app.runs; "
        "print(json.dumps([inner, outer, [*sys.modules]]))"
    )
    inner, outer, recorder = json.loads(output_of([sys.executable, "-c", code], cwd=ROOT))
    edge = {"flwr", "yaml", "transformers", "datasets", "flower_desloc.app.config", "ray", "typer"}
    assert "torch" in inner
    assert not edge & {*inner}
    assert "flwr" not in outer
    assert not {"matplotlib", "tensorboard"} & {*recorder}


def test_a_command_does_not_wait_for_what_it_may_not_use():
    code = "import json, sys, flower_desloc.app.cli; print(json.dumps([*sys.modules]))"
    brought = json.loads(output_of([sys.executable, "-c", code], cwd=ROOT))
    slow = {"matplotlib", "pandas", "sqlalchemy", "fastapi", "ray", "transformers"}
    assert not slow & {*brought}


def test_every_public_name_is_there():
    """That every name that the package imports for its users is public, ruff checks (F401)."""
    assert [name for name in flower_desloc.__all__ if not hasattr(flower_desloc, name)] == []


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'flower_desloc' has no attribute 'Desloc'"):
        flower_desloc.Desloc  # noqa: B018


def test_the_reference_implementation_imports_nothing_of_ours():
    reference = ROOT / "tests" / "reference.py"
    names = {name.partition(".")[0] for name in imported_names(reference)}
    assert names <= PURE | {"torch"}
