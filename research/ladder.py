"""Methods compared with Local: by gradient noise, model size, length of the run and period.

`python research/draw.py ladder` draws research/ladder.png and the tables of the studies in
`STUDIES`. A method is compared with the Local run of the same seed, partition, optimizer, model
size, batch, steps and K_x; the tables have the mean over seeds and the 95 % t-interval.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import fmean
from typing import Any, NamedTuple

from collect import FLOWERS, records
from paired import GREY, PARTITIONS, RESEARCH, SPARE, Estimate, Run, Table, differences, spread

from flower_desloc.app.runs.figures import style

LOCAL, DESLOC, FAVG, DDP = "Local", "DES-LOC", "FAVG+OPT", "DDP"
LEAN, LEAN_ADOPT = "u as often as x, lean, bounded", "u as often as x, lean"
CHECKS = ("ladder_check", "ladder_check_fresh", "low_frequency_check")
"""Studies on text that the others do not read."""
PAPER, LOW, PARTS = "paper_baselines", "low_frequency", "which_moment"
OWN_RATES = ("ladder_tuned", CHECKS[1], PAPER, LOW)
"""Studies in which every method has a learning rate of its own."""
STUDIES = (
    *("ladder_batch", "ladder_batch_short", "ladder_size", "ladder_horizon"),
    *("ladder_half_lives", "ladder_tuned", PAPER, LOW, PARTS, *CHECKS, "thin_links_longer"),
)
BETA_2 = {"adam": 0.95, "adamw": 0.95, "adopt": 0.9999}
"""As in the paper."""
STREAMS = ("params", "exp_avg", "exp_avg_sq")
STEPS, PERIOD = 512, 16
NAMES = {"adam": "Adam", "adamw": "AdamW", "adopt": "ADOPT"}
MARGIN = 0.5
"""Per cent of the loss."""
ORDER = (LOCAL, DESLOC, "DES-LOC, bounded", LEAN, LEAN_ADOPT, FAVG, "FAVG-OPT", DDP, "DiLoCo")
"""Methods that come first in a table."""
CODED = {"lean": "int8, int4, int8", "8 bits": "int8", "4 bits": "int4, v int8"}
"""Formats of x, u and v by their name in a method's name."""
SHOWN = {
    LEAN: ("lean: 16/16/96, lossy", "#117733", "o"),
    LEAN_ADOPT: ("lean: 16/16/96, lossy", "#117733", "o"),
    DESLOC: ("DES-LOC: 16/48/96", "#0072B2", "s"),
    FAVG: ("FAVG+OPT: 16/never/never", "#D55E00", "^"),
    "u as often as x, v never, 4 bits, bounded": ("16/16/never, 4 bits", "#CCBB44", "v"),
    "K = 12/144/288, 4 bits, bounded": ("12/144/288, 4 bits", "#AA4499", "P"),
    "Local, lean": ("Local: 16, lossy", "#999999", "D"),
    "Local, twice the period": ("Local: 32", "#000000", "D"),
    "DES-LOC, half the periods": ("DES-LOC: 8/24/48", "#56B4E9", "s"),
    "DES-LOC, half the periods, lean": ("DES-LOC: 8/24/48, lossy", "#882255", "s"),
}
"""Methods of the figure: their label, colour and marker. The tables have all."""
BY_BYTES = ((41_120, 256), (213_440, 1024), (1_082_496, 1024))
"""Parameters and tokens of the figure's panels by bytes."""
LIMITS = (-2.6, 4.3)  # per cent, of the figure
FIRST_TABLE = {
    LEAN: "**`lean`: 16/16/96, bounded, lossy formats**",
    "u as often as x, bounded": "16/16/96, bounded, fp32",
    "u as often as x": "16/16/96, fp32",
    DESLOC: "DES-LOC as in the paper, 16/48/96",
    "u as often as x, K = 24, bounded": "24/24/96, bounded",
    "Local, twice the period": "Local, 32",
    FAVG: "FAVG+OPT, 16",
    "DES-LOC, half the periods": "DES-LOC, 8/24/48",
    "DES-LOC, half the periods, lean": "8/24/48, the formats of `lean`",
    "Local, lean": "Local, 16, the formats of `lean`",
    "Local, K = 24, lean": "Local, 24, the formats of `lean`",
    "DES-LOC, lean": "16/48/96, the formats of `lean`",
}
"""Methods of the table in research/paper.md."""
FIRST_COLUMNS = {
    ("ladder_tuned", 41_120, 256): "41,120 parameters, each method at its own rate",
    ("ladder_batch", 41_120, 256): "the same, at one rate",
    ("ladder_size", 213_440, 1024): "213,440",
    ("ladder_size", 1_082_496, 1024): "1,082,496",
    ("ladder_size", 4_262_144, 1024): "4,262,144",
}


