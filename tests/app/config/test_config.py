"""Laws of the configuration: typed once, and one clear sentence for whatever is wrong."""

import dataclasses
import json
import re
from contextlib import nullcontext

import pytest
import yaml
from configurations import with_values
from hypothesis import given
from hypothesis import strategies as st

from flower_desloc.app.config import (
    PRESETS,
    Config,
    ConfigError,
    dump,
    load,
    load_run_config,
    parse,
)
from flower_desloc.app.config.check import check_clients, why_not_evaluated
from flower_desloc.app.config.overrides import override, split_arguments
from flower_desloc.app.config.paths import absolute_paths
from flower_desloc.app.config.run_config import SETTINGS, app_run_config
from flower_desloc.app.config.schema import Optimizer
from flower_desloc.app.setup.streams import RunStreams
from flower_desloc.optim import OPTIMIZERS

NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))


def quickstart(overrides=()):
    return load("quickstart", overrides)


def assert_refused(parts, call, *arguments, **options):
    """Fail unless the call is refused in one line that has all of ``parts``."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert isinstance(error.value, ValueError)
    assert "\n" not in message
    assert not [part for part in parts if part not in message], message


@pytest.fixture
def presets(tmp_path):
    """Write files into a folder of presets: ``presets(base="run: ...", child="extends: base")``."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="latin-1")
        return tmp_path

    return write


BASE = "run: {steps: 96}\noptimizer: {name: adam, lr: 0.5}\nsync: {params: 4, exp_avg: 8}\n"

# ----------------------------------------------------------------------------------------- Presets


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_by_name_and_path_and_says_first_what_it_is_for(name):
    by_name, path = load(name), PRESETS / f"{name}.yaml"
    assert by_name.run.name == name
    assert load(str(path)) == by_name
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_dumped_parses_to_itself(name):
    config = load(name, "run.seed=7 optimizer.clip_norm=null federation.attendance.96=2")
    assert parse(dump(config)) == config
    assert dump(parse(dump(config))) == dump(config)


LOOKS_LIKE_SOMETHING_ELSE = r"""
007 010 0o10 2026_01_05 2024-01-05 1:30 1e3 1e-8 .5 0x1F 1_000 .inf nan yes No on y true null ~ ???
${oc.env:HOME} = a:1 a,b x#y * @x %x `x 'tis a'b - << !x &x | C:\x ü
"""
TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [
        *LOOKS_LIKE_SOMETHING_ELSE.split(),
        "",
        "a: b",
        " x ",
        "#x",
        "'007'",
        '"a b"',
        "[x, y]",
        "\u2028",
    ]
)


@pytest.mark.parametrize("text", LOOKS_LIKE_SOMETHING_ELSE.split())
def test_a_setting_of_type_text_takes_what_was_typed(presets, text):
    config = quickstart([f"data.text_field={text}"])
    assert config.data.text_field == text
    assert from_run_config(overrides=f"data.text_field={text} run.seed=3").data.text_field == text
    assert parse(dump(config)) == config
    if not any(char in text for char in "'@%`!&|*,?$ü"):
        assert quickstart([f"data.domains=[{text},x]"]).data.domains == [text, "x"]
        folder = presets(base=BASE, mine=f"extends: base\ndata: {{text_field: {text}, source: x}}")
        assert load("mine", presets=folder).data.text_field == text


@given(TEXTS, st.lists(TEXTS), st.dictionaries(TEXTS, TEXTS | st.lists(TEXTS) | st.integers()))
def test_every_text_survives_the_command_line_and_the_file(text, texts, options):
    words = [
        override("task", "mine:Task"),
        override("data.source", text),
        override("data.domains", texts),
        override("task_options", options),
    ]
    config = quickstart(words)
    assert (config.data.source, config.data.domains) == (text, texts)
    assert config.task_options == options
    assert from_run_config(overrides=" ".join(words)) == config
    assert parse(dump(config)) == config
    assert dump(parse(dump(config))) == dump(config)
    assert yaml.safe_load(dump(config)) == json.loads(json.dumps(dataclasses.asdict(config)))


def test_numbers_follow_yaml_1_2():
    numbers = {"010": 10, "0o10": 8, "0x1F": 31, "+7": 7}
    assert {text: quickstart(f"run.seed={text}").run.seed for text in numbers} == numbers
    assert quickstart("optimizer.lr=1e-8").optimizer.lr == 1e-8
    options = quickstart("task=a:b task_options={a: 1e-3, b: yes, c: 2026_01_05, d: 1:30, e: .inf}")
    assert options.task_options == {
        "a": 1e-3, "b": "yes", "c": "2026_01_05", "d": "1:30", "e": float("inf")
    }  # fmt: skip


