"""Secure sums over TLS, between processes: the weights of a plain run."""

import pytest
import torch
from command import accepted
from safetensors.torch import load_file
from tiny import TINY, train


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_four_supernodes_that_hide_their_streams_end_with_the_plain_weights(tmp_path):
    words = [*TINY, "run.steps=4", "run.eval_every=0", "evaluation.central=false"]
    words += ["sync.params=2", "sync.exp_avg=4", "sync.exp_avg_sq=4"]
    secure = ["privacy.secure_aggregation=true", "federation.min_clients=3"]
    output = ["--nodes", 4, "--output-dir", tmp_path / "secure"]
    said = accepted("federate", "quickstart", *words, *secure, *output)
    assert "4 SuperNodes online" in said
    plain = train(tmp_path / "plain", *words, "evaluation.federated=false", clients=4)
    (ours,) = (tmp_path / "secure").glob("*/final/model.safetensors")
    one, other = load_file(ours), load_file(plain / "final" / "model.safetensors")
    for key in one:  # the steps after an average carry its rounding on
        torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-7)
