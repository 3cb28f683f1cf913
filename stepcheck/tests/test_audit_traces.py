"""An audit leaves no trace, says what it cannot see, and refuses what it cannot mean."""

import keras
import numpy as np
import pytest
from audit_loops import MODELS, RIGHT, W, X, Y, network
from audit_routes import LOOPS
from keras import layers
from test_audit import trainer

import stepcheck
import wholestep as ws
from stepcheck.keras import hooks
from stepcheck.keras.meaning import meant, weighed
from stepcheck.report.causes import BY_NAME

ENGINE = keras.backend.backend()
ONLY_JAX = pytest.mark.skipif(ENGINE != "jax", reason="a route of JAX")
ONLY_TENSORFLOW = pytest.mark.skipif(ENGINE != "tensorflow", reason="a route of TensorFlow")
OPTIMIZER = next(each for each in keras.optimizers.Optimizer.__mro__ if "apply" in vars(each))
NAMES = ["call", "fit", "train_on_batch", "evaluate", "predict", "test_on_batch", "predict_on_batch"]


def attributes(model):
    """Return all that an audit hooks, the things themselves."""
    held = [vars(model).get(name) for name in NAMES] + [vars(OPTIMIZER)["apply"]]
    held += [model.train_function, model.jit_compile, vars(keras.optimizers.LossScaleOptimizer)["check_finite"]]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        held += [vars(tf.GradientTape)[name] for name in ("__enter__", "__exit__", "gradient")]
    return held


def values(model):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]]


def large(name):
    return pytest.param(name, marks=pytest.mark.large)


def are_same(one, two):
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


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
    if error is not None:
        assert f"the rest of the loop: it ended with {error.__name__}" in report.unseen


def test_replaced_attributes_come_back_in_whichever_order_they_end():
    class Owner:
        name = 0

    outer, inner = hooks.replaced(Owner, "name", 1), hooks.replaced(Owner, "name", 2)
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


def run(name, folder, *, is_audited):
    """Train by a right loop; return the values that it leaves, and those once the report has been read."""
    loop = RIGHT[name]
    middle = [layers.BatchNormalization(), layers.Dropout(0.4, seed=5)] if name != "scope" else []
    train, model = trainer(loop.text, folder), network(*middle)
    if not is_audited:
        train(model, X.copy(), Y.copy(), W)
        return values(model), None
    x, y = X.copy(), Y.copy()
    with stepcheck.watch(model, data=(x, y)) as report:
        train(model, x, y, W)
    left = values(model)
    assert report.causes == []
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)
    return left, values(model)


