"""benchmarks/gpu.sh on the CPU: every line of a training, and what it does without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scripts import ROOT


def gpu_sh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "benchmarks" / "gpu.sh"), "--results", str(folder / "results"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.soak
def test_a_piece_is_rehearsed_and_not_repeated(tmp_path):
    first = gpu_sh(tmp_path, "--rehearse", "favg_opt")
    assert first.returncode == 0, first.stderr
    rehearsed = tmp_path / "results" / "rehearsal" / "gpu_favg_opt.json"
    summary = json.loads(rehearsed.read_text())
    assert summary["status"] == "completed"
    assert summary["config"]["periods"]["exp_avg"] == "never"
    assert "has a result" in gpu_sh(tmp_path, "--rehearse", "favg_opt").stdout
    # Nothing that a real run skips on, or that gpu_tables.py reads.
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["rehearsal"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = gpu_sh(tmp_path, "favg_opt")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--rehearse" in done.stderr
