"""A watched loop computes the same bits, leaves nothing behind, and what cannot be seen of it is not judged."""

import gc
import threading
import weakref

import keras
import numpy as np
import pytest
from keras import layers
from small import NUM, X, Y, by, descend, faults, network, reasons, train

import stepcheck
import wholestep as ws
from stepcheck.faults import Fault, Stage
from stepcheck.keras import hooks
from stepcheck.keras.hooks import Hooks, listening
from stepcheck.keras.listener import listener
from stepcheck.keras.state import room
from stepcheck.trace import log as logs
from stepcheck.values import Reason, Unjudged

ENGINE = keras.backend.backend()
ONLY_JAX = pytest.mark.skipif(ENGINE != "jax", reason="a route of JAX")
ONLY_TENSORFLOW = pytest.mark.skipif(
    ENGINE != "tensorflow", reason="a route of TensorFlow"
)
OPTIMIZER = next(
    each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each)
)
NAMES = [
    "call",
    "fit",
    "train_on_batch",
    "evaluate",
    "predict",
    "test_on_batch",
    "predict_on_batch",
]


def attributes(model):
    """Return all that is hooked, the things themselves."""
    held = [vars(model).get(name) for name in NAMES] + [
        vars(OPTIMIZER)["apply"]
    ]
    held += [
        model.train_function,
        model.jit_compile,
        vars(keras.optimizers.LossScaleOptimizer)["check_finite"],
    ]
    if ENGINE == "tensorflow":
        import tensorflow as tf

        held += [
            vars(tf.GradientTape)[name]
            for name in ("__enter__", "__exit__", "gradient")
        ]
    return held


def values(model):
    return [
        np.array(keras.ops.convert_to_numpy(v))
        for v in [*model.variables, *model.optimizer.variables]
    ]


def are_same(one, two):
    return len(one) == len(two) and all(
        a is b for a, b in zip(one, two, strict=True)
    )


def with_state(optimizer="adam", loss="mse"):
    """Return a model with seeds and statistics."""
    keras.utils.set_random_seed(3)
    middle = [
        layers.Dense(4, "tanh"),
        layers.BatchNormalization(),
        layers.Dropout(0.4, seed=5),
    ]
    model = keras.Sequential([keras.Input((5,)), *middle, layers.Dense(1)])
    model.compile(optimizer, loss)
    model.optimizer.build(model.trainable_variables)
    return model


# ---- everything is restored ----


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_every_attribute_is_the_object_that_it_was(error):
    model = network()
    before = attributes(model)
    try:
        with stepcheck.watch(model, data=(X, Y)) as report:
            assert not are_same(attributes(model), before)
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt) as raised:
        assert type(raised) is error  # noqa: PT017
    assert are_same(attributes(model), before)
    assert (Reason.ENDED in reasons(report)) == (error is not None)


def test_replaced_attributes_come_back_in_whichever_order_they_end():
    class Owner:
        name = 0

    outer, inner = (
        hooks.replaced(Owner, "name", 1),
        hooks.replaced(Owner, "name", 2),
    )
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert Owner.name == 2
    inner.__exit__(None, None, None)
    assert Owner.name == 0


def test_a_call_of_the_models_own_is_put_back():
    model = network()
    call = model.call
    vars(model)["call"] = call
    with stepcheck.watch(model, data=(X, Y)):
        pass
    assert vars(model).pop("call") is call


@pytest.mark.slow
def test_what_fit_has_hooked_is_put_back_after_an_error_inside():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = network()
    model.jit_compile = True
    model.fit(X, Y, verbose=0)
    before = attributes(model)
    assert before[-1 if ENGINE == "jax" else -4] is not None
    with pytest.raises(KeyboardInterrupt), stepcheck.watch(model, data=(X, Y)):
        model.fit(X, Y, verbose=0, callbacks=[Stops()])
    assert are_same(attributes(model), before)


def test_a_model_that_is_compiled_anew_inside_keeps_no_step_of_before():
    model = network()
    model.fit(X, Y, verbose=0)
    with stepcheck.watch(model, data=(X, Y)):
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    assert model.train_function is None