def test_the_key_of_a_dictionary_is_a_text_or_a_step():
    assert quickstart("federation.attendance={0: 4, 96: 3}").federation.attendance == {0: 4, 96: 3}
    assert quickstart("task=a:b task_options.yes=1").task_options == {"yes": 1}
    assert_refused(["attendance=now", "integer"], quickstart, "federation.attendance.now=3")


def test_a_dump_states_every_setting_in_plain_yaml():
    config = quickstart()
    assert yaml.safe_load(dump(config)) == json.loads(json.dumps(dataclasses.asdict(config)))


def test_a_configuration_is_plain_typed_objects():
    config = quickstart("optimizer.lr=1 data.domains=[a,b]")
    assert isinstance(config, Config)
    assert isinstance(config.optimizer.lr, float)
    assert isinstance(config.optimizer.betas, tuple)
    assert config.data.domains == ["a", "b"]
    assert (type(config.sync), type(config.data.domains)) == (dict, list)


# --------------------------------------------------------------------------------------- Overrides


@pytest.mark.parametrize(
    "overrides",
    [
        "  sync.params=32   optimizer.eps=1e-5\trun.seed=3 ",
        ("run.seed=9", "sync.params=32", "optimizer.eps=1e-5", "run.seed=3"),
    ],
)
def test_overrides_win_as_text_or_list_and_the_last_one_wins(overrides):
    expected = quickstart()
    expected.sync["params"] = 32
    expected = with_values(expected, {"optimizer.eps": 1e-5, "run.seed": 3})
    assert quickstart(overrides) == expected


def test_blanks_in_the_brackets_or_quotes_around_a_value_separate_no_overrides():
    for overrides in (["data.domains=[a b, c]"], " data.domains=[a b, c]  run.seed=0 "):
        assert quickstart(overrides).data.domains == ["a b", "c"]
    assert quickstart("data.source='my  file' run.seed=3").data.source == "my  file"
    assert quickstart("data.source='tis run.seed=3").data.source == "'tis"


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        (" data.source=/tmp/my data ", {"data.source": "/tmp/my data"}),
        ("data.source=/tmp/my a=b", {"data.source": "/tmp/my a=b"}),
        ("data.source=/tmp/my  a.b=c run.seed=3", {"data.source": "/tmp/my  a.b=c", "run.seed": 3}),
        ("run.seed=3 data.source=/tmp/my data", {"data.source": "/tmp/my data", "run.seed": 3}),
        ("data.source='my data' run.seed=3", {"data.source": "my data", "run.seed": 3}),
        ("run.seed=3\ttask=causal_lm", {"run.seed": 3, "task": "causal_lm"}),
    ],
)
def test_an_argument_is_split_only_before_a_setting(argument, meant):
    words = split_arguments([argument])
    assert quickstart(words) == with_values(quickstart(), meant)
    assert quickstart(" ".join(words)) == quickstart(words)  # as it is sent to the app


def test_a_misspelt_setting_of_an_argument_is_named():
    with pytest.raises(ConfigError, match=r"run\.sede"):
        quickstart(split_arguments(["run.steps=4 run.sede=3"]))


def test_paths_anywhere_in_the_options_of_a_task_become_absolute(tmp_path, monkeypatch):
    (tmp_path / "a b").touch()
    monkeypatch.chdir(tmp_path)
    options = {"one": "./a b", "all": ["./a b", "a b", 3], "deep": {"x": ["./a b"], "y": "./c"}}
    words = ["task=own:Task", *(override(f"task_options.{k}", v) for k, v in options.items())]
    assert not absolute_paths(quickstart("data.source=org/name"))  # on the Hub
    found = absolute_paths(quickstart(words))
    there = str(tmp_path / "a b")
    expected = {"one": there, "all": [there, "a b", 3], "deep": {"x": [there], "y": "./c"}}
    assert found == {f"task_options.{key}": value for key, value in expected.items()}
    again = [*words, *(override(key, value) for key, value in found.items())]
    assert quickstart(again).task_options == expected
    assert not absolute_paths(quickstart(again))


def test_loading_twice_shares_nothing():
    one, two = quickstart(), quickstart()
    one.sync["params"] = 1
    one.data.domains.append("x")
    assert two == quickstart()


