"""Right PyTorch loops of ordinary users, each with something that many loops have: the audit accuses none of them."""

import random
import warnings
from collections import UserDict
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import stepcheck  # noqa: E402

NUM, SIZE = 24, 8
LOOPS = {}


def draw(seed):
    return torch.Generator().manual_seed(seed)


X = torch.randn(NUM, 3, generator=draw(0))
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(NUM, 1, generator=draw(1))
KIND = torch.randint(0, 4, (NUM,), generator=draw(2))
CROSS = nn.CrossEntropyLoss()


def loop(**expected):
    """Keep a loop, which returns (model, data, loss, the training), with what is expected of its report."""

    def kept(make):
        LOOPS[make.__name__] = make, expected
        return make

    return kept


def cross_entropy(outputs, labels, **options):
    return functional.cross_entropy(outputs, labels, **options)  # looked up when it is called


def batches(epochs=2):
    for _ in range(epochs):
        yield from torch.randperm(NUM).split(SIZE)


def fit(model, of, *, optimizer=None, after=lambda rows: None, epochs=2):
    """Make an update of the loss of each batch's rows."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    for rows in batches(epochs):
        loss = of(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        after(rows)


def mlp(width=4):
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, width))


class Several(nn.Module):
    """Returns features beside the scores of classes."""

    def __init__(self, pack):
        super().__init__()
        self.body, self.head, self.pack = nn.Linear(3, 6), nn.Linear(6, 4), pack

    def forward(self, x):
        features = torch.tanh(self.body(x))
        return self.pack(features, self.head(features))


@loop()
def loss_of_the_second_output():
    model = Several(lambda features, scores: (features, scores))
    return (
        model,
        (X, KIND),
        lambda out, y: cross_entropy(out[1], y, reduction="none"),
        lambda: fit(model, lambda rows: cross_entropy(model(X[rows])[1], KIND[rows])),
    )


@loop()
def loss_of_an_output_by_its_name():
    model, cross = Several(lambda features, scores: {"scores": scores, "features": features}), nn.CrossEntropyLoss()
    meant = lambda out, y: cross(out["scores"], y)  # noqa: E731
    return model, (X, KIND), meant, lambda: fit(model, lambda rows: cross(model(X[rows])["scores"], KIND[rows]))


@loop(is_judged=False)
def clips_with_a_loss_of_the_modules_own():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = mlp()

        def loss(self, x, kind):
            return cross_entropy(self.actor(x), kind)

        def forward(self, x):
            return self.actor(x)

    model = Agent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def clipped(rows):
        loss = model.loss(X[rows], KIND[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return model, (X, KIND), CROSS, lambda: [clipped(rows) for rows in batches()]


@loop(is_judged=False)
def measures_with_a_graph_beside_a_loss_of_the_modules_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def loss(self, x, kind):
            return cross_entropy(self.body(x), kind)

        def forward(self, x):
            return self.body(x)

    model, right = Net(), []

    def measure(rows):
        right.append((model(X[rows]).argmax(1) == KIND[rows]).float().mean())

    return model, (X, KIND), CROSS, lambda: fit(model, lambda rows: model.loss(X[rows], KIND[rows]), after=measure)


@loop()
def head_alone_in_training_mode():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout()), nn.Dropout(0.2), nn.Linear(6, 4)
    )
    model(X)
    for p in model[0].parameters():
        p.requires_grad_(False)
    model.eval()
    model[1].train()
    model[2].train()
    return model, (X, KIND), CROSS, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))


class Places(nn.Module):
    """Returns numbers for each place: (rows, places, width)."""

    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(2, width)

    def forward(self, x):
        return self.dense(x)


SERIES = torch.randn(NUM, 5, 2, generator=draw(7))


@loop()
def channels_moved_before_the_loss():
    model, labels = Places(3), torch.randn(NUM, 3, 5, generator=draw(8))

    def moved(rows):
        return functional.mse_loss(model(SERIES[rows]).transpose(1, 2), labels[rows])

    return model, (SERIES, labels), nn.MSELoss(), lambda: fit(model, moved)


@loop()
def as_many_places_as_classes():
    model, labels = Places(5), torch.randint(0, 5, (NUM, 5), generator=draw(9))

    def flat(rows):
        return cross_entropy(model(SERIES[rows]).reshape(-1, 5), labels[rows].reshape(-1))

    return model, (SERIES, labels), lambda out, y: cross_entropy(out.mT, y), lambda: fit(model, flat)


@loop()
def as_many_places_as_classes_moved():
    model, labels = Places(5), torch.randint(0, 5, (NUM, 5), generator=draw(9))

    def moved(rows):
        return cross_entropy(model(SERIES[rows]).transpose(1, 2), labels[rows])

    return model, (SERIES, labels), lambda out, y: cross_entropy(out.mT, y), lambda: fit(model, moved)


@loop()
def one_place_squeezed_before_the_loss():
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Linear(3, 4))
    meant = lambda out, y: cross_entropy(out.squeeze(1), y)  # noqa: E731
    return (
        model,
        (X, KIND),
        meant,
        lambda: fit(model, lambda rows: cross_entropy(model(X[rows]).squeeze(1), KIND[rows])),
    )


@loop(is_judged=None)
def time_before_the_rows():
    class InTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 1)

        def forward(self, t, x):
            return self.dense(torch.cat([x, t.expand(len(x), 1)], 1))

    model, time = InTime(), torch.tensor(0.5)
    return (
        model,
        (X, Y),
        nn.MSELoss(),
        lambda: fit(model, lambda rows: functional.mse_loss(model(time, X[rows]), Y[rows])),
    )


@loop(is_judged=None)
def module_without_arguments():
    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.at = nn.Parameter(torch.zeros(NUM, 1))

        def forward(self):
            return self.at * 1.0

    model = Point()
    return model, (X, Y), nn.MSELoss(), lambda: fit(model, lambda rows: functional.mse_loss(model()[rows], Y[rows]))


class Rateless(torch.optim.Optimizer):
    """Takes its rate from the number of its steps, as Adafactor may."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.num = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num += 1
        for p in self.param_groups[0]["params"]:
            p -= 0.1 / self.num**0.5 * p.grad


