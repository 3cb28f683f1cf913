"""The audit of plain PyTorch loops: each fault by its name, its right twin without one, and training as it was."""

import copy
import random
import re
import subprocess
import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

import torch_kinds  # noqa: E402
import torch_right  # noqa: E402
from test_examples import load  # noqa: E402
from torch import nn  # noqa: E402
from torch_loops import NUM, Loop, plain  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.faults import Fault  # noqa: E402
from stepcheck.report.causes import CAUSES  # noqa: E402
from stepcheck.report.found import Found  # noqa: E402
from stepcheck.torch.calls import Calls  # noqa: E402
from stepcheck.torch.hooks import Watcher  # noqa: E402
from stepcheck.torch.words import said  # noqa: E402
from stepcheck.trace.log import Log  # noqa: E402

pytestmark = pytest.mark.filterwarnings(  # PyTorch's own words about two of the faults
    "ignore:.*target size", "ignore:Detected call of `lr_scheduler.step"
)


def audited(**given):
    """Return the report on a loop."""
    loop = Loop(**given)
    rate = (lambda n: 0.05 / (1 + n)) if loop.schedule else None
    with stepcheck.watch(loop.model, data=(loop.x, loop.y), loss=loop.loss, learning_rate=rate) as report:
        loop.train()
    report.printed(loss=loop.shown)
    return report


def linear(width=1):
    torch.manual_seed(1)
    return nn.Linear(3, width)


WINDOW = {"window": 3}  # six microbatches in a pass
UNEVEN = {"window": 4}  # the last window of a pass has two
DECAYED = {"options": {"lr": 0.05, "weight_decay": 0.01}}
MUTANTS = {  # the fault, its name or the beginning of the note that the report begins with; without it the twin
    "broadcast": ({}, "broadcast"),
    "never zeroed": ({}, "not reset"),
    "zeroed in every microbatch": (WINDOW, "only the last microbatch"),
    "never divided": (WINDOW, "summed over microbatches"),
    "mean of means": (WINDOW, "mean of means"),
    "full window": (UNEVEN, "divided by a full window"),
    "eval": ({}, "inference mode"),
    "train once": ({}, "inference mode"),
    "softmax": ({"of_classes": True}, "softmax twice"),
    "clip per microbatch": ({"clip": 0.5, **WINDOW}, "clip per microbatch"),
    "step first": ({"model": linear}, "stale gradients"),
    "same order": ({}, "same order every pass"),
    "labels shifted": ({}, "labels shifted"),
    "labels shuffled": ({}, "labels of other rows"),
    "schedule per microbatch": ({"schedule": True, **WINDOW}, "schedule by microbatch"),
    "schedule first": ({"schedule": True}, "schedule one ahead"),
    "decay by hand": (DECAYED, "decayed twice"),
    "penalty by hand": (DECAYED, "decayed twice"),
    "summed": ({}, "never divided"),
    "last window dropped": (UNEVEN, "last window dropped"),
    "prints the last batch": ({}, "printed: last batch"),
    "twice": ({}, "applied twice"),
    "optimizer in each epoch": ({"optimizer": torch.optim.Adam}, "optimizer re-created"),
}


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_has_its_name(fault):
    given, name = MUTANTS[fault]
    report = audited(faults=(fault,), **given)
    assert [cause.name for cause in report.causes] == ([] if name[0].isupper() else [name]), report
    assert report.first_line.lower().startswith(name.lower())


@pytest.mark.parametrize("fault", MUTANTS)
def test_its_right_twin_has_none(fault):
    report = audited(**MUTANTS[fault][0])
    assert report.causes == [], report
    assert report.first_line.startswith("Nothing found in"), report
    assert not report.unseen, report


@pytest.mark.parametrize("name", torch_right.LOOPS)
def test_a_right_loop_has_no_cause(name):
    model, data, loss, train = torch_right.LOOPS[name]()
    with stepcheck.watch(model, data=data, loss=loss) as report:
        train()
    assert report.causes == [], report
    assert not report.has_likely, report
    assert report.is_judged is (name not in torch_right.UNJUDGED), report
    assert bool(report.unseen) is (name in torch_right.UNSEEN), report


def of_kind(name, fault=""):
    model, data, loss, train = torch_kinds.KINDS[name](fault)
    with stepcheck.watch(model, data=data, loss=loss) as report:
        train()
    return report


