"""`stepcheck run` watches a script that knows nothing of it: what is meant is stated by the script's names."""

import json
import re
import signal
import sys
import time
from importlib.util import find_spec

import keras
import pytest

import stepcheck
from stepcheck.cli import main
from stepcheck.command.names import Names
from stepcheck.command.script import Enough
from stepcheck.command.watching import Watched
from stepcheck.trace.log import STEPPED

ENGINE = keras.backend.backend()
RIGHT, WRONG, UNSEEN = 0, 1, 2
pytestmark = pytest.mark.own  # on both engines

HEAD = """
import sys
import keras, numpy as np
keras.utils.set_random_seed(0)
x_all = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
y_all = x_all[:, :1] * 2
w_all = np.linspace(0.5, 1.5, 48).astype("float32")
"""
MODEL = """
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    opt = keras.optimizers.SGD(0.05)
    opt.build(net.trainable_variables)
    trainer = {"models": [net]}
    squares = keras.losses.MeanSquaredError()
"""
ENDED_IN_A_SHAPE = """
import signal
shapes = {"__name__": "tensorflow.shapes", "signal": signal}
exec('''
def length():
    signal.raise_signal(signal.SIGALRM)
    print("a whole shape")
''', shapes)
def train():
    shapes["length"]()
    print("the end")
train()
"""
LOOPS = {
    "tensorflow": HEAD
    + """
import tensorflow as tf
@tf.function
def step(net, opt, squares, x, y):
    with tf.GradientTape() as tape:
        loss = FACTOR * squares(y, net(x, training=True))
    opt.apply_gradients(zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables))

def train():"""
    + MODEL
    + """
    for epoch in range(EPOCHS):
        for rows in np.random.permutation(48).reshape(-1, 8):
            step(net, opt, squares, x_all[rows], y_all[rows])
    print("the end")
train()
""",
    "jax": HEAD
    + """
import jax

def train():"""
    + MODEL
    + """
    @jax.jit
    def step(params, slots, x, y):
        def loss(params):
            return FACTOR * squares(y, net.stateless_call(params, [], x, training=True)[0])
        grads = jax.grad(loss)(params)
        return opt.stateless_apply(slots, grads, params)
    state = [v.value for v in net.trainable_variables], [v.value for v in opt.variables]
    for epoch in range(EPOCHS):
        for rows in np.random.permutation(48).reshape(-1, 8):
            state = step(*state, x_all[rows], y_all[rows])
    print("the end")
train()
""",
}
FIT = """
net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
net.compile("sgd", "mse")
net.fit(x_all, y_all, batch_size=8, epochs=EPOCHS, verbose=0, OTHERS)
print("the end")
"""


def loop(factor="1.0", epochs=3):
    return (
        LOOPS[ENGINE].replace("FACTOR", factor).replace("EPOCHS", str(epochs))
    )


def fit(others="", epochs=3):
    return HEAD + FIT.replace("OTHERS", others).replace("EPOCHS", str(epochs))


@pytest.fixture
def run(tmp_path, capsys):
    """Return a function that runs the command on the text of a script: (exit code, stdout, stderr)."""

    def ran(text, *options):
        script = tmp_path / "train.py"
        script.write_text(text)
        code = main(["run", str(script), *options])
        return code, *capsys.readouterr()

    return ran


STATED = "--model", "net", "--data", "x_all,y_all", "--loss", "squares"


def test_a_right_loop_is_certified(run):
    code, out, _ = run(loop(), *STATED)
    assert (code, "18 updates" in out, "the end" in out) == (
        RIGHT,
        True,
        True,
    ), out
    assert "rows, forward pass, gradient, optimizer step, state" in out


def test_a_fault_is_located(run):
    code, out, _ = run(loop("8"), *STATED)
    assert (code, out.splitlines()[1][:13]) == (WRONG, "Never divided"), out
    assert "FACTOR" not in out


def test_names_have_dots_and_brackets_and_a_loss_that_of_keras(run):
    code, out, _ = run(
        loop(),
        "--model",
        "trainer['models'][0]",
        "--data",
        "x_all[:48],y_all",
        "--loss",
        "mse",
    )
    assert code == RIGHT, out


