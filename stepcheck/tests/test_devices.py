"""Loops by hand on several devices of JAX: they run as without, and the devices are replicas."""

import keras
import numpy as np
import pytest
from small import faults, reasons

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.values import Reason, Unjudged

pytestmark = [
    pytest.mark.skipif(
        keras.backend.backend() != "jax", reason="programs of JAX"
    ),
    pytest.mark.filterwarnings("ignore:.*vjp of pvary"),
]

NUM = 4
ROWS = np.random.default_rng(0)
X = ROWS.normal(size=(96, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32") + X[:, 1:2]


def built():
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(1e-2)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, "tanh", kernel_regularizer=penalty),
        ]
    )
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def mesh_of(*axes):
    import jax

    shape = (NUM,) if len(axes) == 1 else (2, NUM // 2)
    return jax.sharding.Mesh(np.array(jax.devices()[:NUM]).reshape(shape), axes)


def sharded(model, batches, reduced):
    """Train in a program over arrays whose rows lie on several devices: JAX itself reduces."""
    import jax

    mesh = mesh_of("rows")
    whole, parts = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        for axes in ((), ("rows",))
    )

    @jax.jit
    def step(params, slots, x, y):
        grads = jax.grad(loss_of(model))(params, x, y)
        return model.optimizer.stateless_apply(slots, grads, params)

    params, slots = jax.device_put(values(model), whole)
    for x, y in batches:
        params, slots = step(params, slots, *jax.device_put((x, y), parts))
    return params


def mapped(model, batches, reduced, *axes):
    """Train by gradients that are taken on each device under `shard_map`; one step after it."""
    import jax

    spec, axes = jax.sharding.PartitionSpec, axes or ("rows",)

    def local(params, x, y):
        return reduced(jax.grad(loss_of(model))(params, x, y), axes)

    specs = {
        "in_specs": (spec(), spec("rows"), spec("rows")),
        "out_specs": spec(),
        "check_vma": False,
    }
    taken = jax.shard_map(local, mesh=mesh_of(*axes), **specs)

    @jax.jit
    def step(params, slots, x, y):
        return model.optimizer.stateless_apply(
            slots, taken(params, x, y), params
        )

    params, slots = values(model)
    for x, y in batches:
        params, slots = step(params, slots, x, y)
    return params


def copied(model, batches, reduced):
    """Train by `pmap`: each device makes the step."""
    import jax
    import jax.numpy as jnp

    def local(params, slots, x, y):
        grads = reduced(jax.grad(loss_of(model))(params, x, y), "rows")
        return model.optimizer.stateless_apply(slots, grads, params)

    step = jax.pmap(local, axis_name="rows", devices=jax.devices()[:NUM])
    params, slots = jax.tree.map(
        lambda leaf: jnp.stack([leaf] * NUM), values(model)
    )
    for x, y in batches:
        params, slots = step(
            params, slots, x.reshape(NUM, -1, 6), y.reshape(NUM, -1, 1)
        )
    return [leaf[0] for leaf in params]


def values(model):
    return [v.value for v in model.trainable_variables], [
        v.value for v in model.optimizer.variables
    ]


def loss_of(model):
    def loss(params, x, y):
        outputs, _, penalties = model.stateless_call(
            params, [], x, training=True, return_losses=True
        )
        return keras.ops.mean((outputs - y) ** 2) + sum(penalties)

    return loss


def mean(grads, axes):
    import jax

    return jax.lax.pmean(grads, axes)


def added_up(grads, axes="rows"):
    import jax

    return jax.lax.psum(grads, axes)


def batches():
    order = np.random.default_rng(1)
    for _ in range(3):
        for rows in np.split(order.permutation(96), 4):
            yield X[rows], Y[rows]


@pytest.mark.parametrize("train", [sharded, mapped, copied])
def test_a_right_loop_on_several_devices_is_right_and_computes_the_same_bits(
    train,
):
    alone, model = train(built(), batches(), mean), built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        found = train(model, batches(), mean)
    assert report.is_right, str(report)
    for one, two in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_loop_over_several_axes_of_a_mesh_runs_and_is_not_judged():
    model = built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        mapped(model, batches(), mean, "rows", "others")
    assert report.findings == []
    assert Reason.BLIND in reasons(report)


@pytest.mark.parametrize("train", [mapped, copied])
def test_means_of_devices_that_are_added_up_are_named(train):
    model = built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        train(model, batches(), added_up)
    assert faults(report) == [Fault.SUMMED_OVER_REPLICAS], str(report)


def test_the_line_of_a_penalty_that_each_device_adds_is_that_of_the_loss(
    monkeypatch,
):
    def loss_of(model):
        def loss(params, x, y):
            outputs, _, penalties = model.stateless_call(
                params, [], x, training=True, return_losses=True
            )
            data = keras.ops.mean((outputs - y) ** 2) / NUM
            return data + sum(penalties)

        return loss

    monkeypatch.setitem(globals(), "loss_of", loss_of)
    model = built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        mapped(model, batches(), added_up)
    (found,) = report.findings
    assert found.fault is Fault.PENALTY_ONCE_PER_REPLICA
    assert found.where.line.text == "return data + sum(penalties)"


