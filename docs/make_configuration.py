"""Write docs/reference/configuration.md from the sentences in flower_desloc/app/config/schema.py.

Run it as ``python docs/make_configuration.py``.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from flower_desloc.app.config import schema
from flower_desloc.app.config.check import own_options
from flower_desloc.app.config.run_config import SETTINGS
from flower_desloc.flower import policy
from flower_desloc.optim import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "configuration.md"
MODULES = (schema, policy)  # the second has the section federation

_AS_YAML = {
    "None": "null",
    "True": "true",
    "False": "false",
    "field(default_factory=list)": "[]",
    "field(default_factory=dict)": "{}",
}

HEAD = """# Configuration

Configure a run by a preset of `configs/` or a YAML file, and overrides:

```bash
desloc run quickstart sync.params=32 optimizer.name=adamw run.seed=3
flwr run . --stream --run-config 'config="quickstart" overrides="sync.params=32 run.seed=3"'
flwr run . --stream --run-config 'exp-avg-period=96 learning-rate=0.003'
```

The most common settings are keys of Flower's run config; `""` changes nothing:

{keys}
A file may build on a preset, `extends: quickstart`, or on a file, `extends: base.yaml`, and state
what differs. Its `sync` section replaces the other's. Under `flwr run` relative paths start where
the SuperLink was started.

A setting that is a text takes what was typed: `run.name=2026_01_05`. Numbers follow YAML 1.2: `010`
is ten. In `task_options`, `optimizer.options` and `model.config`, quote a text that looks like a
number. Blanks separate overrides, except in brackets or quotes. `compression={{}}` clears a
dictionary, which later overrides fill.

What belongs to a site is in its [node config](../how-to/deployment.md#a-site).

"""


def page() -> str:
    """Return the page."""
    sections = dict(_sections())
    lines = [HEAD.format(keys=_keys())]
    lines += _table("", sections.pop("Config"))
    for name, (doc, fields) in sections.items():
        key = {"LRSchedule": "lr_schedule", "Policy": "federation"}.get(name, name.lower())
        lines += [f"## {key}\n", f"{doc}\n", *_table(f"{key}.", (doc, fields))]
        lines += _optimizers() if key == "optimizer" else []
    return "\n".join(lines).rstrip() + "\n"


def _optimizers() -> list[str]:
    """Return the table of the project's optimizers, with their own defaults."""
    rows = [
        "| optimizer | settings and their defaults | weight decay | states |",
        "|---|---|---|---|",
    ]
    for name, described in OPTIMIZERS.items():
        options = own_options(name)
        settings = ", ".join(
            f"`{'options.' * (key in options)}{key}` "
            f"{[*value] if isinstance(value, tuple) else value}"
            for key, value in described.all_settings.items()
        )
        states = ", ".join(f"`{state.name}`" for state in described.all_states)
        rows.append(f"| `{name}` | {settings} | {described.weight_decay} | {states} |")
    return [*rows, ""]


_FIELDS = ("bounded", "may_differ", "one_of")
"""What makes a field; its first argument leads to the default."""


def _keys() -> str:
    rows = [f"| `{key}` | `{setting}` |" for key, setting in SETTINGS.items()]
    return "\n".join(["| key of the run config | setting |", "|---|---|", *rows, ""])


def _sections() -> Iterator[tuple[str, tuple[str, list[tuple[str, str, str]]]]]:
    for module in MODULES:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef) and (fields := list(_fields(node, module))):
                yield node.name, ((ast.get_docstring(node) or "").partition("\n")[0], fields)


def _fields(node: ast.ClassDef, module: ModuleType) -> Iterator[tuple[str, str, str]]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            doc = " ".join(ast.literal_eval(text.value).split())
            assert isinstance(field.target, ast.Name)
            assert field.value is not None
            value = field.value
            while isinstance(value, ast.Call) and ast.unparse(value.func) in _FIELDS:
                value = value.args[0]
            if isinstance(value, ast.Starred):  # one_of(*OPTIMIZERS)
                value = ast.Constant(next(iter(getattr(module, ast.unparse(value.value)))))
            if isinstance(value, ast.Call):  # field(default_factory=..., metadata=...)
                value.keywords = [word for word in value.keywords if word.arg != "metadata"]
            default = ast.unparse(value)
            yield field.target.id, _AS_YAML.get(default, default), doc


def _table(prefix: str, section: tuple[str, list[tuple[str, str, str]]]) -> list[str]:
    rows = ["key | default | meaning", "---|---|---"]
    for name, default, doc in section[1]:
        rows.append(f"`{prefix}{name}` | `{default}` | {doc.replace('|', chr(92) + '|')}")
    return [*rows, ""]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
