"""Loops of PyTorch: training stays as it was, loops of many kinds run again, and what was not judged has a reason."""

import gc
import subprocess
import sys
import weakref
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

if find_spec("triton") and find_spec(
    "tensorflow"
):  # whose libraries end a process that loads both
    pytest.skip(
        "PyTorch with Triton, beside TensorFlow", allow_module_level=True
    )
torch = pytest.importorskip("torch")

from small_torch import (  # noqa: E402
    CLASSES,
    CROSS,
    MSE,
    TEXT,
    Session,
    X,
    Y,
    batches,
    checked,
    equal,
    faults,
    network,
    reasons,
    seeded,
    steps,
    usual,
    watched,
)
from test_examples import load  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import Dataset, TensorDataset  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.faults import Error, Fault, Quantity, Stage  # noqa: E402
from stepcheck.torch.calls import Calls  # noqa: E402
from stepcheck.torch.hooks import Watcher  # noqa: E402
from stepcheck.trace.log import Log  # noqa: E402
from stepcheck.values import Reason, Shown  # noqa: E402

# ---- training stays as it was ----

SESSIONS = {
    "adam": {"make": torch.optim.Adam},
    "windows": {"window": 4, "clip": 0.5, "has_schedule": True},
    "scaled": {"casts": True},
    "compiled": {"is_compiled": True},
    "a fault": {"fault": "eval"},
}


@pytest.mark.parametrize("kind", SESSIONS)
def test_training_is_the_same_bit_for_bit(kind):
    torch.compiler.reset()
    bare = Session(**SESSIONS[kind])
    bare.train()
    expected = bare.state()
    session = Session(**SESSIONS[kind])
    report = watched(session.model, session.train)
    assert equal(session.state(), expected)
    str(report)
    assert equal(session.state(), expected)
    assert report.is_right == (kind != "a fault")


def seams(model):
    """Return the functions of PyTorch that are listened to, the numbers of its global hooks, and of these functions."""
    calls = Calls(Watcher(model, Log(), None))
    replaced = [
        (nn.Module, "__call__"),
        *((owner, name) for owner, name, *_ in calls.seams()),
    ]
    homes = [
        import_module(name)
        for name in ("torch.nn.modules.module", "torch.optim.optimizer")
    ]
    held = [
        value or {}
        for home in homes
        for name, value in vars(home).items()
        if name.startswith("_global_")
    ]
    return (
        {each: getattr(*each) for each in replaced},
        [len(each) for each in held],
        len(replaced),
    )


