"""Final weights of every preset after 32 steps, compared between two versions of the code.

    python benchmarks/preset_weights.py run OUT [--code CHECKOUT] [--data DIR]
    python benchmarks/preset_weights.py compare BEFORE AFTER

`run` trains every preset in one process with the code of CHECKOUT (default: this one), and some
presets again with short periods. `smollm2_*` are run with a small model on the text in DIR, which
has one folder for each domain; without DIR they are skipped, as `paper_*` are. With it, methods
are run by settings that are all explicit too: their weights also stay when presets change.
`compare` prints which weights are equal bit for bit, and the largest difference of the others.
"""

import json
from pathlib import Path

import typer
from common import desloc
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["sync.params=4", "sync.exp_avg=8", "sync.exp_avg_sq=16"]
VARIANTS = {
    "short_adopt": ["desloc_adopt", *SHORT],
    "short_adam": ["desloc_adam", *SHORT],
    "short_lean": ["lean", *SHORT],
    "short_sgdm": ["desloc_sgdm", "sync.params=4", "sync.momentum_buffer=8"],
    "short_diloco": ["diloco", "sync.params=4"],
    "short_coins": ["desloc_adopt", *SHORT, "sync_mode=probabilistic"],
    "short_examples": ["desloc_adam", *SHORT, "federation.weighting=examples"],
    "short_bf16": [
        *("desloc_adopt", *SHORT),
        *("compression.params=bf16", "compression.exp_avg=int8", "compression.exp_avg_sq=bf16"),
    ],
}
SMALL = [
    *("model.hidden_size=48", "model.intermediate_size=96", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=3", "model.num_key_value_heads=1", "model.vocab_size=256"),
    *("data.domains=[wiki,stories,python,math,french]", "data.tokenizer=bytes", "data.seq_len=64"),
    *("data.batch_size=4", "data.micro_batch_size=null", "simulation.client_gpus=0"),
    *("lr_schedule.warmup_steps=4",),
]
STATED = [
    *("run.seed=3", "data.domains=[wiki,python,math,french]", "data.max_bytes=300000"),
    *("data.seq_len=32", "data.batch_size=4", "model.hidden_size=48", "model.num_hidden_layers=2"),
    *("model.intermediate_size=96", "model.num_attention_heads=3", "evaluation.central=false"),
    *("evaluation.federated=false", "optimizer.weight_decay=0", "optimizer.clip_norm=1.0"),
]
ADAM = [*SHORT, "optimizer.lr=0.003", "optimizer.betas=[0.95,0.95]", "sync_bound=false"]
EXPLICIT = {
    "adopt": ["desloc_adopt", *ADAM, "optimizer.lr=0.0042", "optimizer.betas=[0.95,0.9999]"],
    "adam": ["desloc_adam", *ADAM],
    "bounded": ["desloc_adam", *ADAM, "sync_bound=true"],
    "sgdm": ["desloc_sgdm", "sync.params=4", "sync.momentum_buffer=8", "optimizer.lr=0.5"],
    "lean": ["lean", *ADAM, "optimizer.name=adam", "optimizer.eps=1e-8", "sync.exp_avg=4"],
    "coins": ["desloc_adam", *ADAM, "sync_mode=probabilistic"],
    "ddp": ["ddp", "optimizer.lr=0.003"],
    "diloco": ["diloco", "sync.params=4", "optimizer.lr=0.003"],
    "fedavg": ["fedavg", "sync.params=4", "optimizer.lr=0.003"],
}


app = typer.Typer(help=__doc__)


@app.command("run")
def run_presets(out: Path, code: Path = ROOT, data: Path | None = None) -> None:
    """Train every preset with the code of a checkout; keep the runs that are in OUT."""
    runs = {path.stem: [path.stem] for path in sorted((code / "configs").glob("*.yaml"))}
    for name in [name for name in runs if name.startswith(("smollm2", "paper"))]:
        if data is None or name.startswith("paper"):  # of another shape, which SMALL does not fit
            del runs[name]
        else:
            runs[name] += [f"data.source={data.resolve()}", *SMALL]
    if data is not None:
        source = [f"data.source={data.resolve()}", *STATED]
        runs |= {f"explicit_{k}": [w[0], *source, *w[1:]] for k, w in EXPLICIT.items()}
    for name, arguments in (runs | VARIANTS).items():
        if not (out / name / "summary.json").exists():
            run(code.resolve(), out.resolve(), name, *arguments)


def run(code: Path, out: Path, name: str, *arguments: str) -> None:
    short = ["run.steps=32", "run.eval_every=16", f"run.name={name}"]
    done = desloc(
        code, ["run", *arguments, "--engine", "inprocess", "--output-dir", str(out), *short]
    )
    print(name, "completed" if done.returncode == 0 else done.stdout + done.stderr, flush=True)


@app.command()
def compare(before: Path, after: Path) -> None:
    """Print which final weights are equal bit for bit, and how far apart the others are."""
    for path in sorted(before.glob("*/summary.json")):
        name = path.parent.name
        both = [path, after / name / "summary.json"]
        if not both[1].exists():
            print(f"{name:16}  not run")
            continue
        first, second = (json.loads(p.read_text()).get("weights_sha256") for p in both)
        if first is not None and first == second:
            print(f"{name:16}  bit for bit")
            continue
        a, b = (load_file(p.parent / "final" / "model.safetensors") for p in both)
        apart = max(float((a[k].double() - b[k].double()).abs().max()) for k in a)
        size = max(float(t.abs().max()) for t in a.values())
        print(f"{name:16}  differ by at most {apart:.1e}, of weights up to {size:.2g}")


if __name__ == "__main__":
    app()
