"""The settings of a run: one dataclass for each section.

The sentence below a field explains it; ``docs/reference/configuration.md`` is generated from them.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from flower_desloc.core.schedule import GRADIENTS
from flower_desloc.flower.fields import bounded, may_differ, one_of
from flower_desloc.flower.policy import Policy
from flower_desloc.optim import OPTIMIZERS

AUTO = "auto"
"""Value of ``data.micro_batch_size``: as many as fit into a GPU's memory."""
COLUMN = "column:"
"""What ``data.partition`` begins with where a column is the partition."""

PARTITIONS: Final = {
    "causal_lm": ("iid", "by_domain", "dirichlet", "quantity"),
    "image_classification": ("iid", "dirichlet", "pathological", "quantity"),
}
"""By task the other values of ``data.partition``."""


def column_of(partition: str) -> str:
    """Return NAME of ``data.partition=column:NAME``; empty under another partition."""
    return partition.removeprefix(COLUMN) if partition.startswith(COLUMN) else ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run: its name, seed, length and checkpoints."""

    name: str = may_differ("desloc")
    """Name of the run, and of its folder; a preset's by default."""
    seed: int = bounded(0, 0, 2**32 - 1)
    """Seed of the initial weights and the coins."""
    steps: int = bounded(192, 1)
    """Local steps of every client."""
    eval_every: int = bounded(48, 0)
    """Evaluate at the first average of params from each multiple of this many steps on; 0: only
    before and after training."""
    checkpoint_every: int = may_differ(bounded(1, 0))
    """Write a checkpoint every this many windows, and at the end; 0: never."""
    resume: str = may_differ("")
    """Resume a run: its folder or URL, one of its checkpoints, or `auto`: the last of this name, or
    a new one if that is complete."""
    keep_best: str = ""
    """Metric, such as `loss` or `federated/accuracy`, whose best model is kept in `best/`; of your
    own metric `max:NAME` or `min:NAME`."""
    patience: int | None = bounded(None, 1)
    """Stop after this many evaluations in a row without a better keep_best; null: never."""
    trackers: list[str] = field(default_factory=list, metadata={"may_differ": True})
    """Trackers to send the run to, of `wandb`, `mlflow` and `trackio`, each an extra."""
    track_model: bool = may_differ(False)
    """Also send them the final model."""
    metrics_port: int | None = may_differ(bounded(None, 1, 65535))
    """Port of 127.0.0.1 where Prometheus reads the run (extra `metrics`)."""
    copy_to: str = may_differ("")
    """URL (`s3://`, `gs://`, `hf://`, any of fsspec's) under which a copy of the run's folder is
    kept."""
    init_from: str = may_differ("")
    """Start from another run's model (its folder or a checkpoint) or one of transformers (a folder
    or hub name); its architecture replaces the section model."""
    preflight: str = may_differ(one_of("stop", "warn"))
    """If the run, without activations, needs more memory or clearly more disk space than there is:
    `stop`, with the reason, or `warn`."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the transformers library for the task, with weights drawn from the seed."""

    type: str = "llama"
    """Architecture, under transformers' name (its `model_type`): a causal language model such as
    `llama`, or for images a classifier such as `vit` or `resnet`."""
    hidden_size: int = bounded(128, 1)
    """Width of the residual stream, the paper's d_model."""
    intermediate_size: int = bounded(512, 1)
    """Width of the feed-forward layers."""
    num_hidden_layers: int = bounded(4, 1)
    """Number of transformer blocks."""
    num_attention_heads: int = bounded(4, 1)
    """Attention heads; divides hidden_size."""
    num_key_value_heads: int | None = bounded(None, 1)
    """Heads of keys and values, each shared by equally many attention heads; divides
    num_attention_heads; null: num_attention_heads."""
    vocab_size: int | None = bounded(None, 1)
    """Rows of the embeddings, at least the tokenizer's vocabulary; null: its vocabulary."""
    tie_word_embeddings: bool = True
    """Use one matrix for input and output embeddings; it is sent once."""
    rope_theta: float = bounded(10000.0, 1e-3)
    """Base of the rotary position embedding."""
    patch_size: int | None = bounded(None, 1)
    """Side of a vision transformer's patches, in pixels; null: about a quarter of the image's
    side."""
    config: dict[str, Any] = field(default_factory=dict)
    """The whole architecture, as in transformers' `config.json`; replaces all settings above but
    type. A model in run.init_from fills it in."""
    dtype: str = one_of("float32", "float64")
    """Type of weights and optimizer states."""
    precision: str = one_of("full", "bf16")
    """Precision of forward and backward passes: `full`: dtype; `bf16`: `torch.autocast` to
    bfloat16."""
    compile: bool = False
    """`torch.compile` the loss and the steps of this project's optimizers; needs a C++ compiler."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data: its source, and which client gets which part."""

    source: str = "builtin"
    """`builtin`: text of the Python installation, in natural domains, or scikit-learn's digits;
    otherwise a file, a folder with a file or folder for each domain or label (JSONL, Parquet, text,
    images; also .gz), or a name for `datasets.load_dataset`, as `name` or `name:config`."""
    domains: list[str] = field(default_factory=list)
    """The domains to use, in this order; empty: all. For a named data set these are its configs."""
    domain_field: str = ""
    """Column whose values are the domains; empty: files or configs are the domains."""
    text_field: str = "text"
    """Column of the text."""
    image_field: str = ""
    """Column of the images, encoded or as arrays; empty: the only column of that type."""
    label_field: str = ""
    """Column of the labels; empty: the only column that can be one."""
    image_size: int | None = bounded(None, 1)
    """Side in pixels that every image is resized to; null: not resized, all must have one size."""
    streaming: bool = False
    """Read a named data set as a stream, up to max_bytes of each domain, instead of downloading
    it. With max_bytes=0, text of any source is read while it is trained on."""
    weights: list[float] = field(default_factory=list)
    """Weight of each domain for a client that trains on the mixture; empty: equal. Needs streaming,
    max_bytes=0."""
    max_bytes: int = bounded(4_000_000, 0)
    """Text read of each domain, in UTF-8 bytes; 0: all."""
    partition: str = "by_domain"
    """`iid`: documents shuffled by the seed; `by_domain`: each client one domain, the first client
    the mixture of all; `dirichlet`: each domain's documents in proportions drawn from
    Dirichlet(alpha); `quantity`: amounts drawn from Dirichlet(alpha); `column:NAME`: a client for
    each value of a column, or equally many. For images labels replace domains, and `pathological`,
    classes_per_client labels each, replaces `by_domain`."""
    seed: int | None = bounded(None, 0, 2**32 - 1)
    """Seed of partition and order; null: run.seed."""
    alpha: float = bounded(0.5, 1e-6)
    """Concentration of the Dirichlet and quantity partitions; smaller is more unequal."""
    classes_per_client: int = bounded(2, 1)
    """Labels of each client in the pathological partition."""
    validation_fraction: float = bounded(0.1, 0.001, 0.5)
    """Fraction of each domain's documents, or each label's images, that is held out if the source
    has no validation part."""
    drop_missing: bool = False
    """Leave out rows without label, domain, text or image; false: refuse them. Missing text of a
    stream is always left out."""
    tokenizer: str = "bytes"
    """`bytes`: one token for each byte, or the tokenizer of the model in run.init_from; otherwise a
    `tokenizer.json`, or a name or folder."""
    seq_len: int = bounded(128, 2)
    """Tokens in a sequence."""
    batch_size: int = bounded(8, 1)
    """Sequences or images in a local step of each client."""
    micro_batch_size: int | str | None = None
    """Examples that go through the model at once; divides batch_size. `auto`: as many as fit into
    each client's GPU, by halving the batch, 1 on CPUs or with privacy; null: the whole batch."""