@loop()
def rate_of_none():
    model = mlp(1)

    def train():
        optimizer = Rateless(model.parameters(), lr=None)
        schedule = Constant(optimizer)
        fit(
            model,
            lambda rows: functional.mse_loss(model(X[rows]), Y[rows]),
            optimizer=optimizer,
            after=lambda _: schedule.step(),
        )

    return model, (X, Y), nn.MSELoss(), train


class Constant(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [None]

    def _update_lr(self):
        pass

    def step(self, epoch=None):
        pass


@loop()
def no_rate_at_all():
    model = mlp(1)
    return (
        model,
        (X, Y),
        nn.MSELoss(),
        lambda: fit(
            model,
            lambda rows: functional.mse_loss(model(X[rows]), Y[rows]),
            optimizer=Rateless(model.parameters()),
        ),
    )


TEXT = torch.randint(0, 10, (NUM, 7), generator=draw(10))


class Gpt(nn.Module):
    """Computes its loss itself, as nanoGPT does."""

    def __init__(self, is_reversed=False):
        super().__init__()
        self.table, self.head, self.is_reversed = nn.Embedding(10, 6), nn.Linear(6, 10), is_reversed

    def forward(self, idx, targets=None):
        scores = self.head(self.table(idx).cumsum(1))
        loss = None if targets is None else cross_entropy(scores.view(-1, 10), targets.view(-1))
        return (loss, scores) if self.is_reversed else (scores, loss)


@loop(told=["as the model computes it"])
def loss_of_the_model_by_place():
    model = Gpt()
    return (
        model,
        (TEXT[:, :-1], TEXT[:, 1:]),
        None,
        lambda: fit(model, lambda rows: model(TEXT[rows, :-1], TEXT[rows, 1:])[1]),
    )


@loop(told=["as the model computes it"])
def loss_of_the_model_by_name_and_first():
    model = Gpt(is_reversed=True)

    def of(rows):
        return model(TEXT[rows, :-1], targets=TEXT[rows, 1:])[0]

    return model, (TEXT[:, :-1], TEXT[:, 1:]), None, lambda: fit(model, of)


@loop(told=["as the model computes it"])
def loss_of_the_model_without_data():
    model = Gpt()
    return model, None, None, lambda: fit(model, lambda rows: model(TEXT[rows, :-1], TEXT[rows, 1:])[1])


@loop()
def reentrant_checkpoints():
    class Saving(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block = nn.Linear(3, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 4))

        def forward(self, x):
            return checkpoint(self.block, self.first(x), use_reentrant=True)

    model = Saving()
    return model, (X, KIND), CROSS, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))


