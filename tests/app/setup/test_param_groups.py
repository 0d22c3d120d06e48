"""`optimizer.groups`: parameters by name and kind, with settings of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY, failing_at, summary, train
from torch import nn

from flower_desloc.app.config import Config, ConfigError, dump, load, parse
from flower_desloc.app.plan.from_config import planned_run, planned_streams
from flower_desloc.app.plan.wall_clock import Link
from flower_desloc.app.setup.build import build_lr_schedule, build_optimizer
from flower_desloc.app.setup.param_groups import OPTIMIZER, param_groups, param_kinds
from flower_desloc.app.setup.preflight import Needs
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.app.tasks import Site, build_task
from flower_desloc.core.streams import digest, parameters
from flower_desloc.core.traffic import compressed_bytes, stream_bytes

UNDECAYED = "{kinds: [norms_and_biases], weight_decay: 0}"
HEAD = '{names: ["*embed*"], lr: 0.001, betas: [0.8, 0.99], eps: 1e-6}'
ADAMW = ["optimizer.name=adamw", "optimizer.lr=0.003", "optimizer.weight_decay=0.1"]


def groups(*entries: str) -> str:
    return f"optimizer.groups=[{', '.join(entries)}]"


def config_of(*entries: str, words: list[str] = ADAMW) -> Config:
    return load("quickstart", [*TINY, *words, groups(*entries)])


class Net(nn.Module):
    """One parameter of each sort: a table, matrices, vectors, a scalar, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.conv, self.out = nn.Conv1d(4, 3, 2), nn.Linear(4, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.old = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 2, bias=False)


def members(config: Config, model: nn.Module) -> list[tuple[list[str], dict[str, Any]]]:
    """Return the names in each group, and its settings."""
    names = {id(p): key for key, p in model.named_parameters()}
    found = []
    for group in param_groups(config, model):
        settings = {key: value for key, value in group.items() if key not in ("params", OPTIMIZER)}
        found.append(([names[id(p)] for p in group["params"]], settings))
    return found


def test_every_parameter_is_of_one_kind_and_a_tied_head_is_an_embedding():
    net = Net()
    kinds = {
        "embeddings": ["table.weight"],
        "matrices": ["conv.weight", "out.weight", "old.weight"],
        "head": ["head.weight"],
        "norms_and_biases": ["scale", "norm.weight", "norm.bias", "conv.bias", "old.bias"],
    }
    assert param_kinds(net) == {key: kind for kind, keys in kinds.items() for key in keys}
    net.out.weight = net.table.weight
    assert param_kinds(net)["table.weight"] == "embeddings"
    assert "out.weight" not in param_kinds(net)


def test_entries_claim_what_their_names_and_kinds_both_match_and_the_rest_comes_first():
    entries = ("{names: ['conv.*', norm.*], kinds: [norms_and_biases], lr: 1}",
               "{kinds: [embeddings, head, matrices], options: {}}")  # fmt: skip
    assert members(config_of(*entries), Net()) == [
        (["scale"], {}),
        (["norm.weight", "norm.bias", "conv.bias"], {"lr": 1.0}),
        (["table.weight", "conv.weight", "out.weight", "head.weight"], {}),
    ]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["{names: [out.*, nroms.*]}"], ["groups[0].names=nroms.*: matches no trained parameter"]),
        (["{names: [old.*]}"], ["names=old.*: matches no trained parameter", "conv.bias"]),
        (["{names: [out.*], kinds: [embeddings]}"], ["of kinds=['embeddings']", "table.weight"]),
        (["{kinds: [matrices]}", "{names: ['*.weight']}"],
         ["groups[0] and optimizer.groups[1]: both name the parameter 'conv.weight'"]),
    ],
)  # fmt: skip
def test_a_name_without_a_match_and_a_parameter_of_two_entries_are_refused(entries, words):
    with pytest.raises(ConfigError) as error:
        param_groups(config_of(*entries), Net())
    assert not [word for word in words if word not in str(error.value)]