@pytest.mark.parametrize("name", {"tensorflow": ["simple", "function"], "jax": ["scope"]}[keras.backend.backend()])
def test_the_loop_computes_the_same_bits_and_judging_moves_nothing(name, tmp_path):
    plain, _ = run(name, tmp_path, is_audited=False)
    left, later = run(name, tmp_path, is_audited=True)
    for ours, theirs, after in zip(left, plain, later, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(after, theirs)


JAX_RETURNS = ("            tv, ntv, ov = step(tv, ntv, ov, x[rows], y[rows])\n", "    return tv, ntv, ov\n")


@ONLY_JAX
@pytest.mark.parametrize("jitted", [pytest.param(False, marks=pytest.mark.large), True])
@pytest.mark.slow
def test_a_stateless_loop_computes_the_same_bits(jitted, tmp_path):
    import jax

    text = RIGHT["jitted"].text.replace(*(JAX_RETURNS[0], JAX_RETURNS[0] + JAX_RETURNS[1]))
    text = text if jitted else text.replace("    @jax.jit\n", "")
    train = trainer(text, tmp_path)
    results = []
    for is_audited in (False, True, False):
        model = network(layers.BatchNormalization(), layers.Dropout(0.4, seed=5))
        if is_audited:
            with stepcheck.watch(model, data=(X, Y)) as report:
                results.append(train(model, X, Y, None))
            assert report.causes == []
        else:
            results.append(train(model, X, Y, None))
    for ours, *others in zip(*map(jax.tree.leaves, results), strict=True):
        for other in others:
            np.testing.assert_array_equal(ours, other)


ROUTES = ["fit", "own step", "scaled", {"tensorflow": "replicas", "jax": "epoch"}[ENGINE], "fit accumulates"]


@pytest.mark.parametrize("name", [ROUTES[0], *map(large, ROUTES[1:])])
@pytest.mark.slow
def test_every_route_computes_the_same_bits(name, tmp_path):
    """Also one that has run before, and goes on afterwards."""
    loop, left = LOOPS[name], []
    train = trainer(loop.text, tmp_path)
    x, y = loop.data
    for is_audited in (False, True):
        keras.utils.set_random_seed(1)
        model = MODELS[loop.model]()
        train(model, x, y, None)
        function = model.train_function
        if is_audited:
            with stepcheck.watch(model, data=(x, y)) as report:
                train(model, x, y, None)
            assert report.has_seen
            assert report.causes == []
            assert model.train_function is (None if name == "fit accumulates" else function)  # which compiles anew
        else:
            train(model, x, y, None)
        train(model, x, y, None)
        left.append(values(model))
    for ours, theirs in zip(*left, strict=True):
        np.testing.assert_array_equal(ours, theirs)


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


def test_wholesteps_own_trainer_runs_as_ever_and_is_said_not_to_be_seen():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        ws.Trainer(model).fit(X, Y, batch_size=8, verbose=0)
    assert (report.causes, report.has_seen) == ([], False)
    assert any("wholestep.Trainer" in told for told in report.unseen)


@ONLY_TENSORFLOW
@pytest.mark.slow
def test_what_fit_has_compiled_is_audited_without_and_told():
    model = network()
    model.jit_compile = True
    with stepcheck.watch(model, data=(X, Y)) as report:
        model.fit(X, Y, verbose=0, batch_size=8)
    assert model.jit_compile
    assert (report.causes, report.has_seen) == ([], True)
    assert "fit() is compiled by XLA; here it ran without" in report.notes[0]


def test_a_model_that_is_compiled_anew_inside_keeps_no_step_of_before():
    model = network()
    model.fit(X, Y, verbose=0)
    with stepcheck.watch(model, data=(X, Y)):
        model.compile("sgd", "mse")
        model.fit(X, Y, verbose=0)
    assert model.train_function is None


# ---- what it cannot see, it says ----


def test_no_update_is_said_to_be_none():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        model(X)
    assert not report.has_seen
    assert "no optimizer step was made, and no weight moved" in report.unseen[0]


def test_steps_without_an_optimizer_are_said_not_to_be_seen():
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        for v in model.trainable_variables:
            v.assign(0.9 * v)
    assert not report.has_seen
    assert "the weights moved, but no optimizer step of Keras was seen" in report.unseen[0]


def test_inputs_that_are_no_rows_are_said_to_be_none(tmp_path):
    loop = RIGHT["simple"]
    model = network(layers.Dropout(0.4))
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(loop.text, tmp_path)(model, X * 1.5, Y, None)
    assert (report.causes, report.has_seen) == ([], False)
    assert "no rows of `data`" in report.unseen[0]


def test_a_loop_on_more_rows_than_the_data_is_told_so(tmp_path):
    draw, model = np.random.default_rng(3), network(layers.Dropout(0.4))
    more = np.concatenate([X, draw.normal(size=X.shape).astype("float32")])
    order = draw.permutation(len(more))
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(RIGHT["simple"].text, tmp_path)(model, more[order], np.concatenate([Y, Y])[order], None)
    assert not report.has_seen
    assert [note for note in report.notes if "are rows of `data`, and the others are none" in note]


@ONLY_TENSORFLOW
@pytest.mark.parametrize(
    ("edit", "causes"), [(("(b", "(b"), []), (("training=True", "training=False"), ["inference mode"])]
)
def test_a_function_that_xla_compiles_is_audited_without(edit, causes, tmp_path):
    import tensorflow as tf

    call = type(tf.function(lambda: None)).__call__
    text = RIGHT["function"].text.replace("@tf.function", "@tf.function(jit_compile=True)").replace(*edit)
    model = network(layers.Dropout(0.4))
    model.optimizer.build(model.trainable_variables)
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert ([cause.name for cause in report.causes], report.has_seen) == (causes, True), str(report)
    assert any("() is compiled by XLA; here it ran without" in note for note in report.notes)
    assert type(tf.function(lambda: None)).__call__ is call


@ONLY_TENSORFLOW
def test_a_function_that_xla_compiled_before_is_not_seen():
    import tensorflow as tf

    model = network()
    model.optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((model(a, training=True)[:, 0] - b) ** 2)
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    step(X[:8], Y[:8])
    with stepcheck.watch(model, data=(X, Y)) as report:
        step(X[:8], Y[:8])
    assert (report.causes, report.has_seen) == ([], False)


@ONLY_TENSORFLOW
def test_what_was_traced_before_is_said_not_to_be_seen():
    import tensorflow as tf

    model = network()

    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((b[:, None] - model(a, training=True)) ** 2)
        model.optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    step(tf.constant(X), tf.constant(Y))
    with stepcheck.watch(model, data=(X, Y)) as report:
        step(tf.constant(X), tf.constant(Y))
    assert not report.has_seen
    assert "traced before the audit" in report.unseen[0]


@ONLY_JAX
def test_per_row_gradients_run_as_ever_and_are_said_not_to_be_seen():
    import jax

    model = network()

    def loss_at(tv, a, b):
        output, _ = model.stateless_call(tv, [], a[None], training=True)
        return (output[0, 0] - b) ** 2

    tv = [v.value for v in model.trainable_variables]
    with stepcheck.watch(model, data=(X, Y)) as report:
        grads = jax.vmap(jax.grad(loss_at), (None, 0, 0))(tv, X, Y)
    assert grads[0].shape == (20, 5, 4)
    assert any("vmap" in told for told in report.unseen)


@ONLY_TENSORFLOW
def test_two_optimizers_of_one_update_are_judged_as_one(tmp_path):
    text = (
        RIGHT["simple"]
        .text.replace(
            "            model.optimizer.apply_gradients(zip(grads, model.trainable_variables))\n",
            "            first.apply_gradients(zip(grads[:2], model.trainable_variables[:2]))\n"
            "            other.apply_gradients(zip(grads[2:], model.trainable_variables[2:]))\n",
        )
        .replace(
            "    printed = []\n",
            "    printed = []\n    first, other = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)\n",
        )
    )
    assert "first.apply" in text
    model = network(layers.Dropout(0.4))
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert report.causes == []
    assert report.unseen == []
    assert report.first_line.startswith("Nothing found in 6 updates:")


@ONLY_TENSORFLOW
def test_an_optimizer_that_is_made_anew_once_is_a_note(tmp_path):
    text = RIGHT["accumulated"].text.replace(
        "    for epoch in range(2):\n", "    for epoch in range(2):\n        optimizer = keras.optimizers.Adam(0.01)\n"
    )
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert report.causes == []
    assert any("begins anew at update 3" in note for note in report.notes)


@ONLY_TENSORFLOW
def test_stages_of_other_learning_rates_are_a_note(tmp_path):
    text = RIGHT["accumulated"].text.replace(
        "    for epoch in range(2):\n",
        "    for epoch in range(4):\n        optimizer = keras.optimizers.Adam(0.01 / 2**epoch)\n",
    )
    model = network()
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert report.causes == []
    assert any("begins anew at update 3, 5, 7" in note for note in report.notes)


def test_gradients_that_are_masked_by_zeros_are_a_note(tmp_path):
    apply = {"tensorflow": "model.optimizer.apply_gradients", "jax": "tv, ov = optimizer.stateless_apply"}[ENGINE]
    text = LOOPS["deep"].text.replace(apply, f"grads = [*grads[:4], *(0 * g for g in grads[4:])]; {apply}")
    assert "0 * g" in text
    model = MODELS["deep"]()
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert report.causes == []
    assert ["is zero in every update" in note for note in report.notes].count(True) == 1


def test_batches_of_few_labels_that_chance_makes_are_a_note(tmp_path):
    labels = np.concatenate([np.zeros(34, int), np.ones(3, int), [2, 3, 4]])
    text = """
def train(model, x, y, w):
    for epoch in range(2):
        for start in np.random.default_rng(epoch).permutation(5) * 8:
            model.train_on_batch(x[start : start + 8], y[start : start + 8])
"""
    model = MODELS["sorted"]()
    x = np.random.default_rng(1).normal(size=(40, 5)).astype("float32")
    with stepcheck.watch(model, data=(x, labels)) as report:
        trainer(text, tmp_path)(model, x, labels, None)
    assert report.causes == []
    assert BY_NAME["same batches every pass"].explanation in report.notes


@ONLY_TENSORFLOW
@pytest.mark.parametrize("has_optimizer", [True, large(False)])
@pytest.mark.slow
def test_frozen_variables_that_another_optimizer_trains_are_a_note(has_optimizer, tmp_path):
    step = "adam.apply([grads[-1]], [kernel])" if has_optimizer else "kernel.assign_sub(0.01 * grads[-1])"
    apply = "            model.optimizer.apply_gradients"
    text = (
        LOOPS["frozen"]
        .text.replace("as tape:\n", "as tape:\n                tape.watch(kernel.value)\n")
        .replace(
            "full, model.trainable_variables)", "full, [*(v.value for v in model.trainable_variables), kernel.value])"
        )
        .replace(apply, f"            {step}\n            grads = grads[:-1]\n{apply}")
        .replace(
            "    printed = []", "    printed, adam, kernel = [], keras.optimizers.Adam(0.01), model.layers[0].kernel"
        )
    )
    model = MODELS["frozen"]()
    with stepcheck.watch(model, data=(X, Y)) as report:
        trainer(text, tmp_path)(model, X, Y, None)
    assert [cause.name for cause in report.causes] == ([] if has_optimizer else ["frozen variable trained"])
    assert any("trained all the same" in note for note in report.notes) == has_optimizer


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"data": X}, "data must be"),
        ({"data": (X, Y, W, W)}, "4 parts"),
        ({"data": (X, Y[:-1])}, "the same number of rows"),
        ({"data": (X, [1.0] * 20)}, "data must hold arrays"),
        ({"data": (X, Y), "loss": 3}, "loss must be a Keras loss"),
        ({"data": (X, Y), "learning_rate": "fast"}, "learning_rate must be"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_three_parts(arguments, part):
    model = network()
    before = attributes(model)
    with pytest.raises(stepcheck.SpecificationError, match=part) as raised, stepcheck.watch(model, **arguments):
        pass
    assert all(word in str(raised.value) for word in ("Received:", "Try:"))
    assert are_same(attributes(model), before)


def test_a_model_without_a_loss_needs_one():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(1)])
    with pytest.raises(stepcheck.SpecificationError, match="needs the loss"), stepcheck.watch(model, data=(X, Y)):
        pass


