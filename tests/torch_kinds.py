"""Kinds of loops of PyTorch, right or with a named fault: functions return (model, data, loss, the loop)."""

import torch
from torch import nn
from torch.nn import functional
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

    return model, (X, CLASSES), None, train


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

    return model, (X, CLASSES), None, train


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


UNJUDGED = ()  # the report says that the gradient or the loss is not judged
FAULTS = {  # by kind and fault: the name of the cause, or the beginning of the note that the report begins with
    ("autocast", "never zeroed"): "not reset",
    ("autocast_inside", "labels shifted"): "labels shifted",
    ("scaler_with_clip", "clip before unscale_"): "clip before unscale",
    ("scaler", "the optimizer's own step"): "loss scale left in",
    ("scaler", "the scaled loss is not used"): "loss not scaled",
}