class Rung(NamedTuple):
    """What a comparison holds fixed, besides the seed."""

    study: str
    partition: str
    optimizer: str
    params: int
    tokens: int
    steps: int
    period: int
    beta_2: float


class Arm(NamedTuple):
    """A method at its periods of x, u and v."""

    method: str
    periods: tuple[int | str, ...]


Seeds = dict[int, Run]
Ladder = dict[Rung, dict[Arm, Seeds]]


@cache
def ladder() -> Ladder:
    """Return the runs of all studies, by rung, method and seed."""
    found: Ladder = defaultdict(lambda: defaultdict(dict))
    for study in STUDIES:
        for run in records(study):
            if run["seed"] >= SPARE or run["status"] != "completed":
                continue
            # DiLoCo's AdamW and Flower's strategies are compared with Local Adam.
            optimizer: Any = {"adamw": "adam"}.get(run["optimizer"], run["optimizer"])
            values = [run[key] for key in ("params", "tokens", "steps", "period")]
            values += [run["betas"][1]]
            rung = Rung(study, run["partition"], optimizer, *values)
            periods = tuple(run["sync"][stream] for stream in STREAMS if stream in run["sync"])
            found[rung][Arm(run["method"], periods)][run["seed"]] = run
    return found


def seeds_of(methods: dict[Arm, Seeds], name: str, *periods: int | str) -> Seeds:
    """Return a method's runs by seed; none if it was not run."""
    for arm, seeds in methods.items():
        if arm.method == name and periods in ((), arm.periods):
            return seeds
    return {}


def values(seeds: Seeds, key: str = "loss") -> dict[int, float]:
    return {seed: run[key] for seed, run in seeds.items()}


def above(ours: Seeds, theirs: Seeds, key: str = "loss") -> Estimate:
    """Compare runs by seed with those of the same seeds, in per cent."""
    return Estimate.above(values(ours, key), values(theirs, key))


def bytes_share(ours: Seeds, theirs: Seeds) -> float:
    """Return the bytes that a client sent, as a share of those with the same seed; their mean."""
    mine, others = (values(seeds, "bytes_sent_by_a_client") for seeds in (ours, theirs))
    return fmean(sent / others[seed] for seed, sent in mine.items() if seed in others)


# ----------------------------------------------------------------------------------------- Tables


def comparison(study: str) -> Table:
    """Return the methods of a study, each compared with Local and with DES-LOC."""
    heads = ["data", "optimizer", "parameters", "tokens", "steps", "β₂", "method"]
    heads += ["K_x / K_u / K_v", "formats of x, u, v", "bound", "rate", "seeds", "bytes", "loss"]
    heads += ["above Local, %", "above DES-LOC, %", "above DDP, %", "perplexity above Local, %"]
    heads += ["worst client's loss", "parameter norm", "activation norm"]
    rows = []
    for rung, methods in sorted(item for item in ladder().items() if item[0].study == study):
        if study == LOW:  # data parallelism has no period: it was run with those of the other study
            shorter = ladder()[rung._replace(study=PAPER, period=PERIOD)]
            parallel = {arm: seeds for arm, seeds in shorter.items() if arm.method == DDP}
            methods = parallel | methods
        local, desloc, ddp = (seeds_of(methods, name) for name in (LOCAL, DESLOC, DDP))
        for arm, seeds in sorted(methods.items(), key=order):
            first, *_ = seeds.values()
            row: list[Any] = [
                PARTITIONS[rung.partition],
                NAMES[first["optimizer"]],
                f"{rung.params:,}",
            ]
            row += [rung.tokens, rung.steps, rung.beta_2, *in_words(arm)]
            row += [", ".join(sorted({f"{run['rate']:.3g}" for run in seeds.values()}))]
            row += [len(seeds), f"{bytes_share(seeds, local):.2f}"]
            row += [f"{fmean(values(seeds).values()):.3f}"]
            references = [(local, "loss"), (desloc, "loss"), (ddp, "loss")]
            for reference, key in [*references, (local, "perplexity")]:
                known = seeds is not reference and reference
                row += [above(seeds, reference, key).interval if known else ""]
            for key in ("worst_client", "param_norm", "activation_norm"):
                measured: list[Any] = [run.get(key) for run in seeds.values()]
                row += ["" if None in measured else spread(measured)]
            rows.append(row)
    return Table(heads, rows)


