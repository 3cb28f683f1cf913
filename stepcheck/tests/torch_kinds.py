"""Kinds of loops of PyTorch, right or with a named fault: functions return (model, data, loss, the loop)."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import Dataset
from torch_right import CLASSES, CROSS, NUM, X, batches, mlp

KINDS = {}


def kind(make):
    def seeded(fault=""):
        torch.manual_seed(1)
        return make(fault)

    KINDS[make.__name__] = seeded
    return make


def _scaled(fault, *, casts, clip=0.0, **options):
    model, scaler = mlp(nn.Dropout(0.1)), torch.amp.GradScaler("cpu", **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train():
        for _ in range(3):
            for rows in batches():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=casts):
                    loss = functional.cross_entropy(model(X[rows]), CLASSES[rows])
                scaled = scaler.scale(loss)
                (loss if fault == "the scaled loss is not used" else scaled).backward()
                if clip and fault != "clip before unscale_":
                    scaler.unscale_(optimizer)
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                if fault == "the optimizer's own step":
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()

    return model, (X, CLASSES), CROSS, train


@kind
def autocast(fault):
    """Under bfloat16, with an output that is made float32 before the loss."""
    model = mlp(nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train():
        for _ in range(2):
            for rows in batches():
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(X[rows])
                loss = CROSS(out.float(), CLASSES[rows])
                loss.backward()
                optimizer.step()
                if fault != "never zeroed":
                    optimizer.zero_grad()

    return model, (X, CLASSES), CROSS, train


class Cast(nn.Sequential):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x):
        return super().forward(x)


@kind
def autocast_inside(fault):
    model = Cast(*mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(2):
            for rows in batches():
                optimizer.zero_grad()
                y = CLASSES[(rows + 1) % NUM] if fault else CLASSES[rows]
                CROSS(model(X[rows]).float(), y).backward()
                optimizer.step()

    return model, (X, CLASSES), CROSS, train


@kind
def scaler_with_clip(fault):
    return _scaled(fault, casts=True, clip=0.05)


@kind
def scaler(fault):
    return _scaled(fault, casts=False)


@kind
def scaler_that_skips(fault):
    """The first steps are skipped: at this scale gradients are not finite."""
    return _scaled(fault, casts=True, init_scale=2.0**127)


def _scheduled(fault, make):
    """With a schedule that is stepped after each update, the first one inside of the audit."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train():
        scheduler = make(optimizer)
        for _ in range(4):
            for rows in batches():
                loss = CROSS(model(X[rows]), CLASSES[rows])
                optimizer.zero_grad()
                loss.backward()
                given = (loss.item(),) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
                if fault == "before the update":
                    scheduler.step(*given)
                optimizer.step()
                if fault == "in each update" or (not given and not fault):
                    scheduler.step(*given)
            if given and not fault:
                scheduler.step(*given)

    return model, (X, CLASSES), CROSS, train


@kind
def plateau(fault):
    return _scheduled(fault, lambda own: lr_scheduler.ReduceLROnPlateau(own, factor=0.5, patience=0))


@kind
def schedules_in_turn(fault):
    parts = (lr_scheduler.LinearLR, {"total_iters": 4}), (lr_scheduler.CosineAnnealingLR, {"T_max": 20})
    return _scheduled(fault, lambda own: lr_scheduler.SequentialLR(own, [of(own, **how) for of, how in parts], [4]))


@kind
def chained_schedules(fault):
    parts = (lr_scheduler.LinearLR, {"total_iters": 4}), (lr_scheduler.ExponentialLR, {"gamma": 0.95})
    return _scheduled(fault, lambda own: lr_scheduler.ChainedScheduler([of(own, **how) for of, how in parts]))


@kind
def schedule_by_a_number(fault):
    """Whose step before each update gets the number of this update."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)

    def train():
        for epoch in range(4):
            for i, rows in enumerate(batches()):
                optimizer.zero_grad()
                CROSS(model(X[rows]), CLASSES[rows]).backward()
                scheduler.step(epoch + i / 5)
                optimizer.step()
                if fault:
                    optimizer.step()

    return model, (X, CLASSES), CROSS, train


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.head = nn.Linear(3, 6), nn.Dropout(0.1), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.drop(self.first(x).relu()))


def _compiled(fault, model, called):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train():
        for _ in range(2):
            for rows in batches():
                optimizer.zero_grad()
                if fault == "eval":
                    called.eval()
                out = called(X[rows])
                CROSS(out if fault != "softmax" else out.softmax(1), CLASSES[rows]).backward()
                optimizer.step()

    return (X, CLASSES), CROSS, train


@kind
def compiled(fault):
    """With the compiled module as the one that is audited; no hook is in its graph."""
    torch.compiler.reset()
    model = torch.compile(Compiled(), backend="aot_eager", fullgraph=True)
    return model, *_compiled(fault, model, model)


@kind
def compiled_inside(fault):
    """With the original module as the one that is audited, and a part that is compiled in place."""
    torch.compiler.reset()
    model = Compiled()
    model.first.compile(backend="eager")
    return model, *_compiled(fault, model, torch.compile(model, backend="eager"))


@kind
def closure_with_a_metric(fault):
    """Whose closure runs the model twice, once for a gradient."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(2):
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

    return model, (X, CLASSES), CROSS, train