@pytest.mark.parametrize("name", torch_kinds.KINDS)
def test_a_right_loop_of_a_kind_has_no_cause(name):
    report = of_kind(name)
    assert report.causes == [], report
    assert not report.has_likely, report
    assert report.is_judged, report


@pytest.mark.parametrize(("name", "fault"), torch_kinds.FAULTS)
def test_a_fault_of_a_kind_has_its_name(name, fault):
    report, told = of_kind(name, fault), torch_kinds.FAULTS[name, fault]
    assert [cause.name for cause in report.causes] == ([] if told[0].isupper() else [told]), report
    assert report.first_line.lower().startswith(told.lower())


def state_after(loop, optimizers):
    return {
        "values": {name: value.clone() for name, value in loop.model.state_dict().items()},
        "grads": [None if p.grad is None else p.grad.clone() for p in loop.model.parameters()],
        "modes": [part.training for part in loop.model.modules()],
        "trained": [p.requires_grad for p in loop.model.parameters()],
        "slots": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        "random": (torch.get_rng_state(), np.random.get_state()[1], random.getstate()),
        "shown": loop.shown,
    }


def equal(one, two):
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return bool(np.array_equal(np.asarray(one), np.asarray(two))) and type(one) is type(two)


@pytest.mark.parametrize(
    "given",
    [{"optimizer": torch.optim.Adam}, {"clip": 0.5, "schedule": True, **WINDOW}, {"faults": ("broadcast", "eval")}],
    ids=["adam", "window", "faults"],
)
def test_training_is_the_same_bit_for_bit(given):
    states = []
    for is_audited in (False, True):
        loop, optimizers = Loop(**given), []
        random.seed(3)
        np.random.seed(3)

        def make(*arguments, optimizers=optimizers, loop=loop, **options):
            optimizers.append(given.get("optimizer", torch.optim.SGD)(*arguments, **options))
            return optimizers[-1]

        loop.optimizer = make
        if is_audited:
            with stepcheck.watch(loop.model, data=(loop.x, loop.y), loss=loop.loss) as report:
                loop.train()
            before = state_after(loop, optimizers)
            str(report)
            assert equal(before, state_after(loop, optimizers))
        else:
            loop.train()
        states.append(state_after(loop, optimizers))
    assert equal(*states)