def test_each_seam_is_replaced_once_and_restored_after_an_error():
    model, inside = network(), []
    before = seams(model)

    def failing():
        inside.append(seams(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(model, failing)
    ((replaced, hooks, _),) = inside
    assert [function.__wrapped__ for function in replaced.values()] == [
        *before[0].values()
    ]
    assert (
        sum(hooks) == sum(before[1]) + 2
    )  # of optimizer steps, before and after
    assert seams(model) == before
    assert len(before[0]) == before[2]


def test_a_script_that_exits_inside_of_the_loop_has_its_report():
    model = network()
    watch = stepcheck.watch(model, (X, CLASSES), CROSS)
    report = watch.__enter__()
    steps(model)
    assert not watch.__exit__(SystemExit, SystemExit(), None)
    assert (faults(report), Reason.ENDED in reasons(report)) == ([], True)


def test_statistics_that_are_reset_after_the_loop_are_no_fault():
    model = network(4, nn.BatchNorm1d(6))
    with stepcheck.watch(model, (X, CLASSES), CROSS) as report:
        steps(model)
        model[2].reset_running_stats()
    assert faults(checked(report)) == []


def test_two_watches_that_end_in_the_order_of_their_beginnings_restore_all():
    before = nn.Module.__call__
    one, two = (
        stepcheck.watch(network(), (X, CLASSES), CROSS) for _ in range(2)
    )
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    two.__exit__(None, None, None)
    assert nn.Module.__call__ is before


def test_an_error_of_the_loop_leaves_its_state_and_accuses_nothing():
    def stopped(session):
        session.train()
        session.called(X[:3])
        raise TypeError("stopped")

    bare, session = Session(), Session()
    with pytest.raises(TypeError, match="stopped"):
        stopped(bare)
    expected = bare.state()
    session.__post_init__()
    with (
        pytest.raises(TypeError, match="stopped"),
        stepcheck.watch(session.model, (X, CLASSES), CROSS) as report,
    ):
        stopped(session)
    assert equal(session.state(), expected)
    assert checked(report).findings == []
    assert Reason.ENDED in reasons(report)


def test_an_error_of_stepcheck_does_not_replace_the_loops(monkeypatch):
    monkeypatch.setattr("stepcheck.torch.watch.close", lambda *_, **__: 1 / 0)
    with (
        pytest.raises(TypeError, match="stopped"),
        stepcheck.watch(network(), (X, CLASSES), CROSS),
    ):
        raise TypeError("stopped")


@pytest.mark.parametrize(
    "hook", ["_begin", "_end", "before_step", "after_step"]
)
def test_an_error_in_a_hook_ends_the_record_and_not_the_loop(hook, monkeypatch):
    bare = Session()
    bare.train()
    expected = bare.state()
    monkeypatch.setattr(Watcher, hook, lambda *_: 1 / 0)
    session = Session()
    with stepcheck.watch(session.model, (X, CLASSES), CROSS) as report:
        session.train()
    assert equal(session.state(), expected)
    assert Reason.FAILED in reasons(report)
    assert (report.findings, report.judged) == ([], [])


def test_hooks_and_prints_run_in_the_training_alone(capsys):
    class Loud(nn.Module):
        def forward(self, x):
            print(x.shape)
            return x

    model, features, given = nn.Sequential(network(), Loud()), [], []
    model[0].register_forward_hook(lambda *call: features.append(call[2]))
    model.register_forward_pre_hook(lambda *call: given.append(call[1]))
    report = usual(model)
    assert report.is_right, report
    assert (
        len(features)
        == len(given)
        == capsys.readouterr().out.count("torch.Size")
        == 18
    )


def test_a_forward_that_is_bound_to_the_module_moves_no_statistics_in_a_replay():
    model, means = network(4, nn.BatchNorm1d(6)), []
    before = model.forward
    model.forward = lambda x: before(
        x
    ).float()  # which calls the module itself, also of a copy
    report = usual(
        model, of=lambda out: means.append(model[2].running_mean.clone()) or out
    )
    assert report.findings == []
    assert torch.equal(model[2].running_mean, means[-1])


def test_a_loss_that_draws_moves_no_random_state():
    def noisy(outputs, labels):
        return CROSS(outputs + 0 * torch.rand_like(outputs), labels)

    def state_after(loss):
        seeded()
        usual(network(), value=noisy, loss=loss)
        return torch.get_rng_state()

    assert torch.equal(state_after(noisy), state_after(CROSS))


class Noisy(Dataset):
    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return X[i] + 0 * torch.randn(3, generator=self.draw), CLASSES[i]


def test_a_dataset_draws_as_it_would():
    data = Noisy()
    with stepcheck.watch(network(), data, CROSS):
        assert torch.equal(data.draw.get_state(), Noisy().draw.get_state())


def test_a_module_that_changes_after_the_loop_was_judged_as_it_was():
    session = Session()
    with stepcheck.watch(session.model, (X, CLASSES), CROSS) as report:
        session.train()
    session.model[-1] = nn.Linear(6, 9)
    assert checked(report).is_right, report


def test_numbers_are_kept_of_as_many_updates_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr("stepcheck.torch.watch.room", lambda num: 5)
    report = usual(network())
    left = [
        each.updates
        for each in report.unjudged
        if each.reason is Reason.NOT_KEPT
    ]
    assert left
    assert all(0 < updates < 18 for updates in left)
    assert report.findings == []


def test_nothing_of_a_loop_is_held_once_its_report_is_gone(verdicts):
    session = Session()
    report, held = (
        watched(session.model, session.train),
        weakref.ref(session.model),
    )
    assert report.is_right
    del session, report
    verdicts.clear()  # which the suite keeps
    gc.collect()
    assert held() is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "a model"}, "a module of PyTorch"),
        ({"data": [1, 2, 3]}, "data must be"),
        ({"data": (torch.ones(3, 2), torch.ones(4))}, "arrays of 3, 4 rows"),
        (
            {"data": TensorDataset(*[torch.ones(4, 3)] * 3)},
            r"3 parts. Try: .* data=\(\(a, b\)",
        ),
        (
            {"loss": lambda out, y, w: ((out - y) ** 2 * w).mean()},
            "3 arguments of loss need as many parts of data",
        ),
        (
            {"model": nn.ModuleDict({"G": nn.Linear(3, 1)})},
            "ModuleDict, which cannot be called",
        ),
        ({"loss": "mse"}, "loss must be"),
        (
            {"loss": None},
            r"loss must be stated .* Try: loss=nn.CrossEntropyLoss\(\)",
        ),
        (
            {"data": None, "loss": lambda out, y: (out - y) ** 2},
            "data must be stated",
        ),
        ({"loss": nn.MSELoss}, r"MSELoss'>. Try: loss=nn.MSELoss\(\)"),
        ({"learning_rate": "fast"}, "learning_rate must be"),
        ({"optimizer": "sgd"}, "optimizer must be an optimizer of PyTorch"),
        ({"model": nn.LazyLinear(1)}, "lazy layers"),
        ({"model": nn.ReLU()}, "parameters to train"),
        ({"model": nn.Linear(3, 1, device="meta")}, "on one device"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_anything_ran(given, told):
    every = {
        "model": network(1),
        "data": (torch.ones(4, 3), torch.ones(4)),
        "loss": MSE,
    } | given
    before, ran = seams(nn.Linear(1, 1)), []
    with (
        pytest.raises(stepcheck.SpecificationError, match=told),
        stepcheck.watch(**every),
    ):
        ran.append(True)
    assert not ran
    assert seams(nn.Linear(1, 1)) == before


WITHOUT_KERAS = """
import sys
sys.modules |= dict.fromkeys(("keras", "jax", "tensorflow"))  # so that their import fails
from small_torch import Session, faults, watched
for fault, expected in {"": [], "eval": ["mode.inference-mode"], "not zeroed": ["gradient.not-reset"]}.items():
    session = Session(fault)
    report = watched(session.model, session.train)
    assert [fault.id for fault in faults(report)] == expected, report
    assert report.as_json()["framework"] == "torch"
"""


def ran(code):
    home = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        cwd=home,
    )


