"""What may be configured and what it means, one dataclass a section.

Every field has its default here and its meaning in the sentence below it; ``docs/configuration.md``
is made from them.
"""

from dataclasses import dataclass, field
from typing import Any

from flower_desloc.flower.policy import Policy

AUTO = "auto"
"""Value of ``data.micro_batch_size``: as many as fit into memory."""


@dataclass(kw_only=True)
class Run:
    """What is run, and for how long."""

    name: str = "desloc"
    """Name of the run and of its folder."""
    seed: int = 0
    """Fixes the weights' start, the data's partition and order, and the coins."""
    steps: int = 192
    """Local steps of every client."""
    eval_every: int = 48
    """Evaluate at the first average of params at or after each multiple of so many steps; 0: only
    before and after training."""
    checkpoint_every: int = 1
    """Write what it takes to go on after every so many windows, and at the end; 0: never."""
    resume: str = ""
    """Go on with a run that was cut off: its folder, one of its checkpoints, or `auto`: the last
    run of this name in the output folder, or a new one if that is complete."""
    init_from: str = ""
    """Begin with the model of another run, its folder or one of its checkpoints; or with a model of
    transformers, a folder of `save_pretrained` or a name on the hub, whose architecture takes the
    place of the section model. Optimizer states and steps begin anew."""
    preflight: str = "stop"
    """What becomes of a run that clearly cannot fit, by the estimate made before it starts: `stop`
    it, with the reason, or `warn` and go on."""


@dataclass(kw_only=True)
class Model:
    """A model of the transformers library that fits the task, with weights drawn from the seed."""

    type: str = "llama"
    """Architecture, under transformers' name (its `model_type`): a causal language model such as
    `llama`, or for images a classifier such as `vit` or `resnet`."""
    hidden_size: int = 128
    """Width of the residual stream, the paper's d_model."""
    intermediate_size: int = 512
    """Width of the feed-forward layers."""
    num_hidden_layers: int = 4
    """Number of transformer blocks."""
    num_attention_heads: int = 4
    """Attention heads; divides hidden_size."""
    num_key_value_heads: int | None = None
    """Heads of keys and values, each shared by as many attention heads; divides
    num_attention_heads; null: as many as those."""
    vocab_size: int | None = None
    """Rows of the embeddings, at least as many as the tokenizer has tokens; null: as many."""
    tie_word_embeddings: bool = True
    """Use one matrix for input and output embeddings; it travels once."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    patch_size: int | None = None
    """Side of the squares a vision transformer cuts images into, in pixels; null: a quarter of the
    image's, or the next smaller that divides it."""
    config: dict[str, Any] = field(default_factory=dict)
    """The architecture whole, as transformers' `config.json` states it, in place of all above but
    type. A model in run.init_from fills it in."""
    dtype: str = "float32"
    """Type of weights and optimizer states: float32 or float64."""
    precision: str = "full"
    """What forward and backward passes compute in: `full`: dtype; `bf16`: bfloat16 where
    `torch.autocast` holds it to be safe. Weights, optimizer states and averages stay in dtype."""
    compile: bool = False
    """Compile the loss and the steps of adopt, sgdm and paper_adam with `torch.compile` (PyTorch's
    own Adam has one fused kernel). The first compilation takes a minute or more and is cached in
    `~/.cache/flower-desloc`; every new process then takes seconds. Needs a C++ compiler."""


@dataclass(kw_only=True)
class Data:
    """Text or images: where they come from and who gets which part."""

    source: str = "builtin"
    """`builtin`: text every Python installation holds, in natural domains; else a file, a folder
    with one file or folder a domain (JSONL, Parquet, text; .gz too), or a name for
    `datasets.load_dataset`, as `name` or `name:config`. For images `builtin` are scikit-learn's
    digits; a file is Parquet, and a folder holds Parquet files or image files in one folder a
    label."""
    domains: list[str] = field(default_factory=list)
    """The domains to use, in this order; empty: all that the source has. For a named data set
    these are its configs, and those of others, as `name:config`."""
    domain_field: str = ""
    """Column whose values are the domains; empty: files or configs are."""
    text_field: str = "text"
    """Column that holds the text."""
    image_field: str = ""
    """Column that holds the images, encoded or as arrays; empty: the only one that can."""
    label_field: str = ""
    """Column that holds what an image shows; empty: the only one that can."""
    image_size: int | None = None
    """Side in pixels that every image is resized to; null: as they are, all of one size."""
    streaming: bool = False
    """Read a named data set as a stream, up to max_bytes a domain, instead of downloading it. With
    max_bytes=0, and of any source: read the text as it is trained on, never the whole."""
    weights: list[float] = field(default_factory=list)
    """Share of every domain in the tokens of a client that trains on the mixture, one for each of
    domains; empty: equal shares. Needs streaming with max_bytes=0; else documents mix as they are
    many."""
    max_bytes: int = 4_000_000
    """Text read per domain, in UTF-8 bytes; 0: all."""
    partition: str = "by_domain"
    """`iid`: documents shuffled by the seed; `by_domain`: each client one domain, the first client
    the mixture of all (the paper's heterogeneous setting); `dirichlet`: each domain's documents
    dealt in shares drawn from Dirichlet(alpha); `quantity`: like documents for all, in amounts
    drawn from Dirichlet(alpha). For images labels take the place of domains, there is no
    `by_domain`, and there is `pathological`: each client classes_per_client labels only."""
    alpha: float = 0.5
    """Concentration of the Dirichlet and quantity partitions; small is unlike."""
    classes_per_client: int = 2
    """Labels each client holds in the pathological partition."""
    validation_fraction: float = 0.1
    """Share of each domain's documents, or each label's images, held out where the source has no
    validation part."""
    tokenizer: str = "bytes"
    """`bytes`: one token a byte, or what the model in run.init_from was trained with; else a
    `tokenizer.json`, or a name or folder for transformers."""
    seq_len: int = 128
    """Tokens a sequence."""
    batch_size: int = 8
    """Sequences or images a local step, per client."""
    micro_batch_size: int | str | None = None
    """How many of them go through the model at once, which bounds the memory of a step; their
    gradients add up to those of the batch, in the last bits not the same; divides batch_size;
    `auto`: each client as many as its memory holds; null: all."""