def seams(model):
    """Return the functions of PyTorch's that an audit listens to, and its hooks."""
    calls = Calls(Watcher(model, Log(), None))
    replaced = [(nn.Module, "__call__"), *((seam.owner, seam.name) for seam in calls._seams())]
    homes = [import_module(name) for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
    held = [value or {} for home in homes for name, value in vars(home).items() if name.startswith("_global_")]
    return {each: getattr(*each) for each in replaced}, [len(each) for each in held], len(replaced)


def test_each_seam_is_replaced_once_and_restored_after_an_error():
    def failing():
        inside.append(seams(loop.model))
        raise ZeroDivisionError

    loop, inside = Loop(), []
    before = seams(loop.model)
    with pytest.raises(ZeroDivisionError), stepcheck.watch(loop.model, (loop.x, loop.y), loop.loss):
        failing()
    ((replaced, hooks, _),) = inside
    assert [function.__wrapped__ for function in replaced.values()] == [*before[0].values()]
    assert sum(hooks) == sum(before[1]) + 2  # of optimizer steps, before and after
    assert seams(loop.model) == before
    assert len(before[0]) == before[2]


@pytest.mark.parametrize("how", [torch.mean, torch.sum, lambda values: values], ids=["mean", "sum", "rows"])
def test_a_loss_that_changes_the_rank_of_the_outputs_itself_gets_labels_as_they_are(how):
    def loss(out, y):
        return how((out.squeeze(-1) - y) ** 2)

    x, y, model = torch.randn(24, 3), torch.randn(24), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with stepcheck.watch(model, data=(x, y), loss=loss) as report:
        for _ in range(3):
            for rows in torch.randperm(24).split(8):
                optimizer.zero_grad()
                loss(model(x[rows]), y[rows]).mean().backward()
                optimizer.step()
    assert "broadcast" not in str(report).lower()
    assert not [cause for cause in report.causes if not cause.is_listed]


@pytest.mark.parametrize("divisor", [len, lambda y: 4], ids=["right", "full batch"])
def test_a_mean_of_the_rows_may_be_a_sum_that_the_loop_divides(divisor):
    loop = Loop(loss=lambda out, y: nn.functional.mse_loss(out, y, reduction="sum") / divisor(y), model=plain)
    with stepcheck.watch(loop.model, data=(loop.x, loop.y), loss=nn.MSELoss()) as report:
        loop.train()
    assert [cause.name for cause in report.causes] == ["divided by the full batch"] * (divisor is not len)
    assert report.is_judged


BY_CLASS = torch.tensor([0.4, 1.5, 2.5])
WEIGHTED = {  # the weight of each row by (outputs, labels), whether they are divided by their sum
    "other order": (lambda out, y: BY_CLASS.flip(0)[y], False),
    "their sum": (lambda out, y: BY_CLASS.flip(0)[y], True),
    "predictions": (lambda out, y: BY_CLASS[out.argmax(1)], False),
    "right": (lambda out, y: BY_CLASS[y], True),
}


@pytest.mark.parametrize("kind", WEIGHTED)
def test_other_weights_by_class_are_located(kind):
    weigh, is_divided = WEIGHTED[kind]

    def loss(out, y):
        losses, weights = nn.functional.cross_entropy(out, y, reduction="none"), weigh(out, y)
        return (losses * weights).sum() / (weights.sum() if is_divided else len(y))

    torch.manual_seed(0)
    x, y = torch.randn(120, 6), torch.randint(0, 3, (120,))
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with stepcheck.watch(model, data=(x, y, BY_CLASS[y]), loss=nn.CrossEntropyLoss()) as report:
        for rows in [*torch.randperm(120).split(20), *torch.randperm(120).split(20)]:
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    places = [cause.finding.fault for cause in report.causes]
    assert places == [] if kind == "right" else places[0] in (Fault.ROWS_COUNTED_OTHERWISE, Fault.LOSS_UNLIKE)


def test_sums_of_microbatches_that_are_clipped_are_found_in_updates_of_any_size():
    torch.manual_seed(0)
    x, y = torch.randn(44, 4), torch.randn(44, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, data=(x, y), loss=nn.MSELoss()) as report:
        for batch in [part for _ in range(4) for part in torch.randperm(44).split(20)]:  # the last one has four rows
            held = [torch.zeros_like(p) for p in model.parameters()]
            for rows in batch.split(5):
                loss = ((model(x[rows]) - y[rows]) ** 2).sum()
                gradients = torch.autograd.grad(loss, [*model.parameters()])
                share = min(1.0, 3 / float(sum((g**2).sum() for g in gradients)) ** 0.5)
                held = [a + share * g for a, g in zip(held, gradients, strict=True)]
            for p, sum_of in zip(model.parameters(), held, strict=True):
                p.grad = sum_of / len(batch)
            optimizer.step()
    assert report.first_line.startswith(
        "Clip per microbatch. The gradient of each microbatch is clipped to the norm 3."
    )


def test_a_microbatch_that_is_added_after_the_step_is_not_in_the_loss():
    torch.manual_seed(0)
    x, y = torch.randn(72, 4), torch.randn(72, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, held = torch.optim.SGD(model.parameters(), 0.05), [torch.zeros_like(p) for p in model.parameters()]
    with stepcheck.watch(model, data=(x, y), loss=nn.MSELoss()) as report:
        for i, rows in enumerate([*torch.randperm(72).split(6), *torch.randperm(72).split(6)], 1):
            gradients = torch.autograd.grad(nn.functional.mse_loss(model(x[rows]), y[rows]), [*model.parameters()])
            if i % 3 == 0:
                for p, sum_of in zip(model.parameters(), held, strict=True):
                    p.grad = sum_of / 3
                optimizer.step()
                held = [torch.zeros_like(p) for p in model.parameters()]
            held = [a + b for a, b in zip(held, gradients, strict=True)]
    (cause,) = report.causes
    change = cause.finding.change
    assert (change.fault, change.numbers) == (Fault.PASSES_LEFT_OUT, (3, 3))
    assert "optimizer.step()" in str(cause.line)


@pytest.mark.parametrize("is_right", [True, False])
def test_labels_that_are_inverted_are_said(is_right):
    def contrastive(out, same):
        return same * out**2 + (1 - same) * (2 - out).clamp(min=0) ** 2

    torch.manual_seed(0)
    x, same = torch.randn(80, 6), torch.randint(0, 2, (80,)).float()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Softplus(), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with stepcheck.watch(model, data=(x, same), loss=contrastive) as report:
        for rows in [*torch.randperm(80).split(16), *torch.randperm(80).split(16)]:
            optimizer.zero_grad()
            contrastive(model(x[rows]), same[rows] if is_right else 1 - same[rows]).mean().backward()
            optimizer.step()
    assert ("The labels are inverted, 1 - label." in report.first_line) == (not is_right), str(report)
    assert bool(report.causes) != is_right


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_with_rows_on_another_axis_or_a_loss_that_fails_are_said(fails):
    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x) if fails else super().forward(x).T

    def loss(out, y):
        if fails and len(torch.unique(y)) < len(y):  # the rows of no batch of the loop
            raise ValueError("equal labels")
        return (out.reshape(y.shape) - y).square().mean()

    torch.manual_seed(1)
    loop = Loop(model=lambda width: Turned(3, width), loss=loss)
    with stepcheck.watch(loop.model, (loop.x, loop.y), loss) as report:
        loop.train()
    assert not report.causes
    told = "it does not take the outputs and labels" if fails else "the rows are not the first axis of the outputs"
    assert told in str(report)


LINES = {  # of a fault, the text of the line that makes it
    "zeroed in every microbatch": "optimizer.zero_grad()",
    "last window dropped": "optimizer.zero_grad()",
    "schedule first": "scheduler.step()",
    "clip per microbatch": "nn.utils.clip_grad_norm_(model.parameters(), self.clip)",
    "train once": "model.eval()",
}


@pytest.mark.parametrize("fault", LINES)
def test_the_line_is_that_of_the_mistake(fault):
    (cause,) = audited(faults=(fault,), **MUTANTS[fault][0]).causes
    assert cause.line.text == LINES[fault]


def test_a_head_that_the_optimizer_does_not_hold_is_said():
    loop = Loop(model=plain)
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.model[2] = nn.Linear(6, 1)
    loop.optimizer = lambda *arguments, **options: optimizer
    with stepcheck.watch(loop.model, (loop.x, loop.y), loop.loss) as report:
        loop.train()
    assert "the optimizer does not hold 2 of 4 variables, 2.weight, 2.bias" in report.first_line


@pytest.mark.parametrize("is_shifted", [False, True])
def test_classes_may_be_the_last_axis_of_outputs_that_the_loop_makes_flat(is_shifted):
    torch.manual_seed(1)
    x, model = torch.randint(0, 9, (NUM, 5)), nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))
    y, optimizer = (x * x + x.sum(1, keepdim=True)) % 3, torch.optim.SGD(model.parameters(), lr=0.1)
    with stepcheck.watch(model, (x, y), nn.CrossEntropyLoss()) as report:
        for _ in range(2):
            for rows in torch.randperm(NUM).split(4):
                optimizer.zero_grad()
                labels = y[(rows + is_shifted) % NUM]
                nn.functional.cross_entropy(model(x[rows]).view(-1, 3), labels.reshape(-1)).backward()
                optimizer.step()
    assert [cause.name for cause in report.causes] == ["labels shifted"] * is_shifted
    assert report.is_judged