@loop()
def schedule_that_ends_low_after_many_updates():
    model = mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)

    def train():
        of = lambda rows: functional.mse_loss(model(X[rows]), Y[rows])  # noqa: E731
        fit(model, of, optimizer=optimizer, after=lambda _: schedule.step(), epochs=80)

    return model, (X, Y), nn.MSELoss(), train


@loop(is_judged=None)
def losses_by_a_generator():
    model = mlp(1)
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.05), model[0].weight.detach().clone()

    def train():
        for rows in batches():
            losses = [functional.mse_loss(model(X[part]), Y[part]) for part in rows.split(4)]
            optimizer.zero_grad()
            torch.autograd.backward(loss / 2 for loss in losses)
            optimizer.step()
        assert not torch.equal(before, model[0].weight)

    return model, (X, Y), nn.MSELoss(), train


@dataclass
class Out:
    """An output."""

    features: torch.Tensor
    scores: torch.Tensor


@loop()
def output_of_a_dataclass():
    model = Several(Out)
    meant = lambda out, y: cross_entropy(out.scores, y)  # noqa: E731
    return model, (X, KIND), meant, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]).scores, KIND[rows]))


@loop(is_judged=None)
def batch_of_a_mapping():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, batch):
            return self.body(batch["x"])

    model = Named()
    return (
        model,
        (X, KIND),
        nn.CrossEntropyLoss(),
        lambda: fit(model, lambda rows: cross_entropy(model(UserDict(x=X[rows])), KIND[rows])),
    )


@loop(is_judged=None)
def scripted_module():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(mlp())
    return model, (X, KIND), CROSS, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))


@loop(is_judged=None)
def sounds_of_different_lengths_without_data():
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def of(rows):
        length = 5 + int(rows[0]) % 3
        return cross_entropy(model(SERIES[rows].mT.repeat(1, 1, 2)[..., :length]), KIND[rows])

    return model, None, CROSS, lambda: fit(model, of)