# --------------------------------------------------------------------------------------- Optimizer


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch.optim:RAdam"])
@pytest.mark.parametrize("preset", ["quickstart", "desloc_adopt", "desloc_sgdm", "diloco"])
def test_another_optimizer_brings_its_own_defaults_and_needs_its_own_rate(preset, name):
    before = load(preset).optimizer
    after = load(preset, f"optimizer.name={name} optimizer.lr=0.5").optimizer
    if name == before.name:
        assert after == dataclasses.replace(before, lr=0.5)
        return
    own = dict(OPTIMIZERS[name].all_settings) if name in OPTIMIZERS else {}
    options = {key: own.pop(key) for key in [*own] if not hasattr(before, key)}
    kept = dataclasses.replace(Optimizer(), clip_norm=before.clip_norm, name=name, lr=0.5)
    assert after == dataclasses.replace(kept, **own, options=options)
    if name in OPTIMIZERS and OPTIMIZERS[name].shares_rate(OPTIMIZERS[before.name]):
        assert load(preset, f"optimizer.name={name}").optimizer.lr == before.lr
    else:
        stated = f"optimizer.lr={before.lr} was chosen for {before.name}"
        assert_refused(["also set optimizer.lr", stated], load, preset, f"optimizer.name={name}")


def test_what_a_file_or_the_user_states_for_an_optimizer_stays(presets):
    folder = presets(
        base=BASE + "data: {seq_len: 16}",
        child="extends: base\noptimizer: {name: adopt, betas: [0.5, 0.6]}",
        alone="optimizer: {name: adam, lr: 0.1}\nsync: {params: 4}",
        without="optimizer: {name: adam}\nsync: {params: 4}",
    )

    def optimizer(name, overrides=""):
        return load(name, overrides, presets=folder).optimizer

    assert_refused(["optimizer.name=adopt", "0.5 was chosen for adam"], optimizer, "child")
    assert_refused(["0.0021 was chosen for adopt", "eps=1e-08"], optimizer, "without")
    child = optimizer("child", "optimizer.lr=0.2 optimizer.weight_decay=0.1")
    assert (child.lr, child.betas, child.eps) == (0.2, (0.5, 0.6), 1e-6)
    assert child.weight_decay == 0.1
    assert optimizer("child", "optimizer.name=adamw").lr == 0.5  # that of the base
    assert optimizer("child", "optimizer.name=adam optimizer.eps=1e-5").betas == (0.9, 0.95)
    assert optimizer("alone").eps == 1e-8
    assert optimizer("base").betas == (0.9, 0.95)


# ---------------------------------------------------------------------------- Data parallelism


@pytest.mark.parametrize("name", NAMES)
def test_one_override_makes_any_preset_data_parallel(name):
    before = load(name)
    if before.strategy != "desloc":
        assert_refused(["set strategy=desloc"], load, name, "sync.gradients=1")
        config = load(name, "strategy=desloc sync.gradients=1")
    else:
        config = load(name, "sync.gradients=1")
    assert config.sync == {"gradients": 1}
    assert RunStreams(config).schedule.periods == config.sync
    assert (config.outer, config.compression) == (Config().outer, {})
    assert (config.optimizer, config.model, config.data) == (
        before.optimizer, before.model, before.data,
    )  # fmt: skip
    steps = before.sync.get("params", 1)  # a window is one step, and checkpoints are as far apart
    assert config.run.checkpoint_every == before.run.checkpoint_every * steps
    assert (
        load(name, "strategy=desloc sync.gradients=1 run.checkpoint_every=5").run.checkpoint_every
        == 5
    )


@pytest.mark.parametrize("other", ["sync.params=4", "sync_delay=2", "outer.name=sgd"])
def test_what_is_stated_with_gradients_and_has_no_effect_is_refused(other):
    assert_refused(
        ["gradients", other.partition("=")[0].split(".")[-1]],
        quickstart,
        f"sync.gradients=1 {other}",
    )


# -------------------------------------------------------------------------------------- Run config

# what a user types after --run-config, for each key
TYPED: dict[str, str | int | float] = {
    "num-steps": 96,
    "params-period": 8,
    "exp-avg-period": 24,
    "exp-avg-sq-period": "never",
    "learning-rate": 0.003,
    "batch-size": 4,
    "fraction-train": 0.5,
    "seed": 3,
}


def from_run_config(**keys):
    return load_run_config({**app_run_config(), **{k.replace("_", "-"): keys[k] for k in keys}})


def test_the_apps_own_run_config_is_the_quickstart():
    found = app_run_config()
    assert dict(found) == {
        "config": "quickstart", "overrides": "", "output-dir": "runs", **dict.fromkeys(SETTINGS, "")
    }  # fmt: skip
    assert load_run_config(found) == quickstart()


def test_a_key_of_the_run_config_is_its_setting():
    assert list(TYPED) == list(SETTINGS)
    for key, value in TYPED.items():
        config = load_run_config({**app_run_config(), key: value})
        assert config == quickstart(f"{SETTINGS[key]}={value}") != quickstart()