def test_a_dataset_is_read_row_by_row():
    loop = Loop(faults=("broadcast",), model=plain)
    data = torch.utils.data.TensorDataset(loop.x, loop.y)
    for given in (data, torch.utils.data.Subset(data, range(len(data)))):
        with stepcheck.watch(loop.model, given, loop.loss) as report:
            loop.train()
        assert [cause.name for cause in report.causes] == ["broadcast"]


def test_rows_in_the_order_of_the_data_are_a_note():
    report = audited(faults=("in the order of the data",))
    assert report.causes == []
    assert report.notes == ["Every pass takes the rows in the order of the data: they are not shuffled."]


def test_an_evaluation_in_training_mode_is_a_note():
    report = audited(faults=("evaluated in training mode",))
    assert report.causes == []
    assert "`model.eval()` before it" in report.notes[0]


def test_a_module_that_cannot_be_copied_is_not_judged():
    class Locked(nn.Linear):
        lock = None

        def forward(self, x):
            self.lock = threading.Lock()
            return super().forward(x)

    loop = Loop(model=lambda width: Locked(3, width))
    with stepcheck.watch(loop.model, (loop.x, loop.y), loop.loss) as report:
        loop.train()
    assert report.first_line == "Nothing can be said: no update on rows of the data was seen."
    assert "a copy of the model does not run a pass again" in report.unseen[0]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "a model"}, "a module of PyTorch"),
        ({"data": [1, 2, 3]}, "data must be"),
        ({"data": (torch.ones(3, 2), torch.ones(4))}, "arrays of 3, 4 rows"),
        ({"data": torch.utils.data.TensorDataset(*[torch.ones(4, 3)] * 3)}, r"3 parts. Try: .* data=\(\(a, b\)"),
        ({"loss": lambda out, y, w: ((out - y) ** 2 * w).mean()}, "3 arguments of loss need as many parts of data"),
        ({"data": [(torch.ones(2),) * 3] * 4}, r"4 parts"),
        ({"data": torch.utils.data.StackDataset(a=[1, 2], b=[1, 2])}, "no pairs, but of type dict"),
        ({"model": nn.ModuleDict({"G": nn.Linear(3, 1)})}, "ModuleDict, which cannot be called"),
        ({"loss": "mse"}, "loss must be"),
        ({"loss": nn.CTCLoss()}, "CTCLoss"),
        ({"loss": None}, r"loss must be stated .* Try: loss=nn.CrossEntropyLoss\(\)"),
        ({"data": None, "loss": lambda out, y: (out - y) ** 2}, "data must be stated"),
        ({"loss": nn.MSELoss}, r"the class MSELoss. Try: loss=MSELoss\(\)"),
        ({"learning_rate": "fast"}, "learning_rate must be"),
        ({"model": nn.LazyLinear(1)}, "lazy layers"),
        ({"model": nn.ReLU()}, "parameters to train"),
        ({"model": nn.Linear(3, 1, device="meta")}, "on the CPU"),
    ],
)
def test_it_refuses_what_it_cannot_watch(given, told):
    every = {"model": plain(), "data": (torch.ones(4, 3), torch.ones(4)), "loss": nn.MSELoss()} | given
    with pytest.raises(stepcheck.SpecificationError, match=told), stepcheck.watch(**every):
        pass