@loop(is_judged=None)
def number_of_time_without_data():
    class InTime(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(4, 1)

        def forward(self, x, t):
            return self.dense(torch.cat([x, t.expand(len(x), 1)], 1))

    model = InTime()
    return (
        model,
        None,
        nn.MSELoss(),
        lambda: fit(model, lambda rows: functional.mse_loss(model(X[rows], torch.tensor(0.3)), Y[rows])),
    )


@loop(is_judged=None)
def learning_to_learn():
    model, cross = mlp(), nn.CrossEntropyLoss()

    def of(rows):
        names, params = zip(*model.named_parameters(), strict=True)
        near, far = rows.split(4)
        grads = torch.autograd.grad(cross(model(X[near]), KIND[near]), params, create_graph=True)
        fast = {name: p - 0.1 * g for name, p, g in zip(names, params, grads, strict=True)}
        return cross(torch.func.functional_call(model, fast, (X[far],)), KIND[far])

    return model, (X, KIND), cross, lambda: fit(model, of)


@loop()
def group_without_decay_for_other_names():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(3, 6, bias=False), nn.RMSNorm(6), nn.Linear(6, 1, bias=False)

        def forward(self, x):
            return self.head(self.norm(self.body(x)))

    model, names = Scaled(), ("bias", "LayerNorm.weight")
    own = [[p for n, p in model.named_parameters() if any(e in n for e in names) is out] for out in (False, True)]
    groups = [{"params": own[0], "weight_decay": 0.01}, {"params": own[1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return (
        model,
        (X, Y),
        nn.MSELoss(),
        lambda: fit(model, lambda rows: functional.mse_loss(model(X[rows]), Y[rows]), optimizer=optimizer),
    )


class Marked(nn.Module):
    """Computes its loss of labels among its named inputs, as BERT does."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 4)

    def forward(self, input_ids, attention_mask, token_type_ids, labels=None):
        mask = attention_mask[..., None]
        scores = self.head(((self.table(input_ids) + token_type_ids[..., None]) * mask).sum(1) / mask.sum(1))
        return {"scores": scores, "loss": functional.mse_loss(scores[:, :1], labels)}


MARKED = {
    "input_ids": TEXT,
    "attention_mask": torch.ones(NUM, 7, dtype=torch.long),
    "token_type_ids": torch.zeros(NUM, 7, dtype=torch.long),
}


@loop(is_judged=False, told=["Nothing found"])
def labels_among_the_named_inputs():
    model = Marked()

    def of(rows):
        return model(**{name: part[rows] for name, part in MARKED.items()}, labels=Y[rows])["loss"]

    return model, (MARKED, Y), None, lambda: fit(model, of)


@loop(is_judged=False, told=["Nothing found"])
def dataset_of_dicts():
    model, items = Marked(), [{**{n: part[i] for n, part in MARKED.items()}, "labels": Y[i]} for i in range(NUM)]

    def of(rows):
        chosen = [items[i] for i in rows]
        return model(**{name: torch.stack([item[name] for item in chosen]) for name in items[0]})["loss"]

    return model, Items(items), None, lambda: fit(model, of)


class Items(torch.utils.data.Dataset):
    """Holds items."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Focal(nn.Module):
    """A criterion as many users write it."""

    def forward(self, outputs, labels):
        cross = cross_entropy(outputs, labels, reduction="none")
        return ((1 - torch.exp(-cross)) ** 2 * cross).mean()


@loop()
def criterion_of_the_users():
    model, focal = mlp(), Focal()
    return model, (X, KIND), focal, lambda: fit(model, lambda rows: focal(model(X[rows]), KIND[rows]))


@loop()
def state_before_the_rows():
    class Stepwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 4)

        def forward(self, state, x):
            return self.head(self.cell(x, state)[0][:, -1])

    model = Stepwise()
    return (
        model,
        (SERIES, KIND),
        CROSS,
        lambda: fit(model, lambda rows: cross_entropy(model(torch.zeros(1, len(rows), 4), SERIES[rows]), KIND[rows])),
    )


@loop()
def inputs_in_another_order_than_the_data():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.cell = nn.Linear(3, 4), nn.Linear(10, 4)

        def forward(self, series, x):
            return self.dense(x) + self.cell(series.flatten(1))

    model = Two()
    return (
        model,
        ((X, SERIES), KIND),
        CROSS,
        lambda: fit(model, lambda rows: cross_entropy(model(SERIES[rows], X[rows]), KIND[rows])),
    )


@pytest.mark.parametrize("name", LOOPS)
def test_it_has_no_fault(name):
    make, expected = LOOPS[name]
    torch.manual_seed(1)
    model, data, loss, train = make()
    with stepcheck.watch(model, data=data, loss=loss) as report:
        train()
    assert report.causes == [], report
    assert not report.has_likely, report
    if (is_judged := expected.get("is_judged", True)) is not None:
        assert report.is_judged is is_judged, report
    for told in expected.get("told", ()):
        assert told in str(report), report


def test_an_error_of_the_loop_accuses_nothing():
    def stopped():
        functional.cross_entropy(model(X), KIND).backward()
        raise TypeError("stopped")

    model = mlp()
    watched = stepcheck.watch(model, (X, KIND), CROSS)
    with pytest.raises(TypeError, match="stopped"), watched as report:
        stopped()
    assert not report.causes, report
    assert not report.has_likely, report


def test_an_error_of_the_audit_does_not_replace_the_loops(monkeypatch):
    monkeypatch.setattr("stepcheck.torch.watch.close", lambda *_, **__: 1 / 0)
    with pytest.raises(TypeError, match="stopped"), stepcheck.watch(mlp(), (X, KIND), CROSS):
        raise TypeError("stopped")


def test_hooks_and_prints_of_the_users_run_in_the_training_alone(capsys):
    class Loud(nn.Module):
        def forward(self, x):
            print(x.shape)
            return x

    model, features, given = nn.Sequential(mlp(), Loud()), [], []
    model[0].register_forward_hook(lambda *call: features.append(call[2]))
    model.register_forward_pre_hook(lambda *call: given.append(call[1]))
    with stepcheck.watch(model, (X, KIND), CROSS) as report:
        fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))
    assert report.is_judged, report
    assert len(features) == len(given) == capsys.readouterr().out.count("torch.Size") == 6


def test_a_hook_that_changes_the_outputs_runs_again():
    model = mlp()
    model[0].register_forward_hook(lambda *call: 2 * call[2])
    with stepcheck.watch(model, (X, KIND), CROSS) as report:
        fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))
    assert (report.causes, report.is_judged) == ([], True), report


