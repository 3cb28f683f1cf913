"""What is compared with what, and the bar for each."""

from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks import children
from benchmarks.table import Row, by_difference, by_ratio

ENGINES = ("jax", "tensorflow")
_ROUNDS = 3
_IMPORTS = 5


class Comparison(NamedTuple):
    """
    Two contestants of one work.

    Args:
        bars: for each engine, how many times as fast (or as small) as the other ours must be; none:
            for information.
    """

    ours: str
    other: str
    bars: dict[str, float]


_EVERYWHERE = dict.fromkeys(ENGINES, 1.0)
_PLAIN = (Comparison("wholestep", "Keras fit", _EVERYWHERE),)
_AGAIN = (Comparison("wholestep", "Keras fit", {"jax": 0.9}),)
_CUT = "wholestep, microbatch_size=6"
_AUTO = 'wholestep, "auto"'
_ACCUMULATED = "Keras fit, 10 x 6 accumulated"
_WORDS = "wholestep, 20 000 words"
_SPEED = {
    "A": (
        Comparison(_CUT, _ACCUMULATED, {"jax": 2.5, "tensorflow": 5.0}),
        Comparison(_AUTO, _ACCUMULATED, {"jax": 10.0, "tensorflow": 15.0}),
        Comparison(_CUT, "hand-written loop, 10 x 6", {"jax": 0.8}),
        Comparison(_AUTO, "hand-written loop, whole", {"jax": 0.8, "tensorflow": 0.77}),
        *(
            Comparison(_AUTO, f"Keras fit, batch 60, {num} at once", _EVERYWHERE)
            for num in (1, 16, 64)
        ),
    ),
    "B": _PLAIN,
    "C": (
        Comparison(_WORDS, "Keras fit, 20 000 words", {"jax": 6.0, "tensorflow": 12.0}),
        Comparison(f"{_WORDS}, batch 2048", "Keras fit, 20 000 words", {}),
        # A batch has 1.21 times as many different words, and so many rows move.
        Comparison("wholestep, 400 000 words", _WORDS, dict.fromkeys(ENGINES, 0.8)),
    ),
    "D": _PLAIN,
    "E": _PLAIN,
}
_UNITS: dict[str, tuple[str, Callable[[dict], float]]] = {
    "A": ("s/epoch", lambda epoch: 1),
    "C": ("s for 1e6 pairs", lambda epoch: epoch["rows"] / 1e6),
    "D": ("s for 1e6 tokens", lambda epoch: 64 * epoch["rows"] / 1e6),
}
_BUCKETS = "wholestep, tokens=2048"
_EACH = "Keras fit, each batch padded"
_ALL = "Keras fit, padded to the longest"
_RAGGED = (
    Comparison(_BUCKETS, _EACH, dict.fromkeys(ENGINES, 2.0)),
    Comparison(_BUCKETS, _ALL, dict.fromkeys(ENGINES, 4.0)),
)
_PATHS = {  # how many times as fast as Keras, on jax and on tensorflow
    "fit, arrays": (3.2, 12),
    "fit, arrays, against Keras with its best steps_per_execution": (1, 1),
    "fit, arrays, against a loop by hand": (0.77, 0.77),
    "fit, validation_data": (3, 10),
    "fit, a callback reads every batch's logs": (1, 6),
    "fit, a callback reads every batch's logs alone": (1.5, 6),
    "fit, a callback reads the weights every 50 batches": (1, 6),
    "fit, a PyDataset": (1.3, 2.5),
    "fit, a generator": (1.3, 2.5),
    "fit, tf.data": (1.3, 2.5),
    "steps(), against fit": (1, 6),
    "steps(), every loss read, against fit": (1, 4),
    "update(), against train_on_batch": (3, 3),
    "update(), against a bare call": (0.67, 0.67),
    "evaluate": (4, 10),
    "predict, batch 60": (2, 6),
    "predict, batch 1024": (1.2, 5),
    "fit, a PyDataset, another to validate on": (1, 1),
    "fit, a PyDataset, a callback reads every batch's logs": (1, 1),
    "fit, a PyDataset, a callback reads every batch's logs alone": (1, 1),
    "steps() on a PyDataset, against fit": (1, 1),
    "evaluate, a PyDataset": (1, 1),
    "predict, a PyDataset": (1, 1),
    "test_on_batch": (1, 1),
}
_CHECKPOINTS = {  # what is compared, and how many times as long as the other it may take
    "updates": ("saving", "not saving", 1.03),
    "hold": ("snapshot", "copy", 1.2),
    "load": ("verified", "plain", 2.0),
    "small": ("save", "plain write", 3.0),
    "digest": ("xxh3_128", "2 GB/s", 1.0),
}
# of Keras; the second takes part if orbax is installed
_OTHERS = ("ModelCheckpoint", "OrbaxCheckpoint")
_MODELS = (  # of `models.MODELS`, which imports Keras
    *(
        "ViT",
        "residual",
        "MobileNet",
        "U-Net",
        "WaveNet",
        "ConvLSTM",
        "diffusion",
        "VAE",
        "LSTM",
        "Transformer",
    ),
)
_NAMES = {1: "1 process", 2: "2 processes"}
_ONE = "wholestep, one replica"
_RAGGED_FIRST = (Comparison(_BUCKETS, _EACH, {}), Comparison(_BUCKETS, _ALL, {}))