def test_fixes_are_in_the_words_of_pytorch():
    others = re.compile(r"tf\.|[Kk]eras|jax|model\.losses|stateless|training=|tape|strategy")
    for cause in CAUSES:
        found = said(Found(cause.name, cause.stage, cause.explanation, cause.fix, 1.0, 0.0, None, (1,)))
        assert cause.name in NOT_OF_PYTORCH or not others.search(found.explanation + found.fix), cause.name


NOT_OF_PYTORCH = {  # of masks, several outputs, sample weights, replicas, losses of layers and traces
    *(
        "mask ignored",
        "summed over replicas",
        "divided by the replicas twice",
        "penalty forgotten",
        "penalty once per microbatch",
    ),
    *("penalty once per replica", "penalty added twice", "penalty divided", "loss scale frozen in a trace"),
    *("clip forgotten", "clipped otherwise", "rate frozen in a trace", "printed: without penalty"),
    "replicas drift apart",
    *("other loss weights", "loss weights ignored", "output left out", "padding trained on", "padding counted"),
}


def test_the_example_names_the_fault_and_its_fix_mends_it(capsys):
    written, mended = load("audit_torch").main()
    assert [cause.name for cause in written.causes] == ["broadcast"]
    assert "squeeze(-1)" in written.causes[0].fix
    assert mended.causes == mended.notes == mended.unseen == []
    assert "Nothing found in " in capsys.readouterr().out


WITHOUT_KERAS = """
import sys, warnings
sys.modules |= dict.fromkeys(("keras", "jax", "tensorflow"))  # so that their import fails
warnings.simplefilter("ignore")
import torch_right
import stepcheck
from torch_loops import Loop

for name in ("short_batches_of_text", "generator", "two_heads_and_an_input_without_rows"):
    model, data, loss, train = torch_right.LOOPS[name]()
    with stepcheck.watch(model, data, loss) as report:
        train()
    assert not report.causes and report.has_seen, report
for fault in ("broadcast", "never zeroed", "labels shuffled", "summed"):
    loop = Loop(faults=(fault,))
    with stepcheck.watch(loop.model, (loop.x, loop.y), loop.loss) as report:
        loop.train()
    assert len(report.causes) == 1 and report.as_json()["engine"] == "torch", report
"""


def test_it_needs_no_keras():
    home = Path(__file__).parent
    ran = subprocess.run([sys.executable, "-c", WITHOUT_KERAS], capture_output=True, text=True, cwd=home)
    assert ran.returncode == 0, ran.stderr


def test_pytorch_is_not_imported_otherwise():
    code = "import sys, stepcheck; stepcheck.watch; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"


