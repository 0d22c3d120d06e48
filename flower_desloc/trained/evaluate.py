"""Zero-shot scores through ``lm-eval``, its questions from the hub or from local files."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from flower_desloc.tasks.quiet import quiet

PAPER = ("arc_challenge", "arc_easy", "piqa", "hellaswag")
"""The tasks of the paper's table, under lm-eval's names."""

_YAML = {
    "arc_challenge": ("arc/arc_challenge.yaml", {"question", "choices", "answerKey"}),
    "arc_easy": ("arc/arc_easy.yaml", {"question", "choices", "answerKey"}),
    "piqa": ("piqa/piqa.yaml", {"goal", "sol1", "sol2", "label"}),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
    ),
}
"""Where lm-eval says how to ask and to score, and the columns that this reads."""

_OWN = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{query}}",
    "doc_to_choice": "choices",
    "doc_to_target": "gold",
    "metric_list": [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True}
        for metric in ("acc", "acc_norm")
    ],
}
"""A set of one's own: a text, what may follow it, and which of that does."""
_OWN_COLUMNS = {"query", "choices", "gold"}


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a model scores on one task, as shares of 1."""

    questions: int
    acc: float
    acc_stderr: float
    acc_norm: float | None
    """By likelihood per character of the answer; None where the task does without."""
    acc_norm_stderr: float | None
    chance: float
    """The mean over questions of 1 / answers."""
    cut: int
    """Answers whose question lost its beginning, as the model's window is too short."""


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    data: Path | None,
    limit: int | None,
    batch_size: int,
    window: int | None,
) -> dict[str, Score]:
    """Return the scores by task; the first ``limit`` questions of each, or all.

    With ``data`` the questions of task ``NAME`` are those of ``data/NAME.jsonl``: with the columns
    of the data set that lm-eval reads for the tasks of :data:`PAPER`, or for a task of any name
    ``query``, ``choices`` and ``gold``, the number of the right one. Otherwise lm-eval fetches its
    own. ``window`` is how many tokens the model is shown at most; by default, what it takes.

    Raises ``ValueError`` when lm-eval is missing or has no such task, when there is no such file or
    column, when an answer does not fit the window, or for a task that is not multiple choice.
    """
    lm_eval = require_lm_eval()
    with _silence(), _manager(tasks, data) as manager:
        scorer = import_module("lm_eval.models.huggingface").HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=window,
            prefix_token_id=_separator(tokenizer),
        )
        try:
            found = lm_eval.simple_evaluate(
                scorer, tasks=list(tasks), task_manager=manager, limit=limit
            )
        except AssertionError as error:  # lm-eval's own, which says nothing
            raise ValueError(
                f"an answer is longer than the {scorer.max_length} tokens that the model is shown; "
                "leave the task out, or show it more with --window"
            ) from error
        except Exception as error:
            raise ValueError(
                f"lm-eval cannot evaluate {', '.join(tasks)} "
                f"({type(error).__name__}: {' '.join(str(error).split())})"
            ) from error
        return {
            name: _score(result, found["samples"][name], scorer)
            for name, result in found["results"].items()
            if name in found["samples"]
        }


def to_json(scores: Mapping[str, Score], source: str) -> str:
    """Return the scores, whose they are, and the versions that made them."""
    from flower_desloc.outputs.versions import versions

    with_what = versions() | {"lm_eval": require_lm_eval().__version__}
    tasks = {name: asdict(score) for name, score in scores.items()}
    return json.dumps({"model": source, "tasks": tasks, "versions": with_what}, indent=2) + "\n"


def require_lm_eval() -> Any:
    """Return the library; raises ``ValueError`` when it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("lm_eval")
    except ImportError as error:
        raise ValueError(
            f"lm-eval is not installed ({error}); install it with pip install '.[eval]'"
        ) from error


@contextmanager
def _silence() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), quiet():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _manager(tasks: Sequence[str], data: Path | None) -> Iterator[Any]:
    """Yield lm-eval's index of tasks; with ``data``, of tasks that are asked from its files."""
    make = import_module("lm_eval.tasks").TaskManager
    theirs = Path(str(import_module("lm_eval.tasks").__file__)).parent
    if data is None:
        # To know all of its tasks lm-eval reads some ten thousand files.
        few = [str(theirs / folder) for folder in ("arc", "piqa", "hellaswag")]
        known = {*tasks} <= {*PAPER}
        yield make(include_path=few, include_defaults=False) if known else make()
        return
    with TemporaryDirectory() as folder:
        for name in tasks:
            task = _local_task(name, data.expanduser().resolve() / f"{name}.jsonl", theirs)
            task["dataset_kwargs"]["cache_dir"] = folder
            Path(folder, f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
        yield make(include_path=folder, include_defaults=False)


def _local_task(name: str, file: Path, theirs: Path) -> dict[str, Any]:
    columns = _columns(file)
    if columns >= _OWN_COLUMNS:
        how: dict[str, Any] = _OWN
    elif name in _YAML and columns >= _YAML[name][1]:
        how = {"include": str(theirs / _YAML[name][0])}
    else:
        wanted = [_OWN_COLUMNS, *([_YAML[name][1]] if name in _YAML else [])]
        raise ValueError(
            f"{file}: has the columns {', '.join(sorted(columns))}; for the task {name} it needs "
            f"{' or '.join(', '.join(sorted(each)) for each in wanted)}"
        )
    return {
        **how,
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(file)}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
    }


def _columns(file: Path) -> set[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            first = json.loads(lines.readline())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; it holds one question a line") from error
    except ValueError as error:
        raise ValueError(f"{file}: its first line is no JSON object ({error})") from error
    return {*first} if isinstance(first, dict) else set()


def _separator(tokenizer: Any) -> int:
    """Return the token that stands before a text: of our bytes, which have no other, a line end."""
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer.encode("\n"))
    return next(int(i) for i in ids if i is not None)


def _score(result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], scorer: Any) -> Score:
    value = {key.removesuffix(",none"): number for key, number in result.items()}
    if "acc" not in value:
        raise ValueError(
            f"{result['alias']}: lm-eval scores it by {', '.join(samples[0]['metrics'])}; here are "
            "scored multiple-choice tasks, by acc"
        )
    texts = [context + answer for sample in samples for context, answer in sample["arguments"]]
    return Score(
        questions=len(samples),
        acc=value["acc"],
        acc_stderr=value["acc_stderr"],
        acc_norm=value.get("acc_norm"),
        acc_norm_stderr=value.get("acc_norm_stderr"),
        chance=sum(1 / len(sample["resps"]) for sample in samples) / len(samples),
        cut=sum(len(scorer.tok_encode(text)) > scorer.max_length + 1 for text in texts),
    )