class Sharpness(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as its users write it: with an optimizer inside."""

    def __init__(self, params, size, **given):
        super().__init__(params, given)
        self.inner, self.size = torch.optim.SGD(self.param_groups, **given), size

    @torch.no_grad()
    def step(self, closure):
        moved = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in moved]
        for p in moved:
            p.add_(self.size * p.grad)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p, old in zip(moved, before, strict=True):
            p.copy_(old)
        self.inner.step()
        self.zero_grad()


@kind
def sharpness_aware(fault):
    model = mlp()
    optimizer = Sharpness(model.parameters(), 0.05, lr=0.1)

    def train():
        for _ in range(2):
            for rows in batches():

                def value(rows=rows):
                    out = model(X[rows])
                    loss = CROSS(out.softmax(1) if fault else out, CLASSES[rows])
                    loss.backward()
                    return loss

                value()
                optimizer.step(value)

    return model, (X, CLASSES), CROSS, train


class Variational(nn.Module):
    """Whose outputs are made of each other: (reconstruction, mean, logarithm of the variance, a mean of outputs)."""

    def __init__(self):
        super().__init__()
        self.first, self.mean, self.log, self.last = (nn.Linear(*sizes) for sizes in ((3, 6), (6, 2), (6, 2), (2, 3)))

    def forward(self, x):
        h = self.first(x).relu()
        mean, log = self.mean(h), self.log(h)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp() if self.training else mean
        made = self.last(z)
        return made, mean, log, made.square().mean()


@kind
def variational(fault):
    model = Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train():
        for _ in range(3):
            for rows in batches():
                if not fault:
                    optimizer.zero_grad()
                made, mean, log, penalty = model(X[rows])
                divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
                loss = functional.mse_loss(made, X[rows], reduction="sum") + divergence + 0.1 * penalty
                loss.backward()
                optimizer.step()

    def meant(out, x):
        made, mean, log, penalty = out
        divergence = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        return functional.mse_loss(made, x, reduction="sum") + divergence + 0.1 * penalty

    return model, (X, X), meant, train


W = torch.rand(NUM, generator=torch.Generator().manual_seed(2)) + 0.1


class Weighted(Dataset):
    """Rows of inputs, labels and weights."""

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return X[i], CLASSES[i], W[i]


def of_weights(out, y, w):
    return (functional.cross_entropy(out, y, reduction="none") * w).sum() / w.sum()


def _weighted(fault, data, meant, of):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    changed = {"ignored": torch.ones_like(W), "squared": W * W, "others": W.roll(-1)}

    def train():
        for _ in range(3):
            for rows in batches():
                optimizer.zero_grad()
                of(model(X[rows]), CLASSES[rows], changed.get(fault, W)[rows]).backward()
                optimizer.step()

    return model, data, meant, train


@kind
def loss_of_three_arguments(fault):
    return _weighted(fault, Weighted(), of_weights, of_weights)


@kind
def weights_of_rows(fault):
    return _weighted(fault, (X, CLASSES, W), nn.CrossEntropyLoss(), of_weights)


@kind
def weights_divided_by_the_rows(fault):
    """Which is as right as a division by the sum of the weights."""
    unreduced = nn.CrossEntropyLoss(reduction="none")
    return _weighted(fault, (X, CLASSES, W), CROSS, lambda out, y, w: (unreduced(out, y) * w).mean())


FAULTS = {  # by kind and fault: the name of the cause, or the beginning of the note that the report begins with
    ("autocast", "never zeroed"): "not reset",
    ("autocast_inside", "labels shifted"): "labels shifted",
    ("scaler_with_clip", "clip before unscale_"): "clip before unscale",
    ("scaler", "the optimizer's own step"): "loss scale left in",
    ("scaler", "the scaled loss is not used"): "loss not scaled",
    ("schedule_by_a_number", "two steps"): "applied twice",
    ("variational", "never zeroed"): "not reset",
    ("loss_of_three_arguments", "ignored"): "mean of row means",
    ("weights_of_rows", "squared"): "weights squared",
    ("weights_of_rows", "others"): "weights of other rows",
    ("weights_divided_by_the_rows", "ignored"): "weights ignored",
    ("compiled", "eval"): "inference mode",
    ("closure_with_a_metric", "never zeroed"): "not reset",
    ("sharpness_aware", "softmax"): "softmax twice",
    ("compiled_inside", "softmax"): "softmax twice",
}
