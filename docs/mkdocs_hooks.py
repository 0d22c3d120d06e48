"""Hooks of mkdocs.yml: pages and files outside docs/ that pages link to are part of the site.

The README is its first page, all else is below repository/. Links work as they do in the
repository, so no page is written twice.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from flower_desloc.app import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"),
    *(
        f"research/{page}.md"
        for page in ("README", "baseline", "paper", "ladder", "theorem", "thin-links", "toy")
    ),
)
cli.command = typer.main.get_command(cli.app)  # type: ignore[attr-defined]  # for mkdocs-click

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and every file that a page links to."""
    for path in PAGES:
        files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    for page in list(files.documentation_pages()):
        here = _source(page.src_uri)
        for target, _ in _LINK.findall((ROOT / here).read_text()):
            path = _resolved(here, target)
            if place(path) not in files.src_uris:
                files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with its links as they are in the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        target = place(_resolved(_source(here), match[1]))
        return f"]({os.path.relpath(target, PurePosixPath(here).parent)}{match[2] or ''})"

    return _LINK.sub(moved, markdown)


def place(path: str) -> str:
    """Return where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _source(uri: str) -> str:
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def _resolved(page: str, target: str) -> str:
    return os.path.normpath(PurePosixPath(page).parent / target)
