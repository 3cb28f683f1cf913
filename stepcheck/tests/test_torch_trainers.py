"""Loops of Transformers, whose models compute their own loss, of Accelerate and of Lightning."""

from contextlib import chdir
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
pytest.importorskip("torch")

import stepcheck
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
ITEMS = (
    "x, y = torch.randn(44, 3), torch.randn(44)\nloader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)"
)
ACCELERATE = f"""
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
{ITEMS}
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
accelerator = Accelerator(gradient_accumulation_steps=1, cpu=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
with stepcheck.watch(model, data=(x, y), loss=nn.MSELoss()) as report:
    for epoch in range(3):
        for batch, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(batch).squeeze(-1), labels))
                optimizer.step()
                optimizer.zero_grad()
"""
LIGHTNING = f"""
import lightning, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
{ITEMS}

class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, i):
        return nn.functional.mse_loss(self(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)

silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
lit = Lit()
with stepcheck.watch(lit.net, data=(x, y), loss=nn.MSELoss()) as report:
    lightning.Trainer(max_epochs=3, accelerator="cpu", accumulate_grad_batches=1, **silent).fit(lit, loader)
"""


def report_of(text, folder):
    """Return the report on a script."""
    names = {"stepcheck": stepcheck}
    with chdir(folder):
        exec(compile(text, "train.py", "exec"), names)
    return names["report"]


def faults(report):
    assert report.as_json()["failures"] == {}
    return [found.fault for found in report.findings]


def test_the_loss_that_a_model_computes_is_the_one_that_is_meant(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    report = report_of(TRANSFORMERS, tmp_path)
    assert faults(report) == []
    assert [each.reason for each in report.unjudged] == [Reason.DATA_AS_GIVEN], report
    report.require("mode", "gradient", "step", "state")
    assert report.as_json()["updates"] == 12
    # Without its number of items a model divides by its own labels: the mean of means that Transformers had to 4.45.
    monkeypatch.setattr(transformers.Trainer, "_get_num_items_in_batch", lambda *_: None)
    assert faults(report_of(TRANSFORMERS, tmp_path)) == [Fault.MEAN_OF_MEANS]


@pytest.mark.parametrize(
    ("library", "text", "old"),
    [("accelerate", ACCELERATE, "steps=1"), ("lightning", LIGHTNING, "accumulate_grad_batches=1")],
)
def test_accelerate_and_lightning(library, text, old, tmp_path):
    pytest.importorskip(library)
    report = report_of(text, tmp_path)
    assert report.is_right, report
    assert report.as_json()["updates"] == 33
    of_four = text.replace(old, old.replace("1", "4"))  # of eleven batches: the last three are a window
    assert faults(report_of(of_four, tmp_path)) == [Fault.DIVIDED_BY_A_FULL_WINDOW]