def test_what_is_stated_is_what_is_meant(run):
    code, out, _ = run(
        loop(), *STATED[:2], "--data", "x_all,y_all,w_all", "--loss", "squares"
    )
    assert (code, "Weights ignored" in out) == (WRONG, True), out
    code, out, _ = run(loop(), *STATED, "--learning-rate", "0.1")
    assert (code, "rate" in out) == (WRONG, True), out


def test_the_use_of_the_rows_is_stated(run):
    code, out, _ = run(loop(), *STATED, "--rows", "shuffled")
    assert (code, "order of the pass before" in out) == (RIGHT, False), out
    in_order = loop().replace("np.random.permutation(48)", "np.arange(48)")
    code, out, _ = run(in_order, *STATED, "--rows", "shuffled")
    assert (code, "Same order every pass" in out) == (WRONG, True), out


def test_an_optimizer_is_stated(run):
    text = loop().replace(
        "opt.build", "other = keras.optimizers.SGD(0.05)\n    opt.build"
    )
    code, out, _ = run(text, *STATED, "--optimizer", "other")
    assert code == RIGHT, out


def test_a_script_ends_after_enough_updates(run):
    code, out, _ = run(loop(epochs=2000), *STATED, "--updates", "12")
    assert (code, "12 updates" in out, "the end" in out) == (
        RIGHT,
        True,
        False,
    ), out


def test_a_script_ends_on_its_next_line_where_an_engine_runs(tmp_path, capsys):
    """TensorFlow takes the `len` of a shape for unknown if it raises, and overruns its buffer."""
    (tmp_path / "train.py").write_text(ENDED_IN_A_SHAPE)
    before, tracer = signal.getsignal(signal.SIGALRM), sys.gettrace()
    run = Watched(Names({}), 1)
    run.of(str(tmp_path / "train.py"), [])
    signal.signal(signal.SIGALRM, before)
    assert isinstance(run.error, Enough)
    assert capsys.readouterr().out == "a whole shape\n"
    assert sys.gettrace() is tracer


def test_fit_ends_after_enough_updates(run):
    code, out, _ = run(fit(epochs=2000), "--updates", "12")
    assert (code, "12 updates" in out) == (RIGHT, True), out


def test_an_alarm_after_the_script_has_ended_ends_nothing(tmp_path):
    """Engines report an update late: the last ones may come when the script is over."""
    (tmp_path / "empty.py").write_text("")
    before = signal.getsignal(signal.SIGALRM)
    Watched(Names({}), 1).of(str(tmp_path / "empty.py"), [])
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    signal.signal(signal.SIGALRM, before)


def test_arguments_after_two_dashes_are_those_of_the_script(run):
    text = loop("float(sys.argv[1].removeprefix('--factor='))")
    assert run(text, *STATED, "--", "--factor=1")[0] == RIGHT
    assert run(text, *STATED, "--", "--factor=8")[0] == WRONG


def test_a_compiled_model_and_the_arrays_of_fit_need_no_names(run):
    code, out, _ = run(fit())
    assert (code, "18 updates" in out) == (RIGHT, True), out


@pytest.mark.parametrize(
    "others", ["validation_split=0.5", "sample_weight=w_all", "shuffle=False"]
)
def test_what_fit_does_is_right(run, others):
    code, out, _ = run(fit(others))
    assert code == RIGHT, out


def test_a_fit_on_other_rows_than_those_named_is_not_judged(run):
    text = fit().replace("net.fit(x_all", "net.fit(x_all + 1")
    code, out, _ = run(text, "--data", "x_all,y_all")
    assert (code, "no rows of `data`" in out) == (UNSEEN, True), out


def test_data_of_one_expression(run):
    text = (
        loop()
        .replace("    print(", "    rows = x_all, y_all\n    print(")
        .replace("def train():", "pair = x_all, y_all\ndef train():")
    )
    code, out, _ = run(
        text, "--model", "net", "--data", "pair", "--loss", "squares"
    )
    assert code == RIGHT, out


def test_json_is_all_that_is_printed(run):
    code, out, err = run(loop(), *STATED, "--json")
    facts = json.loads(out)
    assert (code, facts["findings"], facts["framework"]) == (RIGHT, [], ENGINE)
    assert "the end" in err