def test_printed_losses_must_be_numbers():
    with stepcheck.watch(network(), data=(X, Y)) as report:
        for loss in ("low", [float("nan")], []):
            with pytest.raises(stepcheck.SpecificationError, match="Received"):
                report.printed(loss=loss)
        assert "not over" in str(report)


@ONLY_TENSORFLOW
def test_what_is_trainable_may_change_inside_of_a_loop_and_is_said_to():
    import tensorflow as tf

    judge = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), judge])
    optimizers, x, y = [keras.optimizers.SGD(0.1) for _ in range(2)], np.eye(8, 2, dtype="float32"), np.ones((8, 1))
    x += np.arange(8, dtype="float32")[:, None]
    with stepcheck.watch(made, data=(x, y), loss="mse") as report:
        for start in range(0, 8, 4):
            for optimizer, judge.trainable in zip(optimizers, (True, False), strict=True):
                variables = judge.trainable_variables or made.trainable_variables
                with tf.GradientTape() as tape:
                    loss = keras.ops.mean((made(x[start : start + 4], training=True) - y[start : start + 4]) ** 2)
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert report.causes == []
    assert "which variables are trainable changes inside of the loop" in str(report)


def contrast(_, both):
    """The number of a batch whose rows have to find one another."""
    scores = 5 * both[0] @ keras.ops.transpose(both[1])
    return -keras.ops.mean(keras.ops.diagonal(keras.ops.log_softmax(scores)))


