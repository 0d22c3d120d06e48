"""Loading the model of a run, of a checkpoint, of a folder, or of the hub."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import torch

from flower_desloc.app.config import Config, parse
from flower_desloc.app.runs.folder import RunFolder, read_lines
from flower_desloc.app.runs.resume import completed
from flower_desloc.app.runs.summary import build
from flower_desloc.app.setup.initial import is_pretrained
from flower_desloc.app.tasks import build_task
from flower_desloc.core.schedule import PARAMS
from flower_desloc.core.streams import BUFFERS, digest, install
from flower_desloc.flower.checkpoint import Checkpoint, last_checkpoint


@dataclass(frozen=True)
class TrainedModel:
    """The final model of a run, or that of a checkpoint."""

    run: RunFolder
    checkpoint: Path | None
    """None if the run is complete and its model is in ``final/``."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the model of a run's folder or of a checkpoint.

        For a run that is not complete, its last checkpoint is used. Raises ``ValueError`` if there
        is none.
        """
        folder = RunFolder(path.expanduser().resolve())
        if completed(folder) and folder.final.is_dir():
            return cls(folder, None)
        file = last_checkpoint(path.expanduser())
        return cls(RunFolder(file.parent.parent), file)

    def write(self, folder: Path) -> None:
        """Write the model into an existing folder, as the run itself does."""
        if self.checkpoint is None:
            shutil.copytree(self.run.final, folder, dirs_exist_ok=True)
            return
        checkpoint = Checkpoint.read(self.checkpoint)
        task = build_task(parse(checkpoint.settings))
        model = task.build_model()
        for name in {PARAMS, BUFFERS} & checkpoint.averages.keys():
            install(model, checkpoint.averages[name])
        task.save(model, folder)

    def facts(self) -> tuple[Config, dict[str, Any]]:
        """Return the run's configuration, and its summary up to the model's step."""
        if self.checkpoint is None:
            config = parse(self.run.config.read_text(encoding="utf-8"))
            summary: dict[str, Any] = json.loads(self.run.summary.read_text(encoding="utf-8"))
            if missing := {"steps", "clients", "bytes"} - summary.keys():
                raise ValueError(f"{self.run.summary}: it has no {', '.join(sorted(missing))}")
            return config, summary
        checkpoint = Checkpoint.read(self.checkpoint)
        config = parse(checkpoint.settings)
        lines = (line for line in read_lines(self.run.metrics) if line["round"] <= checkpoint.round)
        return config, build(
            lines,
            config=config,
            plan=None,
            status="failed",
            weights_sha256=digest(checkpoint.averages[PARAMS]),
        )


@contextmanager
def _loadable(source: str) -> Iterator[str]:
    """Yield the argument of ``from_pretrained`` for ``source``.

    ``source`` is a run's folder, a checkpoint, a folder of ``save_pretrained``, or a name on the
    hub. Raises ``ValueError`` if it is none of them.
    """
    path = Path(source).expanduser()
    if is_pretrained(source) or _holds_adapters(path):
        yield str(path) if path.exists() else source
        return
    trained = TrainedModel.of(path)
    if trained.checkpoint is None:
        yield str(trained.run.final)
        return
    with tempfile.TemporaryDirectory() as folder:
        trained.write(Path(folder))
        yield folder


def load(source: str) -> tuple[Any, Any]:
    """Return the model of ``source`` and its tokenizer, on the GPU if there is one.

    Raises ``ValueError`` if transformers cannot load every tensor of it from safetensors.
    """
    # transformers takes seconds to import.
    from transformers import AutoTokenizer

    from flower_desloc.app.tasks.causal_lm.pretrained import architecture_of, read
    from flower_desloc.app.tasks.causal_lm.tokens import knows_nothing
    from flower_desloc.app.tasks.quiet import quiet

    with _loadable(source) as name:
        if _holds_adapters(Path(name)):
            raise ValueError(
                f"{source}: holds adapters of peft without their model; merge them first: "
                "PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(...)"
            )
        try:
            architecture_of(name)
            model = read(name)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        try:
            with quiet():
                tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:
            why = shorten(str(error), 200)
            raise ValueError(f"{source}: has no tokenizer that can be loaded ({why})") from error
        if knows_nothing(tokenizer):
            raise ValueError(f"{source}: has no tokenizer; its files are not there")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def _holds_adapters(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()