def order(item: tuple[Arm, Seeds]) -> tuple[Any, ...]:
    arm, _ = item
    rank = ORDER.index(arm.method) if arm.method in ORDER else len(ORDER)
    return rank, arm.method, list(map(str, arm.periods))


def in_words(arm: Arm) -> list[str]:
    """Return a method's name, periods, formats and bound."""
    parts = arm.method.split(", ")
    known = (DESLOC, FAVG, "FAVG-OPT", DDP, "DiLoCo", LOCAL, "early average", *FLOWERS.values())
    name = "`lean`" if arm.method in (LEAN, LEAN_ADOPT) else parts[0]
    name = name if name in known or name == "`lean`" else ""
    formats = next((CODED[part] for part in parts if part in CODED), "")
    return [name, " / ".join(map(str, arm.periods)), formats, "yes" * ("bounded" in parts)]


def first_table() -> Table:
    """Return the table of paper.md: IID, Adam, K_x = 16; in brackets interval and seeds."""
    columns = []
    for study, params, tokens in FIRST_COLUMNS:
        rung = Rung(study, "iid", "adam", params, tokens, STEPS, PERIOD, BETA_2["adam"])
        columns.append(ladder()[rung])
    rows = []
    for name, label in FIRST_TABLE.items():
        both = [(seeds_of(methods, name), seeds_of(methods, LOCAL)) for methods in columns]
        sent = next(bytes_share(*pair) for pair in both if pair[0])
        cells = [
            f"{gap.interval} {gap.seeds}" if (gap := above(*pair)).seeds else "" for pair in both
        ]
        rows.append([label, f"{sent:.2f}", *cells])
    return Table(["", "bytes", *FIRST_COLUMNS.values()], rows)


def lean_table() -> Table:
    """Return the table of ladder.md: lean and DES-LOC in every setting with Adam and K_x = 16."""
    rows = []
    for rung, methods in sorted(ladder().items(), key=lambda item: in_figure(item[0])):
        lean, desloc, local = (seeds_of(methods, name) for name in (LEAN, DESLOC, LOCAL))
        if lean and rung.period == PERIOD and rung.study.startswith(("ladder", PAPER)):
            gaps = [above(seeds, local) for seeds in (lean, desloc)]
            rows.append([setting(rung), len(lean), *(gap.interval for gap in gaps)])
    return Table(["setting", "seeds", "`lean`", "DES-LOC"], rows)


def which_moment() -> Table:
    """Return the cost of rare averages of u, of v and of both, by K_x and by v's half-life."""
    columns = {
        "v as often as x": "u rarely: K_u = 3 K_x",
        "u as often as x, bounded": "v rarely: K_v = 6 K_x, bounded",
        DESLOC: "both: K_u = 3 K_x, K_v = 6 K_x",
    }
    rows = []
    key = ("partition", "params", "period", "beta_2")
    for rung, methods in sorted(
        (item for item in ladder().items() if item[0].study == PARTS),
        key=lambda item: [getattr(item[0], name) for name in key],
    ):
        local = seeds_of(methods, LOCAL)
        k = rung.period
        periods = [(k, 3 * k, k), (k, k, 6 * k), (k, 3 * k, 6 * k)]
        gaps = [
            above(seeds_of(methods, name, *at), local)
            for name, at in zip(columns, periods, strict=True)
        ]
        row = [PARTITIONS[rung.partition], f"{rung.params:,}", rung.period, rung.beta_2]
        rows.append([*row, gaps[0].seeds, *(gap.interval for gap in gaps)])
    return Table(["data", "parameters", "K_x", "β₂", "seeds", *columns.values()], rows)