def test_a_page_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    assert run(loop(), *STATED, "--html", str(page))[0] == RIGHT
    assert "18 updates, all as meant" in page.read_text()


def test_a_missing_name_lists_near_ones(run):
    code, _, err = run(
        loop(), "--model", "nett", "--data", "x_al,y_all", "--loss", "square"
    )
    assert code == UNSEEN
    assert "--model must be known" in err
    assert "Received: nett. Try: net" in err
    assert "Received: x_al. Try: x_all" in err
    assert "Received: square. Try: squares" in err


def test_too_little_stated_prints_the_command_to_run(run):
    code, out, err = run(loop(), "--model", "net")
    assert (code, "the end" in out) == (UNSEEN, False)  # at the first update
    assert "--model, --data and --loss must state what is meant" in err
    first, last = err.splitlines()[-2:]
    assert "Try: stepcheck run " in first
    assert first.endswith("--model net --data X,Y --loss squares")
    assert last.startswith("Seen in the script: model net; data ")
    assert {"x_all (48, 4)", "y_all (48, 1)", "w_all (48,)"} <= {
        *re.split(", (?=[a-z])|data |; ", last)
    }
    assert "optimizer opt" in last


def test_a_data_set_is_proposed_before_the_tensors_of_a_batch(tmp_path, capsys):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "rows = TensorDataset(torch.randn(24, 3), torch.randn(24, 1))\n"
        "net, loss = torch.nn.Linear(3, 1), torch.nn.MSELoss()\n"
        "opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for x, y in DataLoader(rows, 8, shuffle=True):\n"
        "    opt.zero_grad()\n"
        "    loss(net(x), y).backward()\n"
        "    opt.step()\n"
    )
    assert main([str(script)]) == UNSEEN
    err = capsys.readouterr().err
    assert "--model net --data rows --loss loss" in err
    assert "data rows (24,)" in err


def test_a_loss_is_never_supposed(run):
    code, _, err = run(loop(), "--model", "net", "--data", "x_all,y_all")
    assert (code, "Received: --model net --data x_all,y_all" in err) == (
        UNSEEN,
        True,
    ), err


@pytest.mark.parametrize(
    "given", ["net(", "make()", "net if 1 else 2", "lambda: 1"]
)
def test_an_expression_that_is_no_name_is_refused_before_the_script_runs(
    run, given
):
    code, out, err = run(loop(), "--model", given, "--data", "x_all,y_all")
    assert (code, out) == (UNSEEN, "")
    assert err.startswith(
        f"--model must be a name of the script, with dots and brackets. Received: {given}. Try: "
    )


def test_what_cannot_be_watched_ends_the_script(run):
    code, out, err = run(
        loop(), "--model", "net", "--data", "x_all", "--loss", "mse"
    )
    assert (code, "the end" in out) == (UNSEEN, False)
    assert "(x, y) or (x, y, sample_weight)." in err
    assert STEPPED.get() is None


def test_a_script_that_fails_is_judged_up_to_there(run):
    text = loop().replace(
        '    print("the end")', "    raise KeyError('no such file')"
    )
    code, out, err = run(text, *STATED)
    assert (
        code,
        "KeyError: 'no such file'" in err,
        "ended with an error (KeyError)" in out,
    ) == (
        UNSEEN,
        True,
        True,
    )
    assert (
        run(text.replace("1.0 * squares", "8 * squares"), *STATED)[0] == WRONG
    )


def test_a_script_that_fails_before_its_first_pass(run):
    code, _, err = run("import no_such_module\n")
    assert code == UNSEEN
    assert (
        "Nothing was watched: the script ended with ModuleNotFoundError: No module named 'no_such_module'."
        in err
    )


def test_an_exit_code_of_the_script_is_no_success(run):
    assert run(loop() + "sys.exit(0)", *STATED)[0] == RIGHT
    assert run(loop() + "sys.exit(3)", *STATED)[0] == UNSEEN


def test_nothing_is_trained(run):
    code, _, err = run("print(1)")
    assert (
        code,
        "calls no model of Keras, and no module of PyTorch" in err,
    ) == (
        UNSEEN,
        True,
    )
    code, out, _ = run(
        HEAD + "net = keras.Sequential([keras.layers.Dense(1)])\nnet(x_all)",
        "--model",
        "net",
        "--data",
        "x_all,y_all",
        "--loss",
        "mse",
    )
    assert (code, "no optimizer step was made" in out) == (UNSEEN, True), out


