"""Zero-shot scores by ``lm-eval``, with questions from the hub or from local files."""

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import yaml

from flower_desloc.app.config.errors import one_line
from flower_desloc.app.runs.summary import versions
from flower_desloc.app.tasks.quiet import quiet

Question = Mapping[str, Any]


def _of_arc(question: Question) -> tuple[Any, Any]:
    texts, labels = (question["choices"][key] for key in ("text", "label"))
    return texts, labels.index(question["answerKey"])


_ARC = {"question", "choices", "answerKey"}
_YAML: dict[str, tuple[str, set[str], Callable[[Question], tuple[Any, Any]]]] = {
    "arc_challenge": ("arc/arc_challenge.yaml", _ARC, _of_arc),
    "arc_easy": ("arc/arc_easy.yaml", _ARC, _of_arc),
    "piqa": (
        "piqa/piqa.yaml",
        {"goal", "sol1", "sol2", "label"},
        lambda question: ([question["sol1"], question["sol2"]], question["label"]),
    ),
    "hellaswag": (
        "hellaswag/hellaswag.yaml",
        {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
        lambda question: (question["endings"], int(question["label"])),
    ),
}
"""For each task of the paper's table: lm-eval's file, the columns it reads, and a function that
returns the answers and the index of the right one."""

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
"""The task of a file with questions of one's own."""
_OWN_COLUMNS = {"query", "choices", "gold"}
_GIT = "lm_eval.evaluator.get_git_commit_hash"  # which logs an error outside a repository
_A_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """Scores of a model on one task, as shares of 1."""

    questions: int
    acc: float
    acc_stderr: float | None
    """None for a single question."""
    acc_norm: float | None
    """By likelihood per character of the answer; None if the task does not report it."""
    acc_norm_stderr: float | None
    chance: float
    """Mean over the questions of 1 / number of answers."""
    cut: int
    """Answers whose question was truncated at its beginning to fit the model."""


def evaluate(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    data: Path | None,
    limit: int | None,
    batch_size: int,
    window: int | None,
) -> dict[str, TaskScore]:
    """Return the scores by task, for the first ``limit`` questions of each or all.

    With ``data`` the questions of task ``NAME`` are read from ``data/NAME.jsonl``. Its columns are
    those of lm-eval's data set for the tasks of the paper, or for any task ``query``, ``choices``
    and ``gold``, the index of the right answer. Otherwise lm-eval downloads its own.
    ``window`` is the longest input in tokens; by default the model's.

    Raises ``ValueError`` if lm-eval is missing or has no such task, if a file, column or right
    answer is missing, if an answer does not fit the window, or if a task is not multiple choice.
    """
    lm_eval = require_lm_eval()
    # Before a text comes a line end for the byte tokenizer, which has no separator.
    separators = (tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer.encode("\n"))
    with _silence(), _manager(tasks, data) as manager:
        scorer = import_module("lm_eval.models.huggingface").HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=window,
            prefix_token_id=next(int(token) for token in separators if token is not None),
        )
        try:
            found = lm_eval.simple_evaluate(
                scorer, tasks=list(tasks), task_manager=manager, limit=limit
            )
        except AssertionError as error:  # lm-eval's own, without a message
            raise ValueError(
                f"an answer is longer than the {scorer.max_length} tokens that the model is shown; "
                "leave the task out, or give a larger --window"
            ) from error
        except Exception as error:
            raise ValueError(
                f"lm-eval cannot evaluate {', '.join(tasks)} "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error
        return {
            name: _score(result, found["samples"][name], scorer)
            for name, result in found["results"].items()
            if name in found["samples"]
        }


def to_json(scores: Mapping[str, TaskScore], source: str) -> str:
    """Return the scores as JSON, with the model's name and the versions of the libraries."""
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
            f"lm-eval is not installed ({error}); install it with pip install 'flower-desloc[eval]'"
        ) from error