@dataclass(frozen=True, kw_only=True)
class ParamGroup:
    """An entry of ``optimizer.groups``: which parameters, and their own settings.

    A setting that is null is that of the section ``optimizer``, or under another ``name`` the
    default of that optimizer.
    """

    KINDS: ClassVar[tuple[str, ...]] = ("matrices", "embeddings", "head", "norms_and_biases")
    SETTINGS: ClassVar[tuple[str, ...]] = ("lr", "betas", "momentum", "eps", "weight_decay")

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    name: str | None = one_of(None, *OPTIMIZERS, or_path=True)
    lr: float | None = bounded(None, 0)
    betas: tuple[float, ...] | None = bounded(None, 0, below=1)
    momentum: float | None = bounded(None, 0, below=1)
    eps: float | None = bounded(None, 0)
    weight_decay: float | None = bounded(None, 0)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The local optimizer of every client."""

    name: str = one_of(*OPTIMIZERS, or_path=True)
    """One of the table below; or a torch.optim.Optimizer by its import path, such as
    `pytorch_optimizer:Lion`, whose own settings are in options. Another
    optimizer than the preset's has its own defaults and needs its own lr (adam, adamw, amsgrad,
    muon share one)."""
    lr: float = bounded(0.0021, 0)
    """Peak learning rate, the paper's eta."""
    betas: tuple[float, ...] = bounded((0.95, 0.9999), 0, below=1)
    """Decays of the moments, as many as the optimizer has."""
    momentum: float = bounded(0.9, 0, below=1)
    """Decay of the momentum, the paper's beta."""
    eps: float = bounded(1e-6, 0)
    """Stability term; its place in the formula depends on the optimizer."""
    weight_decay: float = bounded(0.0, 0)
    """Weight decay, added to the clipped gradient or decoupled from it."""
    clip_norm: float | None = bounded(1.0, 1e-12)
    """Clip the gradient's global norm, the paper's rho; null: no clipping."""
    clip_value: float | None = bounded(None, 1e-12)
    """Clip each coordinate of the gradient, after the norm."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of an optimizer named by its import path, or settings of one in the table without a
    key of their own. Lists become tuples."""
    groups: list[ParamGroup] = field(default_factory=list)
    """Parameter groups, as `[{kinds: [norms_and_biases], weight_decay: 0}, {names: ["*.w"], name:
    sgdm, lr: 0.1}]`. A parameter must match one of names (shell patterns), and one of kinds, where
    they are stated. Kinds: `embeddings`, `head`, `norms_and_biases` (below two
    dimensions), `matrices` (all others). name: another optimizer."""

    @property
    def names(self) -> list[str]:
        """The names of this section's optimizer and of those of its groups, each once."""
        return list(dict.fromkeys([self.name, *(group.name or self.name for group in self.groups)]))

    @property
    def title(self) -> str:
        """The names in a sentence."""
        return " and ".join(self.names)


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The server's optimizer of the averaged parameters, as in DiLoCo."""

    name: str = one_of("none", "sgd", "adam")
    """`none`: training continues from the clients' mean; `sgd` or `adam`: from an optimizer step,
    with the last parameters minus that mean as the gradient."""
    lr: float = bounded(0.7, 0)
    """Learning rate, constant."""
    momentum: float = bounded(0.9, 0, below=1)
    """Momentum of sgd."""
    nesterov: bool = True
    """Nesterov's momentum, in sgd."""


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate as a function of the global step."""

    name: str = one_of("wsd", "cosine", "constant")
    """`wsd` (warm-up, stable, 1 - sqrt decay), `cosine` or `constant`."""
    warmup_steps: int | None = bounded(None, 0)
    """Steps of linear warm-up; null: a twelfth of the run."""
    decay_steps: int | None = bounded(None, 0)
    """Steps of wsd's decay; null: the last tenth of the run."""
    final: float = bounded(0.0, 0, 1)
    """Fraction of the peak rate at which cosine ends."""

    def warmup_of(self, num_steps: int) -> int:
        """Return the steps of warm-up in a run of ``num_steps`` steps."""
        return num_steps // 12 if self.warmup_steps is None else self.warmup_steps

    def decay_of(self, num_steps: int) -> int:
        """Return the steps of wsd's decay in a run of ``num_steps`` steps."""
        return num_steps // 10 if self.decay_steps is None else self.decay_steps


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The clients that `desloc run` simulates."""

    num_clients: int = bounded(4, 1)
    """Number of clients."""
    client_cpus: int = may_differ(bounded(1, 1))
    """CPU cores, and so threads, a simulated client gets; the result depends on it in the last
    bits."""
    client_gpus: float = may_differ(bounded(0.0, 0))
    """Share of a GPU a simulated client gets."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation of the averaged model."""

    central: bool = True
    """Evaluate on the server, on its GPU if it has one, with held-out data of every domain or
    label."""
    federated: bool = True
    """Evaluate on every client, on its own held-out part."""
    sequences: int = bounded(64, 1)
    """Held-out sequences for each domain, and for each client."""
    images: int = bounded(0, 0)
    """Held-out images for each label, and for each client; 0: all."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """[Privacy](../explanation/privacy.md)."""

    secure_aggregation: bool = False
    """Let the server learn sums only."""
    epsilon: float | None = may_differ(bounded(None, above=0))
    """Budget of each client; null: a site's own."""
    delta: float = may_differ(bounded(1e-5, 1e-9, below=1))
    """Well below 1 / examples."""
    max_grad_norm: float = bounded(1.0, 1e-6, 1e6)
    """Bound of each example's gradient."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole configuration of a run."""

    run: Run = field(default_factory=Run)
    task: str = one_of(*PARTITIONS, or_path=True)
    """`causal_lm` (text), `image_classification`, or a task of your own by its import path,
    `module:Class`."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Settings of a task of your own, under any names."""
    strategy: str = one_of("desloc", "fedavg", "fedavgm", "fedprox", "fedadam", "fedyogi")
    """`desloc`, or Flower's own `fedavg`, `fedavgm`, `fedprox`, `fedadam`, `fedyogi`: every
    sync.params local steps parameters are averaged and clients start new optimizers; sync then
    holds params only."""
    strategy_options: dict[str, Any] = field(default_factory=dict)
    """Settings of Flower's strategy, under Flower's names."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    sync: dict[str, Any] = field(default_factory=dict)
    """Period of every stream in local steps: params (K_x), exp_avg (K_u), exp_avg_sq (K_v), ...; or
    `never`; or, for an optimizer state, `reset`: zero after every average of params; null leaves a
    stream of the preset out. `gradients: 1`, alone, is data parallelism; as an override it replaces
    all settings of averages."""
    sync_mode: str = one_of("periodic", "probabilistic")
    """`periodic`, or `probabilistic`: after each step with probability 1 / period."""
    sync_phase: dict[str, int] = field(default_factory=dict)
    """Steps by which the averages of single streams are shifted, below their period: with
    sync.exp_avg=48 and sync_phase.exp_avg=16 after the steps 16, 64, 112, ..."""
    sync_once_at: list[int] = field(default_factory=list)
    """Steps after which every stream is averaged once more."""
    sync_delay: int = bounded(0, 0)
    """Local steps that every client takes before it merges an average, corrected for the delay. A
    shorter window merges at its end."""
    sync_bound: bool = True
    """Bound Adam's first moment by its second after an average of either: |u| <= c sqrt(v). `false`
    is the paper's letter, under which a run can spike."""
    compression: dict[str, str] = field(default_factory=dict)
    """Format of each stream in messages: `fp32` (default), `bf16`, or `int8`, `int4`, `int2` in
    blocks with a scale each."""
    outer: Outer = field(default_factory=Outer)
    federation: Policy = field(default_factory=Policy)
    privacy: Privacy = field(default_factory=Privacy)
    simulation: Simulation = field(default_factory=Simulation)
    evaluation: Evaluation = field(default_factory=Evaluation)

    @property
    def is_desloc(self) -> bool:
        """Whether the strategy is this project's, not one of Flower's own."""
        return self.strategy == "desloc"

    @property
    def averages_gradients(self) -> bool:
        """Whether the run is data parallelism."""
        return GRADIENTS in self.sync

    @property
    def data_seed(self) -> int:
        """The seed of partition and order."""
        return self.run.seed if self.data.seed is None else self.data.seed
