"""Two runs of PyTorch: where they differ first, and what is no difference."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import stepcheck  # noqa: E402
from stepcheck.differences import Kind, Part, Relation  # noqa: E402

ROWS, SIZE = 64, 8
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def network(*more):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), *more, nn.Linear(8, 1))


def batches(num):
    return [
        torch.arange(SIZE) + SIZE * (i % (ROWS // SIZE)) for i in range(num)
    ]


def trained(
    *,
    optimizer=torch.optim.SGD,
    cut=1,
    num=6,
    order=lambda i, rows: rows,
    loss=nn.functional.mse_loss,
    before=lambda i, model, optimizer: None,
    after=lambda i, model, optimizer: None,
    model=None,
    device="cpu",
):
    """Return the trace of a loop; by default a right one."""
    model = network() if model is None else model
    own = optimizer(model.parameters(), 0.05)
    with stepcheck.record() as trace:
        for i, rows in enumerate(batches(num)):
            own.zero_grad()
            for part in order(i, rows).split(SIZE // cut):
                (loss(model(X[part]), Y[part]) / cut).backward()
            before(i, model, own)
            own.step()
            after(i, model, own)
    return trace


def found(a, b, **given):
    """Return (update, part, kind) of the first difference."""
    first = stepcheck.diff(a, b, **given).first
    return None if first is None else (first.update, first.part, first.kind)


def test_equal_runs_are_equal_to_the_bit():
    result = stepcheck.diff(trained(), trained(), bits=True)
    assert result.is_equal, str(result)
    assert result.compared == [*Part]


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop]
)
@pytest.mark.parametrize("cut", [2, 8])
def test_microbatches_are_no_difference(optimizer, cut):
    a, b = (trained(optimizer=optimizer, cut=each, num=30) for each in (cut, 1))
    assert stepcheck.diff(a, b).is_equal, str(stepcheck.diff(a, b))
    assert not stepcheck.diff(a, b, bits=True).is_equal


def test_the_order_of_rows_in_an_update_is_no_difference():
    def shuffled(i, rows):
        return rows[torch.randperm(SIZE)]

    result = stepcheck.diff(trained(order=shuffled, cut=2), trained())
    assert result.is_equal, str(result)


def test_another_order_of_updates():
    def later(i, rows):
        return (rows + SIZE) % ROWS

    result = stepcheck.diff(trained(order=later, num=8), trained(num=8))
    assert result.first.kind is Kind.OTHER_ORDER
    assert "one seed" in str(result)


def test_one_update_that_counts_a_quarter():
    def quarter(i, model, optimizer):
        if i == 4:
            for p in model.parameters():
                p.grad /= 4

    result = stepcheck.diff(trained(before=quarter), trained())
    assert (result.first.update, result.first.kind) == (5, Kind.MULTIPLE)
    assert result.first.counts == pytest.approx([0.25])
    relations = [
        update.parts[Part.GRADIENT].relation
        for update in result.models[0].updates
    ]
    assert relations == [Relation.EQUAL] * 4 + [
        Relation.DIFFERS,
        Relation.FOLLOWS,
    ]
    assert "is 1/4 times" in str(result)


def test_a_sum_over_microbatches_counts_each_row_so_often():
    def summed(out, y):
        return 4 * nn.functional.mse_loss(out, y)

    result = stepcheck.diff(trained(loss=summed, cut=4), trained())
    assert result.first.kind is Kind.ROWS_COUNT
    assert result.first.counts == pytest.approx([4.0] * SIZE)


def test_rows_of_one_microbatch_count_otherwise():
    def half(out, y):
        return nn.functional.mse_loss(out, y) * (
            0.5 if torch.equal(y[0], Y[0]) else 1
        )

    result = stepcheck.diff(trained(loss=half, cut=2), trained(cut=2))
    assert result.first.kind is Kind.ROWS_COUNT
    assert result.first.where.rows == (0, 1, 2, 3)
    assert "rows 0, 1, 2, 3 counts 1/2" in str(result)


def test_a_clip_is_between_loss_and_step():
    def clip(i, model, optimizer):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    result = stepcheck.diff(trained(before=clip), trained())
    assert result.first.kind is Kind.AFTER_LOSS


def test_a_gradient_of_some_parameters_alone():
    def lost(i, model, optimizer):
        model[0].weight.grad = None

    result = stepcheck.diff(trained(before=lost), trained())
    assert result.first.kind is Kind.NO_GRADIENT
    assert result.first.where.parameters == ("0.weight",)


def test_layers_that_are_frozen_and_thawed():
    def frozen(thawed_at):
        model = network()
        model[0].requires_grad_(requires_grad=False)

        def thaw(i, model, optimizer):
            if i == thawed_at:
                model[0].requires_grad_(requires_grad=True)

        return trained(model=model, after=thaw)

    assert stepcheck.diff(frozen(2), frozen(2)).is_equal
    assert found(frozen(2), frozen(3)) == (4, Part.GRADIENT, Kind.NO_GRADIENT)
    assert found(frozen(9), trained()) == (1, Part.GRADIENT, Kind.NO_GRADIENT)


def test_a_closure_runs_the_model_inside_of_the_step():
    def closed(factor):
        model = network()
        own = torch.optim.SGD(model.parameters(), 0.05)
        with stepcheck.record() as trace:
            for rows in batches(6):

                def loss(rows=rows):
                    own.zero_grad()
                    value = factor * nn.functional.mse_loss(
                        model(X[rows]), Y[rows]
                    )
                    value.backward()
                    return value

                own.step(loss)
        return trace

    assert stepcheck.diff(closed(1), trained()).is_equal
    assert found(closed(2), trained()) == (1, Part.GRADIENT, Kind.ROWS_COUNT)


def test_models_one_after_another():
    def coded(penalty, noise=0.0):
        torch.manual_seed(0)
        encoder, decoder = nn.Linear(3, 4), nn.Linear(4, 3)
        own = torch.optim.Adam(
            [*encoder.parameters(), *decoder.parameters()], 0.05
        )
        with stepcheck.record() as trace:
            for rows in batches(6):
                own.zero_grad()
                code = encoder(X[rows]) * (1 + noise)
                value = nn.functional.mse_loss(decoder(code), X[rows])
                (value + penalty * (code**2).mean()).backward()
                own.step()
        return trace

    result = stepcheck.diff(coded(0.1, noise=1e-5), coded(0.1))
    assert not [
        each for each in result.differences if each.part is Part.ROWS
    ], str(result)
    result = stepcheck.diff(coded(0.2), coded(0.1))
    assert (result.first.update, result.first.part) == (1, Part.GRADIENT)
    assert len(result.differences) == 1


def test_weights_that_are_changed_after_a_step():
    def decay(i, model, optimizer):
        if i == 2:
            with torch.no_grad():
                model[0].weight.mul_(0.99)

    assert found(trained(after=decay), trained()) == (
        3,
        Part.STATE,
        Kind.WRITTEN,
    )


@pytest.mark.parametrize("bits", [False, True])
def test_numbers_that_are_not_finite_are_equal_to_themselves_alone(bits):
    def times(factor):
        def grow(i, model, optimizer):
            if i == 2:
                model[0].weight.grad.fill_(factor)

        return trained(before=grow)

    numbers = [float("nan"), float("inf"), -float("inf"), 1.0]
    for one in numbers:
        for two in numbers:
            at = (3, Part.GRADIENT, Kind.AFTER_LOSS)
            expected = None if one is two else at
            assert found(times(one), times(two), bits=bits) == expected


def test_a_schedule_that_is_one_ahead():
    def schedule(ahead):
        def set_rate(i, model, optimizer):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + i + ahead)

        return set_rate

    a, b = trained(before=schedule(1)), trained(before=schedule(0))
    assert found(a, b) == (1, Part.STEP, Kind.OTHER_RATE)


@pytest.mark.parametrize("pair", [("Adam", "AdamW"), ("SGD", "Adam")])
def test_another_optimizer_is_found_in_the_step(pair):
    a, b = (trained(optimizer=getattr(torch.optim, name)) for name in pair)
    assert found(a, b) == (1, Part.STEP, Kind.OTHER_STEP)


def test_slots_that_are_reset():
    def reset(i, model, optimizer):
        if i == 2:
            optimizer.state.clear()

    a, b = (
        trained(
            optimizer=lambda p, r: torch.optim.SGD(p, r, momentum=0.9),
            after=after,
        )
        for after in (reset, lambda *_: None)
    )
    update, part, _ = found(a, b)
    assert (update, part) in {(3, Part.STATE), (4, Part.STEP)}


def test_statistics_and_modes():
    def with_mode(is_training):
        model = network(nn.BatchNorm1d(8))
        model.train(is_training)
        return trained(model=model)

    assert found(with_mode(False), with_mode(True)) == (
        1,
        Part.MODE,
        Kind.OTHER_MODE,
    )
    assert found(with_mode(True), with_mode(True)) is None

    def other_momentum(momentum):
        return trained(model=network(nn.BatchNorm1d(8, momentum=momentum)))

    a, b = other_momentum(0.2), other_momentum(0.1)
    assert found(a, b) == (1, Part.STATE, Kind.OTHER_STATISTICS)


def test_other_draws():
    def dropped(seed):
        model = network(nn.Dropout(0.5))
        torch.manual_seed(seed)
        return trained(model=model)

    assert found(dropped(1), dropped(2)) == (1, Part.OUTPUTS, Kind.OTHER_DRAWS)
    assert found(dropped(1), dropped(1)) is None


def test_rounding_that_grows_is_no_difference():
    def noisy(i, model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.grad *= 1 + 1e-6 * torch.randn_like(p)

    def trace(before):
        return trained(
            optimizer=lambda p, r: torch.optim.Adam(p, 0.5),
            num=200,
            before=before,
        )

    result = stepcheck.diff(trace(noisy), trace(lambda *_: None))
    assert result.is_equal, str(result)


def test_long_runs_are_compared_by_outlines():
    def late(i, model, optimizer):
        if i == 60:
            model[0].weight.grad *= 2

    result = stepcheck.diff(trained(before=late, num=80), trained(num=80))
    assert (result.first.update, result.first.part) == (61, Part.GRADIENT)
    assert found(trained(num=80), trained(num=80), bits=True) is None


def test_a_long_run_finds_late_rows_and_steps():
    def other(i, rows):
        return rows + 1 if i == 70 else rows

    assert found(trained(order=other, num=75), trained(num=75))[:2] == (
        71,
        Part.ROWS,
    )

    def wrong(i, model, optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.5 * (i == 70)

    assert found(trained(before=wrong, num=75), trained(num=75))[:2] == (
        71,
        Part.STEP,
    )


def test_match_views_another_layout():
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            inner = network()
            self.kernel = nn.Parameter(inner[0].weight.detach().T.clone())
            self.bias = nn.Parameter(inner[0].bias.detach().clone())
            self.last = inner[2]

        def forward(self, x):
            return self.last(torch.tanh(x @ self.kernel + self.bias))

    def match(name):
        if name == "0.weight":
            return "kernel", lambda value: value.T
        return {"0.bias": "bias"}.get(name) or name.replace("2", "last")

    a, b = trained(), trained(model=Transposed())
    with pytest.raises(stepcheck.SpecificationError, match="match="):
        stepcheck.diff(a, b)
    assert stepcheck.diff(a, b, match=match).is_equal, str(
        stepcheck.diff(a, b, match=match)
    )
    with pytest.raises(stepcheck.SpecificationError, match="nothing"):
        stepcheck.diff(a, b, match=lambda name: "nothing")
    other = trained(model=Transposed(), loss=nn.functional.l1_loss)
    assert found(a, other, match=match)[:2] == (1, Part.GRADIENT)


def test_padding_is_no_part_of_a_row():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.table, self.head = (
                nn.Embedding(12, 5, padding_idx=0),
                nn.Linear(5, 12),
            )

        def forward(self, ids, mask):
            return self.head(self.table(ids) * mask[..., None])

    rows = [torch.randint(1, 12, (n,)) for n in (7, 2, 5, 4)]
    total = sum(map(len, rows))

    def of(cut, is_mean_of_means=False):
        model = Tagger()
        own = torch.optim.SGD(model.parameters(), 0.1)
        with stepcheck.record() as trace:
            for _ in range(3):
                own.zero_grad()
                for i in range(0, 4, cut):
                    ids = nn.utils.rnn.pad_sequence(
                        rows[i : i + cut], batch_first=True
                    )
                    mask = (ids > 0).long()
                    out = model(ids, mask)
                    each = nn.functional.cross_entropy(
                        out.flatten(0, 1), ids.flatten(), reduction="none"
                    )
                    value = (each * mask.flatten()).sum()
                    num = mask.sum() * 4 / cut if is_mean_of_means else total
                    (value / num).backward()
                own.step()
        return trace

    assert stepcheck.diff(of(1), of(4)).is_equal, str(
        stepcheck.diff(of(1), of(4))
    )
    result = stepcheck.diff(of(1, is_mean_of_means=True), of(4))
    assert result.first.kind is Kind.ROWS_COUNT
    assert result.first.counts == pytest.approx(
        [total / 4 / len(row) for row in rows], rel=1e-3
    )


def test_two_optimizers_and_a_model_that_is_not_trained():
    def adversarial(factor):
        torch.manual_seed(0)
        one, two, judge = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)
        judge.requires_grad_(requires_grad=False)
        first, second = (
            torch.optim.SGD(each.parameters(), 0.1) for each in (one, two)
        )
        with stepcheck.record() as trace:
            for rows in batches(3):
                for own in (first, second):
                    own.zero_grad()
                    (two(one(X[rows])) + judge(X[rows])).mean().mul(
                        factor
                    ).backward()
                    own.step()
        return trace

    trace = adversarial(1)
    assert [run.name for run in trace.runs] == ["Linear", "Linear"]
    assert stepcheck.diff(trace, adversarial(1)).is_equal
    assert stepcheck.diff(trace, adversarial(3)).first.part is Part.GRADIENT


def test_the_same_bits_and_all_is_restored():
    call = nn.Module.__call__

    def weights(is_recorded):
        model = network(nn.Dropout(0.3))
        own = torch.optim.Adam(model.parameters(), 0.05)

        def loop():
            for rows in batches(50):
                own.zero_grad()
                nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
                own.step()

        if is_recorded:
            with stepcheck.record():
                loop()
        else:
            loop()
        return [p.detach().numpy() for p in model.parameters()]

    assert all(map(np.array_equal, weights(True), weights(False)))
    assert nn.Module.__call__ is call
    with pytest.raises(ZeroDivisionError):
        trained(before=lambda *_: 1 / 0)
    assert nn.Module.__call__ is call


def test_a_trace_is_read_by_numpy_alone(tmp_path):
    trained(num=50).save(tmp_path / "a.trace")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['keras'] = None; import stepcheck;"
        f"print(stepcheck.diff(*[{str(tmp_path / 'a.trace')!r}] * 2, bits=True).is_equal)"
    )
    import subprocess
    import sys

    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "True\n", ran.stderr


def test_the_example_of_a_loop_that_was_rewritten(capsys):
    from diff_torch import main

    draft, now = main()
    assert (draft.first.update, draft.first.kind) == (4, Kind.ROWS_COUNT)
    assert draft.first.counts == pytest.approx([4.0] * 32)
    assert now.is_equal
    assert "each row counts 4 times" in capsys.readouterr().out


def test_of_several_models_the_first_difference_is_the_one_that_is_told():
    def in_turn(factor, num):
        one, two = network(), network()
        with stepcheck.record() as trace:
            for i, rows in enumerate(batches(4)):
                for model in (one, two)[: 1 + (i < num)]:
                    own = torch.optim.SGD(model.parameters(), 0.05)
                    scale = factor if i else 1
                    loss = nn.functional.mse_loss(model(X[rows]), Y[rows])
                    (scale * loss).backward()
                    own.step()
                    own.zero_grad()
        return trace

    result = stepcheck.diff(in_turn(2, 3), in_turn(1, 4))
    assert [len(model.differences) for model in result.models] == [1, 2]
    assert (result.first.update, result.first.part) == (2, Part.GRADIENT)
    result = stepcheck.diff(in_turn(1, 3), in_turn(1, 4))
    assert (result.first.update, result.first.kind) == (4, Kind.FEWER_UPDATES)