def test_a_kind_that_the_model_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"groups\[0\]\.kinds=.*its kinds are head"):
        param_groups(config_of("{kinds: [embeddings]}"), nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([groups("{lr: 1}")], r"^optimizer\.groups\[0\]: names no parameters"),
        ([groups(UNDECAYED, "{kinds: [norms]}")], r"groups\[1\]\.kinds=norms: must be one of"),
        ([groups("{names: [a], lr: -1}")], r"groups\[0\]\.lr=-1\.0: must be at least 0"),
        ([groups("{names: [a], wd: 1}")], r"groups\[0\]\.wd: no such key"),
        ([groups("{names: [a], momentum: 0.5}")], r"\.momentum: optimizer.name=adamw has no such"),
        ([groups("{names: [a], betas: [0.9]}")], r"\.betas=\[0\.9\]: takes 2 values where"),
        ([groups("{names: [a], options: {nu: 1}}")], r"\.options\.nu: .* has lr, betas, eps, weig"),
        (["optimizer.name=torch.optim:SGD", "optimizer.lr=1", groups(UNDECAYED)],
         r"groups\[0\]\.weight_decay: .*state options: {weight_decay: VALUE}"),
    ],
)  # fmt: skip
def test_an_entry_that_no_model_could_have_is_refused_when_the_file_is_read(words, said):
    with pytest.raises(ConfigError, match=said):
        load("quickstart", words)


def test_groups_are_written_and_read_back_and_end_with_their_optimizer():
    config = config_of(UNDECAYED, HEAD)
    assert parse(dump(config)) == config
    assert load("quickstart", [groups(UNDECAYED), "optimizer.name=adamw"]).optimizer.groups
    preset = [groups("{kinds: [matrices], betas: [0.9, 0.9]}")]
    assert load("quickstart", preset).optimizer.groups[0].betas == (0.9, 0.9)


def test_a_file_that_names_another_optimizer_drops_the_groups_of_the_one_below(tmp_path):
    (tmp_path / "below.yaml").write_text(
        "extends: quickstart\noptimizer: {groups: [{names: ['*'], betas: [0.9, 0.9]}]}\n"
    )
    above = tmp_path / "above.yaml"
    above.write_text("extends: below.yaml\n")
    assert load(str(above)).optimizer.groups
    words = "optimizer.name=sgdm optimizer.lr=0.1 sync={params: 8, momentum_buffer: 8}"
    assert not load(str(above), words).optimizer.groups


def test_an_optimizer_of_another_package_takes_options_that_it_has():
    sgd = ["optimizer.name=torch.optim:SGD", "optimizer.lr=0.1", "optimizer.options.momentum=0.9"]
    sync = ["sync.exp_avg=null", "sync.exp_avg_sq=null", "sync.momentum_buffer=2"]
    entry = "{kinds: [matrices], options: {weight_decay: 0.1}}"
    config = config_of(entry, words=[*sgd, *sync])
    RunStreams(config).check()
    [rest, matrices] = build_optimizer(config, param_groups(config, Net())).param_groups
    assert (rest["weight_decay"], matrices["weight_decay"]) == (0, 0.1)
    config = config_of(entry.replace("decay", "decoy"), words=[*sgd, *sync])
    with pytest.raises(ConfigError, match=r"options\.weight_decoy: .* \(did you mean weight_decay"):
        build_optimizer(config, param_groups(config, Net()))


def test_a_plan_is_made_for_the_state_that_forgets_most_slowly_and_for_any_decay():
    words = ["optimizer.name=adam", "optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0"]
    plain = {s.name: s for s in planned_streams(RunStreams(config_of(UNDECAYED, words=words)))}
    assert (plain["exp_avg"].beta, plain["exp_avg"].ceiling) == (0.9, 1.0)
    entry = "{kinds: [matrices], betas: [0.8, 0.99], weight_decay: 0.1}"
    mixed = {s.name: s for s in planned_streams(RunStreams(config_of(entry, words=words)))}
    assert [mixed[name].beta for name in ("exp_avg", "exp_avg_sq")] == [0.9, 0.99]
    assert mixed["exp_avg"].ceiling is None  # decay enters the gradients of some


EVERY_STEP = ["sync={params: 1, exp_avg: 1, exp_avg_sq: 1}", "run.steps=5"]
SHORT = [*TINY, *ADAMW, *EVERY_STEP, "lr_schedule.name=cosine", "simulation.num_clients=1"]