def measure(work: str, engines: list[str], *, quick: bool) -> list[Row]:
    """Return the rows of the table on this work, engine by engine."""
    rows = []
    for engine in engines:
        found = _MEASURES[work](engine, quick)
        peak = children.take_peak()
        rows += [row._replace(peak=peak) for row in found]
    return rows


def _speed(work: str, engine: str, quick: bool) -> list[Row]:
    found = children.measure(
        "speed", engine, work=work, rounds=1 if quick else _ROUNDS, quick=quick
    )
    title, unit = _UNITS.get(work, ("ms/step", lambda epoch: epoch["updates"] / 1000))
    times = {
        name: [seconds / unit(epoch) for seconds in epoch["times"]] for name, epoch in found.items()
    }
    return _compare(f"{work}, {title}", engine, times, _SPEED[work])


def _ragged(engine: str, quick: bool) -> list[Row]:
    found = children.measure("ragged", engine, rounds=1 if quick else _ROUNDS, quick=quick)
    later = {
        name: [seconds * 1e6 / found["tokens"] for seconds in times]
        for name, times in found["later"].items()
    }
    return [
        *_compare("D', s for 1e6 real tokens", engine, later, _RAGGED),
        *_compare("D', s for the first epoch", engine, found["first"], _RAGGED_FIRST),
    ]


def _first(engine: str, quick: bool) -> list[Row]:
    works = "A" if quick else "ABDE"
    rounds = 1 if quick else _ROUNDS
    rows = [
        row
        for work in works
        for row in _compare(
            f"{work}, s to the first update", engine, _firsts(engine, work, rounds), _PLAIN
        )
    ]
    if engine == "jax":
        with TemporaryDirectory() as programs:
            for work in works:
                _firsts(engine, work, 1, programs=programs)
                again = _firsts(engine, work, rounds, programs=programs)
                title = f"{work}, s to the first update, programs kept in a folder"
                rows += _compare(title, engine, again, _AGAIN)
    return rows


def _firsts(engine: str, work: str, rounds: int, **options: str) -> dict[str, list[float]]:
    return _in_turns(
        rounds,
        {
            who: partial(children.measure, "first", engine, work=work, who=who, **options)
            for who in ("wholestep", "Keras fit")
        },
    )


