"""Loops of PyTorch: training stays as it was, loops of many kinds run again, and what was not judged has a reason."""

import gc
import subprocess
import sys
import threading
import weakref
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

from small_torch import (  # noqa: E402
    CLASSES,
    CROSS,
    MSE,
    NUM,
    PLACES,
    TEXT,
    Session,
    X,
    Y,
    batches,
    checked,
    cross,
    equal,
    faults,
    fit,
    network,
    reasons,
    seeded,
    watched,
)
from test_examples import load  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.utils import parametrizations  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import Dataset, StackDataset, Subset, TensorDataset  # noqa: E402

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
    replaced = [(nn.Module, "__call__"), *((seam.owner, seam.name) for seam in calls._seams())]
    homes = [import_module(name) for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    held = [value or {} for home in homes for name, value in vars(home).items() if name.startswith("_global_")]
    return {each: getattr(*each) for each in replaced}, [len(each) for each in held], len(replaced)


def test_each_seam_is_replaced_once_and_restored_after_an_error():
    model, inside = network(), []
    before = seams(model)

    def failing():
        inside.append(seams(model))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(model, failing)
    ((replaced, hooks, _),) = inside
    assert [function.__wrapped__ for function in replaced.values()] == [*before[0].values()]
    assert sum(hooks) == sum(before[1]) + 2  # of optimizer steps, before and after
    assert seams(model) == before
    assert len(before[0]) == before[2]


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
    with pytest.raises(TypeError, match="stopped"), stepcheck.watch(session.model, (X, CLASSES), CROSS) as report:
        stopped(session)
    assert equal(session.state(), expected)
    assert checked(report).findings == []
    assert Reason.ENDED in reasons(report)


def test_an_error_of_stepcheck_does_not_replace_the_loops(monkeypatch):
    monkeypatch.setattr("stepcheck.torch.watch.close", lambda *_, **__: 1 / 0)
    with pytest.raises(TypeError, match="stopped"), stepcheck.watch(network(), (X, CLASSES), CROSS):
        raise TypeError("stopped")


@pytest.mark.parametrize("hook", ["_begin", "_end", "_before_step", "_after_step"])
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
    report = watched(model, lambda: fit(model, lambda rows: cross(model, rows)))
    assert report.is_right, report
    assert len(features) == len(given) == capsys.readouterr().out.count("torch.Size") == 12


def test_a_forward_that_is_bound_to_the_module_is_left_as_it_is():
    model = network(4, nn.BatchNorm1d(6))
    before, own = model.forward, []
    model.forward = lambda x: before(x).float()
    own.append(model.forward)
    report = watched(model, lambda: fit(model, lambda rows: cross(model, rows)))
    kept = model[2].running_mean.clone()
    assert report.findings == []
    assert model.forward is own[0]
    assert torch.equal(model[2].running_mean, kept)


def test_a_report_that_is_read_moves_no_random_state():
    def noisy(outputs, labels):
        return functional.cross_entropy(outputs + 0 * torch.rand_like(outputs), labels, reduction="none")

    model = network()
    with stepcheck.watch(model, (X, CLASSES), noisy) as report:
        fit(model, lambda rows: noisy(model(X[rows]), CLASSES[rows]).mean())
    state = torch.get_rng_state()
    assert checked(report).findings == []
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dataset_draws_as_it_would():
    class Noisy(Dataset):
        def __init__(self):
            self.rng, self.draw = np.random.default_rng(0), torch.Generator().manual_seed(0)

        def __len__(self):
            return NUM

        def __getitem__(self, i):
            return X[i] + 0 * torch.randn(3, generator=self.draw), CLASSES[i] + 0 * int(self.rng.integers(9))

    data = Noisy()
    with stepcheck.watch(network(), data, CROSS):
        assert data.rng.integers(1000) == np.random.default_rng(0).integers(1000)
        assert torch.equal(data.draw.get_state(), torch.Generator().manual_seed(0).get_state())


def test_a_module_that_changes_after_the_loop_was_judged_as_it_was():
    model = network()
    with stepcheck.watch(model, (X, CLASSES), CROSS) as report:
        fit(model, lambda rows: cross(model, rows))
    model[2] = nn.Linear(6, 9)
    assert report.is_right, report


# ---- memory ----


def test_numbers_are_kept_of_as_many_updates_as_there_is_room_for(monkeypatch):
    monkeypatch.setattr("stepcheck.torch.watch.room", lambda num: 5)
    model = network()
    report = watched(model, lambda: fit(model, lambda rows: cross(model, rows), num=3))
    left = [each for each in report.unjudged if each.reason is Reason.NOT_KEPT]
    assert left
    assert all(0 < each.updates < 18 for each in left)
    assert report.findings == []


def test_nothing_of_a_loop_is_held_once_its_report_is_gone():
    session = Session()
    report, held = watched(session.model, session.train), weakref.ref(session.model)
    assert report.is_right
    del session, report
    gc.collect()
    assert held() is None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "a model"}, "a module of PyTorch"),
        ({"data": [1, 2, 3]}, "data must be"),
        ({"data": (torch.ones(3, 2), torch.ones(4))}, "arrays of 3, 4 rows"),
        ({"data": TensorDataset(*[torch.ones(4, 3)] * 3)}, r"3 parts. Try: .* data=\(\(a, b\)"),
        ({"loss": lambda out, y, w: ((out - y) ** 2 * w).mean()}, "3 arguments of loss need as many parts of data"),
        ({"data": [(torch.ones(2),) * 3] * 4}, r"4 parts"),
        ({"data": StackDataset(a=[1, 2], b=[1, 2])}, "no pairs, but of type dict"),
        ({"model": nn.ModuleDict({"G": nn.Linear(3, 1)})}, "ModuleDict, which cannot be called"),
        ({"loss": "mse"}, "loss must be"),
        ({"loss": nn.CTCLoss()}, "CTCLoss"),
        ({"loss": None}, r"loss must be stated .* Try: loss=nn.CrossEntropyLoss\(\)"),
        ({"data": None, "loss": lambda out, y: (out - y) ** 2}, "data must be stated"),
        ({"loss": nn.MSELoss}, r"the class MSELoss. Try: loss=MSELoss\(\)"),
        ({"learning_rate": "fast"}, "learning_rate must be"),
        ({"optimizer": "sgd"}, "optimizer= is for models of Keras"),
        ({"model": nn.LazyLinear(1)}, "lazy layers"),
        ({"model": nn.ReLU()}, "parameters to train"),
        ({"model": nn.Linear(3, 1, device="meta")}, "on the CPU"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_anything_ran(given, told):
    every = {"model": network(1), "data": (torch.ones(4, 3), torch.ones(4)), "loss": MSE} | given
    before, ran = seams(nn.Linear(1, 1)), []
    with pytest.raises(stepcheck.SpecificationError, match=told), stepcheck.watch(**every):
        ran.append(True)
    assert not ran
    assert seams(nn.Linear(1, 1)) == before


# ---- no other framework ----

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
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=home)