def towers():
    keras.utils.set_random_seed(3)
    left, right = keras.Input((5,)), keras.Input((5,))
    return keras.Model([left, right], [layers.Dense(3, name="left")(left), layers.Dense(3, name="right")(right)])


@ONLY_TENSORFLOW
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_loss_of_all_pairs_of_a_batch_is_taken_whole(is_swapped):
    import tensorflow as tf

    model, optimizer = towers(), keras.optimizers.SGD(0.1)
    variables = model.trainable_variables
    with stepcheck.watch(model, data=((X, X + 1), np.zeros(len(X), "float32")), loss=contrast) as report:
        for start in range(0, 24, 6):
            with tf.GradientTape() as tape:
                loss = contrast(None, model([X[start : start + 6], X[start : start + 6] + 1], training=True))
            grads = tape.gradient(loss, variables)
            optimizer.apply(grads[2:] + grads[:2] if is_swapped else grads, variables)
    assert [cause.name for cause in report.causes] == ["gradients swapped"] * is_swapped


@pytest.mark.parametrize(
    ("function", "is_coupled"),
    [
        (lambda y, out: keras.ops.mean((y - out) ** 2), False),
        (lambda y, out: keras.ops.sum((y - out) ** 2), False),
        (lambda y, out: keras.ops.sum(y * out) / keras.ops.sum(y), False),
        (lambda y, out: keras.ops.sqrt(keras.ops.mean((y - out) ** 2)), True),
        (lambda y, out: keras.ops.std(out), True),
        (lambda y, out: keras.ops.mean(keras.ops.reshape(y - out, (2, 3)) ** 2), True),  # of a batch of six alone
    ],
)
def test_only_losses_that_look_at_several_rows_are_taken_whole(function, is_coupled):
    data = X, np.arange(len(X), dtype="float32")[:, None] + 1, None
    model = network()
    _, objective = weighed(model, data, meant(model, function, *data[:2]))
    assert objective.loss.is_coupled is is_coupled