def test_a_file_that_does_not_exist(capsys):
    assert main(["run", "no_such_file.py"]) == UNSEEN
    assert (
        "The script must be a file of Python. Received: no_such_file.py."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", [[], ["run"], ["record", "-o", "a.trace"]])
def test_a_notebook_is_watched_in_a_cell(command, tmp_path, capsys):
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    assert main([*command, str(notebook)]) == UNSEEN
    assert (
        "Try: in a cell, `with stepcheck.watch(model" in capsys.readouterr().err
    )


def test_a_script_without_a_command_is_run(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main([str(script), "--", "--epochs", "3"]) == UNSEEN
    assert "Nothing was watched" in capsys.readouterr().err
    assert main([str(tmp_path / "none.py")]) == UNSEEN
    assert "must be a file" in capsys.readouterr().err


def test_arguments_of_a_script_without_two_dashes(run):
    code, out, err = run(loop(), *STATED, "--epochs", "3")
    assert (code, out) == (UNSEEN, "")
    assert err.startswith(
        "Arguments of the script must stand after `--`. Received: --epochs 3. Try: stepcheck run "
    )
    assert err.endswith("train.py [options] -- --epochs 3\n")


def test_a_name_that_comes_later_is_waited_for(run):
    first = (
        loop()
        .replace("train()\n", "")
        .replace("net", "teacher")
        .replace("squares", "error")
    )
    text = (
        first.replace("def train():", "def begin():")
        + "begin()\n"
        + loop().removeprefix(HEAD)
    )
    code, out, err = run(text, *STATED)
    assert (code, out.count("the end")) == (RIGHT, 2), err


def test_a_name_that_is_nowhere_written_ends_the_script_at_its_first_update(
    run,
):
    code, out, err = run(loop(epochs=2000), *STATED[2:], "--model", "net" * 2)
    assert (code, "the end" in out) == (UNSEEN, False)
    assert f"Received: {'net' * 2}. Try: " in err
    assert "Try: stepcheck run" not in err


def test_a_fit_without_arrays_ends_at_its_first_update(run):
    data = "net.fit(((x_all[i : i + 8], y_all[i : i + 8]) for i in range(0, 48, 8)), verbose=0)"
    code, out, err = run(
        fit().replace("net.fit(x_all", f"{data}\nnet.fit(x_all")
    )
    assert (code, "the end" in out) == (UNSEEN, False)
    assert (
        "--model net --data X,Y --loss LOSS\nLOSS is a name of the script, such as"
        in err
    )


@pytest.fixture
def record(tmp_path, capsys):
    """Return a function that records the text of a script: (exit code, path of the trace, stdout, stderr)."""

    def recorded(text, name, *options):
        script, trace = tmp_path / f"{name}.py", tmp_path / f"{name}.trace"
        script.write_text(text)
        code = main(["record", str(script), "-o", str(trace), *options])
        return code, str(trace), *capsys.readouterr()

    return recorded


def test_two_recorded_scripts_are_compared(record, capsys):
    ordered = loop().replace("np.random.permutation(48)", "np.arange(48)")
    code, before, out, _ = record(ordered, "before")
    assert (
        code,
        "the end" in out,
        "before.trace: <stepcheck.Trace of" in out,
    ) == (
        0,
        True,
        True,
    )
    same, wrong = (
        record(ordered, "same")[1],
        record(ordered.replace("1.0 *", "2.0 *"), "wrong")[1],
    )
    assert main(["diff", before, same, "--bits"]) == 0
    capsys.readouterr()
    assert main(["diff", before, wrong, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["differences"][0]["update"],
        facts["differences"][0]["part"],
    ) == (
        1,
        "gradient",
    )
    assert main(["diff", before, wrong]) == 1
    assert "first in the gradient" in capsys.readouterr().out


def test_a_record_ends_after_enough_updates(record):
    code, trace, out, _ = record(loop(epochs=2000), "long", "--updates", "5")
    assert (code, "the end" in out) == (0, False)
    again = record(loop(epochs=2000), "again", "--updates", "5")[1]
    assert stepcheck.load(trace).num_updates == 5
    assert main(["diff", trace, again, "--bits"]) == RIGHT


def test_what_cannot_be_recorded_or_compared(record, tmp_path, capsys):
    code, trace, _, err = record("print(1)", "empty")
    assert (code, "Nothing was watched: the script calls no model" in err) == (
        UNSEEN,
        True,
    )
    assert main(["diff", trace, trace]) == UNSEEN
    assert (
        main(["record", __file__, "-o", str(tmp_path / "no" / "a.trace")])
        == UNSEEN
    )
    assert "The folder of the trace must exist." in capsys.readouterr().err
    code, trace, _, err = record(
        loop().replace('    print("the end")', "    raise KeyError"), "failed"
    )
    assert (code, "KeyError" in err) == (UNSEEN, True)
    assert main(["diff", trace, trace]) == RIGHT


def test_keras_is_as_it_was(run):
    before = (
        keras.layers.Layer.__call__,
        keras.Model.fit,
        __builtins__["__import__"],
    )
    run(loop(), *STATED)
    run(loop(), "--model", "nett")
    assert before == (
        keras.layers.Layer.__call__,
        keras.Model.fit,
        __builtins__["__import__"],
    )
    assert "fit" not in vars(keras.Model)


TORCH = """
import torch
from torch import nn
torch.manual_seed(0)
x_all = torch.randn(48, 4)
y_all = x_all[:, :1] * 2
class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.opt = torch.optim.SGD(self.model.parameters(), 0.05)
        self.criterion = nn.MSELoss()
    def fit(self, epochs):
        for epoch in range(epochs):
            for rows in torch.randperm(48).split(8):
                self.opt.zero_grad()
                self.criterion(self.model(x_all[rows]), y_all[rows]).backward()
                self.opt.step()
        print("the end")
trainer = Trainer()
trainer.fit(EPOCHS)
"""
OF_TRAINER = (
    "--model",
    "trainer.model",
    "--data",
    "x_all,y_all",
    "--loss",
    "trainer.criterion",
)
with_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="PyTorch is not installed"
)


@with_torch
def test_pytorch(run):
    right = TORCH.replace("EPOCHS", "3")
    code, out, _ = run(right, *OF_TRAINER)
    assert (code, "18 updates" in out) == (RIGHT, True), out
    code, out, _ = run(
        right.replace("self.opt.zero_grad()", "pass"), *OF_TRAINER
    )
    assert (code, "Not reset" in out) == (WRONG, True), out


@with_torch
def test_pytorch_ends_after_enough_updates(run):
    code, out, _ = run(
        TORCH.replace("EPOCHS", "3000"), *OF_TRAINER, "--updates", "12"
    )
    assert (code, "12 updates" in out, "the end" in out) == (
        RIGHT,
        True,
        False,
    ), out


@with_torch
def test_pytorch_with_too_little_stated(run):
    code, _, err = run(
        TORCH.replace("EPOCHS", "1"), "--model", "trainer.modell"
    )
    assert code == UNSEEN
    assert "Received: modell. Try: model." in err
    assert "--model trainer.modell --data x_all,y_all --loss " in err
    code, out, err = run(TORCH.replace("EPOCHS", "1"))
    assert (code, "the end" in out) == (UNSEEN, False)
    command = next(line for line in err.splitlines() if "Try: " in line)
    assert command.endswith(
        "--model trainer.model --data x_all,y_all --loss trainer.criterion"
    )
    assert (
        "model trainer.model; data x_all (48, 4), y_all (48, 1), rows (8,)"
        in err
    )
    assert "loss trainer.criterion; optimizer trainer.opt." in err


@with_torch
def test_pytorch_is_recorded_and_compared(record, capsys):
    text = TORCH.replace("EPOCHS", "3000")
    trace, same = (
        record(text, name, "--updates", "5")[1] for name in ("before", "same")
    )
    other = record(text.replace("0.05)", "0.06)"), "other", "--updates", "5")[1]
    assert stepcheck.load(trace).num_updates == 5
    assert main(["diff", trace, same]) == RIGHT
    capsys.readouterr()
    assert main(["diff", trace, other, "--json"]) == WRONG
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["differences"][0]["update"],
        facts["differences"][0]["part"],
    ) == (
        1,
        "step",
    )