def test_it_needs_no_keras():
    done = ran(WITHOUT_KERAS)
    assert done.returncode == 0, done.stderr


def test_pytorch_is_not_imported_otherwise():
    assert ran("import sys, stepcheck; stepcheck.watch; print('torch' in sys.modules)").stdout == "False\n"


# ---- kinds of loops: right, and with a fault ----

KINDS = {}


def kind(**expected):
    """Keep a kind of loop, a function that returns the report; by the names of its faults: what is found."""

    def kept(make):
        KINDS.update({(make.__name__, fault): (make, found) for fault, found in ({"": None} | expected).items()})
        return make

    return kept


def simple(model, fault, of=lambda out: out, **given):
    """Return the report on a usual loop of classes, with a fault or without."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def train():
        for rows in batches(3):
            if fault != "not_zeroed":
                optimizer.zero_grad()
            labels = CLASSES[(rows + 1) % NUM] if fault == "shifted" else CLASSES[rows]
            out = of(model(X[rows]))
            CROSS(out.softmax(1) if fault == "softmax" else out, labels).backward()
            optimizer.step()

    return watched(model, train, **given)


class Cast(nn.Sequential):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


@kind(shifted=Fault.LABELS_SHIFTED)
def autocast(fault):
    return simple(Cast(*network()), fault, lambda out: out.float())


@kind(clips_scaled=Fault.CLIP_BEFORE_UNSCALE, own_step=Fault.LOSS_SCALE_LEFT_IN, unscaled=Fault.LOSS_NOT_SCALED)
def scaler(fault):
    """Scales the loss; its first steps are skipped, as at this scale gradients are not finite."""
    model = network()
    clip = 0.0 if fault in ("own_step", "unscaled") else 0.05
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (16 if fault else 127))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def train():
        for rows in batches(3):
            optimizer.zero_grad()
            loss = cross(model, rows)
            scaled = scaler.scale(loss)
            (loss if fault == "unscaled" else scaled).backward()
            if clip and fault != "clips_scaled":
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if fault == "own_step":
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()

    return watched(model, train)


@kind(softmax=Fault.SOFTMAX_TWICE)
def compiled(fault):
    torch.compiler.reset()
    return simple(torch.compile(network(), backend="aot_eager", fullgraph=True), fault)


@kind(not_zeroed=Fault.NOT_RESET)
def compiled_in_part(fault):
    torch.compiler.reset()
    model = network()
    model[0].compile(backend="eager")
    return simple(model, fault)


class Tied(nn.Module):
    """A model of a text whose first and last weights are one; it computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, text, targets=None):
        scores = self.head(self.table(text).cumsum(1))
        return scores, None if targets is None else CROSS(scores.view(-1, 10), targets.reshape(-1))