def test_overrides_win_over_the_keys_and_these_over_the_preset(presets):
    file = presets(mine="extends: quickstart\noptimizer: {lr: 0.5}\nrun: {seed: 7}\n") / "mine.yaml"
    stated = {"config": str(file), "learning_rate": 0.25, "exp_avg_period": 32}
    config = from_run_config(**stated, overrides="sync.exp_avg=64")
    assert (config.run.seed, config.optimizer.lr, config.sync["exp_avg"]) == (7, 0.25, 64)
    assert from_run_config(**stated).sync == quickstart().sync | {"exp_avg": 32}


def test_a_deployment_may_have_more_sites_than_a_simulation_has_clients():
    overrides = "federation.min_clients=6 federation.attendance.96=7"
    config = from_run_config(overrides=overrides)
    assert (config.simulation.num_clients, config.federation.min_clients) == (4, 6)


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"learning_rte": 1}, ["learning-rte: no such key", "did you mean learning-rate?"]),
        ({"learning_rate": True}, ["optimizer.lr=True: must be a number", "learning-rate=True"]),
        ({"seed": 1.5}, ["run.seed=1.5: must be an integer", "seed=1.5"]),
        ({"exp_avg_period": "nver"}, ["'exp_avg' must be", "got 'nver'", "exp-avg-period=nver"]),
        ({"overrides": "run.seed=x"}, ["run.seed=x: must be an integer"]),
    ],
)
def test_a_wrong_run_config_is_refused_with_its_keys(keys, parts):
    assert_refused(parts, from_run_config, **keys)


# ----------------------------------------------------------------------------------------- Extends