def _import(engine: str, quick: bool) -> list[Row]:
    modules = {
        "keras": ["keras"],
        "keras, wholestep": ["keras", "wholestep.trainer", f"wholestep.engines.{engine}"],
    }
    times = _in_turns(
        1 if quick else _IMPORTS,
        {
            name: partial(children.measure, "imports", engine, modules=names)
            for name, names in modules.items()
        },
    )
    ours = times["keras, wholestep"]
    other = times["keras"]
    return [
        by_difference("import, s", engine, ("keras, wholestep", ours), ("keras", other), bar=0.3)
    ]


def _memory(engine: str, quick: bool) -> list[Row]:
    parts = {"wholestep, 10 parts": 10, "wholestep, whole": 1, "Keras fit": None}
    found = {
        name: children.measure("memory", engine, parts=num, quick=quick)
        for name, num in parts.items()
    }
    peaks = {name: [sizes["peak"] / 2**20] for name, sizes in found.items()}
    programs = {
        name: [sizes["program"] / 2**20]
        for name, sizes in found.items()
        if sizes["program"] is not None
    }
    falls = Comparison("wholestep, 10 parts", "wholestep, whole", dict.fromkeys(ENGINES, 2.0))
    against = Comparison("wholestep, whole", "Keras fit", {})
    return [
        *_compare("growth of peak memory, MiB", engine, peaks, (falls, against)),
        *_compare("memory of the program, MiB", engine, programs, (falls,)),
    ]


def _processes(engine: str, quick: bool) -> list[Row]:
    """Two processes on a core each, against one on one core. The JAX engine alone has several
    processes.
    """
    if engine != "jax":
        return []
    rows = []
    for work in "E" if quick else "AE":
        found = {
            num: children.measure("processes", engine, work=work, num=num, quick=quick)
            for num in (1, 2)
        }
        times = {
            name: [1000 * s / found[num]["updates"] for s in found[num]["epoch"]]
            for num, name in _NAMES.items()
        }
        rows += _compare(
            f"{work}, ms/step", engine, times, (Comparison(_NAMES[2], _NAMES[1], {"jax": 1.6}),)
        )
        firsts = [(_NAMES[num], [found[num]["first"]]) for num in (2, 1)]
        rows.append(
            by_difference(
                f"{work}, s from the command to the first update", engine, *firsts, bar=3.0
            )
        )
    return rows


def _replica(engine: str, quick: bool) -> list[Row]:
    rows = []
    for work in "E" if quick else "AE":
        found = children.measure(
            "speed", engine, work=f"{work}, one replica", rounds=1 if quick else 5, quick=quick
        )
        times = {
            name: [1000 * s / epoch["updates"] for s in epoch["times"]]
            for name, epoch in found.items()
        }
        rows += _compare(
            f"{work}, ms/step", engine, times, (Comparison(_ONE, "wholestep", {engine: 0.98}),)
        )
    return rows


def _paths(engine: str, quick: bool) -> list[Row]:
    """What people call, one update at a time or many, against the same in Keras."""
    found = children.measure("paths", engine, rounds=1 if quick else 2 * _ROUNDS, quick=quick)
    rows = []
    for name, times in found.items():
        bars = dict(zip(ENGINES, _PATHS[name], strict=True))
        other = "by hand" if name.endswith(("by hand", "bare call")) else "Keras"
        shown = {"wholestep": times["wholestep"], other: times["Keras"]}
        rows += _compare(
            f"P, {name}, us/batch", engine, shown, (Comparison("wholestep", other, bars),)
        )
    return rows


def _inputs(engine: str, quick: bool) -> list[Row]:
    """The kinds of data that `fit` takes, against the same in Keras."""
    found = children.measure("inputs", engine, rounds=1 if quick else 2 * _ROUNDS, quick=quick)
    comparison = Comparison("wholestep", "Keras", {})
    return [
        row
        for name, times in found.items()
        for row in _compare(f"inputs, {name}, us/batch", engine, times, (comparison,))
    ]


