"""Pages that are made from the code say what the code says; links lead somewhere."""

import html
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import flower_desloc

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("research/*.md"),
    ]
)


def test_the_configuration_page_is_made_from_the_schema():
    made = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))["page"]()
    assert made == (ROOT / "docs" / "reference" / "configuration.md").read_text(), (
        "run python docs/make_configuration.py"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readmes_tree_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    (tree,) = re.findall(r"<!-- tree -->\n```\n(.*?)```", text, re.DOTALL)
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders[depth:] = [name]
        assert ROOT.joinpath(*folders).exists(), line


@pytest.mark.parametrize("file", ["README.md", "examples/stock_app/stock_app.py"])
def test_an_app_of_ones_own_imports_from_the_root_of_the_package(file):
    imported = re.findall(r"^(?:from|import) (flower_desloc\S*)", (ROOT / file).read_text(), re.M)
    assert set(imported) == {"flower_desloc"}


def test_the_containers_have_the_proxy_and_the_arguments_of_the_page():
    page = (ROOT / "docs" / "how-to" / "deployment.md").read_text()
    config = (ROOT / "containers" / "nginx.conf").read_text()
    assert config[config.index("server {") :] in page
    page += "".join(unit.read_text() for unit in (ROOT / "containers" / "systemd").iterdir())
    services = yaml.safe_load((ROOT / "containers" / "compose.yaml").read_text())["services"]
    for service in ("superlink", "site-a", "site-b"):
        for argument in services[service]["command"]:
            assert argument.partition("=")[0] in page
    assert all(services[site]["init"] for site in ("site-a", "site-b"))


def test_every_dependency_has_its_line():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text()
    for requirement in project["dependencies"]:
        name = re.split(r"[\[<>=]", requirement)[0]
        assert f"`{name}`" in page, name


def test_the_versions_tested_together_install_on_the_oldest_python():
    """Of those that are installed here in the version of constraints.txt."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    installed = {name: each for each in metadata.distributions() if (name := each.name) in pins}
    same = {name for name, each in installed.items() if each.version.split("+")[0] == pins[name]}
    assert len(same) > 50
    for name in same:
        needed = installed[name].metadata["Requires-Python"] or ""
        assert SpecifierSet(needed).contains(oldest), f"{name}=={pins[name]} needs {needed}"


def test_the_site_is_built_without_a_warning(tmp_path):
    """Links, anchors and the docstrings of everything that the package exports."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    api = (tmp_path / "reference" / "api" / "index.html").read_text()
    missing = [name for name in flower_desloc.__all__ if f'id="flower_desloc.{name}"' not in api]
    assert not missing
    assert not [*tmp_path.rglob("mkdocs_hooks.py*"), *tmp_path.rglob("make_configuration.py*")]
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 20
    assert not [dead for page in pages for dead in dead_links(page)]


def dead_links(page):
    """Return the links of a page to files and anchors that the site does not have."""
    for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
        link = html.unescape(link)
        if re.match(r"\w+:|//", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / unquote(path)).resolve() if path else page
        target = target / "index.html" if target.is_dir() else target
        named = f'id="{unquote(anchor)}"' if anchor and target.suffix == ".html" else ""
        if not target.exists() or named not in (target.read_text() if named else ""):
            yield page.parent.name, link
