"""Right loops of PyTorch of many kinds: each function returns (model, data, loss, the loop)."""

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

NUM, SIZE = 20, 4
LOOPS = {}
UNJUDGED = "generator", "lbfgs"  # the report says that the gradient or the loss is not judged
UNSEEN = (*UNJUDGED, "step_at_the_beginning")  # it says that some is not
draw = torch.Generator().manual_seed(0)
X = torch.randn(NUM, 3, generator=draw)
Z = torch.randn(NUM, 2, generator=draw)
Y = X @ torch.tensor([1.0, -2.0, 3.0]) + torch.randn(NUM, generator=draw)
CLASSES = torch.randint(0, 4, (NUM,), generator=draw)
TEXT = torch.randint(0, 10, (NUM, 6), generator=draw)
NEXT = torch.roll(TEXT, -1, 1)
NEXT[:, -1], NEXT[::3, 3:] = -100, -100
CROSS = nn.CrossEntropyLoss()


def loop(make):
    def seeded():
        torch.manual_seed(1)
        np.random.seed(1)
        random.seed(1)
        return make()

    LOOPS[make.__name__] = seeded
    return make


def fit(model, loss, *data, optimizer=None, after=lambda: None):
    """Train for two epochs, and evaluate after each."""
    optimizer = optimizer or torch.optim.Adam(model.parameters())
    for _ in range(2):
        model.train()
        for *inputs, labels in DataLoader(TensorDataset(*data), batch_size=SIZE, shuffle=True):
            value = loss(model(*inputs), labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            after()
        model.eval()
        with torch.no_grad():
            model(*data[:-1])


def batches():
    return torch.randperm(NUM).split(SIZE)


def mlp(*more):
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 4), *more)


def updates(optimizer, model, of, *, epochs=2):
    """Yield each batch's rows, and make an update of its loss."""
    for _ in range(epochs):
        for rows in batches():
            optimizer.zero_grad()
            of(rows).backward()
            optimizer.step()
            yield rows


@loop
def recurrent():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 4), nn.Linear(5, 4)
            self.lstm = nn.LSTM(4, 5, batch_first=True, num_layers=2, dropout=0.1)

        def forward(self, text):
            return self.head(self.lstm(self.table(text))[0][:, -1])

    model = Model()
    return model, (TEXT, CLASSES), CROSS, lambda: fit(model, CROSS, TEXT, CLASSES)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.mixer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
        self.head.weight = self.table.weight

    def forward(self, text):
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.mixer(self.table(text), mask)).transpose(1, 2)


@loop
def tokens():
    model = Tied()
    return model, (TEXT, NEXT), CROSS, lambda: fit(model, CROSS, TEXT, NEXT)


@loop
def tokens_by_a_function():
    model = Tied()
    unreduced = nn.CrossEntropyLoss(reduction="none")
    return model, (TEXT, NEXT), lambda out, y: unreduced(out, y), lambda: fit(model, CROSS, TEXT, NEXT)


@loop
def tokens_by_a_number():
    model = Tied()
    return model, (TEXT, NEXT), lambda out, y: CROSS(out, y), lambda: fit(model, CROSS, TEXT, NEXT)


@loop
def tokens_with_weights():
    model = Tied()
    unreduced = nn.CrossEntropyLoss(reduction="none")
    return model, (TEXT, NEXT), lambda o, y: (unreduced(o, y), y >= 0), lambda: fit(model, CROSS, TEXT, NEXT)


def of_classes(loss, model=None, y=CLASSES, cast=lambda out, y: (out, y)):
    model = model or mlp()
    return model, (X, y), loss, lambda: fit(model, lambda out, y: loss(*cast(out, y)), X, y)


@loop
def class_weights_and_smoothing():
    return of_classes(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 0.5]), label_smoothing=0.1))


@loop
def one_hot():
    return of_classes(CROSS, y=functional.one_hot(CLASSES, 4).float())