def test_a_forward_that_is_bound_to_the_module_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    before = model.forward
    model.forward = lambda x: before(x).float()
    with stepcheck.watch(model, (X, KIND), CROSS) as report:
        fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))
    kept = model[1].running_mean.clone()
    assert not report.causes, report
    assert torch.equal(model[1].running_mean, kept)


def test_a_report_that_is_read_moves_no_random_state():
    def noisy(outputs, labels):
        return functional.cross_entropy(outputs + 0 * torch.rand_like(outputs), labels, reduction="none")

    model = mlp()
    with stepcheck.watch(model, (X, KIND), loss=noisy) as report:
        fit(model, lambda rows: noisy(model(X[rows]), KIND[rows]).mean())
    state = torch.get_rng_state()
    assert not report.causes, report
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dataset_draws_as_without_the_audit():
    class Noisy(torch.utils.data.Dataset):
        def __init__(self):
            self.rng, self.draw, self.plain = np.random.default_rng(0), draw(0), random.Random(0)

        def __len__(self):
            return NUM

        def __getitem__(self, i):
            return X[i] + 0 * torch.randn(3, generator=self.draw), KIND[i] + 0 * int(self.rng.integers(9))

    data = Noisy()
    with stepcheck.watch(mlp(), data, CROSS):
        assert data.rng.integers(1000) == np.random.default_rng(0).integers(1000)
        assert torch.equal(torch.randn(1, generator=data.draw), torch.randn(1, generator=draw(0)))


def test_a_module_that_changes_after_the_loop_was_judged_as_it_was():
    model = mlp()
    with stepcheck.watch(model, (X, KIND), CROSS) as report:
        fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))
    model[2] = nn.Linear(6, 9)
    assert report.is_judged, report


def test_stages_that_a_closure_of_several_gradients_hides_are_not_said_to_be_judged():
    def closure():
        optimizer.zero_grad()
        loss = functional.mse_loss(model(X), Y)
        loss.backward()
        return loss

    model = mlp(1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with stepcheck.watch(model, (X, Y), nn.MSELoss()) as report:
        for _ in range(3):
            optimizer.step(closure)
    assert report.first_line.endswith("Nothing found in the other stages of 3 updates: rows were judged."), report


def test_an_output_of_which_no_gradient_is_taken_is_named():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.two = nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(6, 4)

        def forward(self, x):
            h = torch.tanh(self.body(x))
            return self.one(h), self.two(h)

    def meant(outputs, y):
        return cross_entropy(outputs[1], y, reduction="none") + outputs[0].square().sum(1)

    model = Heads()
    with stepcheck.watch(model, (X, KIND), meant) as report:
        fit(model, lambda rows: cross_entropy(model(X[rows])[1], KIND[rows]))
    (cause,) = report.causes
    assert cause.finding.where.outputs == ("1",)


def test_the_input_that_is_no_row_of_the_data_is_shown():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 1)

        def forward(self, x, mask):
            return self.inner(x * mask)

    model, mask = Masked(), torch.arange(3).repeat(NUM, 1) < 2
    with stepcheck.watch(model, ((X, mask), Y), nn.MSELoss()) as report:
        fit(model, lambda rows: functional.mse_loss(model(X[rows], ~mask[rows]), Y[rows]))
    shown = "the model got (0, 0, 1) as input 2, and row"
    assert any(shown in each and "the nearest, is (1, 1, 0)" in each for each in report.unseen), report