@pytest.mark.slow
def test_a_number_for_a_batch_is_not_masked():
    def masked(y, out):
        weights = keras.ops.cast(y >= 0, "float32")
        return keras.ops.sum((y - out) ** 2 * weights) / keras.ops.sum(weights)

    tokens = np.tril(np.full((24, 6), 3))
    labels = np.where(tokens > 0, tokens % 2, -1).astype("float32")
    keras.utils.set_random_seed(3)
    sequence = [layers.Embedding(8, 4, mask_zero=True), layers.GRU(4, return_sequences=True), layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *sequence])
    model.compile("sgd", masked)
    with stepcheck.watch(model, data=(tokens, labels)) as report:
        model.fit(tokens, labels, batch_size=6, epochs=2, verbose=0)
    assert report.causes == []
    assert report.unseen == []


def test_weights_that_climb_by_hand_are_named():
    model = network()
    with stepcheck.watch(model, data=(X, Y), loss="mse") as report:
        climb(model)
    assert [cause.name for cause in report.causes] == ["ascent"]


def climb(model):
    """Add the gradient where it is to be subtracted."""
    if ENGINE == "tensorflow":
        import tensorflow as tf

        for start in range(0, 24, 6):
            with tf.GradientTape() as tape:
                output = model(X[start : start + 6], training=True)
                loss = tf.reduce_mean((Y[start : start + 6, None] - output) ** 2) + sum(model.losses)
            for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
                v.assign_add(0.02 * g)
        return
    import jax

    def total(values, rows):
        output, _, own = model.stateless_call(values, [], X[rows], training=True, return_losses=True)
        return ((Y[rows, None] - output) ** 2).mean() + sum(own)

    values = [v.value for v in model.trainable_variables]
    for start in range(0, 24, 6):
        grads = jax.grad(total)(values, np.arange(len(X))[start : start + 6])
        values = [v + 0.02 * g for v, g in zip(values, grads, strict=True)]
    for variable, value in zip(model.trainable_variables, values, strict=True):
        variable.assign(value)