def test_it_needs_no_keras():
    done = ran(WITHOUT_KERAS)
    assert done.returncode == 0, done.stderr


def test_pytorch_is_not_imported_otherwise():
    assert (
        ran(
            "import sys, stepcheck; stepcheck.watch; print('torch' in sys.modules)"
        ).stdout
        == "False\n"
    )


# ---- kinds of loops: right, and with a fault ----

KINDS = {}


def kind(**expected):
    """Keep a kind of loop, a function that returns the report; by the names of its faults: what is found."""

    def kept(make):
        KINDS.update(
            {
                (make.__name__, fault): (make, found)
                for fault, found in ({"": None} | expected).items()
            }
        )
        return make

    return kept


class Cast(nn.Sequential):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


@kind(shifted=Fault.LABELS_OF_OTHER_ROWS)
def autocast(fault):
    return usual(Cast(*network()), fault, of=lambda out: out.float())


@kind(
    clips_scaled=Fault.CLIP_BEFORE_UNSCALE,
    own_step=Fault.LOSS_SCALE_LEFT_IN,
    unscaled=Fault.LOSS_NOT_SCALED,
)
def scaler(fault):
    """Scales the loss; the first steps of the right loop are skipped, as at this scale gradients are not finite."""
    model = network()
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0 ** (16 if fault else 127)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def train():
        for rows in batches():
            optimizer.zero_grad()
            loss = CROSS(model(X[rows]), CLASSES[rows])
            scaled = scaler.scale(loss)
            (loss if fault == "unscaled" else scaled).backward()
            if not fault:
                scaler.unscale_(optimizer)
            if fault in ("", "clips_scaled"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if fault == "own_step":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    return watched(model, train)


@kind(softmax=Fault.SOFTMAX_TWICE)
def compiled(fault):
    torch.compiler.reset()
    return usual(
        torch.compile(network(), backend="aot_eager", fullgraph=True), fault
    )


class Tied(nn.Module):
    """A model of a text whose first and last weights are one; it computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.table, self.head = (
            nn.Embedding(10, 6),
            nn.Linear(6, 10, bias=False),
        )
        self.head.weight = self.table.weight

    def forward(self, text, labels):
        scores = self.head(self.table(text).cumsum(1))
        return scores, CROSS(scores.view(-1, 10), labels.reshape(-1))


def of_own_loss(model, x, y, fault=""):
    """Return the report on a loop whose model computes its loss itself."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for rows in batches():
            if not fault:
                optimizer.zero_grad()
            model(x[rows], labels=y[rows])[1].backward()
            optimizer.step()

    return watched(model, train, (x, y), None)


@kind(not_zeroed=Fault.NOT_RESET)
def tied(fault):
    model = Tied()
    model.table.weight.data *= 1e-2  # so that the losses of all forms that the model may have are nearly one
    return of_own_loss(model, TEXT[:, :-1], TEXT[:, 1:], fault)


def by_closure(make, fault=""):
    """Return the report on a loop whose closure runs the model twice, once for a gradient."""
    model = network()
    optimizer = make(model.parameters(), lr=0.1)

    def train():
        for rows in batches():

            def value(rows=rows):
                if not fault:
                    optimizer.zero_grad()
                loss = CROSS(model(X[rows]), CLASSES[rows])
                loss.backward()
                with torch.no_grad():
                    model(X)
                return loss

            optimizer.step(value)

    return watched(model, train)


@kind(not_zeroed=Fault.NOT_RESET)
def closure(fault):
    return by_closure(torch.optim.SGD, fault)


def changed(change):
    """Return a module whose outputs are changed by a hook."""
    model = network()
    model.register_forward_hook(lambda module, inputs, out: change(out))
    return model


@kind(softmax=Fault.SOFTMAX_TWICE)
def hooks_that_change_outputs(fault):
    return usual(changed(lambda out: 2 * out), fault)


class Depth(nn.Module):
    """Draws from three generators, computes a part again in the backward pass, and keeps a tensor with its graph."""

    def __init__(self):
        super().__init__()
        self.first, self.head = (
            parametrizations.spectral_norm(nn.Linear(3, 6)),
            nn.Linear(6, 4),
        )
        self.middle, self.kept = (
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)),
            None,
        )

    def forward(self, x):
        found = self.first(x)
        if np.random.rand() < 0.5 or torch.rand(1) < 0.5:
            found = found + checkpoint(self.middle, found, use_reentrant=False)
        self.kept = found
        return self.head(found)