@contextmanager
def _silence() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), quiet(), patch(_GIT, lambda: None):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextmanager
def _manager(tasks: Sequence[str], data: Path | None) -> Iterator[Any]:
    """Yield lm-eval's index of tasks; with ``data``, an index of the tasks of its files."""
    make = import_module("lm_eval.tasks").TaskManager
    theirs = Path(str(import_module("lm_eval.tasks").__file__)).parent
    if data is None:
        # Its complete index takes reading ten thousand files.
        few = [str(theirs / folder) for folder in ("arc", "piqa", "hellaswag")]
        known = _YAML.keys() >= {*tasks}
        yield make(include_path=few, include_defaults=False) if known else make()
        return
    with TemporaryDirectory() as folder:
        for name in tasks:
            if not _A_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not the name of a file in {data}; use letters and digits"
                )
            task = _local_task(name, data.expanduser().resolve() / f"{name}.jsonl", theirs)
            task["dataset_kwargs"]["cache_dir"] = folder
            Path(folder, f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
        yield make(include_path=folder, include_defaults=False)


def _local_task(name: str, file: Path, theirs: Path) -> dict[str, Any]:
    questions = list(_questions(file))
    if not questions:
        raise ValueError(f"{file}: holds no question")
    columns = {*questions[0]}
    answers: Callable[[Question], tuple[Any, Any]]
    if columns >= _OWN_COLUMNS:
        how: dict[str, Any] = _OWN
        answers = _own_answers
    elif name in _YAML and columns >= _YAML[name][1]:
        how = {"include": str(theirs / _YAML[name][0])}
        answers = _YAML[name][2]
    else:
        wanted = [_OWN_COLUMNS, *([_YAML[name][1]] if name in _YAML else [])]
        raise ValueError(
            f"{file}: has the columns {', '.join(sorted(columns))}; for the task {name} it needs "
            f"{' or '.join(', '.join(sorted(each)) for each in wanted)}"
        )
    for number, question in enumerate(questions, start=1):
        try:
            _check_answers(*answers(question))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{file}, line {number}: has wrong {', '.join(sorted(columns))} "
                f"({type(error).__name__}: {error})"
            ) from error
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


def _questions(file: Path) -> Iterator[Question]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; it holds one question a line") from error
    for number, line in enumerate(lines, start=1):
        try:
            question = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: is not JSON ({error})") from error
        if not isinstance(question, dict):
            raise ValueError(f"{file}, line {number}: is not a JSON object")
        yield question


def _own_answers(question: Question) -> tuple[Any, Any]:
    if not isinstance(question["query"], str):
        raise TypeError("query is not text")
    return question["choices"], question["gold"]


def _check_answers(answers: Any, right: Any) -> None:
    if not isinstance(answers, list) or len(answers) < 2:
        raise TypeError("needs a list of two answers or more")
    if not all(isinstance(answer, str) and answer for answer in answers):
        raise TypeError("an answer is empty, or not text")
    if type(right) is not int or not 0 <= right < len(answers):
        raise ValueError(f"the right answer is number {right!r}, of {len(answers)} from 0")


def _score(
    result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], scorer: Any
) -> TaskScore:
    value = {key.removesuffix(",none"): number for key, number in result.items()}
    if "acc" not in value:
        raise ValueError(
            f"{result['alias']}: lm-eval scores it by {', '.join(samples[0]['metrics'])}; only "
            "multiple-choice tasks, scored by acc, are supported"
        )
    texts = [context + answer for sample in samples for context, answer in sample["arguments"]]
    return TaskScore(
        questions=len(samples),
        acc=value["acc"],
        acc_stderr=_number(value["acc_stderr"]),
        acc_norm=value.get("acc_norm"),
        acc_norm_stderr=_number(value.get("acc_norm_stderr")),
        chance=sum(1 / len(sample["resps"]) for sample in samples) / len(samples),
        cut=sum(len(scorer.tok_encode(text)) > scorer.max_length + 1 for text in texts),
    )


def _number(value: Any) -> float | None:
    return value if isinstance(value, float) else None  # lm-eval writes N/A