@dataclass(kw_only=True)
class Optimizer:
    """The local optimizer of every client."""

    name: str = "adopt"
    """`adopt`, `adam`, `adamw`, `amsgrad`, `sgdm`, or `paper_adam` (the paper's literal Adam); or
    any torch.optim.Optimizer by its import path, such as `pytorch_optimizer:Lion`, which is given
    lr and options and nothing else of this section but clipping."""
    lr: float = 0.0021
    """Peak learning rate, the paper's eta."""
    betas: tuple[float, float] = (0.95, 0.9999)
    """Decay of the first and second moment."""
    momentum: float = 0.9
    """Decay of sgdm's momentum, the paper's beta."""
    eps: float = 1e-6
    """Stability term; where it enters differs by optimizer."""
    weight_decay: float = 0.0
    """Weight decay; decoupled in adamw and adopt."""
    clip_norm: float | None = 1.0
    """Clip the gradient's global norm, the paper's rho; null: do not."""
    clip_value: float | None = None
    """Clip each coordinate of the gradient, as in the paper's listings; after the norm, if both
    are set."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of an optimizer named by its import path."""


@dataclass(kw_only=True)
class Outer:
    """The server's optimizer of the averaged parameters, as in DiLoCo."""

    name: str = "none"
    """`none`: training goes on from the clients' mean; `sgd` or `adam`: from a step along the
    difference from that mean to the last parameters."""
    lr: float = 0.7
    """Learning rate, the same all along."""
    momentum: float = 0.9
    """Momentum of sgd."""
    nesterov: bool = True
    """Nesterov's momentum, in sgd."""


@dataclass(kw_only=True)
class FedAdam:
    """The server's step under `strategy: fedadam`; the defaults are Flower's."""

    lr: float = 0.1
    """Learning rate, Flower's eta."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the moments of the clients' mean movement."""
    tau: float = 1e-3
    """Stability term; the larger, the less each coordinate has a rate of its own."""


@dataclass(kw_only=True)
class LRSchedule:
    """The learning rate as a function of the global step."""

    name: str = "wsd"
    """`wsd` (warm-up, stable, 1 - sqrt decay), `cosine` or `constant`."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; null: a twelfth of the run."""
    decay_steps: int | None = None
    """Steps of wsd's decay; null: the last tenth of the run, as in the paper."""
    final: float = 0.0
    """Factor of the peak at which cosine ends."""


@dataclass(kw_only=True)
class Federation(Policy):
    """Who takes part, and what happens when a client fails."""

    num_clients: int = 4
    """Clients that `desloc run` simulates; in a deployment the SuperNodes are what they are."""
    client_cpus: int = 1
    """CPU cores, and so threads, a simulated client gets; the result depends on it in the last
    bits."""
    client_gpus: float = 0.0
    """Share of a GPU a simulated client gets."""


@dataclass(kw_only=True)
class Evaluation:
    """Where the averaged model is evaluated, and on how much."""

    central: bool = True
    """On the server, on the held-out text of every domain, or the images of every label."""
    federated: bool = True
    """On every client, on its own held-out part."""
    sequences: int = 64
    """Held-out sequences per domain, and per client."""
    images: int = 0
    """Held-out images per label, and per client; 0: all."""


@dataclass(kw_only=True)
class Config:
    """A run, whole."""

    run: Run = field(default_factory=Run)
    task: str = "causal_lm"
    """What is learned: `causal_lm`, the next token of text, or `image_classification`; or a task of
    your own by its import path, `module:Class`."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Settings of a task of your own, under names of its own."""
    strategy: str = "desloc"
    """`desloc`, or Flower's own `fedavg` or `fedadam`: every sync.params local steps, which is then
    all of sync, the parameters are averaged, and every client starts a new optimizer."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    sync: dict[str, Any] = field(default_factory=dict)
    """Period of every stream in local steps: params (K_x), exp_avg (K_u), exp_avg_sq (K_v), ...; or
    `never`; or, for an optimizer state, `reset`: zero again after every average of params.
    `gradients: 1`, alone, is data parallelism: every step's gradient is averaged, and one
    optimizer, on the server, takes the step."""
    sync_mode: str = "periodic"
    """`periodic`, or `probabilistic`: after each step with probability 1 / period."""
    sync_once_at: list[int] = field(default_factory=list)
    """Steps after which every stream is averaged once, besides its own clock."""
    wire: dict[str, str] = field(default_factory=dict)
    """How a stream travels: `fp32`, as it is, unless stated; `bf16`; or, in blocks with a scale
    each, `int8` or `int4`. What the code of params and first moments loses is sent later."""
    outer: Outer = field(default_factory=Outer)
    fedadam: FedAdam = field(default_factory=FedAdam)
    federation: Federation = field(default_factory=Federation)
    evaluation: Evaluation = field(default_factory=Evaluation)