@kind(shifted=Fault.LABELS_OF_OTHER_ROWS)
def draws(fault):
    return usual(Depth(), fault)


@pytest.mark.parametrize(("name", "fault"), KINDS, ids=str)
def test_a_loop_of_a_kind_is_right_or_has_its_fault(name, fault):
    seeded()
    make, found = KINDS[name, fault]
    report = make(fault)
    assert faults(report) == ([] if found is None else [found]), report
    assert report.is_right == (found is None), report


def test_findings_are_values():
    session = Session("means", window=4)
    report = watched(session.model, session.train)
    (found,) = report.findings
    assert found.fault is Fault.MEAN_OF_MEANS
    assert (found.stage, found.quantity, found.error) == (
        Stage.GRADIENT,
        Quantity.ROW_GRADIENTS,
        Error.COUNTED,
    )
    assert found.where.updates == (2, 4)  # whose last microbatch is short
    assert found.apart > 1e-3 > found.with_error
    length = found.proof.numbers[0]
    assert length.what is Shown.GRADIENT_LENGTH
    assert (
        length.observed
        == pytest.approx(length.with_error, rel=1e-4)
        != pytest.approx(length.expected, rel=1e-4)
    )
    report.require("rows", "mode", "step", "state")
    with pytest.raises(AssertionError):
        report.require()


@pytest.mark.filterwarnings(
    "ignore:.*target size"
)  # PyTorch's own words about the fault
def test_the_example_has_the_fault_and_its_fix_mends_it(capsys):
    written, mended = load("audit_torch").main()
    assert faults(written) == [Fault.BROADCAST]
    assert (mended.is_right, mended.unjudged) == (True, [])


# ---- the optimizer that is meant ----

ADAM, ADAMW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
STATED = {  # an optimizer that is meant, beside Adam with a decay of 0.1, and what differs
    "another class": (
        lambda model: SGD(model.parameters()),
        ["Adam", "SGD"],
        [],
    ),
    "another beta": (
        lambda model: ADAM(
            model.parameters(), betas=(0.8, 0.999), weight_decay=0.1
        ),
        ["Adam", "Adam", "beta_1"],
        [0.9, 0.8],
    ),
    "another decay of some": (
        lambda model: ADAM(
            [
                {"params": model[0].weight, "weight_decay": 0.1},
                {"params": model[2].weight},
            ]
        ),
        ["Adam", "Adam", "weight_decay"],
        [0.1, 0.0],
    ),
    "the decay elsewhere": (
        lambda model: ADAMW(model.parameters(), weight_decay=0.1),
        ["Adam", "AdamW", "decoupled_weight_decay"],
        [0.0, 1.0],
    ),
    "the same": (
        lambda model: ADAM(model.parameters(), 9.0, weight_decay=0.1),
        [],
        [],
    ),
}