def tuning(study: str) -> Table:
    """Return the loss of every learning rate that was tried on the spare seeds."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for run in records(study):
        if run["seed"] >= SPARE and run["status"] == "completed":
            key = run["cell"], run["method"], f"{run['rate']:.3g}"
            found[key].append(run["loss"])
    rows = [[*key, len(losses), f"{fmean(losses):.3f}"] for key, losses in sorted(found.items())]
    return Table(["cell", "method", "rate", "seeds", "loss"], rows)


# ---------------------------------------------------------------------------------------- Figures


def picture() -> None:
    """Draw the presets' gaps in every setting, and all methods' gaps against their bytes."""
    made, (settings, *sent) = style.figure(1, 1 + len(BY_BYTES), 7.6, width_ratios=(1.5, 1, 1, 1))
    made.set_figwidth(14)
    by_setting(settings)
    for panel, (params, tokens) in zip(sent, BY_BYTES, strict=True):
        study = "ladder_batch" if tokens == 256 else "ladder_size"
        methods = ladder()[
            Rung(study, "iid", "adam", params, tokens, STEPS, PERIOD, BETA_2["adam"])
        ]
        local = seeds_of(methods, LOCAL)
        panel.axhspan(-MARGIN, MARGIN, color="#EDEDED", zorder=0)
        panel.axhline(0, color=GREY, lw=0.8)
        for name in SHOWN:
            if seeds := seeds_of(methods, name):
                draw_point(panel, name, bytes_share(seeds, local), above(seeds, local))
        panel.plot(1, 0, "D", color=GREY, ms=5)
        panel.annotate("Local", (1, 0), (0, 7), textcoords="offset points", ha="center", size=8)
        panel.set_xscale("log", base=2)
        ticks = {1 / 16: "1/16", 1 / 8: "1/8", 1 / 4: "1/4", 1 / 2: "1/2", 1: "1"}
        panel.set_xticks(list(ticks), list(ticks.values()))
        panel.set(ylim=LIMITS, xlim=(0.055, 1.4), xlabel="bytes, Local = 1")
        style.title(panel, f"{params:,} parameters,\n{tokens} tokens, IID")
    sent[0].set_ylabel("loss above Local Adam's, %")
    found = [panel.get_legend_handles_labels() for panel in sent]
    named = {name: handle for both in found for handle, name in zip(*both, strict=True)}
    named = {name: named[name] for name, *_ in SHOWN.values() if name in named}
    made.legend(
        named.values(), named, frameon=False, fontsize=8, loc="outside lower right", ncols=3
    )
    made.savefig(RESEARCH / "ladder.png", dpi=130)


def by_setting(panel: Any) -> None:
    """Draw one line for every setting."""
    names: list[str] = []
    shifts = dict(zip(SHOWN, (0.22, 0.22, 0, -0.22), strict=False))
    for rung, methods in sorted(ladder().items(), key=lambda item: in_figure(item[0])):
        usual = rung.beta_2 == BETA_2[rung.optimizer]
        if rung.study in (PARTS, "thin_links_longer") or not usual:
            continue
        for name, shift in shifts.items():
            if seeds := seeds_of(methods, name):
                gap = above(seeds, seeds_of(methods, LOCAL))
                draw_point(panel, name, len(names) - shift, gap, flat=True)
        names.append(setting(rung))
    style.rows_axis(panel, names)
    panel.set_yticks(range(len(names)), names, fontsize=7.5)  # every one, however many
    panel.axvspan(-MARGIN, MARGIN, color="#EDEDED", zorder=0)
    panel.axvline(0, color=GREY, lw=0.8)
    panel.set(xlim=LIMITS, xlabel="loss above Local's with the same optimizer, %")
    style.title(panel, "By setting", "parameters, and tokens a worker and step")


def in_figure(rung: Rung) -> tuple[Any, ...]:
    """Return a key that sorts settings for the figure."""
    by_domain = rung.partition == "by_domain"
    return (
        *(rung.optimizer, rung.study in CHECKS, by_domain, rung.params, rung.tokens, rung.steps),
        rung.study in OWN_RATES,
    )


def setting(rung: Rung) -> str:
    """Return a setting in words; what is not said is IID, Adam, K_x = 16 and 512 steps."""
    words = [f"{rung.params:,}", f"{rung.tokens}"]
    words += ["by domain"] if rung.partition == "by_domain" else []
    words += [f"{rung.steps} steps"] if rung.steps != STEPS else []
    words += [f"K = {rung.period}"] if rung.period != PERIOD else []
    words += [NAMES[rung.optimizer]] if rung.optimizer != "adam" else []
    words += ["other text"] if rung.study in CHECKS else []
    words += ["own rates"] if rung.study in OWN_RATES else []
    return ", ".join(words)


def draw_point(panel: Any, method: str, at: float, gap: Estimate, *, flat: bool = False) -> None:
    """Draw a method's point with its interval, which is horizontal if ``flat``."""
    name, colour, marker = SHOWN[method]
    reach = gap.reach if math.isfinite(gap.reach) else 0
    where = (gap.mean, at, None, reach) if flat else (at, gap.mean, reach, None)
    panel.errorbar(*where, label=name, color=colour, fmt=marker, ms=4.5, capsize=2, lw=1.2)


# ----------------------------------------------------------------------------- Further comparisons


def pairs() -> Table:
    """Return the comparisons of the pages whose reference is neither Local nor DES-LOC."""
    setting = "parameters, tokens; IID, Adam, K_x = 16 and 512 steps unless stated"
    heads = [setting, "method", "compared with", "seeds", "loss, %"]
    return Table(heads, [[*words, gap.seeds, gap.interval] for words, gap in _pairs()])


