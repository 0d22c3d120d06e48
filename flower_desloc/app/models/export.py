"""Export of a run's model into a folder for transformers."""

from pathlib import Path

from flower_desloc.app.models.card import card, is_card
from flower_desloc.app.models.model import TrainedModel
from flower_desloc.app.runs.folder import replaced


def export(source: Path, folder: Path | None = None, *, overwrite: bool = False) -> Path:
    """Write model, tokenizer and model card into ``folder``, completely or not at all.

    ``source`` is a run's folder or one of its checkpoints; the default folder is ``export`` in the
    run's folder. ``overwrite`` replaces an earlier export, and no other files.

    Raises ``ValueError`` if there is no model, or ``folder`` holds something else.
    """
    trained = TrainedModel.of(source)
    folder = (folder or trained.run.path / "export").expanduser().resolve()
    former_files = _require_free(folder, overwrite=overwrite)
    with replaced(folder) as partial:
        trained.write(partial)
        config, summary = trained.facts()
        if summary["steps"] == 0:
            raise ValueError(f"{source}: has not completed a window; there is nothing to export")
        (partial / "README.md").write_text(card(config, summary), encoding="utf-8")
        if others := sorted(former_files - {path.name for path in partial.iterdir()}):
            raise ValueError(
                f"{folder}: holds {', '.join(others)}, which this export does not write; remove "
                "it, or give another folder"
            )
    return folder


def _require_free(folder: Path, *, overwrite: bool) -> set[str]:
    """Return the names of the files in ``folder``, which may be an earlier export."""
    if not folder.exists():
        return set()
    if not folder.is_dir():
        raise ValueError(f"{folder}: is a file; give a folder")
    held = list(folder.iterdir())
    if held and not overwrite:
        raise ValueError(f"{folder}: is not empty; give another folder, or --overwrite")
    # An export contains no folders; the working copy of a repository does.
    if held and (any(path.is_dir() for path in held) or not is_card(folder / "README.md")):
        raise ValueError(f"{folder}: is not an exported model; give another folder")
    return {path.name for path in held}