@kind(not_zeroed=Fault.NOT_RESET)
def tied(fault, length=0.3):
    model = Tied()
    model.table.weight.data *= length
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for rows in batches():
            if not fault:
                optimizer.zero_grad()
            model(TEXT[rows, :PLACES], TEXT[rows, 1:])[1].backward()
            optimizer.step()

    return watched(model, train, (TEXT[:, :PLACES], TEXT[:, 1:]), None)


def test_the_form_of_the_models_own_loss_is_the_nearest():
    seeded()
    report = tied("", length=1e-2)  # so that the losses of all places are nearly one
    assert report.is_right, report


@kind(not_zeroed=Fault.NOT_RESET)
def closure(fault):
    """Hands a closure to the step, which runs the model twice, once for a gradient."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for rows in batches():

            def value(rows=rows):
                if not fault:
                    optimizer.zero_grad()
                loss = cross(model, rows)
                loss.backward()
                with torch.no_grad():
                    model(X)
                return loss

            optimizer.step(value)

    return watched(model, train)


@kind(softmax=Fault.SOFTMAX_TWICE)
def hooks_that_change_outputs(fault):
    model = network()
    model[0].register_forward_hook(lambda *call: 2 * call[2])
    return simple(model, fault)


class Depth(nn.Module):
    """Draws from three generators, computes a part again in the backward pass, and keeps a tensor with its graph."""

    def __init__(self):
        super().__init__()
        self.first, self.head = parametrizations.spectral_norm(nn.Linear(3, 6)), nn.Linear(6, 4)
        self.middle, self.kept = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3)), None

    def forward(self, x):
        found = self.first(x)
        if np.random.rand() < 0.5 or torch.rand(1) < 0.5:
            found = found + checkpoint(self.middle, found, use_reentrant=False)
        self.kept = found
        return self.head(found)


@kind(shifted=Fault.LABELS_SHIFTED)
def draws(fault):
    return simple(Depth(), fault)


@kind(shifted=Fault.LABELS_SHIFTED)
def frozen_in_part(fault):
    model = network(4, nn.BatchNorm1d(6))
    model[:3].requires_grad_(requires_grad=False)
    model[2].eval()
    return simple(model, fault)


class Rows(Dataset):
    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return X[i], int(CLASSES[i])


@kind(softmax=Fault.SOFTMAX_TWICE)
def dataset(fault):
    return simple(network(), fault, data=Rows() if fault else Subset(TensorDataset(X, CLASSES), range(NUM)))


@pytest.mark.parametrize(("name", "fault"), KINDS, ids=str)
def test_a_loop_of_a_kind_is_right_or_has_its_fault(name, fault):
    seeded()
    make, found = KINDS[name, fault]
    report = make(fault)
    assert faults(report) == ([] if found is None else [found]), report
    assert report.is_right == (found is None), report


# ---- reports ----


def test_findings_are_values():
    session = Session("means", window=4)
    report = watched(session.model, session.train)
    (found,) = report.findings
    assert found.fault is Fault.MEAN_OF_MEANS
    assert (found.stage, found.quantity, found.error) == (Stage.GRADIENT, Quantity.ROW_GRADIENTS, Error.COUNTED)
    assert found.where.updates == (2, 4)  # whose last microbatch is short
    assert found.apart > 1e-3 > found.with_error
    length = found.proof.numbers[0]
    assert length.what is Shown.GRADIENT_LENGTH
    assert length.observed == pytest.approx(length.with_error, rel=1e-4) != pytest.approx(length.expected, rel=1e-4)
    report.require("rows", "mode", "step", "state")
    with pytest.raises(AssertionError):
        report.require()


def test_a_right_loop_meets_all_that_is_required():
    session = Session(window=4, clip=0.5, has_schedule=True)
    with stepcheck.watch(session.model, (X, CLASSES), CROSS, learning_rate=lambda n: 0.05 / (1 + n)) as report:
        session.train()
    assert checked(report).findings == report.unjudged == []
    report.require()


LINES = {
    "clips each": (Fault.CLIP_PER_MICROBATCH, "nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)"),
    "eval": (Fault.INFERENCE_MODE, "self.model.eval()"),
}


@pytest.mark.parametrize("fault", LINES)
def test_the_line_is_that_of_the_mistake(fault):
    session = Session(fault, window=3, clip=0.05)
    (found,) = watched(session.model, session.train).findings
    assert (found.fault, found.where.line.text) == LINES[fault]


@pytest.mark.filterwarnings("ignore:.*target size")  # PyTorch's own words about the fault
def test_the_example_has_the_fault_and_its_fix_mends_it(capsys):
    written, mended = load("audit_torch").main()
    assert faults(written) == [Fault.BROADCAST]
    assert (mended.is_right, mended.unjudged) == (True, [])


# ---- what is not judged has a reason ----

UNJUDGED = {}


def unjudged(reason, *stages):
    """Keep a right loop, a function that returns its report, of which stages are not judged; by default none is."""

    def kept(make):
        UNJUDGED[make.__name__] = make, reason, {*stages} or {*Stage} - {Stage.PRINTED}
        return make

    return kept


@unjudged(Reason.CLOSURE, Stage.MODE, Stage.GRADIENT, Stage.STEP, Stage.STATE)
def closure_of_several_gradients():
    model = network(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def value():
        optimizer.zero_grad()
        loss = MSE(model(X), Y)
        loss.backward()
        return loss

    return watched(model, lambda: [optimizer.step(value) for _ in range(3)], (X, Y), MSE)


@unjudged(Reason.NOT_REPLAYED)
def module_without_a_copy():
    class Locked(nn.Linear):
        def forward(self, x):
            self.lock = threading.Lock()
            return super().forward(x)

    model = Locked(3, 4)
    return watched(model, lambda: fit(model, lambda rows: cross(model, rows)))


@unjudged(Reason.LOSS_OF_OTHER_AXIS, Stage.GRADIENT)
def rows_on_another_axis():
    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x).T

    model = Turned(3, 1)
    return watched(model, lambda: fit(model, lambda rows: MSE(model(X[rows]).T, Y[rows])), (X, Y), MSE)


@unjudged(Reason.LOSS_FAILED, Stage.GRADIENT)
def loss_that_fails():
    def failing(out, y):
        raise ValueError("no labels like these")

    model = network()
    return watched(model, lambda: fit(model, lambda rows: cross(model, rows)), loss=failing)


@unjudged(Reason.LOSS_WITH_PARAMETERS, Stage.GRADIENT)
def loss_with_parameters():
    model, head = network(), nn.Linear(4, 4)
    return watched(
        model,
        lambda: fit(model, lambda rows: CROSS(head(model(X[rows])), CLASSES[rows])),
        loss=lambda out, y: CROSS(head(out), y),
    )


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 4)

    def forward(self, x):
        features = self.body(x)
        return features, self.head(features)


@unjudged(Reason.LOSS_OF_ONE_OUTPUT, Stage.GRADIENT)
def several_outputs():
    model = Two()
    return watched(model, lambda: fit(model, lambda rows: CROSS(model(X[rows])[1], CLASSES[rows])))


@unjudged(Reason.LOSS_WITHOUT_LABELS, Stage.GRADIENT, Stage.ROWS)
def labels_that_no_loss_was_given():
    model = network(1)
    return watched(model, lambda: fit(model, lambda rows: (model(X[rows]) - Y[rows]).square().mean()), None, MSE)


@unjudged(Reason.LOSS_OF_MODEL, Stage.GRADIENT)
def loss_that_only_the_model_knows():
    class Own(nn.Linear):
        def forward(self, x, labels):
            scores = super().forward(x)
            return (scores - labels).abs().sqrt().mean(), scores

    model = Own(3, 1)
    return watched(model, lambda: fit(model, lambda rows: model(X[rows], labels=Y[rows])[0]), (X, Y), None)


@unjudged(Reason.DATA_AS_GIVEN, Stage.ROWS)
def no_data():
    model = network()
    return watched(model, lambda: fit(model, lambda rows: cross(model, rows)), None)


@unjudged(Reason.FEW_PASSES, Stage.ROWS)
def one_pass():
    model = network()
    return watched(model, lambda: fit(model, lambda rows: cross(model, rows), num=1))


@unjudged(Reason.OTHER_INPUTS)
def inputs_that_are_no_rows():
    model = network()
    return watched(model, lambda: fit(model, lambda rows: CROSS(model(X[rows] / 3), CLASSES[rows])))


@unjudged(Reason.NO_UPDATE)
def no_update():
    model = network()
    return watched(model, lambda: cross(model, range(NUM)).backward())


@unjudged(Reason.OTHER_WEIGHTS_OF_MODEL)
def weights_of_a_function():
    model = network()

    def of(rows):
        weights = {name: 0.9 * p for name, p in model.named_parameters()}
        return CROSS(torch.func.functional_call(model, weights, (X[rows],)), CLASSES[rows])

    return watched(model, lambda: fit(model, of))


def contrastive(outputs, labels):
    """Return the supervised contrastive loss of a batch."""
    features = functional.normalize(outputs, dim=1)
    logits, others = features @ features.T / 0.5, 1 - torch.eye(len(features))
    same = (labels[:, None] == labels[None]).float() * others
    logs = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    return -((same * logs).sum(1) / same.sum(1).clamp_min(1)).mean()


@unjudged(Reason.COUPLED, Stage.GRADIENT)
def windows_of_a_loss_of_a_batch():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def train():
        for i, rows in enumerate(batches()):
            (contrastive(model(X[rows]), CLASSES[rows]) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    return watched(model, train, loss=contrastive)


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_is_not_judged_has_a_reason(name):
    seeded()
    make, reason, stages = UNJUDGED[name]
    report = make()
    assert report.findings == [], report
    assert reason in reasons(report), report
    assert {*Stage} - {Stage.PRINTED, *report.judged} == stages, report


def test_a_loss_of_a_whole_batch_is_judged_as_a_whole():
    model = network()
    of = lambda rows: contrastive(model(X[rows]), CLASSES[rows])  # noqa: E731
    report = watched(model, lambda: fit(model, of), loss=contrastive)
    assert report.is_right, report


def test_a_search_ends_when_its_time_is_up(monkeypatch):
    def odd():
        seeded()
        model = nn.Linear(3, 1)
        of = lambda rows: (model(X[rows]).sin() * (1.7 + Y[rows])).exp().mean()  # noqa: E731
        return watched(model, lambda: fit(model, of), (X, Y), MSE)

    assert Reason.OUT_OF_TIME not in reasons(odd())
    monkeypatch.setattr("stepcheck.stages.gradients._SECONDS", 0.0)
    assert Reason.OUT_OF_TIME in reasons(odd())
