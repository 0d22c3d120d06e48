"""Every command of the documentation is tried here, or named with the reason why not."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from shutil import which

import pytest
from command import accepted, refused

from flower_desloc.app.config import load
from flower_desloc.app.plan import dry_run
from flower_desloc.app.setup.measured_step import MeasuredStep

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / page for page in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    ROOT / "hub" / "README.md",
    *sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "research").glob("*.md")]),
]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
IN_A_TABLE = re.compile(r"`((?:python )?(?:benchmarks|research)/[^`]+)`")
"""The commands of benchmarks/README.md and research/README.md."""

NOT_HERE = {
    "installs: test_wheel.py, and the test command": ("python3 -m venv", ".venv/bin/pip"),
    "installs: test_wheel.py": ("/opt/flower-desloc/.venv/bin/pip",),
    "installs; test_hub.py runs the app": ("pip install",),
    "run by test_hub.py": ("python -m desloc_quickstart.task",),
    "part of README's test command": (
        *(".venv/bin/ruff", ".venv/bin/mypy", ".venv/bin/python -m pytest"),
    ),
    "run by test_gpu_script.py": ("benchmarks/gpu.sh",),
    "needs a network": ("git clone",),
    "run below, in their order": ("openssl", "ssh-keygen"),
    "of the shell": ("export", "cd", "mkdir", "cat", "T="),
    "run by test_simulation.py, test_cluster.py and test_deployment.py": ("flwr",),
    "run by test_deployment.py": ("flower-superlink", "desloc supernode", "desloc federate"),
    "run by test_warm.py and test_deployment.py": ("flower-supernode",),
    "needs a container engine; test_docs.py reads the files": ("docker", "F=", "$F"),
    "run by test_toy.py": ("desloc toy",),
    "run by test_plan_command.py": ("desloc plan",),
    "run by test_partition.py": ("desloc partition",),
    "needs runs: test_report.py": ("desloc report",),
    "needs an extra: test_tracking.py": ("WANDB_MODE=offline", "ls"),
    "needs a ledger: test_account.py": ("python -m flower_desloc.privacy",),
    "makes a key: test_sums.py": ("python -m flower_desloc.secure",),
    "needs a run: test_export.py": ("desloc export",),
    "needs a run: test_final.py": ("lm_eval",),
    "needs a run and transformers[serving]": ("transformers serve", "transformers chat"),
}
"""Why the commands that start so are not tried here."""
OF_ONES_OWN = (
    *("run.init_from", "run.resume=s3", "task_options.base"),
    *("my/own.yaml", "./rest.yaml", "path/to/"),
)
"""What is in a command that needs the result of another one, or the reader's own file."""


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = page.read_text()
        tables = IN_A_TABLE.findall(text) if page.name == "README.md" else []
        for block in [*BLOCK.findall(text), *tables]:
            for line in block.replace("\\\n", " ").splitlines():
                if command := line.partition(" # ")[0].strip():
                    found.append((page.relative_to(ROOT).as_posix(), " ".join(command.split())))
    return [each for each in dict.fromkeys(found) if not each[1].startswith("#")]


def is_elsewhere(command: str) -> bool:
    command = command.removeprefix(".venv/bin/") if "bin/desloc" in command else command
    return any(command.startswith(starts) for starts in NOT_HERE.values())


TRIED = [
    pytest.param(command, id=f"{page}: {command}"[:70])
    for page, command in commands()
    if not is_elsewhere(command)
]


@pytest.mark.parametrize("command", TRIED)
def test_a_command_of_the_documentation_is_accepted(command, tmp_path, monkeypatch):
    command = command.removeprefix(".venv/bin/").partition(" > ")[0]
    command = command.replace("$T", "data.source=DIR data.domains=[wiki,python,math,french]")
    program, what, *rest = shlex.split(command.replace("DIR", str(tmp_path)))
    if program == "python":
        script = ROOT / what
        assert script.exists()
        sources = script.rglob("*.py") if script.is_dir() else [script]
        known = " ".join(path.read_text() for path in sources)
        for word in rest:  # a benchmark takes minutes: its options are those of its functions
            if word.startswith("--"):
                assert re.search(rf"\b{word[2:].replace('-', '_')}\b", known), word
        return
    assert program == "desloc"
    if any(mark in command for mark in OF_ONES_OWN):
        pytest.skip("needs the result of another command, or a file of the reader's own")
    if what == "study":  # test_study.py reads them all, which takes long
        assert (ROOT / rest[0]).exists() or (ROOT / "studies" / f"{rest[0]}.yaml").exists()
        words = [w for before, w in pairwise(rest) if "=" in w and not before.startswith("--")]
        load("quickstart", words)
        return
    if not rest:
        assert "quickstart" in refused(what)  # it lists the presets
        return
    if rest[0].endswith(".yaml"):
        monkeypatch.chdir(ROOT / "examples")
    if "--output-dir" not in rest:
        rest += ["--output-dir", str(tmp_path)]
    # test_preflight.py takes the step.
    monkeypatch.setattr(dry_run, "measured_step", lambda *_: MeasuredStep(1.0, 1))
    accepted(what, *rest, *["--dry-run"] * ("--dry-run" not in rest))


@pytest.mark.skipif(not (which("openssl") and which("ssh-keygen")), reason="they are not installed")
def test_the_pages_certificates_and_keys_are_made_and_accepted(tmp_path):
    tools = ("openssl", "ssh-keygen")
    lines = [
        c
        for page, c in commands()
        if page == "docs/tutorials/three-sites.md" and c.startswith(tools)
    ]
    check = "openssl verify -x509_strict -CAfile ca.crt -verify_hostname fed.example.org server.pem"
    for line in [*lines, check]:
        made = subprocess.run(shlex.split(line), cwd=tmp_path, capture_output=True, text=True)
        assert made.returncode == 0, (line, made.stderr)
    assert (tmp_path / "site-a.pub").read_text().startswith("ecdsa-sha2-nistp384")


def test_every_reason_is_used_and_names_a_test_that_exists():
    found = [command for _, command in commands()]
    found += [command.removeprefix(".venv/bin/") for command in found]
    for why, starts in NOT_HERE.items():
        assert [start for start in starts if not any(c.startswith(start) for c in found)] == []
        for name in re.findall(r"test_\w+\.py", why):
            assert [*(ROOT / "tests").rglob(name)], name