@loop
def log_softmax():
    return of_classes(nn.NLLLoss(), mlp(nn.LogSoftmax(1)))


@loop
def two_classes():
    return of_classes(
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])), nn.Linear(3, 1), (CLASSES > 1).float()[:, None]
    )


@loop
def two_classes_after_a_sigmoid():
    model = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())
    return of_classes(nn.BCELoss(), model, (CLASSES > 1).long(), lambda out, y: (out.squeeze(1), y.float()))


@loop
def several_numbers():
    return of_classes(nn.SmoothL1Loss(), y=torch.randn(NUM, 4))


@loop
def summed():
    return of_classes(nn.MSELoss(reduction="sum"), y=torch.randn(NUM, 4))


@loop
def autoencoder():
    return of_classes(nn.MSELoss(), nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)), X)


@loop
def a_function_of_rows():
    return of_classes(lambda out, y: (out - y).square().mean(), nn.Linear(3, 1), Y[:, None])


@loop
def contrastive():
    def loss(out, y):
        near = functional.normalize(out, dim=1)
        alike = (near @ near.T / 0.5).masked_fill(torch.eye(len(near)).bool(), -1e9)
        return functional.cross_entropy(alike, torch.arange(len(alike)).flip(0))

    return of_classes(loss)


@loop
def images():
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.5)
    model, x = nn.Sequential(*layers, nn.Linear(27, 4)), torch.randn(NUM, 1, 8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    return model, (x, CLASSES), CROSS, lambda: fit(model, CROSS, x, CLASSES, optimizer=optimizer)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, b=None, a=None):
        return {"logits": self.head(torch.cat([a, b], 1)).squeeze(1)}


@loop
def inputs_by_name():
    model, loss = Pair(), nn.MSELoss()
    optimizer = torch.optim.AdamW(model.parameters())
    made = updates(optimizer, model, lambda rows: loss(model(b=Z[rows], a=X[rows])["logits"], Y[rows]))
    return model, ({"a": X, "b": Z}, Y), loss, lambda: list(made)


@loop
def frozen_backbone():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    model[:2].requires_grad_(False)
    model[1].eval()
    optimizer = torch.optim.Adam(model[3].parameters())
    made = updates(optimizer, model, lambda rows: CROSS(model(X[rows]), CLASSES[rows]))
    return model, (X, CLASSES), CROSS, lambda: list(made)


@loop
def two_groups():
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    return model, (X, CLASSES), CROSS, lambda: fit(model, CROSS, X, CLASSES, optimizer=optimizer)


@loop
def two_optimizers():
    model = mlp()

    def train():
        every = torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)
        for _ in range(2):
            for rows in batches():
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                for optimizer in every:
                    optimizer.step()
                    optimizer.zero_grad()

    return model, (X, CLASSES), CROSS, train


@loop
def averaged():
    model = mlp()

    def train():
        average = copy.deepcopy(model)

        def move():
            with torch.no_grad():
                for own, new in zip(average.parameters(), model.parameters(), strict=True):
                    own.lerp_(new, 0.1)
                average(X)

        fit(model, CROSS, X, CLASSES, after=move)

    return model, (X, CLASSES), CROSS, train


@loop
def closure():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(2):
            for rows in batches():

                def value(rows=rows):
                    optimizer.zero_grad()
                    found = CROSS(model(X[rows]), CLASSES[rows])
                    found.backward()
                    return found

                optimizer.step(value)

    return model, (X, CLASSES), CROSS, train


@loop
def lbfgs():
    model, loss = nn.Linear(3, 1), nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def train():
        for _ in range(3):
            for rows in batches():

                def value(rows=rows):
                    optimizer.zero_grad()
                    found = loss(model(X[rows]).squeeze(1), Y[rows])
                    found.backward()
                    return found

                optimizer.step(value)

    return model, (X, Y), loss, train


