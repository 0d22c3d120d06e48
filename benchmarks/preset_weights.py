"""Final weights of every preset after 32 steps, compared between two versions of the code.

    python benchmarks/preset_weights.py run OUT [--code CHECKOUT] [--data DIR]
    python benchmarks/preset_weights.py compare BEFORE AFTER

`run` trains every preset in one process with the code of CHECKOUT (default: this one), and some
presets again with short periods. The paper's presets are run with a small model on the text in DIR,
which has one folder for each domain; without DIR they are skipped. `compare` prints which weights
are equal bit for bit, and the largest difference of the others.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["sync.params=4", "sync.exp_avg=8", "sync.exp_avg_sq=16"]
VARIANTS = {
    "short_adopt": ["quickstart", *SHORT],
    "short_adam": ["desloc_adam", *SHORT],
    "short_lean": ["lean", *SHORT],
    "short_sgdm": ["desloc_sgdm", "sync.params=4", "sync.momentum_buffer=8"],
    "short_diloco": ["diloco", "sync.params=4"],
    "short_coins": ["quickstart", *SHORT, "sync_mode=probabilistic"],
    "short_examples": ["desloc_adam", *SHORT, "federation.weighting=examples"],
    "short_bf16": [
        *("quickstart", *SHORT),
        *("wire.params=bf16", "wire.exp_avg=int8", "wire.exp_avg_sq=bf16"),
    ],
}
SMALL = [
    *("model.hidden_size=48", "model.intermediate_size=96", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=3", "model.num_key_value_heads=1", "model.vocab_size=256"),
    *("data.domains=[wiki,stories,python,math,french]", "data.tokenizer=bytes", "data.seq_len=64"),
    *("data.batch_size=4", "data.micro_batch_size=null", "federation.client_gpus=0"),
    *("lr_schedule.warmup_steps=4",),
]


def run(code: Path, out: Path, name: str, preset: str, *overrides: str) -> None:
    if (out / name / "summary.json").exists():
        return
    command = [sys.executable, "-c", "from flower_desloc.cli import app; app()", "run", preset]
    command += ["--engine", "inprocess", "--output-dir", str(out), f"run.name={name}"]
    command += ["run.steps=32", "run.eval_every=16", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True)
    print(name, "completed" if done.returncode == 0 else done.stdout + done.stderr, flush=True)


def compare(before: Path, after: Path) -> int:
    different = 0
    for path in sorted(before.glob("*/summary.json")):
        name = path.parent.name
        ours = after / name / "summary.json"
        if not ours.exists():
            print(f"{name:16}  not run")
            different += 1
            continue
        hashes = {json.loads(p.read_text()).get("weights_sha256") for p in (path, ours)}
        if len(hashes) == 1 and None not in hashes:
            print(f"{name:16}  bit for bit")
            continue
        a, b = (load_file(p.parent / "final" / "model.safetensors") for p in (path, ours))
        apart = max(float((a[k].double() - b[k].double()).abs().max()) for k in a)
        size = max(float(t.abs().max()) for t in a.values())
        print(f"{name:16}  differ by at most {apart:.1e}, of weights up to {size:.2g}")
        different += 1
    return different


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("run")
    train.add_argument("out", type=Path)
    train.add_argument("--code", type=Path, default=ROOT)
    train.add_argument("--data", type=Path)
    check = verbs.add_parser("compare")
    check.add_argument("before", type=Path)
    check.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "compare":
        compare(arguments.before, arguments.after)
        return
    out = arguments.out.resolve()
    for preset in sorted(path.stem for path in (arguments.code / "configs").glob("*.yaml")):
        if preset.startswith("smollm2"):
            if arguments.data:
                source = f"data.source={arguments.data.resolve()}"
                run(arguments.code.resolve(), out, preset, preset, source, *SMALL)
        else:
            run(arguments.code.resolve(), out, preset, preset)
    for name, (preset, *overrides) in VARIANTS.items():
        run(arguments.code.resolve(), out, name, preset, *overrides)


if __name__ == "__main__":
    main()
