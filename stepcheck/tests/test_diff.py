"""Two runs of Keras: where they differ first, and what is no difference."""

import json

import keras
import numpy as np
import pytest
from keras import layers
from small import ENGINE, NUM, SIZE, X, Y, mean, network, train

import stepcheck
from stepcheck.differences import Kind, Part, Relation


def fitted(optimizer=None, **given):
    """Return the trace of a `fit`."""
    model = network(optimizer)
    options = {"batch_size": SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
    with stepcheck.record() as trace:
        model.fit(X, Y, **options | given)
    return trace


def looped(value=mean, model=None, y=Y):
    model = network() if model is None else model
    with stepcheck.record() as trace:
        train(model, value, y)
    return trace


def found(a, b, **given):
    """Return (update, part, kind) of the first difference."""
    first = stepcheck.diff(a, b, **given).first
    return None if first is None else (first.update, first.part, first.kind)


def test_equal_runs_are_equal_to_the_bit():
    result = stepcheck.diff(looped(), looped(), bits=True)
    assert result.is_equal, str(result)
    assert result.compared == [*Part]
    assert result.models[0].num_updates == (2 * NUM // SIZE, 2 * NUM // SIZE)


def test_a_loop_is_equal_to_fit():
    model, other = network(), network()
    with stepcheck.record() as a:
        model.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
    with stepcheck.record() as b:
        for start in range(0, NUM, SIZE):
            other.train_on_batch(
                X[start : start + SIZE], Y[start : start + SIZE]
            )
    result = stepcheck.diff(a, b)
    assert result.is_equal, str(result)
    assert "The runs are equal: 3 updates" in str(result)


def test_a_broadcast_loss_is_found_in_the_gradient():
    def broadcast(labels, outputs):
        return keras.ops.mean((labels[:, 0] - outputs) ** 2)

    result = stepcheck.diff(looped(broadcast), looped())
    assert (result.first.part, result.first.kind) == (
        Part.GRADIENT,
        Kind.OTHER_LOSS,
    )
    first, later = (result.models[0].updates[i].parts for i in (0, 1))
    assert first[Part.OUTPUTS].relation is Relation.EQUAL
    assert first[Part.STEP].relation is Relation.FOLLOWS
    assert later[Part.GRADIENT].relation is Relation.FOLLOWS
    with pytest.raises(
        AssertionError,
        match="The runs differ from update 1 on, first in the grad",
    ):
        result.require()


def test_a_loss_of_a_quarter_counts_each_row_a_quarter():
    result = stepcheck.diff(looped(lambda y, out: mean(y, out) / 4), looped())
    assert result.first.kind is Kind.ROWS_COUNT
    assert result.first.counts == pytest.approx([0.25] * SIZE)
    assert "each row counts 1/4 times" in str(result)


def test_the_rate_and_the_optimizer_are_found_in_the_step():
    sgd = keras.optimizers.SGD
    assert found(fitted(sgd(0.05)), fitted(sgd(0.06))) == (
        1,
        Part.STEP,
        Kind.OTHER_RATE,
    )
    other = (
        fitted(sgd(0.05, nesterov=True, momentum=0.9)),
        fitted(sgd(0.05, momentum=0.9)),
    )
    assert found(*other) == (1, Part.STEP, Kind.OTHER_STEP)


def test_another_order_of_updates_says_how_to_compare():
    result = stepcheck.diff(fitted(shuffle=True), fitted())
    assert result.first.kind is Kind.OTHER_ORDER
    assert "shuffle=False" in str(result)


def test_other_rows_and_other_batches():
    model = network()
    with stepcheck.record() as trace:
        model.fit(X + 1, Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    assert found(trace, fitted()) == (1, Part.ROWS, Kind.OTHER_ROWS)
    assert found(fitted(batch_size=4), fitted()) == (
        1,
        Part.ROWS,
        Kind.OTHER_CUT,
    )
    assert found(fitted(epochs=1), fitted()) == (
        4,
        Part.ROWS,
        Kind.FEWER_UPDATES,
    )


def test_other_weights_are_the_first_difference():
    model = network()
    with stepcheck.record() as trace:
        model.layers[0].kernel.assign(2 * model.layers[0].kernel.value)
        model.fit(X, Y, batch_size=SIZE, epochs=2, shuffle=False, verbose=0)
    assert found(trace, fitted()) == (0, Part.STATE, Kind.OTHER_WEIGHTS)


def normed(training):
    """Return the trace of a pass over the data, of a model with statistics, in a mode."""
    keras.utils.set_random_seed(3)
    middle = [layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
    model = keras.Sequential([keras.Input((5,)), *middle])
    model.compile("sgd", "mse")

    class Own(keras.Model):
        def call(self, x, training=None):
            return self.inner(x, training=mode)

    mode, own = training, Own()
    own.inner = model
    own.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=False)
    with stepcheck.record(model) as trace:
        own.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
    return trace


def test_inference_mode_is_found_where_it_has_an_effect():
    assert found(normed(False), normed(True)) == (1, Part.MODE, Kind.OTHER_MODE)
    assert found(normed(True), normed(True)) is None


def test_an_accumulating_optimizer_is_compared_by_whole_updates():
    sgd = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    a = fitted(sgd, batch_size=SIZE // 2)
    result = stepcheck.diff(a, fitted())
    parts = result.models[0].updates[0].parts
    assert parts[Part.GRADIENT].relation is Relation.EQUAL, str(result)
    assert parts[Part.ROWS].relation is Relation.EQUAL


def test_sums_of_calls_beyond_the_room_are_not_compared_with_a_whole():
    sgd = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    result = stepcheck.diff(
        fitted(sgd, batch_size=SIZE // 4, epochs=8), fitted(epochs=8)
    )
    assert result.is_equal, str(result)
    last = result.models[0].updates[-1].parts
    assert last[Part.GRADIENT].relation is Relation.UNJUDGED
    assert last[Part.ROWS].relation is Relation.EQUAL


@pytest.mark.skipif(ENGINE != "jax", reason="a function of JAX")
def test_a_pass_that_is_made_again_for_the_gradient_adds_no_row():
    import jax

    def recorded(wrapped):
        model = network()
        weights = [v.value for v in model.trainable_variables]
        others = [v.value for v in model.non_trainable_variables]
        call = wrapped(
            lambda params, x: model.stateless_call(
                params, others, x, training=True
            )[0]
        )
        gradient = jax.jit(
            jax.grad(lambda params, x, y: mean(y, call(params, x)))
        )
        slots = [v.value for v in model.optimizer.variables]
        with stepcheck.record() as trace:
            for rows in np.split(np.arange(NUM), NUM // SIZE):
                grads = gradient(weights, X[rows], Y[rows])
                weights, slots = model.optimizer.stateless_apply(
                    slots, grads, weights
                )
        return trace

    result = stepcheck.diff(
        recorded(jax.checkpoint), recorded(lambda call: call)
    )
    assert result.is_equal, str(result)


def test_draws_of_other_seeds_are_said():
    def dropped(seed):
        keras.utils.set_random_seed(3)
        middle = [
            layers.Dense(4),
            layers.Dropout(0.5, seed=seed),
            layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((5,)), *middle])
        model.compile("sgd", "mse")
        with stepcheck.record() as trace:
            model.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
        return trace

    assert found(dropped(1), dropped(2)) == (1, Part.OUTPUTS, Kind.OTHER_DRAWS)
    assert found(dropped(1), dropped(1)) is None


def test_a_saved_trace_gives_the_same_difference(tmp_path):
    a, b = looped(), looped(lambda y, out: mean(y, out) * 3)
    a.save(tmp_path / "a.trace")
    loaded = stepcheck.diff(tmp_path / "a.trace", b)
    assert loaded.as_json() == stepcheck.diff(a, b).as_json()
    assert json.loads(json.dumps(loaded.as_json()))["is_equal"] is False
    assert stepcheck.diff(str(tmp_path / "a.trace"), a, bits=True).is_equal


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(b"no trace")
    with pytest.raises(
        stepcheck.SpecificationError, match=r"must be a trace.*other"
    ):
        stepcheck.load(path)
    np.savez(tmp_path / "x.npz", x=np.ones(3))
    with pytest.raises(stepcheck.SpecificationError, match="must be a trace"):
        stepcheck.load(tmp_path / "x.npz")


def test_parameters_of_other_shapes_are_refused():
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(3), layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    with stepcheck.record() as trace:
        model.fit(X, Y, batch_size=SIZE, shuffle=False, verbose=0)
    with pytest.raises(
        stepcheck.SpecificationError, match=r"same parameters.*Try: match="
    ):
        stepcheck.diff(trace, fitted())


def test_the_same_bits_with_and_without_a_record():
    def weights(is_recorded):
        model = network(keras.optimizers.Adam(0.05))
        if not is_recorded:
            train(model)
        else:
            with stepcheck.record():
                train(model)
        return [
            np.array(keras.ops.convert_to_numpy(v)) for v in model.variables
        ]

    assert all(map(np.array_equal, weights(True), weights(False)))


def test_all_is_restored_after_an_error():
    held = (
        keras.layers.Layer.__call__,
        keras.optimizers.SGD.apply,
        keras.Model.make_train_function,
    )
    model = network()
    traces = []

    def failing():
        with stepcheck.record() as trace:
            traces.append(trace)
            model.fit(X, Y, batch_size=SIZE, verbose=0)
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        failing()
    (trace,) = traces
    now = (
        keras.layers.Layer.__call__,
        keras.optimizers.SGD.apply,
        keras.Model.make_train_function,
    )
    assert held == now
    assert "call" not in vars(model)
    assert trace.failed == "ValueError"
    assert trace.num_updates == NUM // SIZE


def test_nothing_compared_is_not_equal():
    with stepcheck.record() as trace:
        pass
    result = stepcheck.diff(trace, trace)
    assert not result.is_equal
    assert "Nothing was compared" in str(result)


def test_two_models_that_train_in_turn():
    def trained(fault):
        one, two = network(), network()
        with stepcheck.record() as trace:
            for _ in range(2):
                one.train_on_batch(X[:SIZE], Y[:SIZE])
                two.train_on_batch(X[:SIZE], Y[:SIZE] * fault)
        return trace

    result = stepcheck.diff(trained(2), trained(1))
    assert len(result.models) == 2
    assert not result.models[0].differences
    assert result.models[1].differences[0].part is Part.GRADIENT


@pytest.mark.skipif(ENGINE != "tensorflow", reason="a route of TensorFlow")
def test_a_step_by_hand_is_compared_with_fit():
    import tensorflow as tf

    def by_hand(rate):
        model = network()
        with stepcheck.record() as trace:
            for _ in range(2):
                for start in range(0, NUM, SIZE):
                    rows = slice(start, start + SIZE)
                    with tf.GradientTape() as tape:
                        loss = mean(Y[rows], model(X[rows], training=True))
                    grads = tape.gradient(loss, model.trainable_variables)
                    for grad, weight in zip(
                        grads, model.trainable_variables, strict=True
                    ):
                        weight.assign_sub(rate * grad)
        return trace

    assert found(by_hand(0.05), fitted()) is None
    assert found(by_hand(0.04), fitted()) == (1, Part.STEP, Kind.OTHER_STEP)
