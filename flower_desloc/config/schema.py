"""What may be configured and what it means, one dataclass a section.

Every field has its default here and its meaning in the sentence below it; ``docs/configuration.md``
is made from them.
"""

from dataclasses import dataclass, field
from typing import Any


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


@dataclass(kw_only=True)
class Model:
    """A causal language model of the transformers library, with weights drawn from the seed."""

    type: str = "llama"
    """Architecture, under transformers' name (its `model_type`)."""
    hidden_size: int = 128
    """Width of the residual stream, the paper's d_model."""
    intermediate_size: int = 512
    """Width of the feed-forward layers."""
    num_hidden_layers: int = 4
    """Number of transformer blocks."""
    num_attention_heads: int = 4
    """Attention heads; divides hidden_size."""
    tie_word_embeddings: bool = True
    """Use one matrix for input and output embeddings; it travels once."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    initializer_range: float | None = None
    """Standard deviation of the initial weights; null: 1 / sqrt(hidden_size), the paper's."""
    dtype: str = "float32"
    """Type of weights and optimizer states: float32 or float64."""


@dataclass(kw_only=True)
class Data:
    """Text: where it comes from and who gets which part."""

    source: str = "builtin"
    """`builtin`: text every Python installation holds, in natural domains; else a file, a folder
    with one file or folder a domain (JSONL, Parquet, text; .gz too), or a name for
    `datasets.load_dataset`, as `name` or `name:config`."""
    domains: list[str] = field(default_factory=list)
    """The domains to use, in this order; empty: all that the source has. For a named data set
    these are its configs."""
    domain_field: str = ""
    """Column whose values are the domains; empty: files or configs are."""
    text_field: str = "text"
    """Column that holds the text."""
    streaming: bool = False
    """Read a named data set as a stream, up to max_bytes a domain, instead of downloading it."""
    max_bytes: int = 4_000_000
    """Text read per domain, in UTF-8 bytes; 0: all."""
    partition: str = "by_domain"
    """`iid`: documents shuffled by the seed; `by_domain`: each client one domain, the first client
    the mixture of all (the paper's heterogeneous setting); `dirichlet`: each domain's documents
    dealt in shares drawn from Dirichlet(alpha)."""
    alpha: float = 0.5
    """Concentration of the Dirichlet partition; small is unlike."""
    validation_fraction: float = 0.1
    """Share of each domain's documents held out, where the source has no validation part."""
    tokenizer: str = "bytes"
    """`bytes`: one token a byte; else a `tokenizer.json`, or a name or folder for transformers."""
    seq_len: int = 128
    """Tokens a sequence."""
    batch_size: int = 8
    """Sequences a local step, per client."""


@dataclass(kw_only=True)
class Optimizer:
    """The local optimizer of every client."""

    name: str = "adopt"
    """`adopt`, `adam`, `adamw`, `amsgrad`, `sgdm`, or `paper_adam` (the paper's literal Adam)."""
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
class Federation:
    """Who takes part, and what happens when somebody does not."""

    num_clients: int = 4
    """Clients that `desloc run` simulates; in a deployment the SuperNodes are what they are."""
    client_cpus: int = 1
    """CPU cores, and so threads, a simulated client gets; the result depends on it in the last
    bits."""
    client_gpus: float = 0.0
    """Share of a GPU a simulated client gets."""
    min_clients: int = 1
    """Quorum: wait for so many clients, and average no window with fewer."""
    fraction_train: float = 1.0
    """Share of the clients online, drawn by the seed, that train in a window."""
    weighting: str = "uniform"
    """`uniform` (the paper's E_m) or `examples`."""
    on_failure: str = "stop"
    """What a failed client does to the run: `stop` it, or `continue` without that client."""
    timeout: float = 3600.0
    """Seconds to wait for the next reply, in the clients' order, before going on without it; at
    least what a whole window takes, clients that wait for a core included."""
    repeats: int = 2
    """How often a window below the quorum is repeated before the run stops."""


@dataclass(kw_only=True)
class Evaluation:
    """Where the averaged model is evaluated, and on how much."""

    central: bool = True
    """On the server, on every domain's held-out text."""
    federated: bool = True
    """On every client, on its own held-out text."""
    sequences: int = 64
    """Held-out sequences per domain, and per client."""


@dataclass(kw_only=True)
class Config:
    """A run, whole."""

    run: Run = field(default_factory=Run)
    task: str = "causal_lm"
    """What is learned; `causal_lm`."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_schedule: LRSchedule = field(default_factory=LRSchedule)
    sync: dict[str, Any] = field(default_factory=dict)
    """Period of every stream in local steps, or `never`: params (K_x), exp_avg (K_u), exp_avg_sq
    (K_v), ..."""
    sync_mode: str = "periodic"
    """`periodic`, or `probabilistic`: after each step with probability 1 / period."""
    federation: Federation = field(default_factory=Federation)
    evaluation: Evaluation = field(default_factory=Evaluation)