def filled_up(model, valued, fill, num=84, size=32, *, is_summed_by_jax=False):
    """Train by sums over the devices; the last batch of a pass is filled up, and one device has nothing else.

    Return the losses of the batches of each pass. `is_summed_by_jax`: JAX adds up the gradients once more.
    """
    import jax

    spec = jax.sharding.PartitionSpec

    def local(params, x, y, weight):
        def loss(params):
            outputs, _, penalties = model.stateless_call(
                params, [], x, training=True, return_losses=True
            )
            losses = ((outputs - y) ** 2)[:, 0]
            return valued(
                losses,
                weight,
                lambda own: jax.lax.psum(own, "rows"),
                sum(penalties),
            )

        return added_up(jax.value_and_grad(loss)(params))

    specs = {
        "in_specs": (spec(), *[spec("rows")] * 3),
        "out_specs": spec(),
        "check_vma": is_summed_by_jax,
    }
    taken = jax.shard_map(local, mesh=mesh_of("rows"), **specs)

    @jax.jit
    def step(params, slots, *given):
        value, grads = taken(params, *given)
        return value, *model.optimizer.stateless_apply(slots, grads, params)

    (params, slots), order, losses = values(model), np.random.default_rng(1), []
    for _ in range(2):
        rows = order.permutation(num)
        for start in range(0, num, size):
            own = rows[start : start + size]
            more = size - len(own) if fill else 0
            weight = np.repeat(np.float32([1, 0]), [len(own), more])
            if fill == "copies":
                own = np.append(own, np.zeros(more, int))
                given = X[own], Y[own]
            else:
                given = [
                    np.pad(each[own], ((0, more), (0, 0))) for each in (X, Y)
                ]
            value, params, slots = step(params, slots, *given, weight)
            losses.append(float(value))
    return np.reshape(losses, (2, -1))


def right(losses, w, total, penalty):
    return (losses * w).sum() / total(w.sum()) + penalty / NUM


def mean_of_means(losses, w, total, penalty):
    return ((losses * w).sum() / keras.ops.maximum(w.sum(), 1) + penalty) / NUM


@pytest.mark.parametrize("fill", ["zeros", "copies"])
@pytest.mark.parametrize(
    ("valued", "found"),
    [
        (right, []),
        (mean_of_means, [Fault.MEAN_OF_MEANS]),
        (
            lambda losses, w, total, penalty: (
                ((losses * w).mean() + penalty) / NUM
            ),
            [Fault.PADDING_COUNTED],
        ),
    ],
)
def test_rows_that_fill_up_a_batch_on_several_devices_do_not_count(
    valued, found, fill
):
    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84])) as report:
        filled_up(model, valued, fill)
    assert faults(report) == found, str(report)
    assert found or report.is_right


def test_a_sum_over_devices_is_taken_twice():
    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84])) as report:
        filled_up(model, right, "zeros", is_summed_by_jax=True)
    assert faults(report) == [Fault.SUMMED_OVER_REPLICAS], str(report)


def test_each_of_two_findings_has_the_numbers_of_an_update_where_it_has_an_effect():
    def valued(losses, w, total, penalty):
        return losses.sum() / 32 + penalty  # the last batch has 20 rows

    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84]), loss="mse") as report:
        filled_up(model, valued, None)
    assert faults(report) == [
        Fault.DIVIDED_BY_THE_FULL_BATCH,
        Fault.PENALTY_ONCE_PER_REPLICA,
    ]
    for found in report.findings:
        length = found.proof.numbers[0]
        assert (
            abs(length.observed - length.with_error)
            < 1e-5
            < abs(length.observed - length.expected)
        )
        assert 3 * found.with_error < found.apart


def test_printed_losses_of_several_devices_are_not_judged():
    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84])) as report:
        losses = filled_up(model, right, "zeros")
    report.printed(loss=np.mean(losses, axis=1))
    assert faults(report) == []
    assert Unjudged(Reason.FEW_PASSES, Stage.PRINTED) in report.unjudged


def test_a_call_outside_of_the_devices_comes_after_those_of_all_devices_whenever_these_arrive(
    monkeypatch,
):
    import jax
    import jax.numpy as jnp

    from stepcheck.keras import jax_listener

    calls, told = [], []
    monkeypatch.setattr(
        jax_listener, "io_callback", lambda heard, *_, **__: calls.append(heard)
    )
    listener = jax_listener.EngineListener()

    def note(name):
        return lambda order, replica, _: told.append((order, name, replica))

    def local(x):
        listener.tell(note("pass"), [x])
        return jax.lax.psum(x, "rows")

    def step(x):
        mesh, spec = (
            jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",)),
            jax.sharding.PartitionSpec,
        )
        total = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=spec("rows"),
            out_specs=spec(),
            check_vma=False,
        )(x)
        listener.tell(note("step"), [total])
        return total

    jax.make_jaxpr(step)(jnp.ones(2))
    on_each, outside = calls
    for call, replica in (
        (on_each, 0),
        (outside, 0),
        (on_each, 0),
        (on_each, 1),
        (outside, 0),
        (on_each, 1),
    ):
        call(np.int32(replica), np.ones(1, "float32"))
    assert [each[1:] for each in sorted(told)] == [
        ("pass", 0),
        ("pass", 1),
        ("step", 0),
    ] * 2
