"""The audit of loops of Transformers, whose models state their own loss, of Accelerate and of Lightning."""

from contextlib import chdir
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
pytest.importorskip("torch")

import stepcheck

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
GPT2 = "GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))"
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


def test_the_loss_that_a_model_computes_is_the_one_that_is_meant(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    report = report_of(TRANSFORMERS, tmp_path)
    assert report.first_line.startswith("Nothing found in 12 updates"), report
    assert report.is_judged, report
    assert "loss: cross entropy of the next place, over the places whose label is not -100, as the model" in str(report)
    # Without its number of items a model divides by its own labels: the mean of means that Transformers had to 4.45.
    monkeypatch.setattr(transformers.Trainer, "_get_num_items_in_batch", lambda *_: None)
    report = report_of(TRANSFORMERS, tmp_path)
    assert [cause.name for cause in report.causes] == ["mean of means"], report


BERT = "BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **SIZES))"
T5 = (
    "T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2,"
    " dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))"
)
MEANS, SUM, CARRIED = "mean of means", "summed over microbatches", "window carried over the epoch"
VERSIONS = {  # 4.46.0 divides by the tokens of three microbatches of a pass, where the model takes their number
    "4.45.2": {"Llama": [MEANS], "GPT2": [MEANS], "Bert": [], "T5": [MEANS], "short": [CARRIED]},
    "4.46.0": {"Llama": [], "Bert": [SUM], "T5": [SUM], "short": ["not known"]},
}


@pytest.mark.parametrize("model", ["Llama", "GPT2", "Bert", "T5", "short"])
def test_versions_of_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    names = VERSIONS.get(transformers.__version__, {}).get(model)
    if names is None:
        pytest.skip(f"no report is known of {model} in transformers {transformers.__version__}")
    made = TRANSFORMERS[TRANSFORMERS.index("LlamaForCausalLM(") : TRANSFORMERS.index("\noptions =")]
    text = TRANSFORMERS.replace(made, {"GPT2": GPT2, "Bert": BERT, "T5": T5}.get(model, made))
    text = text.replace("import GPT2Config", "import BertConfig, BertForSequenceClassification, T5Config, GPT2Config")
    text = text.replace("LlamaConfig,", "LlamaConfig, T5ForConditionalGeneration,")
    text = text if model == "short" else text.replace("40", "36")  # whole windows
    if model == "Bert":
        text = text.replace('"labels": torch.where(torch.arange(9) < num[i], ids[i], -100)', '"labels": num[i] % 3')
    assert [cause.name for cause in report_of(text, tmp_path).causes][:1] == names


@pytest.mark.parametrize(
    ("library", "text", "old"),
    [("accelerate", ACCELERATE, "steps=1"), ("lightning", LIGHTNING, "accumulate_grad_batches=1")],
)
def test_accelerate_and_lightning(library, text, old, tmp_path):
    pytest.importorskip(library)
    report = report_of(text, tmp_path)
    assert report.first_line.startswith("Nothing found in 33 updates"), report
    assert report.is_judged, report
    of_four = report_of(
        text.replace(old, old.replace("1", "4")), tmp_path
    )  # of eleven batches: the last three are a window
    assert [cause.name for cause in of_four.causes] == ["divided by a full window"], of_four