def _rung(study: str, params: int = 41_120, tokens: int = 256, **fields: Any) -> Rung:
    usual = Rung(study, "iid", "adam", params, tokens, STEPS, PERIOD, BETA_2["adam"])
    return usual._replace(**fields)


def _pairs() -> Iterator[tuple[list[str], Estimate]]:
    small, large = _rung("ladder_batch"), _rung("ladder_size", 213_440, 1024)
    bounded = "u as often as x, bounded"
    for rung in (small, large):
        for ours, theirs in (
            (LEAN, "Local, lean"),
            (DESLOC, "Local, twice the period"),
            (LEAN, "Local, K = 24, lean"),
            (LEAN, bounded),
            (bounded, "DES-LOC, bounded"),
            ("DES-LOC, lean", DESLOC),
        ):
            yield from _pair(rung, ours, theirs)
    check = _rung("low_frequency_check", partition="by_domain", steps=1536, period=128)
    yield from _pair(check, "v as often as x, lean", LEAN)
    for partition, steps in (("by_domain", 1536), ("iid", 3072)):
        paper = _rung(PAPER, partition=partition, steps=steps)
        yield from _pair(paper, FAVG, "DES-LOC, bounded")
        yield from _pair(paper, DDP, "DES-LOC, bounded")
    for params, tokens, steps in ((41_120, 256, 1536), (213_440, 1024, 768)):
        at = {"partition": "by_domain", "steps": steps, "period": 64}
        yield from _pair(_rung(PARTS, params, tokens, **at), DESLOC, bounded)
    (thin,) = (rung for rung in ladder() if rung.study == "thin_links_longer")
    yield from _pair(thin, "FedAvg (Flower)", LEAN)
    for name in (LOCAL, DDP):
        for rung in sorted(ladder()):
            if rung.optimizer == "adopt" and rung.beta_2 == BETA_2["adopt"]:
                adam = _as_adam(rung)
                adopts, adams = (seeds_of(ladder().get(one, {}), name) for one in (rung, adam))
                if adopts and adams:
                    words = setting(rung._replace(optimizer="adam"))
                    yield [words, f"{name}, ADOPT", f"{name}, Adam"], above(adopts, adams)
    for rung, of, than in ((small, 1024, 256), (small, 4096, 256), (large, 4096, 1024)):
        more = rung._replace(tokens=of)
        yield _change("DES-LOC above Local", f"{of} tokens", f"{than}", DESLOC, more, rung)
    by_domain = small._replace(partition="by_domain")
    yield _change("FAVG+OPT above Local", "by domain", "IID", FAVG, by_domain, small)
    rare = _rung(PARTS, partition="by_domain", steps=1536, period=128)
    longer = rare._replace(beta_2=0.999)
    yield _change("v rarely, above Local", "β₂ = 0.999", "0.95", bounded, longer, rare)


def _as_adam(rung: Rung) -> Rung:
    return rung._replace(optimizer="adam", beta_2=BETA_2["adam"])


def _pair(rung: Rung, ours: str, theirs: str) -> Iterator[tuple[list[str], Estimate]]:
    one, other = (seeds_of(ladder()[rung], name) for name in (ours, theirs))
    if one and other:
        names = [" ".join(_named(name, rung)) for name in (ours, theirs)]
        yield [setting(rung), *names], above(one, other)


def _named(method: str, rung: Rung) -> list[str]:
    arm = next(arm for arm in ladder()[rung] if arm.method == method)
    name, periods, formats, bound = in_words(arm)
    return list(filter(None, [name, periods, formats and f"({formats})", bound and "bounded"]))


def _change(
    what: str, ours: str, theirs: str, method: str, one: Rung, other: Rung
) -> tuple[list[str], Estimate]:
    """Return by how many points a method's gap to Local changes from one setting to another."""
    gaps = [
        differences(values(seeds_of(ladder()[r], method)), values(seeds_of(ladder()[r], LOCAL)))
        for r in (one, other)
    ]
    both = gaps[0].keys() & gaps[1].keys()
    words = f"{what}: {setting(one)}"
    return [words, ours, theirs], Estimate.of(gaps[0][seed] - gaps[1][seed] for seed in both)


TABLES: dict[str, Callable[[], Table]] = {
    **{study: partial(comparison, study) for study in STUDIES},
    "which_moment_by_period": which_moment,
    "pairs": pairs,
    "ladder_rates": lambda: tuning("ladder_rates"),
    "thin_links_rates": lambda: tuning("thin_links_rates"),
}
