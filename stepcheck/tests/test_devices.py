"""Loops by hand on several devices of JAX: they run under the audit as without, and the devices are replicas to it."""

import keras
import numpy as np
import pytest

import stepcheck

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="programs of JAX"),
    pytest.mark.filterwarnings("ignore:.*vjp of pvary"),
]

NUM = 4
ROWS = np.random.default_rng(0)
X = ROWS.normal(size=(96, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32") + X[:, 1:2]


def built():
    keras.utils.set_random_seed(0)
    penalty = keras.regularizers.L2(1e-2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh", kernel_regularizer=penalty)])
    model.add(keras.layers.Dense(1))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def sharded(model, batches, reduced):
    """Train in a program over arrays whose rows lie on several devices: JAX itself reduces."""
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM]), ("rows",))
    whole, parts = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), ("rows",)))

    @jax.jit
    def step(params, slots, x, y):
        grads = jax.grad(loss_of(model))(params, x, y)
        return model.optimizer.stateless_apply(slots, grads, params)

    params, slots = jax.device_put(values(model), whole)
    for x, y in batches:
        params, slots = step(params, slots, *jax.device_put((x, y), parts))
    return params


def mapped(model, batches, reduced):
    """Train by gradients that are taken on each device under `shard_map`; one step after it."""
    import jax

    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(jax.devices()[:NUM]), ("rows",))

    def local(params, x, y):
        return reduced(jax.grad(loss_of(model))(params, x, y))

    specs = {"in_specs": (spec(), spec("rows"), spec("rows")), "out_specs": spec(), "check_vma": False}
    taken = jax.shard_map(local, mesh=mesh, **specs)

    @jax.jit
    def step(params, slots, x, y):
        return model.optimizer.stateless_apply(slots, taken(params, x, y), params)

    params, slots = values(model)
    for x, y in batches:
        params, slots = step(params, slots, x, y)
    return params


def copied(model, batches, reduced):
    """Train by `pmap`: each device makes the step."""
    import jax
    import jax.numpy as jnp

    def local(params, slots, x, y):
        grads = reduced(jax.grad(loss_of(model))(params, x, y))
        return model.optimizer.stateless_apply(slots, grads, params)

    step = jax.pmap(local, axis_name="rows", devices=jax.devices()[:NUM])
    params, slots = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM), values(model))
    for x, y in batches:
        params, slots = step(params, slots, x.reshape(NUM, -1, 6), y.reshape(NUM, -1, 1))
    return [leaf[0] for leaf in params]


def values(model):
    return [v.value for v in model.trainable_variables], [v.value for v in model.optimizer.variables]


def loss_of(model):
    def loss(params, x, y):
        outputs, _, penalties = model.stateless_call(params, [], x, training=True, return_losses=True)
        return keras.ops.mean((outputs - y) ** 2) + sum(penalties)

    return loss


def mean(grads):
    import jax

    return jax.lax.pmean(grads, "rows")


def added_up(grads):
    import jax

    return jax.lax.psum(grads, "rows")


def batches():
    order = np.random.default_rng(1)
    for _ in range(3):
        for rows in np.split(order.permutation(96), 4):
            yield X[rows], Y[rows]


@pytest.mark.parametrize("train", [sharded, mapped, copied])
def test_a_right_loop_on_several_devices_is_right_and_computes_the_same_bits(train):
    alone, model = train(built(), batches(), mean), built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        found = train(model, batches(), mean)
    assert (report.causes, report.has_seen) == ([], True), str(report)
    assert "gradient" in str(report).splitlines()[0]
    for one, two in zip(alone, found, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_loop_over_several_axes_of_a_mesh_runs_and_is_said_not_to_be_looked_at():
    import jax

    model, spec = built(), jax.sharding.PartitionSpec
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:NUM]).reshape(2, 2), ("rows", "others"))

    def local(params, x, y):
        return jax.lax.pmean(jax.grad(loss_of(model))(params, x, y), ("rows", "others"))

    specs = {"in_specs": (spec(), spec("rows"), spec("rows")), "out_specs": spec(), "check_vma": False}
    taken = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    params, slots = values(model)
    with stepcheck.watch(model, data=(X, Y)) as report:
        for x, y in batches():
            params, slots = model.optimizer.stateless_apply(slots, taken(params, x, y), params)
    assert report.causes == []
    assert "what runs under jax.shard_map over several axes of a mesh" in str(report)