def of_a_text(*, clips="", rest=0, is_padded=True, is_given=False):
    """Return the report on a loop of windows of 3 batches whose means are averaged, and whose labels end with zeros.

    `rest`: batches beyond the windows of a pass.
    """
    torch.manual_seed(1)
    num, clip = 4 * (6 + rest), lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ids, ends = torch.randint(1, 300, (num, 8)), torch.randint(3, 9, (num, 1))
    ids[torch.arange(8) >= ends] = 0
    model = nn.Sequential(nn.Embedding(300, 32), nn.Linear(32, 300))  # so many weights that few forms are tried
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss(ignore_index=0 if is_padded else -100)
    data = (ids[:, :-1], ids[:, 1:]) if is_given else None
    with stepcheck.watch(model, data=data, loss=loss) as report:
        for _ in range(3):
            for i, rows in enumerate(torch.randperm(num).split(4)):
                out = model(ids[rows, :-1])
                (loss(out.reshape(-1, 300), ids[rows, 1:].reshape(-1)) / 3).backward()
                if clips == "each":
                    clip()
                if (i + 1) % 3 == 0:
                    if clips == "once":
                        clip()
                    optimizer.step()
                    optimizer.zero_grad()
    return report


MEANS, CARRIED = "mean of means", "window carried over the epoch"


@pytest.mark.parametrize("is_given", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"clips": "each"}, [MEANS, "clip per microbatch"]),
        ({"clips": "once"}, [MEANS]),
        ({"clips": "each", "is_padded": False}, ["clip per microbatch"]),
        ({"rest": 2}, [CARRIED, MEANS]),
        ({"rest": 2, "clips": "each"}, [CARRIED, MEANS, "clip per microbatch"]),
        ({"rest": 2, "clips": "once"}, [CARRIED, MEANS]),
        ({"rest": 2, "clips": "once", "is_padded": False}, [CARRIED]),
        ({"rest": 2, "is_padded": False}, [CARRIED, "divided by a full window"]),
        (
            {"rest": 2, "clips": "each", "is_padded": False},
            [CARRIED, "divided by a full window", "clip per microbatch"],
        ),
    ],
    ids=lambda given: "-".join(map(str, given.values())) if isinstance(given, dict) else "",
)
def test_means_of_a_window_are_told_from_its_clip(given, names, is_given):
    report = of_a_text(**given, is_given=is_given)
    assert [cause.name for cause in report.causes] == names, report
    assert not report.unseen, report


def test_a_search_ends_when_its_time_is_up(monkeypatch):
    def tried():
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = Loop()
        with stepcheck.watch(model, data=(loop.x, loop.y[:, None]), loss=nn.MSELoss()) as report:
            for i in range(6):
                optimizer.zero_grad()
                rows = torch.arange(4 * i, 4 * i + 4) % NUM
                (model(loop.x[rows]).sin() * (1.7 + loop.y[rows, None])).exp().mean().backward()
                optimizer.step()
        return report

    ended = "the search for what makes the gradients differ was ended"
    assert ended not in str(tried())
    monkeypatch.setattr("stepcheck.stages.gradients._SECONDS", 0.0)
    assert ended in str(tried())


class InTime(nn.Module):
    """Takes the last output of an LSTM over the places; `how` brings them to the front."""

    def __init__(self, how):
        super().__init__()
        self.how, self.cell, self.head = how, nn.LSTM(1, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.cell(self.how(x))[0][-1])


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: InTime(lambda x: x.transpose(0, 1)), "Nothing found in"),
        (lambda: InTime(lambda x: x.view(24, -1, 1)), "The output of a row depends on the other rows of its batch"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(24, track_running_stats=False), nn.Linear(24, 1)),
            "Nothing",
        ),
    ],
    ids=["transpose", "view", "statistics of the batch"],
)
def test_rows_that_depend_on_the_rows_beside_them_are_said_first(make, told):
    torch.manual_seed(1)
    model, x = make(), torch.randn(96, 24, 1)
    y = x[:, -1]
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with stepcheck.watch(model, (x, y), nn.MSELoss()) as report:
        for rows in [each for _ in range(2) for each in torch.randperm(96).split(32)]:
            optimizer.zero_grad()
            out = model(x[rows])
            nn.functional.mse_loss(out, y[rows]).backward()
            optimizer.step()
    assert report.first_line.startswith(told), report
