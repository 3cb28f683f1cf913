"""Right PyTorch loops of ordinary users, each with something that many loops have: the audit accuses none of them."""

from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import wholestep as ws  # noqa: E402

NUM, SIZE = 24, 8
LOOPS = {}


def draw(seed):
    return torch.Generator().manual_seed(seed)


X = torch.randn(NUM, 3, generator=draw(0))
Y = X @ torch.tensor([[1.0], [-2.0], [3.0]]) + torch.randn(NUM, 1, generator=draw(1))
KIND = torch.randint(0, 4, (NUM,), generator=draw(2))


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
        None,
        lambda: fit(model, lambda rows: cross_entropy(model(X[rows])[1], KIND[rows])),
    )


@loop()
def loss_of_an_output_by_its_name():
    model, cross = Several(lambda features, scores: {"scores": scores, "features": features}), nn.CrossEntropyLoss()
    return model, (X, KIND), cross, lambda: fit(model, lambda rows: cross(model(X[rows])["scores"], KIND[rows]))


@loop(is_judged=False)
def losses_of_both_outputs():
    model = Several(lambda features, scores: (features, scores))

    def both(rows):
        features, scores = model(X[rows])
        return cross_entropy(scores, KIND[rows]) + 0.1 * cross_entropy(features, KIND[rows])

    return model, (X, KIND), None, lambda: fit(model, both)


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

    return model, (X, KIND), None, lambda: [clipped(rows) for rows in batches()]


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

    return model, (X, KIND), None, lambda: fit(model, lambda rows: model.loss(X[rows], KIND[rows]), after=measure)


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
    return model, (X, KIND), None, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]), KIND[rows]))


@loop(is_judged=False)
def weights_of_classes_that_learn():
    model, soft = mlp(), torch.rand(NUM, 4, generator=draw(3)).softmax(1)
    log_weights = nn.Parameter(torch.zeros(4))

    def weighed(rows):
        return cross_entropy(model(X[rows]), soft[rows], weight=log_weights.exp())

    optimizer = torch.optim.SGD([*model.parameters(), log_weights], lr=0.05)
    return model, (X, soft), None, lambda: fit(model, weighed, optimizer=optimizer)


@loop(is_judged=None)
def squares_with_weights_of_rows():
    model, own = mlp(1), torch.rand(NUM, 1, generator=draw(4))

    def weighed(rows):
        return functional.mse_loss(model(X[rows]), Y[rows], weight=own[rows])

    return model, (X, Y), None, lambda: fit(model, weighed)


@loop(is_judged=None)
def masks_of_places():
    model = nn.Linear(3, 200)
    labels, mask = (torch.rand(NUM, 200, generator=draw(seed)).round() for seed in (5, 6))
    mask[:, :3], mask[:, -3:] = 1, 0

    def masked(rows):
        return functional.binary_cross_entropy_with_logits(model(X[rows]), labels[rows], weight=mask[rows])

    return model, (X, labels), None, lambda: fit(model, masked)


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

    return model, (SERIES, labels), None, lambda: fit(model, moved)


@loop()
def as_many_places_as_classes():
    model, labels = Places(5), torch.randint(0, 5, (NUM, 5), generator=draw(9))

    def flat(rows):
        return cross_entropy(model(SERIES[rows]).reshape(-1, 5), labels[rows].reshape(-1))

    return model, (SERIES, labels), None, lambda: fit(model, flat)


@loop()
def as_many_places_as_classes_moved():
    model, labels = Places(5), torch.randint(0, 5, (NUM, 5), generator=draw(9))

    def moved(rows):
        return cross_entropy(model(SERIES[rows]).transpose(1, 2), labels[rows])

    return model, (SERIES, labels), nn.CrossEntropyLoss(), lambda: fit(model, moved)


@loop()
def one_place_squeezed_before_the_loss():
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Linear(3, 4))
    return model, (X, KIND), None, lambda: fit(model, lambda rows: cross_entropy(model(X[rows]).squeeze(1), KIND[rows]))


@loop(told=["Is that meant?"])
def number_on_the_loss():
    model, cross = mlp(), nn.CrossEntropyLoss()
    return model, (X, KIND), None, lambda: fit(model, lambda rows: 0.5 * cross(model(X[rows]), KIND[rows]))


@pytest.mark.parametrize("name", LOOPS)
def test_it_has_no_fault(name):
    make, expected = LOOPS[name]
    torch.manual_seed(1)
    model, data, loss, train = make()
    with ws.audit.torch(model, data=data, loss=loss) as report:
        train()
    assert report.causes == [], report
    assert not report.has_likely, report
    if (is_judged := expected.get("is_judged", True)) is not None:
        assert report.is_judged is is_judged, report
    for told in expected.get("told", ()):
        assert told in str(report), report