def _draws(engine: str, quick: bool) -> list[Row]:
    """Draws that belong to rows, against the engine's own: of one update, whole and in
    microbatches.
    """
    rows = []
    for work, part in (
        (("augmentation", 32),) if quick else (("D, dropout", 8), ("augmentation", 32))
    ):
        found = children.measure(
            "draws", engine, work=work, rounds=1 if quick else 3 * _ROUNDS, quick=quick
        )
        times = {
            name: [1000 * s / found["updates"] for s in each]
            for name, each in found["times"].items()
        }
        cut = f"wholestep, microbatch_size={part}"
        own = "the engine's draws"
        bars = dict.fromkeys(ENGINES, 1 / 1.05)
        comparisons = (
            Comparison("wholestep", f"wholestep, {own}", bars),
            Comparison(cut, f"{cut}, {own}", bars),
            Comparison("wholestep", "wholestep, again", {}),
        )
        rows += _compare(f"{work}, ms/step", engine, times, comparisons)
    return rows


def _checkpoints(engine: str, quick: bool) -> list[Row]:
    """What checkpoints cost against the least that they could."""
    found = children.measure(
        "checkpoints", engine, rounds=1 if quick else 2 * _ROUNDS - 1, quick=quick
    )
    rows = []
    for work, (ours, other, most) in _CHECKPOINTS.items():
        bars = dict.fromkeys(ENGINES, 1 / most)
        rows += _compare(
            f"checkpoints: {work}, s", engine, found[work], (Comparison(ours, other, bars),)
        )
    others = tuple(Comparison("wholestep", other, {}) for other in _OTHERS)
    for work in ("400 MB, hold", "400 MB, total", "400 MB, read"):
        rows += _compare(f"checkpoints: {work}, s", engine, found[work], others)
    return rows


def _models(engine: str, quick: bool) -> list[Row]:
    """The time of an epoch of ordinary models: 80 updates on batches of 10."""
    rows = []
    for model in _MODELS:
        times = children.measure(
            "models", engine, model=model, rounds=1 if quick else _ROUNDS, quick=quick
        )
        rows += _compare(f"{model}, s/epoch", engine, times, _PLAIN)
    return rows


def _audit(engine: str, quick: bool) -> list[Row]:
    """What an audit costs against the loop that it watches."""
    rows = []
    for kind, seconds in {"right": 30.0, "wrong": 30.0}.items():
        found = children.measure(
            "audit", engine, kind=kind, rounds=1 if quick else _ROUNDS, quick=quick
        )
        times = found["times"]
        audited = ("audited", times["audited"])
        bare = ("the loop", times["bare"])
        rows.append(
            by_difference(f"audit: {kind}, s for 30 updates", engine, audited, bare, bar=seconds)
        )
        rows.append(
            by_ratio(
                f"audit: {kind}, s", engine, ("under the hooks", times["hooks"]), bare, bar=None
            )
        )
        model = ("the model, MB", [found["model"]] * len(found["peak"]))
        rows.append(
            by_ratio(
                f"audit: {kind}, MB",
                engine,
                ("the process grows by", found["peak"]),
                model,
                bar=1 / 8,
            )
        )
    return rows


def _in_turns(rounds: int, contestants: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            found[name].append(run())
    return found


def _compare(
    title: str, engine: str, values: dict, comparisons: tuple[Comparison, ...]
) -> list[Row]:
    """Return a row for each comparison whose contestants both took part."""
    return [
        by_ratio(
            title,
            engine,
            (c.ours, values[c.ours]),
            (c.other, values[c.other]),
            bar=c.bars.get(engine),
        )
        for c in comparisons
        if c.ours in values and c.other in values
    ]


_MEASURES: dict[str, Callable[[str, bool], list[Row]]] = {
    **{work: partial(_speed, work) for work in _SPEED},
    "D'": _ragged,
    "first": _first,
    "import": _import,
    "paths": _paths,
    "inputs": _inputs,
    "memory": _memory,
    "models": _models,
    "draws": _draws,
    "checkpoints": _checkpoints,
    "audit": _audit,
    "replica": _replica,
    "processes": _processes,
}
WORKS = tuple(_MEASURES)
