"""The examples, and what the pages about them print, for tests of models and data of one's own."""

import re

from scripts import ROOT
from tiny import TINY

EXAMPLES = ROOT / "examples"
PAGE = "".join(
    (ROOT / "docs" / page).read_text()
    for page in ("tutorials/your-own-app.md", "how-to/own-task.md")
)
SMALL = [
    *(*TINY, "data.batch_size=4", "simulation.num_clients=2"),
    *("run.steps=6", "run.eval_every=6", "sync.params=2", "sync.exp_avg=3"),
]


def printed(mark: str, language: str) -> str:
    """The block of the page between two comments."""
    (block,) = re.findall(rf"<!-- {mark} -->\n```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(block)
