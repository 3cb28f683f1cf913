"""`stepcheck run` runs scripts of Transformers, Accelerate and Lightning that know nothing of it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
ids, num = torch.randint(3, 50, (40, 9)), torch.randint(3, 9, (40,))
rows = [{"input_ids": ids[i], "labels": torch.where(torch.arange(9) < num[i], ids[i], -100)} for i in range(40)]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=16, **SIZES))
options = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 1.0}
options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 3}
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
lightning.Trainer(max_epochs=3, accelerator="cpu", accumulate_grad_batches=1, **silent).fit(Lit(), loader)
"""


def test_transformers(audit, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    code, out, _ = audit(TRANSFORMERS, "--updates", 20)
    assert (code, "Nothing found in 12 updates: rows, mode, gradient" in out) == (0, True), out
    assert "loss: cross entropy of the next place, over the places whose label is not -100, as the model" in out
    # Without its number of items a model divides by its own labels: the mean of means that Transformers had to 4.45.
    monkeypatch.setattr(transformers.Trainer, "_get_num_items_in_batch", lambda *_: None)
    code, out, _ = audit(TRANSFORMERS.replace('"max_grad_norm": 1.0', '"max_grad_norm": 0.0'), "--updates", 20)
    assert (code, "Mean of means." in out) == (1, True), out


def test_transformers_counts_the_first_places_of_a_model_whose_loss_it_does_not_know(audit):
    pytest.importorskip("transformers", minversion="5.0")
    llama = TRANSFORMERS[TRANSFORMERS.index("LlamaForCausalLM(") : TRANSFORMERS.index("\noptions =")]
    code, out, _ = audit(TRANSFORMERS.replace(llama, GPT2), "--updates", 20)
    assert code == 1
    assert "a first place has a label too, which nothing predicts" in out, out


BERT = "BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, num_labels=3, **SIZES))"
T5 = (
    "T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_ff=24, d_kv=8, num_layers=1, num_heads=2,"
    " dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0))"
)
QUIET, MEANS, SUM = "Nothing found in ", "Mean of means.", "Summed over microbatches."
VERSIONS = {  # 4.46.0 divides by the tokens of three microbatches of a pass, where the model takes their number
    "4.45.2": {"Llama": MEANS, "GPT2": MEANS, "Bert": QUIET, "T5": MEANS, "short": "Window carried over the epoch."},
    "4.46.0": {"Llama": QUIET, "Bert": SUM, "T5": SUM, "short": "Not known, but in the stage: gradient."},
}


@pytest.mark.parametrize("model", ["Llama", "GPT2", "Bert", "T5", "short"])
def test_versions_of_transformers(model, audit):
    transformers = pytest.importorskip("transformers")
    first = VERSIONS.get(transformers.__version__, {}).get(model)
    if first is None:
        pytest.skip(f"no report is known of {model} in transformers {transformers.__version__}")
    made = TRANSFORMERS[TRANSFORMERS.index("LlamaForCausalLM(") : TRANSFORMERS.index("\noptions =")]
    text = TRANSFORMERS.replace(made, {"GPT2": GPT2, "Bert": BERT, "T5": T5}.get(model, made))
    text = text.replace("import GPT2Config", "import BertConfig, BertForSequenceClassification, T5Config, GPT2Config")
    text = text.replace("LlamaConfig,", "LlamaConfig, T5ForConditionalGeneration,")
    text = text.replace('"max_grad_norm": 1.0', '"max_grad_norm": 0.0')
    text = text if model == "short" else text.replace("40", "36")  # whole windows
    if model == "Bert":
        text = text.replace('"labels": torch.where(torch.arange(9) < num[i], ids[i], -100)', '"labels": num[i] % 3')
    code, out, _ = audit(text, "--updates", 20)
    assert (code, first in out) == (int(first != QUIET), True), out


@pytest.mark.parametrize(
    ("library", "text", "old"),
    [("accelerate", ACCELERATE, "steps=1"), ("lightning", LIGHTNING, "accumulate_grad_batches=1")],
)
def test_accelerate_and_lightning(library, text, old, audit):
    pytest.importorskip(library)
    code, out, _ = audit(text)
    assert (code, "Nothing found in 30 updates" in out) == (0, True), out
    code, out, _ = audit(text.replace(old, old.replace("1", "4")))  # of eleven batches: the last three are a window
    assert (code, "Divided by a full window." in out) == (1, True), out


LOCAL = '"average_tokens_across_devices": False, "report_to"'
SINGLE = TRANSFORMERS.replace('"gradient_accumulation_steps": 3', '"gradient_accumulation_steps": 1')


@pytest.mark.parametrize(
    ("library", "text", "first"),
    [
        ("transformers", SINGLE, "Nothing found in 15 updates: rows, mode, gradient, step, state"),
        ("transformers", SINGLE.replace('"report_to"', LOCAL), "Mean of means. Each replica"),
        ("accelerate", ACCELERATE, "Rows twice in a pass."),  # 44 rows are no whole batches of both processes
        (
            "accelerate",
            ACCELERATE.replace("44", "48"),
            "Nothing found in 18 updates: rows, mode, gradient, step, state",
        ),
    ],
)
def test_two_processes(library, text, first, tmp_path):
    pytest.importorskip(library)
    (tmp_path / "train.py").write_text(text)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "stepcheck", "run", "--json", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert json.loads(ran.stdout)["first_line"].startswith(first), ran.stdout