def adamw_of(model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizer of GPT recipes."""
    embedding = model.get_input_embeddings().weight
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p is not embedding]
    own: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
        {"params": [embedding], "lr": 0.001, "betas": (0.8, 0.99), "eps": 1e-6},
    ]
    return [torch.optim.AdamW(own, lr=0.003, betas=(0.9, 0.95), weight_decay=0.1, fused=True)]


def muon_and_adamw_of(model: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of nanochat-like recipes."""
    blocks = [p for p in model.model.layers.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    heads = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    scaled: dict[str, Any] = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
    own: list[dict[str, Any]] = [{"params": heads}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(blocks, lr=0.003, weight_decay=0.1, **scaled),
        torch.optim.AdamW(own, lr=0.003, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
    ]


Optimizers = Callable[[Any], list[torch.optim.Optimizer]]


def in_a_plain_loop(config: Config, optimizers_of: Optimizers = adamw_of) -> str:
    """Train as one does it in PyTorch; return the hash of the weights."""
    task = build_task(config)
    model: Any = task.build_model()
    data = task.client_data(Site(0, 1))
    optimizers = optimizers_of(model)
    rate = build_lr_schedule(config)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    takers: list[Any] = [*optimizers, *schedulers]
    model.train()
    for step in range(config.run.steps):
        model.zero_grad()
        task.loss(model, data.train_batch(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for taker in takers:
            taker.step()
    return digest(parameters(model))


def weights(folder: Path) -> str:
    return str(summary(folder)["weights_sha256"])


def test_a_recipe_equals_the_plain_loop_to_the_bit_also_after_a_resume(tmp_path):
    words = [*SHORT, groups(UNDECAYED, HEAD)]
    expected = in_a_plain_loop(load("quickstart", words))
    with failing_at(3):
        train(tmp_path, *words, clients=1)
    resumed = train(tmp_path, *words, "run.resume=auto", clients=1)
    assert weights(resumed) == expected


def test_data_parallelism_takes_the_same_groups(tmp_path):
    words = [*SHORT, groups(UNDECAYED, HEAD)]
    expected = in_a_plain_loop(load("quickstart", words))
    words = [word for word in words if not word.startswith("sync")]
    assert weights(train(tmp_path, *words, "sync.gradients=1", clients=1)) == expected


def test_entries_of_equal_settings_change_no_bit(tmp_path):
    words = [*TINY, *ADAMW, "run.steps=4", "sync.params=2", "sync_delay=1"]
    entry = "{kinds: [norms_and_biases, embeddings], weight_decay: 0.1, betas: [0.9, 0.95]}"
    one = train(tmp_path, *words)
    assert weights(train(tmp_path, *words, groups(entry))) == weights(one)


def test_a_run_whose_group_has_no_bound_is_warned(tmp_path, caplog):
    entry = "{kinds: [matrices], betas: [0.99, 0.9]}"
    train(tmp_path, *TINY, groups(entry), "run.steps=1")
    assert "exp_avg has no bound in some of optimizer.groups" in caplog.text


# ----------------------------------------------------------------------------- Several optimizers

MUON = ["optimizer.name=muon", "optimizer.lr=0.003", "model.tie_word_embeddings=false"]
OF_MUON = ["sync={params: 1, momentum_buffer: 1, exp_avg: 1, exp_avg_sq: 1}"]


def test_muon_beside_adamw_equals_the_plain_loop_to_the_bit_also_after_a_resume(tmp_path):
    words = [*SHORT, *MUON, *OF_MUON, groups(UNDECAYED)]
    expected = in_a_plain_loop(load("quickstart", words), muon_and_adamw_of)
    with failing_at(3):
        train(tmp_path, *words, clients=1)
    resumed = train(tmp_path, *words, "run.resume=auto", clients=1)
    assert weights(resumed) == expected
    model = build_task(load("quickstart", words)).build_model()
    sizes = stream_bytes(RunStreams(load("quickstart", words)).initial(model))
    assert summary(resumed)["stream_bytes"] == sizes
    assert summary(resumed)["bytes"]["measured"]["up"] == {
        **{name: 5 * size for name, size in sizes.items()},
        "total": 5 * sum(sizes.values()),
    }


def test_entries_that_name_an_optimizer_are_the_same_optimizer(tmp_path):
    """Muon of the section, beside an entry of AdamW, or of an entry, beside AdamW's section."""
    words = [*TINY, "run.steps=4", "optimizer.lr=0.003", "sync.momentum_buffer=2"]
    of_muon = train(tmp_path, *words, "optimizer.name=muon")
    entry = groups("{kinds: [matrices], name: muon}")
    adamw = ["optimizer.name=adamw", "optimizer.weight_decay=0.1", entry]
    assert weights(train(tmp_path, *words, *adamw)) == weights(of_muon)


def test_estimates_have_a_stream_of_some_parameters_at_its_size():
    formats = "compression={params: int8, momentum_buffer: int4, exp_avg_sq: bf16}"
    config = load("quickstart", [*TINY, *MUON, "sync.momentum_buffer=16", formats])
    needs, model = Needs(config), build_task(config).build_model()
    streams = RunStreams(config).initial(model)
    assert needs.sizes == stream_bytes(streams)
    assert needs.compressed == compressed_bytes(streams, config.compression, {})
    assert needs.state_bytes == sum(needs.sizes.values()) - needs.sizes["params"]
    run = planned_run(config, Link(bandwidth=1e6, latency=0.0), mfu=0.4)
    assert run.sizes == pytest.approx(needs.sizes)
    by_name = {stream.name: stream for stream in run.streams}
    assert (by_name["momentum_buffer"].beta, by_name["momentum_buffer"].ceiling) == (0.95, 1.0)


class Matrices(nn.Module):
    """A model of hidden matrices only, as the trained ones of adapters are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.head = nn.Linear(4, 2).requires_grad_(False)


@pytest.mark.parametrize("states", [["momentum_buffer"], ["momentum_buffer", "exp_avg"]], ids=str)
def test_a_stream_that_no_trained_parameter_has_needs_no_period(states, monkeypatch):
    left_out = [f"sync.{name}=null" for name in ("exp_avg", "exp_avg_sq") if name not in states]
    stated = [f"sync.{name}=16" for name in states]
    config = load("quickstart", [*TINY, *MUON, *left_out, *stated])
    RunStreams(config).check()  # there may be such models,
    monkeypatch.setattr(Needs, "model", Matrices())
    needs = Needs(config)  # and this is one
    if states == ["momentum_buffer"]:
        needs.check()
        assert needs.sizes.keys() == {"params", "momentum_buffer"}
        return
    for refused in (needs.check, lambda: needs.sizes):
        with pytest.raises(ConfigError, match=r"sync.exp_avg: muon has no stream of that name"):
            refused()


def test_what_late_averages_cannot_merge_is_refused_also_in_an_entry():
    words = ["optimizer.name=amsgrad", "sync.max_exp_avg_sq=16", "sync.momentum_buffer=16"]
    entry = "{kinds: [norms_and_biases], name: sgdm, lr: 0.1}"
    RunStreams(config_of(entry, words=words)).check()
    with pytest.raises(ConfigError, match=r"sync_delay=1: .*max_exp_avg_sq.* set sync_delay=0"):
        RunStreams(config_of(entry, words=[*words, "sync_delay=1"])).check()


def test_hidden_matrices_train_by_muon_and_the_rest_by_adamw():
    entry = "{names: [conv.*], betas: [0.8, 0.9]}"
    words = ["optimizer.name=muon", "optimizer.lr=0.003"]
    model = Net()
    found = param_groups(config_of(entry, words=words), model)
    names = {id(p): key for key, p in model.named_parameters()}
    assert [(g[OPTIMIZER], sorted(names[id(p)] for p in g["params"])) for g in found] == [
        ("muon", ["out.weight"]),
        ("adamw", ["head.weight", "norm.bias", "norm.weight", "scale", "table.weight"]),
        ("adamw", ["conv.bias", "conv.weight"]),  # of three dimensions
    ]
    assert found[-1]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("words", "entries", "model", "said"),
    [
        (["optimizer.name=muon"], [], nn.Linear(2, 2), "name=muon: it trains hidden matrices"),
        (ADAMW, ["{kinds: [head], name: muon}"], Net(), r"groups\[0\]\.name=muon: it trains hid"),
        (["optimizer.name=muon"], ["{names: [out.*], betas: [0.9, 0.9]}"], Net(),
         r"groups\[0\]\.betas: the parameters of this entry train by muon, which has no such"),
        (["optimizer.name=muon"], ["{kinds: [head], momentum: 0.9}"], Net(),
         r"groups\[0\]\.momentum: .* train by adamw, which has no such"),
    ],
)  # fmt: skip
def test_an_optimizer_or_a_setting_of_no_parameter_is_refused(words, entries, model, said):
    with pytest.raises(ConfigError, match=said):
        param_groups(config_of(*entries, words=words), model)


def test_an_entry_of_another_optimizer_has_its_own_settings_and_rate():
    def refused(entry: str, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            config_of(entry)

    refused("{names: [a], name: sgdm}", r"name=sgdm: also state lr, because .* is for")
    refused("{names: [a], name: sgdm, lr: 1, betas: [0.9, 0.9]}", "name=sgdm has no such setting")
    refused("{names: [a], name: sgd}", r"groups\[0\]\.name=sgd: must be one of adopt, adam,")
    config = config_of("{names: [out.*], name: sgdm, lr: 1}")
    adamw, sgdm = build_optimizer(config, param_groups(config, Net())).param_groups
    assert (sgdm["lr"], sgdm["momentum"], sgdm["weight_decay"]) == (1.0, 0.9, 0.0)
    assert adamw["weight_decay"] == 0.1
