"""The examples run at a reduced size and show what they say."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import keras
import pytest
from shares import on

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, monkeypatch, tmp_path, change=None):
    """Run an example with --quick; `change` makes it smaller still."""
    monkeypatch.chdir(tmp_path)
    module = load(name)
    if change is not None:
        change(module)
    return module.main(["--quick"])


ONES_OWN = sorted(path for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text())


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_read_in_one_sitting(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 280
    assert ("You have seen: " in text) == (path in ONES_OWN)


@pytest.mark.filterwarnings("default")
@on("tensorflow")
@pytest.mark.slow
def test_accumulation(monkeypatch, tmp_path, capsys):
    shown = run("accumulation", monkeypatch, tmp_path)
    assert shown["accumulation"]["difference"] < 2e-5
    assert shown["coupled"]["warned"]
    assert shown["coupled"]["difference"] > 1e-3
    first, later = shown["mixed_float16"].values()
    assert 0 < first["cut"] < min(first["rounding"], later["cut"])
    out = capsys.readouterr().out
    assert "LambdaCallback saw the epochs [0, 1, 2]." in out
    assert out.count("(a) Dense") == out.count("(c) The network of (a)") == 1


@on("jax")
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_finetune(monkeypatch, capsys):
    for name, value in {"WIDTH": 32, "NUM_LAYERS": 1}.items():
        monkeypatch.setattr(f"finetune_model.{name}", value)
    monkeypatch.setattr(
        "finetune_data.MODULES", "argparse calendar datetime decimal pathlib socket threading"
    )
    module = load("finetune")
    is_jax = keras.backend.backend() == "jax"
    pairs = module.docstrings()[:200]
    assert len(pairs) == 200
    module.docstrings = lambda: pairs
    module.NUM_ROWS = 16
    module.MEMORY = 8 * 2**20
    shown = module.main(["--quick", "--shards", "2"] if is_jax else ["--quick"])
    out = capsys.readouterr().out
    assert shown["differing"] == 0
    assert shown["errors"]["divided once"][1] < 1e-5
    assert shown["errors"]["mean of means"][1] > 1e-2
    assert shown["exported"]["difference"] < 0.02
    assert shown["exported"]["largest"] == 0
    assert "not used: head/kernel, head/bias" in out
    # frozen, and sharded
    assert ("attention_0/query/kernel (None, 'model', None)" in out) == is_jax
    assert (re.search(r"rows in \d+ microbatches", out) is not None) == is_jax  # to fit in memory


def fewer_images(module):
    images = module.images
    module.images = lambda num_rows: images(4 * module.BATCH_SIZE)
    module.NUM_BLOCKS = 2


@pytest.mark.filterwarnings("default")
@on("jax")
@pytest.mark.slow
def test_batchnorm_by_hand(monkeypatch, tmp_path):
    shown = run("batchnorm_by_hand", monkeypatch, tmp_path, fewer_images)
    assert shown["weight_difference"] == 0
    assert shown["curve_difference"] == 0
    assert shown["moved"] > 0.1
    assert shown["moved_wrong"] == 0
    assert Path(shown["picture"]).exists()


@on("jax")
@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_retrieval(monkeypatch, tmp_path):
    def change(module):
        monkeypatch.setattr(module, "PACKAGES", ("keras",))
        monkeypatch.setattr(module, "folders", lambda: [Path(keras.__file__).parent])

    shown = run("retrieval", monkeypatch, tmp_path, change)
    assert shown["difference"] < 1e-5
    for values in shown["recall"].values():
        (_, first), (_, last) = values
        assert last > first
    assert (tmp_path / "out" / "retrieval.png").exists()


@pytest.mark.large  # tests/pages/test_glove.py holds its parts
@pytest.mark.filterwarnings("default")
def test_glove(monkeypatch, tmp_path):
    shown = run("glove", monkeypatch, tmp_path)
    written, reshaped, fitted, ours, windowed = shown["losses"].values()
    assert min(written) > 3 * fitted[-1]
    assert written[-1] > 0.9 * written[0]  # a plateau
    assert reshaped == pytest.approx(fitted, rel=1e-3)
    # Keras on TensorFlow squares the gradients of equal embedding rows before it sums them.
    assert ours == pytest.approx(fitted, rel=1e-3 if keras.backend.backend() == "jax" else 0.1)
    assert 1.2 * fitted[-1] < windowed[-1] < 0.6 * written[-1]
    assert (
        "labels of shape (rows,) broadcast against predictions of shape (rows, 1)"
        in shown["refusal"]
    )
    assert "values of shape (512, 512)" in shown["refusal"]
    assert {"raised", "raise", "handler"} & set(shown["neighbours"]["exception"])
    assert len(shown["vectors"].read_text().splitlines()) == shown["num_words"]
    assert shown["picture"].exists()


def fewer_dates(module):
    module.QUICK = replace(module.QUICK, num_rows=400, num_warmup=10, epochs=1)
    module.WIDTH = 32
    module.NUM_PARTS = 2


@pytest.mark.large  # tests/pages/test_translate_dates.py holds its parts
@pytest.mark.filterwarnings("default")
def test_translate_dates(monkeypatch, tmp_path):
    shown = run("translate_dates", monkeypatch, tmp_path, fewer_dates)
    assert shown["losses"][-5:].mean() < 0.8 * shown["losses"][:5].mean()
    check_dates(shown)


@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_dates_are_translated(monkeypatch, tmp_path):
    shown = run("translate_dates", monkeypatch, tmp_path)
    assert shown["losses"][:20].mean() > 1.5
    assert shown["losses"][-20:].mean() < 0.25
    assert shown["held_out"]["token_accuracy"] > 0.9
    assert shown["exact"] > 0.4
    check_dates(shown)


def check_dates(shown):
    assert abs(shown["exact"] - shown["held_out"]["sequence_accuracy"]) < 0.03
    assert shown["errors"]["divided once"] < 1e-5
    assert shown["errors"]["mean of means"] > 1e-2
    assert Path(shown["picture"]).exists()


def fewer_pictures(module):
    name, (x, y), (x_test, y_test) = module.digits()
    module.BATCH_SIZE = 48
    module.NUM_REPLICAS = (1, 3)
    module.digits = lambda: (name, (x[:384], y[:384]), (x_test[:100], y_test[:100]))


@pytest.mark.large  # tests/laws/test_replicas.py holds what it shows
@pytest.mark.filterwarnings("default")
def test_distributed_mnist(monkeypatch, tmp_path):
    shown = run("distributed_mnist", monkeypatch, tmp_path, fewer_pictures)
    assert shown["tested"][1] > 0.3
    check_pictures(shown)


@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_pictures_are_told_apart(monkeypatch, tmp_path):
    shown = run("distributed_mnist", monkeypatch, tmp_path)
    assert shown["tested"][1] > 0.5
    check_pictures(shown)


def check_pictures(shown):
    assert shown["fit_differs"] == 0
    assert shown["fit_curve"] == [row[0] for row in shown["curves"][3]]
    assert shown["between_replicas"] < 1e-4
    assert shown["parts"] == "0 to 3, then 4 to 7"
    assert shown["picture"].exists()
    # one device adds rows up in another order
    assert shown["restored"] == pytest.approx(shown["tested"], rel=1e-6)
