"""The model card of a run, for the Hugging Face hub.

It names no client, path or domain.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from flower_desloc import __version__
from flower_desloc.app.config import Config
from flower_desloc.app.config.imports import is_path
from flower_desloc.app.config.units import (
    TEXT,
    bytes_text,
    examples_noun,
    figures,
    loss_text,
)
from flower_desloc.app.runs.summary import schedule_of
from flower_desloc.app.setup.initial import is_pretrained

_PAPER = "https://arxiv.org/abs/2505.22549"
_USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
tokens = tokenizer("Once", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=50)[0]))
```"""


def card(config: Config, summary: Mapping[str, Any]) -> str:
    """Return ``README.md`` for the model of a run."""
    parts = [
        f"---\n{_front_matter(config)}\n---",
        f"# {config.run.name}",
        _opening(config, summary),
        *([_USE] if config.task == TEXT else []),
        "## Training",
        _table(("", ""), _training(config, summary)),
        _table(("stream", "averaged", "times", "sent up"), _streams(config, summary)),
        _traffic(summary),
        "## Held out",
        _table(("measured", "metric", "before", "after", "best"), _metrics(summary)),
        "## Made with",
        _made_with(summary),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: Config) -> str:
    is_text, is_known = config.task == TEXT, not is_path(config.task)
    base, data = config.run.init_from, config.data.source.partition(":")[0]
    metadata = ModelCardData(
        library_name="transformers" if is_text else None,
        pipeline_tag="text-generation" if is_text else None,
        tags=["federated-learning", "flower", "des-loc"],
        base_model=base if config.model.config and _on_the_hub(base) else None,
        datasets=[data] if is_known and data != "builtin" and _on_the_hub(data) else None,
    )
    return str(metadata.to_yaml())


def _on_the_hub(name: str) -> bool:
    return is_pretrained(name) and not Path(name).expanduser().exists()


def _opening(config: Config, summary: Mapping[str, Any]) -> str:
    done, whole = summary["steps"], config.run.steps
    steps = f"{done} local steps" if done == whole else f"{done} of {whole} local steps"
    how = f"[DES-LOC]({_PAPER})" if config.is_desloc else config.strategy
    return (
        f"Trained by {summary['clients']} clients, each on data of its own, in {steps} with {how} "
        "on [Flower](https://flower.ai). This is the mean of their parameters."
    )


def _training(config: Config, summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    optimizer, data = config.optimizer, config.data
    yield "clients", str(summary["clients"])
    yield "local steps", f"{summary['steps']} of {config.run.steps}"
    yield (
        "optimizer",
        f"{optimizer.name}, learning rate {optimizer.lr:g} ({config.lr_schedule.name})",
    )
    if config.outer.name != "none":
        yield "outer optimizer", f"{config.outer.name}, learning rate {config.outer.lr:g}"
    if is_path(config.task):  # it reads of the settings in model and data what it likes
        yield "model and data", "those of a custom task"
    else:
        if config.task == TEXT:
            yield "a step", f"{data.batch_size} sequences of {data.seq_len} tokens, every client"
            yield "tokenizer", _unless_a_path(data.tokenizer)
        else:
            yield "a step", f"{data.batch_size} {examples_noun(config.task)}, every client"
        yield "data", f"{_unless_a_path(data.source)}; partition {data.partition}"
        yield "precision", f"{config.model.dtype}, {config.model.precision}"
    yield "initial weights", _beginning(config)
    yield "seed", str(config.run.seed)


def _beginning(config: Config) -> str:
    base = config.run.init_from
    if not base:
        return "the task's initial weights" if is_path(config.task) else "random weights"
    return _unless_a_path(base) if config.model.config else "the model of another run"


def _unless_a_path(value: str) -> str:
    # A path may identify a site.
    known = value in ("builtin", "bytes") or _on_the_hub(value.partition(":")[0])
    return value if known else "local files"


def _streams(config: Config, summary: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    sent = summary["bytes"]["measured"]["up"]
    schedule = schedule_of(summary)
    for stream in schedule.periods:
        times = str(summary["syncs"][stream])
        form = f" as {config.compression[stream]}" if stream in config.compression else ""
        yield f"`{stream}`", schedule.period_text(stream), times, bytes_text(sent[stream]) + form


def _traffic(summary: Mapping[str, Any]) -> str:
    measured, ratio = summary["bytes"]["measured"], summary["ratio"]
    text = (
        f"Together the clients sent {bytes_text(measured['up']['total'])} and received "
        f"{bytes_text(measured['down']['total'])}."
    )
    if ratio["local_adam"] and ratio["ddp"]:
        text += (
            f" Averaging every state as often as the parameters (Local Adam) would have sent "
            f"{figures(ratio['local_adam'])} times as much up, data parallelism "
            f"{figures(ratio['ddp'])} times."
        )
    return text


def _metrics(summary: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    places = {"central": "on the server", "federated": "on the clients"}
    for where, metrics in summary["evaluation"].items():
        for metric, course in metrics.items():
            values = {name: loss_text(course[name]) for name in ("first", "final", "best")}
            if course.get("final_step", summary["steps"]) != summary["steps"]:
                values["final"] = f"{values['final']}, at step {course['final_step']}"
            yield places[where], metric, *values.values()


def _made_with(summary: Mapping[str, Any]) -> str:
    versions = summary.get("versions") or {"flower-desloc": __version__}
    text = ", ".join(f"{name} {number}" for name, number in versions.items())
    weights = summary["weights_sha256"]
    return text + (f"\n\nSHA-256 of the weights, not of a file: `{weights}`" if weights else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