@pytest.mark.parametrize("train", [mapped, copied])
def test_means_of_devices_that_are_added_up_are_named(train):
    model = built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        train(model, batches(), added_up)
    (cause,) = report.causes
    assert cause.name == "summed over replicas", str(report)
    assert "Each replica divides by its own rows" in str(report)
    assert "jax.lax.psum" in cause.fix


def test_the_line_of_a_penalty_that_each_device_adds_is_that_of_the_loss(monkeypatch):
    def loss_of(model):
        def loss(params, x, y):
            outputs, _, penalties = model.stateless_call(params, [], x, training=True, return_losses=True)
            data = keras.ops.mean((outputs - y) ** 2) / NUM
            return data + sum(penalties)

        return loss

    monkeypatch.setitem(globals(), "loss_of", loss_of)
    model = built()
    with stepcheck.watch(model, data=(X, Y)) as report:
        mapped(model, batches(), added_up)
    (cause,) = report.causes
    assert (cause.name, cause.line.text) == ("penalty once per replica", "return data + sum(penalties)")
    assert "sum(losses) / jax.lax.psum(1, axis)" in cause.fix


def filled_up(model, valued, fill, num=84, size=32, *, is_summed_by_jax=False):
    """Train by sums over the devices; the last batch of a pass is filled up, and one device has nothing else.

    Return the losses of the batches of each pass. `is_summed_by_jax`: JAX adds up the gradients once more.
    """
    import jax

    spec, mesh = jax.sharding.PartitionSpec, jax.sharding.Mesh(np.array(jax.devices()[:NUM]), ("rows",))

    def local(params, x, y, weight):
        def loss(params):
            outputs, _, penalties = model.stateless_call(params, [], x, training=True, return_losses=True)
            losses = ((outputs - y) ** 2)[:, 0]
            return valued(losses, weight, lambda own: jax.lax.psum(own, "rows"), sum(penalties))

        return added_up(jax.value_and_grad(loss)(params))

    specs = {"in_specs": (spec(), *[spec("rows")] * 3), "out_specs": spec(), "check_vma": is_summed_by_jax}
    taken = jax.shard_map(local, mesh=mesh, **specs)

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
                given = [np.pad(each[own], ((0, more), (0, 0))) for each in (X, Y)]
            value, params, slots = step(params, slots, *given, weight)
            losses.append(float(value))
    return np.reshape(losses, (2, -1))


FILLED = {
    "": lambda losses, w, total, penalty: (losses * w).sum() / total(w.sum()) + penalty / NUM,
    "mean of means": lambda losses, w, total, penalty: (
        ((losses * w).sum() / keras.ops.maximum(w.sum(), 1) + penalty) / NUM
    ),
    "summed over replicas": lambda losses, w, total, penalty: (
        (losses * w).sum() / keras.ops.maximum(w.sum(), 1) + penalty / NUM
    ),
    "padding trained on": lambda losses, w, total, penalty: (losses.mean() + penalty) / NUM,
    "padding counted": lambda losses, w, total, penalty: ((losses * w).mean() + penalty) / NUM,
    "penalty once per replica": lambda losses, w, total, penalty: (losses * w).sum() / total(w.sum()) + penalty,
    "penalty forgotten": lambda losses, w, total, penalty: (losses * w).sum() / total(w.sum()),
    "divided by the replicas twice": lambda losses, w, total, penalty: (
        ((losses * w).sum() / total(w.sum()) + penalty / NUM) / NUM
    ),
}


@pytest.mark.parametrize("fill", ["zeros", "copies"])
@pytest.mark.parametrize("fault", FILLED)
def test_rows_that_fill_up_a_batch_on_several_devices_do_not_count(fault, fill):
    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84])) as report:
        filled_up(model, FILLED[fault], fill)
    assert [cause.name for cause in report.causes] == [fault] * bool(fault), str(report)
    assert not any("replacement" in note for note in report.notes), str(report)
    assert not any(words in str(report) for words in ("on other inputs", "of microbatches", "own microbatch", "window"))
    assert fault or report.first_line.startswith("Nothing found in 6 updates: rows,")