@loop
def gradients_by_function():
    model, params = mlp(), []

    def train():
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            for rows in batches():
                params[:] = model.parameters()
                found = torch.autograd.grad(CROSS(model(X[rows]), CLASSES[rows]), params)
                for p, gradient in zip(params, found, strict=True):
                    p.grad = gradient
                optimizer.step()

    return model, (X, CLASSES), CROSS, train


@loop
def steps_by_hand():
    model = mlp()

    def train():
        for _ in range(2):
            for rows in batches():
                model.zero_grad()
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad

    return model, (X, CLASSES), CROSS, train


@loop
def penalty_by_hand():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def of(rows):
        return CROSS(model(X[rows]), CLASSES[rows]) + 0.01 * sum(p.square().sum() for p in model.parameters())

    return model, (X, CLASSES), CROSS, lambda: list(updates(optimizer, model, of))


@loop
def checkpointed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(3, 5), nn.Linear(5, 4)
            self.middle = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.3), nn.Tanh())

        def forward(self, x):
            return self.head(checkpoint(self.middle, self.first(x), use_reentrant=False))

    return of_classes(CROSS, Model())


@loop
def random_depth():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 4)
            self.kept = []

        def forward(self, x):
            found = self.first(x)
            if not self.training or (np.random.rand() < 0.5) ^ (random.random() < 0.5):
                found = found + self.middle(found)
            self.kept = [found] if self.training else self.kept  # with its graph, which no copy of a module may hold
            return self.head(found)

    return of_classes(CROSS, Model())


@loop
def parametrized():
    return of_classes(CROSS, nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 4)))


class Rows(Dataset):
    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return X[i], int(CLASSES[i])


@loop
def a_dataset_of_rows():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(2):
            for x, y in DataLoader(Rows(), batch_size=6, shuffle=True):
                optimizer.zero_grad()
                CROSS(model(x), y).backward()
                optimizer.step()

    return model, Rows(), CROSS, train


@loop
def double_precision():
    model, loss = nn.Linear(3, 1).double(), nn.MSELoss()
    return model, (X, Y), loss, lambda: fit(model, lambda o, y: loss(o.squeeze(1), y), X.double(), Y.double())


@loop
def half_precision():
    model = mlp().bfloat16()
    return model, (X.bfloat16(), CLASSES), CROSS, lambda: fit(model, CROSS, X.bfloat16(), CLASSES)


@loop
def autocast():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def of(rows):
        with torch.autocast("cpu", torch.bfloat16):
            return CROSS(model(X[rows]), CLASSES[rows])

    return model, (X, CLASSES), CROSS, lambda: list(updates(optimizer, model, of))


@loop
def schedule_by_epoch():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def train():
        for _ in range(4):
            list(updates(optimizer, model, lambda rows: CROSS(model(X[rows]), CLASSES[rows]), epochs=1))
            scheduler.step()

    return model, (X, CLASSES), CROSS, train


@loop
def schedule_by_update():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return model, (X, CLASSES), CROSS, lambda: fit(model, CROSS, X, CLASSES, optimizer=optimizer, after=scheduler.step)


@loop
def step_at_the_beginning():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for _ in range(2):
            for rows in batches():
                optimizer.step()
                optimizer.zero_grad()
                CROSS(model(X[rows]), CLASSES[rows]).backward()
        optimizer.step()

    return model, (X, CLASSES), CROSS, train


@loop
def metrics_after_each_update():
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for rows in updates(optimizer, model, lambda rows: CROSS(model(X[rows]), CLASSES[rows])):
            model.eval()
            CROSS(model(X[rows]), CLASSES[rows]).item()  # with a graph that is never used
            model.train()

    return model, (X, CLASSES), CROSS, train