def test_a_file_anywhere_extends_a_preset_and_changes_what_it_states(presets, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "mine.yaml"
    path.write_text("extends: base\noptimizer: {lr: 0.25}\n")
    config = load(str(path), presets=presets(base=BASE))
    assert (config.run.steps, config.optimizer.name, config.optimizer.lr) == (96, "adam", 0.25)
    assert config.sync == {"params": 4, "exp_avg": 8}


def test_a_childs_sync_replaces_its_parents_and_overrides_merge(presets):
    """Else SGDM's child of an Adam preset would keep a clock for ``exp_avg``."""
    folder = presets(
        base=BASE,
        child="extends: base\nsync: {params: 3, momentum_buffer: never}\n",
        grandchild="extends: child\nrun: {seed: 1}\n",
    )
    own = {"params": 3, "momentum_buffer": "never"}
    assert load("grandchild", presets=folder).sync == own
    assert load("child", "sync.params=9", presets=folder).sync == own | {"params": 9}
    assert load("base", "sync.params=9", presets=folder).sync == {"params": 9, "exp_avg": 8}
    assert load("base", "sync.exp_avg=null", presets=folder).sync == {"params": 4}


def test_an_empty_dictionary_clears_what_is_below_it_and_overrides_fill_it_again(presets):
    more = "task: own:Task\ncompression: {params: int8}\ntask_options: {a: 1}\n"
    folder = presets(base=BASE + more)
    assert load("base", "compression={} task_options={} run={}", presets=folder).run.steps == 96
    words = "task_options.c=3 sync={} compression={} task_options={} sync.params=3 task_options.b=2"
    filled = load("base", words, presets=folder)
    assert (filled.sync, filled.compression, filled.task_options) == ({"params": 3}, {}, {"b": 2})


def test_periods_that_another_optimizer_lacks_are_left_out_by_what_the_error_names():
    """A preset's periods are merged, so there has to be a word that removes one."""
    words = "optimizer.name=sgdm optimizer.lr=0.1 sync={params: 8, momentum_buffer: 16}"
    overrides = words.split(" ", 2)
    remedies = ("sync.exp_avg=null", "sync.exp_avg_sq=null")
    parts = ["sync.exp_avg", "sgdm has no stream of that name", " ".join(remedies)]
    assert_refused(parts, RunStreams(load("quickstart", overrides)).check)
    config = load("quickstart", [*overrides, *remedies])
    RunStreams(config).check()
    assert config.sync == {"params": 8, "momentum_buffer": 16}


def test_a_run_is_named_after_its_file_unless_it_says(presets):
    folder = presets(
        plain=BASE,
        named="extends: plain\nrun: {name: mine}\n",
        child="extends: named\n",
        grandchild="extends: plain\n",
    )
    names = {"plain": "plain", "named": "mine", "child": "mine", "grandchild": "grandchild"}
    assert {file: load(file, presets=folder).run.name for file in names} == names
    assert load("named", "run.name=yours", presets=folder).run.name == "yours"


def test_a_circle_of_files_is_refused(presets):
    folder = presets(a="extends: b\n", b="extends: c\n", c="extends: b\n")
    assert_refused(["b.yaml extends itself"], load, "a", presets=folder)


# ------------------------------------------------------------------------------------------ Errors

# override -> what the one line must say: the key, the value, and what is allowed. Of the ranges and
# words of single settings, which the schema states, one of each kind.
WRONG = {
    "optimzer.lr=1": ["optimzer", "did you mean optimizer?", "lr_schedule", "sync"],
    "optimizer.lrr=1": ["optimizer.lrr", "did you mean lr?", "betas", "weight_decay"],
    "optimizer=adam": ["optimizer=adam", "section", "optimizer.KEY=VALUE"],
    "extends=quickstart": ["extends: no such key"],
    "optimizer.alpha=3": ["an argument of its own is optimizer.options.alpha"],
    "run.steps=12 lr_schedule.decay_steps=12": [
        "lr_schedule.warmup_steps=1 and lr_schedule.decay_steps=12",
        "do not fit into run.steps=12",
    ],
    "run.trackers=[wandb,comet]": ["run.trackers=comet", "wandb, mlflow, trackio"],
    "run.copy_to=s3//bucket/runs": ["run.copy_to=s3//bucket/runs", "s3://bucket/runs"],
    "run.copy_to=/mnt/runs": ["run.copy_to=/mnt/runs", "file:///mnt/runs"],
    "run.copy_to=file://runs": ["run.copy_to=file://runs", "file:///mnt/runs"],
    "run.seed": ["'run.seed'", "key=value"],
    "=5": ["'=5'", "key=value"],
    "run.steps=many": ["run.steps=many", "must be an integer"],
    "run.steps=true": ["run.steps=true", "must be an integer"],
    "privacy.epsilon=0": ["privacy.epsilon=0", "must be above 0"],
    "run.steps=null": ["run.steps=null", "needs a value"],
    "compression.params=null": ["compression.params=null", "fp32, bf16, int8, int4"],
    "compression=int8": ["compression=int8", "set compression.NAME=VALUE"],
    "optimizer.betas=3": ["optimizer.betas=3", "a list"],
    "data.domains=web": ["data.domains=web", "set data.domains=[A,B]"],
    "run.steps=0": ["run.steps=0", "at least 1"],
    "run.keep_best=loss run.patience=0": ["run.patience=0", "at least 1"],
    "run.steps=[1": ["run.steps=[1"],
    "run.seed=4294967296": ["run.seed=4294967296", "at most 4294967295"],
    "run.name=a/b": ["run.name=a/b", "letters, digits"],
    "run.name=.a": ["run.name=.a", "must not begin with"],
    "run.steps=???": ["run.steps"],
    "model.dtype=float16": ["model.dtype=float16", "float32, float64"],
    "model.hidden_size=130": ["model.num_attention_heads=4", "divide", "model.hidden_size=130"],
    "data.partition=random": ["data.partition=random", "iid, by_domain, dirichlet"],
    "data.partition=column:": ["data.partition=column:", "data.partition=column:hospital"],
    "data.partition=column:a data.domain_field=b": ["data.domain_field=b", "column:a"],
    "data.domains=code": ["data.domains=code"],
    "data.micro_batch_size=all": ["data.micro_batch_size=all", "at least 1, auto or null"],
    "data.micro_batch_size=0": ["data.micro_batch_size=0", "at least 1, auto or null"],
    "data.micro_batch_size=3": ["data.micro_batch_size=3", "must divide data.batch_size=8"],
    "data.source=\udcff": ["data.source=\\udcff", "not UTF-8"],
    "data.alpha=.nan": ["data.alpha=nan", "at least 1e-06"],
    "data.alpha=nan": ["data.alpha=nan", "must be a number"],
    "optimizer.name=adm": ["optimizer.name=adm", ", ".join(OPTIMIZERS)],
    "optimizer.lr=inf": ["optimizer.lr=inf"],
    "optimizer.betas=[0.9,1.0]": ["optimizer.betas=[0.9, 1.0]", "below 1"],
    "optimizer.betas=[0.9]": ["optimizer.betas=[0.9]", "takes 2 values"],
    "optimizer.betas=[0.9,0.9,0.9]": ["optimizer.betas=[0.9, 0.9, 0.9]", "takes 2 values"],
    "optimizer.lr=fast": ["optimizer.lr=fast", "must be a number"],
    "optimizer.momentum=0.8": ["optimizer.momentum=0.8", "adamw has no such setting"],
    "sync=5": ["sync=5", "set sync.NAME=VALUE"],
    "sync={params:8}": ["sync={params:8}", "write {params: 8}, with a blank after the colon"],
    "sync.params=0": ["sync", "'params'", "positive integer, 'never' or 'reset'", "got 0"],
    "compression.params=int7": ["compression.params=int7", "fp32, bf16, int8, int4"],
    "compression.exp_avgs=int8": ["compression.exp_avgs", "it has params, exp_avg, exp_avg_sq"],
    "compression.exp_avg=int8 sync.exp_avg=never": ["compression.exp_avg", "sync.exp_avg=never"],
    "sync_phase.exp_avg=48": ["sync_phase", "'exp_avg'", "below its period 48", "got 48"],
    "sync_phase.params=1 sync_mode=probabilistic": ["sync_phase", "sync_mode=probabilistic"],
    "sync_delay=1 sync.exp_avg=reset sync.exp_avg_sq=reset": ["sync_delay=1", "set sync_delay=0"],
    "federation.weighting=size": ["federation.weighting=size", "uniform, examples"],
    "federation.fraction_train=0": ["federation.fraction_train=0.0", "at most 1"],
    "evaluation.central=maybe": ["evaluation.central=maybe", "must be true or false"],
    "evaluation.central=yes": ["evaluation.central=yes", "must be true or false"],
    "run.seed=1_000": ["run.seed=1_000", "must be an integer"],
    "run.seed='5'": ["run.seed=5", "must be an integer"],
    "federation.data_address=host": ["federation.data_address=host", "expected host:port"],
    "federation.grace=5": ["federation.grace=5", "set federation.on_failure=continue"],
}


@pytest.mark.parametrize(("override", "parts"), WRONG.items(), ids=WRONG)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(override, parts):
    assert_refused(parts, quickstart, override.split())


# A refusal that says what to set: following it as it is written is enough.
ADVISED = [
    ("quickstart", "sync_delay=1 sync.exp_avg=reset sync.exp_avg_sq=reset"),
    ("quickstart", "sync_mode=probabilistic sync_phase.params=1"),
    ("quickstart", "outer.name=sgd outer.momentum=0"),
    *(
        ("quickstart", words)
        for words in (
            *("data.alpha=0.1", "data.classes_per_client=3", "lr_schedule.final=0.1"),
            *("outer.lr=0.5", "outer.momentum=0", "outer.nesterov=false"),
            *(
                "outer.name=adam outer.momentum=0",
                "lr_schedule.name=cosine lr_schedule.decay_steps=2",
            ),
            "data.partition=iid data.alpha=0.1",
            "sync.gradients=1 sync_bound=false",
        )
    ),
    *(("diloco", f"outer.name=none {words}") for words in ("outer.momentum=0", "outer.lr=0.7")),
    *(("digits", f"data.partition=iid {words}") for words in ("data.alpha=0.5", "data.alpha=0.3")),
    *((preset, "outer.lr=0.5") for preset in ("fedavg", "ddp")),
    *(("ddp", f"sync_bound={stated}") for stated in ("true", "false")),
    ("desloc_sgdm", "optimizer.betas=[0.95,0.9999]"),
    ("quickstart", "run.patience=3"),
    ("quickstart", "run.track_model=true"),
    ("quickstart", "federation.average=median federation.min_steps=0.5"),
    ("quickstart", "federation.average=median federation.weighting=examples"),
    *(
        ("quickstart", f"privacy.epsilon=1 {w}")
        for w in ("federation.weighting=examples", "model.compile=true", "model.precision=bf16")
    ),
    *(
        ("quickstart", f"privacy.secure_aggregation=true {w}")
        for w in (
            *("federation.average=median", "federation.weighting=examples", "sync_delay=1"),
            *("federation.norm_bound=5", "federation.min_steps=0.5", "compression.params=int8"),
        )
    ),
    *(
        ("quickstart", f"{privacy} {w}")
        for privacy in ("privacy.secure_aggregation=true", "privacy.epsilon=1")
        for w in (
            *("evaluation.federated=true", "run.keep_best=federated/loss"),
            *("run.keep_best=max:federated/f1", "evaluation.central=false run.keep_best=loss"),
        )
    ),
    ("quickstart", "evaluation.central=false run.keep_best=central/loss"),
    ("quickstart", "evaluation.federated=false run.keep_best=federated/loss"),
    *((preset, "privacy.secure_aggregation=true") for preset in ("fedavg", "ddp")),
    ("quickstart", "compression.momentum_buffer=int8"),
    *(("fedavg", words) for words in ("outer.name=sgd", "run.resume=x", "sync_once_at=[4]")),
    *(("fedavg", words) for words in ("sync_phase.params=1", "federation.average=median")),
    ("fedavg", "compression.params=int8"),
    *(("ddp", words) for words in ("sync_delay=2", "federation.min_steps=0.5", "outer.name=sgd")),
]


@pytest.mark.parametrize(("preset", "words"), ADVISED)
def test_what_a_refusal_says_to_set_can_be_set_and_helps(preset, words):
    with pytest.raises(ConfigError) as error:
        load(preset, words)
    said = str(error.value)
    if said.endswith("; leave it out"):
        *others, last = words.split()
        assert said.startswith(last.partition("=")[0])
        load(preset, others)
        return
    advice = re.search(r"(?:set|needs) ([\w.]+=[^\s;]*)$", said)
    assert advice, said
    load(preset, f"{words} {advice[1]}")


@pytest.mark.parametrize(
    ("preset", "words", "choices"),
    [
        ("quickstart", "data.alpha=0.1", ["data.partition=dirichlet", "data.partition=quantity"]),
        ("quickstart", "data.classes_per_client=3", []),
        ("digits", "data.classes_per_client=3", ["data.partition=pathological"]),
        ("quickstart", "outer.lr=0.5", ["outer.name=sgd", "outer.name=adam"]),
        ("quickstart", "lr_schedule.final=0.1", ["lr_schedule.name=cosine"]),
        ("fedavg", "outer.lr=0.5", ["strategy=desloc"]),
        ("ddp", "outer.lr=0.5", []),
    ],
)
def test_a_refusal_names_only_choices_that_can_be_made(preset, words, choices):
    with pytest.raises(ConfigError, match=r"; leave it out$") as error:
        load(preset, words)
    said = re.search(r"only ([\w.]+)=([\w ]+?) (?:uses|has) it", str(error.value))
    named = [f"{said[1]}={value}" for value in said[2].split(" or ")] if said else []
    assert named == choices
    for choice in named:
        others = " outer.name=sgd" if choice == "strategy=desloc" else ""
        load(preset, f"{words} {choice}{others}")


@pytest.mark.parametrize("stated", ["true", "false"])
def test_a_bound_that_flowers_strategies_lack_is_refused(stated):
    parts = [f"sync_bound={stated}: only strategy=desloc has it", "leave it out"]
    assert_refused(parts, load, "fedavg", f"sync_bound={stated}")


@pytest.mark.parametrize("name", ["fedavgg", "null", "[a]"])
def test_a_wrong_strategy_is_refused_before_what_only_another_has(name):
    parts = [f"strategy={name}: must be one of desloc, fedavg"]
    assert_refused(parts, load, "fedavg", f"strategy={name} sync_bound=true")


def test_a_file_that_states_the_whole_configuration_is_loaded_again(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(load("fedavg")))
    assert load(str(tmp_path / "config.yaml")) == load("fedavg")


def test_a_setting_that_nothing_uses_is_refused_with_what_would_use_it():
    assert_refused(
        [
            "data.alpha=0.1: only data.partition=dirichlet or quantity",
            "not data.partition=by_domain",
        ],
        quickstart,
        ["data.alpha=0.1"],
    )
    assert load("quickstart", "data.partition=quantity data.alpha=0.1").data.alpha == 0.1
    own = "task=tiny:Task data.partition=by_domain data.alpha=0.1"  # which may use it
    assert load("quickstart", own).data.alpha == 0.1


def test_what_a_presets_partition_uses_is_left_out_under_another():
    assert load("digits").data.alpha == 0.3
    assert load("digits", "data.partition=quantity").data.alpha == 0.3
    assert load("digits", "data.partition=iid").data.alpha == Config().data.alpha
    with pytest.raises(ConfigError, match=r"^data\.alpha=0\.2"):
        load("digits", "data.partition=iid data.alpha=0.2")


def test_what_belongs_to_the_task_of_a_file_is_left_out_under_another(tmp_path):
    path = tmp_path / "mine.yaml"
    own = "{partition: iid, alpha: 0.05}\ntask_options: {depth: 3}"
    path.write_text(f"extends: digits\ntask: tiny:Task\ndata: {own}\n")
    assert load(str(path)).data.alpha == 0.05
    changed = load(str(path), "task=image_classification")
    assert (changed.data.alpha, changed.task_options) == (Config().data.alpha, {})
    assert load(str(path), "data.partition=iid").task_options == {"depth": 3}


def test_an_override_that_need_not_be_used_is_left_out_where_nothing_uses_it():
    words = ["data.alpha=0.1", "outer.momentum=0.6", "optimizer.betas=[0.9,0.99]"]
    config = load("desloc_sgdm", words, must_use=())
    assert config == load("desloc_sgdm")
    used = load("digits", [*words, "data.partition=dirichlet"], must_use=())
    assert (used.data.alpha, used.optimizer.betas) == (0.1, (0.9, 0.99))
    with pytest.raises(ConfigError, match=r"^data\.alpha=0\.1: .*; leave it out$"):
        load("desloc_sgdm", words, must_use=["data.alpha=0.1"])


def test_a_recorded_value_of_a_setting_that_nothing_uses_means_nothing():
    config = load("digits", "data.partition=iid")
    text = dump(config).replace("alpha: 0.5", "alpha: 0.3")
    assert text != dump(config)
    assert parse(text) == config


def test_a_recorded_configuration_of_another_version_is_named_as_that():
    text = dump(load("digits")) + "no_such_setting: 1\n"
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert str(error.value) == (
        "the configuration was written by another version of flower-desloc (no_such_setting: no "
        "such key); start a new run"
    )


BROKEN_FILES = {
    "invalid_yaml": ("run: [", ["not valid YAML", "broken.yaml"]),
    "duplicate_key": ("run: {seed: 1}\nrun: {seed: 2}", ["not valid YAML", "duplicate key run"]),
    "python_object": ("!!python/object/apply:os.getcwd []", ["not valid YAML"]),
    "list": ("- 1\n- 2", ["keys and values", "list"]),
    "word": ("hello", ["keys and values", "text"]),
    "not_utf8": ("\xff\xfe\x00", ["cannot read", "broken.yaml", "utf-8"]),
    "empty_section": ("extends: base\nrun:", ["run=: a section", "run.KEY=VALUE"]),
    "empty_sync": ("extends: base\nsync: {}", ["sync", "no period is stated"]),
    "number_for_key": ("extends: base\nrun: {1: 2}", ["run.1", "seed, steps"]),
    "unknown_parent": ("extends: bsae", ["extends=bsae", "did you mean base?", "broken"]),
}


@pytest.mark.parametrize(("text", "parts"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_a_broken_file_is_refused(presets, text, parts):
    assert_refused(parts, load, "broken", presets=presets(base=BASE, broken=text))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("quikstart", ["config=quikstart", "did you mean quickstart?", "desloc_adam", ".yaml"]),
        ("nowhere/mine.yaml", ["config=nowhere/mine.yaml", "no such file"]),
        ("", ["config=", "quickstart"]),
    ],
)
def test_a_missing_file_is_refused_with_the_names_there_are(name, parts):
    assert_refused(parts, load, name)


@pytest.mark.parametrize("text", ["", "sync: {params: 0}", "run: {sead: 1}", "["])
def test_a_parsed_text_is_held_to_the_same(text):
    assert_refused([], parse, text)


def test_what_a_preset_states_for_another_optimizer_is_left_out(presets):
    child = "extends: base\noptimizer: {name: sgdm, lr: 1}\nsync: {params: 4, momentum_buffer: 4}\n"
    base = BASE.replace("lr: 0.5", "lr: 0.5, betas: [0.8, 0.9]")
    config = load("child", presets=presets(base=base, child=child))
    assert (config.optimizer.lr, config.optimizer.betas) == (1.0, Config().optimizer.betas)
    with pytest.raises(ConfigError, match=r"^optimizer.betas=.*sgdm has no such setting"):
        load("child", "optimizer.betas=[0.8,0.9]", presets=presets())


def test_a_sum_of_two_clients_is_refused_before_they_start():
    for clients, is_refused in ((2, True), (3, False)):
        text = f"privacy.secure_aggregation=true simulation.num_clients={clients}"
        with pytest.raises(ConfigError, match="=2: ") if is_refused else nullcontext():
            check_clients(load("digits", text.split()))


@pytest.mark.parametrize("private", ["privacy.secure_aggregation=true", "privacy.epsilon=1"])
def test_a_private_run_has_no_evaluation_by_clients_and_defaults_and_false_may_stand(private):
    for words in ("", "evaluation.federated=false", "run.keep_best=loss run.patience=2"):
        config = load("quickstart", f"{private} {words}".strip())
        assert parse(dump(config)) == config
        assert why_not_evaluated(config, "federated") is not None
        assert why_not_evaluated(config, "central") is None
    assert why_not_evaluated(load("quickstart"), "federated") is None


def test_text_that_cannot_hold_a_sequence_for_every_client_is_refused_by_its_size(tmp_path):
    def refused(*settings: str, where: str = "simulation.num_clients") -> str:
        config = load("quickstart", [f"data.source={tmp_path}", "data.seq_len=7", *settings])
        try:
            check_clients(config, where)
        except ConfigError as error:
            return str(error)
        return ""

    (tmp_path / "a.txt").write_text("one two three")
    message = refused()
    assert "it holds 13 bytes, and the 4 clients need data.seq_len + 1 = 8 tokens each" in message
    assert not refused("simulation.num_clients=1")
    assert not refused("data.streaming=true", "data.max_bytes=0")  # read again and again
    assert not refused("simulation.num_clients=3", where="--nodes")  # sites have their own text
    (tmp_path / "b.txt").write_text("x" * 17)  # the ends of two files count as tokens
    assert not refused()
    (tmp_path / "b.txt").write_text("x" * 16)
    assert refused()
    (tmp_path / "c.parquet").touch()
    assert not refused()