@pytest.mark.parametrize("num", [84, 64])  # 20 rows at the end, on four devices, or none
def test_a_sum_over_devices_that_is_taken_twice_is_said(num):
    def valued(losses, w, total, penalty):
        return (losses * w).sum() / total(w.sum()) + penalty / NUM

    model = built()
    with stepcheck.watch(model, data=(X[:num], Y[:num])) as report:
        filled_up(model, valued, "zeros", num=num, is_summed_by_jax=True)
    (cause,) = report.causes
    assert cause.name == "summed over replicas"
    assert "otherwise `jax.shard_map` adds up a gradient by values that the devices share" in cause.fix
    assert cause.explanation.startswith("The sum over the replicas is taken twice") == (num == 84), str(report)


def test_each_of_two_causes_has_the_numbers_of_an_update_where_it_has_an_effect():
    def valued(losses, w, total, penalty):
        return losses.sum() / 32 + penalty  # the last batch has 20 rows

    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84]), loss="mse") as report:
        filled_up(model, valued, None)
    assert [cause.name for cause in report.causes] == ["divided by the full batch", "penalty once per replica"]
    first, second = report.causes
    assert (set(first.updates), first.is_beside, second.is_beside) == ({3, 6}, True, True), str(report)
    assert 1 in second.updates
    for cause in report.causes:
        length = cause.proof.lines[0]
        assert abs(length.yours - length.changed) < 1e-5 < abs(length.yours - length.reference), str(report)
        assert 3 * cause.with_change < cause.without
    assert "reference with the other faults" in str(report)


@pytest.mark.parametrize(("weights", "names"), [([32, 32, 20], []), (None, ["printed: mean of means"])])
def test_printed_losses_are_those_of_the_batches_of_all_devices(weights, names):
    model = built()
    with stepcheck.watch(model, data=(X[:84], Y[:84])) as report:
        losses = filled_up(model, FILLED[""], "zeros")
    report.printed(loss=np.average(losses, axis=1, weights=weights))
    assert [cause.name for cause in report.causes] == names, str(report)
    assert not any("printed" in line for line in [*report.notes, *report.unseen]), str(report)


def test_a_call_outside_of_the_devices_comes_after_those_of_all_devices_whenever_these_arrive(monkeypatch):
    import jax
    import jax.numpy as jnp

    from stepcheck.keras import jax_listener

    calls, told = [], []
    monkeypatch.setattr(jax_listener, "io_callback", lambda heard, *_, **__: calls.append(heard))
    listener = jax_listener.EngineListener()

    def note(name):
        return lambda order, replica, _: told.append((order, name, replica))

    def local(x):
        listener.tell(note("pass"), [x])
        return jax.lax.psum(x, "rows")

    def step(x):
        mesh, spec = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",)), jax.sharding.PartitionSpec
        total = jax.shard_map(local, mesh=mesh, in_specs=spec("rows"), out_specs=spec(), check_vma=False)(x)
        listener.tell(note("step"), [total])
        return total

    jax.make_jaxpr(step)(jnp.ones(2))
    on_each, outside = calls
    for call, replica in ((on_each, 0), (outside, 0), (on_each, 0), (on_each, 1), (outside, 0), (on_each, 1)):
        call(np.int32(replica))
    assert [each[1:] for each in sorted(told)] == [("pass", 0), ("pass", 1), ("step", 0)] * 2


@pytest.mark.parametrize("has_own", [False, True])
def test_replicas_that_draw_from_equal_seeds_are_a_note(has_own):
    import jax
    import jax.numpy as jnp

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.optimizer.build(model.trainable_variables)

    def local(params, slots, seeds, x, y):
        def loss(params):
            own = [seed + has_own * jax.lax.axis_index("rows").astype(seed.dtype) for seed in seeds]
            outputs, new = model.stateless_call(params, own, x, training=True)
            return keras.ops.mean((outputs - y) ** 2), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        params, slots = model.optimizer.stateless_apply(slots, jax.lax.pmean(grads, "rows"), params)
        return params, slots, new if not has_own else [seed + jnp.array([0, 8], seed.dtype) for seed in seeds]

    def train():
        step = jax.pmap(local, axis_name="rows", devices=jax.devices()[:NUM])
        held = *values(model), [v.value for v in model.non_trainable_variables]
        held = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM), held)
        for x, y in batches():
            held = step(*held, x.reshape(NUM, -1, 6), y.reshape(NUM, -1, 1))

    with stepcheck.watch(model, data=(X, Y)) as report:
        train()
    assert report.is_judged, str(report)
    noted = [note for note in report.notes if note.startswith("All replicas draw from the same seeds")]
    assert len(noted) == (not has_own), str(report)
