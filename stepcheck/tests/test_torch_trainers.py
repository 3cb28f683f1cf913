"""Loops of Transformers, whose models compute their own loss."""

from contextlib import chdir
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec(
    "tensorflow"
):  # whose libraries end a process that loads both
    pytest.skip(
        "PyTorch with Triton, beside TensorFlow", allow_module_level=True
    )
pytest.importorskip("torch")

import stepcheck
from stepcheck.cli import main
from stepcheck.faults import Fault
from stepcheck.values import Reason

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
ids, num = torch.randint(3, 50, (40, 9)), torch.randint(3, 9, (40,))
rows = [{"input_ids": ids[i], "labels": torch.where(torch.arange(9) < num[i], ids[i], -100)} for i in range(40)]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **SIZES))
options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.0}
options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 3}
with stepcheck.watch(model) as report:
    Trainer(model, TrainingArguments("out", **options), train_dataset=rows).train()
"""


WATCHED = "with stepcheck.watch(model) as report:\n    "
OWN_LOSS = "options |= {'label_smoothing_factor': 0.1}\n"


def report_of(text, folder):
    """Return the report on a script."""
    names = {"stepcheck": stepcheck}
    with chdir(folder):
        exec(compile(text, "train.py", "exec"), names)
    return names["report"]


def faults(report):
    assert report.as_json()["failures"] == {}
    return [found.fault for found in report.findings]


def test_the_loss_that_a_model_computes_is_the_one_that_is_meant(
    tmp_path, monkeypatch
):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    report = report_of(TRANSFORMERS, tmp_path)
    assert faults(report) == []
    assert [each.reason for each in report.unjudged] == [
        Reason.DATA_AS_GIVEN
    ], report
    report.require("mode", "gradient", "step", "state")
    assert report.as_json()["updates"] == 12
    # Without its number of items a model divides by its own labels: the mean of means that Transformers had to 4.45.
    monkeypatch.setattr(
        transformers.Trainer, "_get_num_items_in_batch", lambda *_: None
    )
    assert faults(report_of(TRANSFORMERS, tmp_path)) == [Fault.MEAN_OF_MEANS]


def test_the_command_needs_no_names_for_a_trainer_with_the_loss_of_its_model(
    tmp_path, capsys
):
    pytest.importorskip("transformers", minversion="5.0")
    script = tmp_path / "train.py"
    with chdir(tmp_path):
        script.write_text(TRANSFORMERS.replace(WATCHED, ""))
        assert main(["run", str(script)]) == 0
        assert "12 updates" in capsys.readouterr().out
        script.write_text(TRANSFORMERS.replace(WATCHED, OWN_LOSS))
        assert main(["run", str(script)]) == 2
    assert "--model model --data ids,num --loss LOSS" in capsys.readouterr().err


def test_an_accumulating_trainer_is_compared_with_one_that_does_not():
    pytest.importorskip("transformers", minversion="5.0")
    from diff_trainer import main

    right, wrong = main()
    assert right.is_equal, str(right)
    assert right.compared == [
        "rows",
        "mode",
        "gradient",
        "step",
        "state",
    ]  # with other padding
    assert (wrong.first.update, wrong.first.kind) == (1, "rows_count")


def test_a_port_from_keras_is_compared():
    import keras

    if keras.backend.backend() == "torch":
        pytest.skip("PyTorch beside another backend of Keras")
    from diff_port import main

    right, wrong = main()
    assert right.is_equal, str(right)
    assert (wrong.first.update, wrong.first.part) == (1, "gradient")