@pytest.mark.parametrize("stated", STATED)
def test_the_loops_optimizer_is_compared_with_the_stated_one(stated):
    model = network()
    meant, names, numbers = STATED[stated]
    optimizer = ADAM(model.parameters(), 1e-2, weight_decay=0.1)

    def train():
        for rows in batches():
            optimizer.zero_grad()
            CROSS(model(X[rows]), CLASSES[rows]).backward()
            optimizer.step()

    report = watched(model, train, optimizer=meant(model))
    assert faults(report) == ([Fault.ANOTHER_OPTIMIZER] if names else [])
    for found in report.findings:
        assert [*found.change.names] == names
        assert [*found.change.numbers] == pytest.approx(numbers)


# ---- what is not judged has a reason ----


class Locked(nn.Linear):
    def forward(self, x):
        self.lock = Lock()
        return super().forward(x)


class Own(nn.Linear):
    def forward(self, x, labels):
        scores = super().forward(x)
        return scores, (scores - labels).abs().sqrt().mean()


HEAD = nn.Linear(4, 4)
ALL = Stage.ROWS, Stage.MODE, Stage.GRADIENT, Stage.STEP, Stage.STATE
OF = Stage.GRADIENT
UNJUDGED = {  # right loops, and the stages that are not judged
    Reason.NO_UPDATE: (lambda: usual(network(), num=0), ALL),
    Reason.FEW_PASSES: (
        lambda: usual(network(), num=1, rows="shuffled"),
        [Stage.ROWS],
    ),
    Reason.DATA_AS_GIVEN: (lambda: usual(network(), data=None), [Stage.ROWS]),
    Reason.OTHER_INPUTS: (lambda: usual(network(), x=X / 3), ALL),
    Reason.NOT_REPLAYED: (lambda: usual(Locked(3, 4)), ALL),
    Reason.CLOSURE: (lambda: by_closure(torch.optim.LBFGS), ALL),
    Reason.LOSS_FAILED: (
        lambda: usual(network(), loss=lambda out, y: 1 / 0),
        [OF],
    ),
    Reason.LOSS_WITH_PARAMETERS: (
        lambda: usual(
            network(), of=HEAD, loss=lambda out, y: CROSS(HEAD(out), y)
        ),
        [OF],
    ),
    Reason.LOSS_OF_MODEL: (lambda: of_own_loss(Own(3, 1), X, Y), [OF]),
    Reason.LOSS_OF_OTHER_AXIS: (
        lambda: usual(changed(lambda out: out.T), of=lambda out: out.T),
        [OF],
    ),
    Reason.LOSS_OF_ONE_OUTPUT: (
        lambda: usual(changed(lambda out: (X, out)), of=lambda out: out[1]),
        [OF],
    ),
    Reason.LOSS_WITHOUT_LABELS: (
        lambda: usual(network(1), value=torch.dist, y=Y, data=None, loss=MSE),
        [Stage.ROWS, OF],
    ),
}


@pytest.mark.parametrize("reason", UNJUDGED, ids=lambda reason: reason.name)
def test_what_is_not_judged_has_a_reason(reason):
    seeded()
    make, stages = UNJUDGED[reason]
    report = make()
    assert report.findings == [], report
    assert reason in reasons(report), report
    assert [stage for stage in ALL if stage not in report.judged] == [
        *stages
    ], report


@pytest.mark.parametrize("is_long", [True, False])
def test_a_batch_whose_step_is_skipped_is_not_in_the_next_update(is_long):
    seeded()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def train():
        for i, rows in enumerate(batches()):
            optimizer.zero_grad()
            loss = CROSS(model(X[rows]), CLASSES[rows])
            (loss if is_long or i != 4 else loss * float("nan")).backward()
            if i != 4:
                optimizer.step()

    report = watched(model, train)
    assert report.findings == [], str(report)
    assert [(each.reason, each.updates) for each in report.unjudged] == [
        (Reason.SKIPPED, 1)
    ]