class Around(keras.Model):
    """A model that has another one as a part."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def call(self, x, training=None):
        return self.part(x, training=training)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_model_around_that_has_trained_before_is_recorded(is_compiled):
    model = network()
    around = Around(model)
    around.compile("sgd", "mse", jit_compile=is_compiled)
    around.fit(X, Y, batch_size=8, verbose=0)
    function = around.train_function
    with stepcheck.watch(model, (X, Y), "mse") as report:
        around.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert report.is_right, str(report)
    assert around.train_function is function
    around.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    "at", ["_tell_call", "_tell_apply", "_before_call", "stepping"]
)
@pytest.mark.parametrize("how", ["fit", "by hand"])
def test_an_error_of_a_hook_ends_the_record_and_not_the_loop(
    at, how, monkeypatch
):
    def fails(*arguments, **others):
        raise LookupError("of the hook")

    monkeypatch.setattr(hooks.Hooks, at, fails)
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        loss = train(model) if how == "by hand" else model.fit(X, Y, verbose=0)
    assert loss is not None or how == "by hand"
    assert (report.findings, report.judged) == ([], [])
    assert (
        Unjudged(Reason.FAILED, told="LookupError: of the hook")
        in report.unjudged
    )


def test_later_models_have_the_names_that_they_have_otherwise():
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(1)(inputs), name="own")
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with stepcheck.watch(model, (X, Y), loss=["mse"]) as report:
        for start in range(0, 24, 8):
            model.train_on_batch(X[start : start + 8], 2 * Y[start : start + 8])
    assert report.findings
    names = (
        keras.Model(inputs, layers.Dense(1)(inputs)).name,
        keras.Variable(0.0).name,
        layers.Dense(1).name,
    )
    assert names == ("functional", "variable", "dense_2")


# ---- the same bits ----


@pytest.mark.parametrize("how", ["fit", "by hand"])
def test_a_loop_computes_the_same_bits_and_judging_moves_nothing(how):
    """Also one that has run before, and goes on afterwards."""

    def go(model, x, y):
        if how == "fit":
            return model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        return train(model, y=y)

    left = []
    for is_watched in (False, True):
        model = with_state()
        go(model, X, Y)
        function = model.train_function
        x, y = X.copy(), Y.copy()
        if is_watched:
            with stepcheck.watch(model, data=(x, y)) as report:
                go(model, x, y)
            after = values(model)
            # the loop by hand on JAX drops the state that each step returns
            dropped = [Fault.STATISTICS_THROWN_AWAY, Fault.SEEDS_THROWN_AWAY]
            is_dropped = ENGINE == "jax" and how == "by hand"
            assert faults(report) == (dropped if is_dropped else [])
            for one, two in zip(after, values(model), strict=True):
                np.testing.assert_array_equal(one, two)
            assert model.train_function is function
        else:
            go(model, x, y)
        np.testing.assert_array_equal(x, X)
        np.testing.assert_array_equal(y, Y)
        go(model, X, Y)
        left.append(values(model))
    for ours, theirs in zip(*left, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@ONLY_JAX
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_stateless_loop_computes_the_same_bits(is_jitted):
    import jax

    def go(model):
        def loss(params, others, x, y):
            outputs, others = model.stateless_call(
                params, others, x, training=True
            )
            return keras.ops.mean((outputs - y) ** 2), others

        def step(params, others, slots, x, y):
            grads, others = jax.grad(loss, has_aux=True)(params, others, x, y)
            params, slots = model.optimizer.stateless_apply(
                slots, grads, params
            )
            return params, others, slots

        step = jax.jit(step) if is_jitted else step
        groups = (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
        )
        held = tuple([v.value for v in group] for group in groups)
        for epoch in range(2):
            for rows in (
                np.random.default_rng(epoch).permutation(NUM).reshape(-1, 8)
            ):
                held = step(*held, X[rows], Y[rows])
        return held

    plain = go(with_state())
    model = with_state()
    with stepcheck.watch(model, data=(X, Y)) as report:
        watched = go(model)
    assert report.findings == []
    assert Stage.GRADIENT in report.judged
    for ours, theirs in zip(
        jax.tree.leaves(watched), jax.tree.leaves(plain), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


# ---- threads, and what is kept ----


def test_a_prediction_in_another_thread_hides_no_update():
    model, are_begun, may_end = network(), threading.Event(), threading.Event()
    model.predict = lambda x: (are_begun.set(), may_end.wait(60))
    with stepcheck.watch(model, (X, Y)) as report:
        actor = threading.Thread(target=lambda: model.predict(X))
        actor.start()
        assert are_begun.wait(60)
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        may_end.set()
        actor.join()
    assert report.is_right, str(report)


@ONLY_TENSORFLOW
def test_outputs_whose_gradient_was_taken_are_not_kept():
    import tensorflow as tf

    model, optimizer, kept, record = (
        network(),
        keras.optimizers.SGD(0.1),
        [],
        logs.Log(),
    )
    optimizer.build(model.trainable_variables)
    engine = listener()
    with listening(engine, [Hooks(model, engine, record)]):
        for rows in np.random.default_rng(1).permutation(24).reshape(6, 4):
            with tf.GradientTape() as one, tf.GradientTape() as two:
                out = model(X[rows], training=True)
                loss = tf.reduce_mean((out - Y[rows]) ** 2)
            kept.append(weakref.ref(out))
            grads = [
                tape.gradient(loss, model.trainable_variables)
                for tape in (one, two)
            ]
            optimizer.apply(
                [(a + b) / 2 for a, b in zip(*grads, strict=True)],
                model.trainable_variables,
            )
        del one, two, out, loss
        gc.collect()
        assert sum(each() is not None for each in kept) <= 1
    assert [len(called.derivatives[0]) for called in record.called] == [2] * 6


def test_of_a_long_loop_some_gradients_are_kept_and_judged():
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.fit(X, Y, batch_size=8, epochs=20, verbose=0)
    assert report.is_right
    told = report.as_json()
    assert (told["updates"], told["unjudged"][0]["updates"]) == (60, 20)
    assert reasons(report) == [Reason.NOT_KEPT]


def test_the_inputs_of_a_long_loop_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(
        logs, "_MOST_BYTES", 10 * 8 * 5 * 4
    )  # of ten updates behind the forty
    model = network()
    with stepcheck.watch(model, (X, Y)) as report:
        model.fit(X, Y, batch_size=8, epochs=40, verbose=0)
    assert report.findings == []
    assert Stage.GRADIENT in report.judged
    assert Reason.CUT in reasons(report)
    assert report.as_json()["updates"] < 60


def test_of_a_large_model_fewer_updates_are_kept():
    large = keras.Sequential(
        [keras.Input((2_500_000,)), layers.Dense(1, use_bias=False)]
    )
    assert room(large) == 10


@ONLY_TENSORFLOW
def test_a_model_that_its_first_call_builds_has_the_room_of_its_weights(
    monkeypatch,
):
    class Unbuilt(keras.Model):
        def __init__(self):
            super().__init__()
            self.own, self.scale = (
                layers.Dense(1),
                self.add_weight(name="scale", shape=(), initializer="ones"),
            )

        def call(self, x):
            return self.own(x) * self.scale

    monkeypatch.setattr(
        logs, "_ROOM", 4 * 40
    )  # of one weight, as it has before
    model, optimizer = Unbuilt(), keras.optimizers.SGD(0.1)
    with stepcheck.watch(model, (X, Y), loss="mse") as report:
        descend(
            model,
            lambda out, y: keras.ops.mean((out - y) ** 2),
            (X, Y),
            8,
            by(optimizer),
            passes=3,
        )
    assert report.is_right, str(report)
    assert [
        each.updates
        for each in report.unjudged
        if each.reason is Reason.NOT_KEPT
    ] == [4]


# ---- what cannot be seen is not judged ----


def test_wholesteps_own_trainer_runs_as_ever_and_is_not_judged():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        ws.Trainer(model).fit(X, Y, batch_size=8, verbose=0)
    assert (report.findings, report.has_seen) == ([], False)
    assert Reason.OWN_TRAINER in reasons(report)


def test_no_update_and_weights_that_move_unseen():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        model(X)
    assert (report.has_seen, reasons(report)) == (False, [Reason.NO_UPDATE])
    with stepcheck.watch(model, data=(X, Y)) as report:
        for v in model.trainable_variables:
            v.assign(0.9 * v)
    assert (report.has_seen, reasons(report)) == (False, [Reason.OUTLINED])


def test_inputs_that_are_no_rows_are_not_judged():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        model.fit(1.5 * X, Y, batch_size=8, verbose=0)
    assert (report.findings, report.judged) == ([], [])
    assert Reason.OTHER_INPUTS in reasons(report)


@pytest.mark.parametrize("num", [0, 2])
def test_updates_of_some_other_rows_are_counted(num):
    model, own = network(), X.copy()
    own[: 8 * num] += 1
    with stepcheck.watch(model, (X, Y)) as report:
        model.fit(own, Y, batch_size=8, shuffle=False, epochs=2, verbose=0)
    left = [
        each.updates
        for each in report.unjudged
        if each.reason is Reason.OTHER_INPUTS
    ]
    assert left == [2 * num] * bool(num)
    assert Stage.GRADIENT in report.judged


@ONLY_TENSORFLOW
def test_a_function_that_xla_compiles_is_not_judged():
    import tensorflow as tf

    model = with_state()

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

    with stepcheck.watch(model, data=(X, Y)) as report:
        for rows in np.random.default_rng(0).permutation(NUM).reshape(-1, 8):
            step(X[rows], Y[rows])
    told = "tf.function(jit_compile=True)"
    assert Unjudged(Reason.BLIND, told=told) in report.unjudged
    assert (report.findings, report.judged) == ([], [])


@ONLY_TENSORFLOW
@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_was_traced_before_is_not_judged(is_compiled):
    import tensorflow as tf

    model = network()

    @tf.function(jit_compile=is_compiled)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables))

    step(X[:8], Y[:8])
    with stepcheck.watch(model, data=(X, Y)) as report:
        step(X[:8], Y[:8])
    assert (report.findings, report.judged) == ([], [])
    assert reasons(report) == [Reason.OUTLINED]


@ONLY_JAX
def test_per_row_gradients_run_as_ever_and_are_not_judged():
    import jax

    model = network()

    def loss_at(params, x, y):
        output, _ = model.stateless_call(params, [], x[None], training=True)
        return (output[0, 0] - y[0]) ** 2

    params = [v.value for v in model.trainable_variables]
    with stepcheck.watch(model, data=(X, Y)) as report:
        grads = jax.vmap(jax.grad(loss_at), (None, 0, 0))(params, X, Y)
    assert grads[0].shape == (NUM, 5, 4)
    assert Reason.BLIND in reasons(report)


def test_a_step_that_an_error_ends_is_judged_up_to_there():
    model = network()

    def interrupt(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    stop = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        stepcheck.watch(model, (X, Y)) as report,
    ):
        model.fit(X, Y, batch_size=8, epochs=2, callbacks=[stop], verbose=0)
    assert report.findings == []
    assert Stage.GRADIENT in report.judged
    assert {*reasons(report)} == {Reason.ENDED}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"data": X}, "data must be"),
        ({"data": (X, Y, Y, Y)}, "4 parts"),
        ({"data": (X, Y[:-1])}, "the same number of rows"),
        ({"data": (X, [1.0] * NUM)}, "Received: float"),
        ({"data": (X, Y), "loss": 3}, "loss must be a Keras loss"),
        ({"data": (X, Y), "loss": {"none": "mse"}}, "one for each"),
        ({"data": (X, Y), "learning_rate": "fast"}, "learning_rate must be"),
        ({"data": (X, Y), "optimizer": "sgd"}, "optimizer must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_three_parts(arguments, part):
    model = network()
    before = attributes(model)
    with (
        pytest.raises(stepcheck.SpecificationError, match=part) as raised,
        stepcheck.watch(model, **arguments),
    ):
        pass
    assert all(word in str(raised.value) for word in ("Received:", "Try:"))
    assert are_same(attributes(model), before)


def test_a_model_without_a_loss_and_what_is_no_model_are_refused():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    with (
        pytest.raises(
            stepcheck.SpecificationError,
            match="loss that is meant must be stated",
        ),
        stepcheck.watch(model, data=(X, Y)),
    ):
        pass
    with (
        pytest.raises(stepcheck.SpecificationError, match="model must be"),
        stepcheck.watch(None, data=(X, Y)),
    ):
        pass
