"""One thread and one Hypothesis profile: every run of the tests is the same run."""

import torch
from hypothesis import settings

settings.register_profile("laws", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("laws")
torch.set_num_threads(1)
