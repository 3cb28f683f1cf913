"""PyTorch's modules on a device that a machine without one stands in for: no tensors of two devices meet."""

from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec(
    "tensorflow"
):  # whose libraries end a process that loads both
    pytest.skip(
        "PyTorch with Triton, beside TensorFlow", allow_module_level=True
    )
torch = pytest.importorskip("torch")

from small_torch import CLASSES, CROSS, X, batches, checked, network, seeded  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils.weak import WeakIdKeyDictionary  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.torch import device as devices  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MAKERS = {
    torch.tensor,
    torch.as_tensor,
    torch.ones,
    torch.zeros,
    torch.arange,
    torch.eye,
}


def tensors(nest):
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from tensors([*nest.values()])
    elif isinstance(nest, tuple | list):
        for part in nest:
            yield from tensors(part)


class Accelerator(TorchFunctionMode):
    """Keeps the device that each tensor would have; all of them are computed on the CPU."""

    def __init__(self):
        super().__init__()
        self.homes = WeakIdKeyDictionary()

    def move(self, module):
        for value in [*module.parameters(), *module.buffers()]:
            self.homes[value] = CUDA
        return module

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return self.homes.get(args[0], CPU)
        wanted = kwargs.pop("device", None)
        if func == Tensor.to:
            args, wanted = self._of_move(args, wanted)
        given = [*tensors(args), *tensors(kwargs)]
        homes = {self.homes.get(each) for each in given if each.ndim} - {None}
        is_free = func in (
            Tensor.to,
            Tensor.cpu,
            torch.as_tensor,
            Tensor.__repr__,
        )
        assert is_free or len(homes) < 2, f"{func} of tensors on two devices"
        assert func != Tensor.numpy or CUDA not in homes, (
            "numpy() of a tensor on the device"
        )
        found = func(*args, **kwargs)
        home = next(iter(homes), None)
        home = (
            CPU
            if func == Tensor.cpu
            else wanted or (CPU if func in MAKERS else home)
        )
        if home is not None:
            self.homes.update(
                {each: torch.device(home) for each in tensors(found)}
            )
        return found

    def _of_move(self, args, wanted):
        own, *others = args
        for each in [*others]:
            if isinstance(each, Tensor):
                wanted = self.homes.get(each, CPU)
            if isinstance(each, torch.device | str):
                wanted = each
                others.remove(each)
        return (own.clone(), *others), wanted or self.homes.get(own)


class Lengths(nn.Module):
    """A module that needs one of its inputs on the CPU."""

    def __init__(self):
        super().__init__()
        self.net = network(4, nn.BatchNorm1d(6), nn.Dropout(0.2))

    def forward(self, x, lengths):
        assert lengths.device == CPU
        return self.net(x)


def each_of(outputs, labels):
    weights = torch.ones(len(labels))
    return (
        nn.functional.cross_entropy(outputs, labels, reduction="none") * weights
    )


def terms(model, batch):
    (x, lengths), labels = batch
    return each_of(model(x, lengths), labels)


LOSSES = CROSS, each_of, stepcheck.Objective(terms)


@pytest.mark.parametrize("loss", LOSSES, ids=["loss", "function", "objective"])
@pytest.mark.parametrize("fault", ["", "twice"])
def test_a_module_on_a_device_is_replayed_on_it(loss, fault):
    seeded()
    lengths = torch.arange(len(X)).float()
    with Accelerator() as accelerator:
        model = accelerator.move(Lengths())
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        data = (X, lengths), CLASSES
        with stepcheck.watch(model, data, loss, optimizer=optimizer) as report:
            for rows in batches():
                optimizer.zero_grad()
                out = model(X[rows].to(CUDA), lengths[rows].to(CPU))
                value = CROSS(out, CLASSES[rows].to(CUDA))
                (value * (2 if fault else 1)).backward()
                optimizer.step()
        checked(report)
        assert report.is_right == (not fault), report
        assert len(report.findings) == len(fault[:1]), report
        str(report)


class Home:
    """The random state of an accelerator."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def get_rng_state_all(self):
        return [self.generator.get_state()]

    def set_rng_state_all(self, states):
        self.generator.set_state(states[0])


class Masked(nn.Module):
    """A network whose dropout is drawn on the accelerator."""

    def __init__(self, home):
        super().__init__()
        self.net, self.home = network(), [home]

    def forward(self, x):
        return self.net(
            x * (torch.rand(x.shape, generator=self.home[0].generator) < 0.7)
        )

    def __deepcopy__(self, memo):
        found = Masked(self.home[0])
        found.load_state_dict(self.state_dict())
        return found


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_random_state_of_a_device_is_kept(is_kept, monkeypatch):
    seeded()
    home = Home()
    monkeypatch.setattr(
        devices, "generators", lambda: home if is_kept else None
    )
    model = Masked(home)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with stepcheck.watch(model, (X, CLASSES), CROSS) as report:
        for rows in batches():
            optimizer.zero_grad()
            CROSS(model(X[rows]), CLASSES[rows]).backward()
            optimizer.step()
        after = home.generator.get_state()
    assert (checked(report).unjudged == []) == is_kept, report
    assert torch.equal(home.generator.get_state(), after) == is_kept