@pytest.mark.filterwarnings("ignore:.*softmax over axis")
def test_outputs_that_are_one_number_are_a_note():
    model = network(activation="softmax", loss="binary_crossentropy")
    with stepcheck.watch(model, data=(X, (Y > 0).astype("float32"))) as report:
        model.fit(X, Y > 0, batch_size=6, verbose=0)
    assert report.causes == []
    assert [note for note in report.notes if "All outputs are 1, in every row" in note]


def test_variables_that_learn_nothing_are_a_note():
    image = keras.Input((5,))
    half = [layers.Dense(n, use_bias=False, kernel_initializer="zeros", name=f"low_{n}") for n in (2, 4)]
    model = keras.Model(image, layers.Dense(1)(layers.Dense(4)(image) + half[1](half[0](image))))
    model.compile("sgd", "mse")
    with stepcheck.watch(model, data=(X, Y)) as report:
        model.fit(X, Y, batch_size=6, verbose=0)
    assert report.causes == []
    assert [note for note in report.notes if "it learns nothing" in note and "low_2/kernel, low_4/kernel" in note]


@ONLY_TENSORFLOW
def test_layers_frozen_after_compile_are_a_note():
    model = network()
    model.fit(X, Y, verbose=0)
    model.layers[0].trainable = False
    with stepcheck.watch(model, data=(X, Y)) as report:
        model.fit(X, Y, verbose=0)
    assert report.causes == []
    assert [note for note in report.notes if "until `compile` is called again" in note]


def test_the_fit_of_a_model_around_the_audited_one_orders_the_rows():
    class Around(keras.Model):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def call(self, x, training=False):
            return self.inner(x, training=training)

    model = network(regularizer=None)
    outer = Around(model)
    outer.compile("sgd", "mse")
    with stepcheck.watch(model, data=(X, Y), loss="mse") as report:
        outer.fit(X, Y, batch_size=6, epochs=3, verbose=0)
    assert report.causes == []


def test_a_loss_of_outputs_whose_shape_nobody_knows_is_looked_at_row_by_row():
    class Rows(layers.Layer):
        def call(self, x):
            return keras.ops.reshape(x, (keras.ops.shape(x)[0], -1))

        def compute_output_spec(self, x):
            return keras.KerasTensor((None, None))

    image = keras.Input((5,))
    model = keras.Model(image, Rows()(layers.Dense(1)(image)))
    model.compile("sgd", lambda y, out: keras.ops.mean((y - out) ** 2))
    with stepcheck.watch(model, data=(X, Y[:, None])) as report:
        model.fit(X, Y[:, None], batch_size=6, epochs=2, verbose=0)
    assert report.causes == report.unseen == []