@loop
def two_losses_one_by_one():
    model, y = nn.Linear(3, 2), torch.randn(NUM, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for _ in range(2):
            for rows in batches():
                out = model(X[rows])
                for i in (0, 1):
                    (functional.mse_loss(out[:, i], y[rows, i]) / 2).backward(retain_graph=True)
                optimizer.step()
                optimizer.zero_grad()

    return model, (X, y), nn.MSELoss(), train


@loop
def sharpness_aware():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train():
        for _ in range(2):
            for rows in batches():
                before = [p.detach().clone() for p in model.parameters()]
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p += 0.05 * p.grad
                optimizer.zero_grad()
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                with torch.no_grad():
                    for p, old in zip(model.parameters(), before, strict=True):
                        p.copy_(old)
                optimizer.step()
                optimizer.zero_grad()

    return model, (X, CLASSES), CROSS, train


@loop
def generator():
    model, critic, loss = nn.Linear(3, 1), nn.Linear(1, 1), nn.BCEWithLogitsLoss()
    one, two = torch.optim.Adam(model.parameters()), torch.optim.Adam(critic.parameters())

    def of(out, y):
        return loss(critic(out), torch.ones(len(out), 1))

    def train():
        for _ in range(2):
            for rows in batches():
                two.zero_grad()
                made = critic(model(X[rows]).detach())
                (of(Y[rows, None], None) + loss(made, torch.zeros(len(rows), 1))).backward()
                two.step()
                one.zero_grad()
                of(model(X[rows]), None).backward()
                one.step()

    return model, (X, Y), of, train


@loop
def all_rows_at_once():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(6):
            optimizer.zero_grad()
            CROSS(model(X), CLASSES).backward()
            optimizer.step()

    return model, (X, CLASSES), CROSS, train


@loop
def microbatches_of_a_function():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def train():
        for _ in range(3):
            for i, rows in enumerate(batches()):
                (CROSS(model(X[rows]), CLASSES[rows]) * len(rows) / (2 * SIZE if i < 4 else SIZE)).backward()
                if i % 2 or i == 4:
                    optimizer.step()
                    optimizer.zero_grad()

    return model, (X, CLASSES), lambda out, y: CROSS(out, y), train


@loop
def thawed_in_the_loop():
    model = mlp()

    def train():
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model[2].parameters())
        fit(model, CROSS, X, CLASSES, optimizer=optimizer)
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": model[0].parameters()})
        fit(model, CROSS, X, CLASSES, optimizer=optimizer)

    return model, (X, CLASSES), CROSS, train


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 1)

    def forward(self, x, scale):
        return self.one(x * scale), self.two(x)


@loop
def two_heads_and_an_input_without_rows():
    model, scale = Heads(), torch.ones(1, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def loss(out, y):
        return functional.cross_entropy(out[0], y[0]) + functional.mse_loss(out[1].squeeze(1), y[1])

    made = updates(optimizer, model, lambda rows: loss(model(X[rows], scale), (CLASSES[rows], Y[rows])))
    return model, (X, (CLASSES, Y)), loss, lambda: list(made)


@loop
def short_batches_of_text():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 5, padding_idx=0, sparse=True), nn.Linear(5, 4)

        def forward(self, text):
            return self.head(self.table(text).sum(1))

    model, text = Model(), TEXT.clamp(min=1)
    for i, row in enumerate(text):
        row[2 + i % 4 :] = 0

    def train():
        every = torch.optim.SparseAdam(model.table.parameters()), torch.optim.Adam(model.head.parameters())
        for _ in range(2):
            for rows in batches():
                batch = text[rows]
                CROSS(model(batch[:, : int((batch != 0).sum(1).max())]), CLASSES[rows]).backward()
                for optimizer in every:
                    optimizer.step()
                    optimizer.zero_grad()

    return model, (text, CLASSES), CROSS, train


@loop
def absolute_penalty_by_hand():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def of(rows):
        return CROSS(model(X[rows]), CLASSES[rows]) + 0.01 * sum(p.abs().sum() for p in model.parameters())

    return model, (X, CLASSES), CROSS, lambda: list(updates(optimizer, model, of))
