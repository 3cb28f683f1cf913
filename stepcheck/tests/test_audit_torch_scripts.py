"""`stepcheck run` runs scripts that train modules of PyTorch and know nothing of it."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("triton") and find_spec("tensorflow"):  # whose libraries end a process that loads both
    pytest.skip("PyTorch with Triton, beside TensorFlow", allow_module_level=True)
torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:.*target size", "ignore:Detected call of `lr_scheduler.step")
DRAWN = """
import sys, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
torch.manual_seed(0)
x = torch.randn(60, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(60)
"""
LOADER = f"""{DRAWN}
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
loss_fn, optimizer = nn.MSELoss(), torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(50):
    for batch, labels in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = loss_fn(model(batch).squeeze(-1), labels)
        loss.backward()
        optimizer.step()
print("the end", sys.argv[1:])
"""
SLICES = f"""{DRAWN}
def main():
    inputs, labels = x.numpy(), (y > 0).long()
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        for rows in torch.randperm(60).split(8):
            F.cross_entropy(net(torch.tensor(inputs[rows])), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
main()
"""
AUGMENTED = f"""{DRAWN}
class Noisy(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, i):
        return {{"id": i, "x": x[i] + 0.1 * torch.randn(4), "y": int(y[i] > 0)}}
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(4):
    net.train()
    for batch in DataLoader(Noisy(), 15, shuffle=True):
        optimizer.zero_grad()
        F.cross_entropy(net(batch["x"]), batch["y"]).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(x)
"""
GAN = f"""{DRAWN}
G, D = nn.Linear(2, 4), nn.Linear(4, 1)
for_g, for_d = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
for epoch in range(3):
    for (real,) in DataLoader(TensorDataset(x), batch_size=20, shuffle=True):
        fake = G(torch.randn(20, 2))
        D.zero_grad()
        F.binary_cross_entropy_with_logits(D(real), torch.ones(20, 1)).backward()
        F.binary_cross_entropy_with_logits(D(fake.detach()), torch.zeros(20, 1)).backward()
        for_d.step()
        G.zero_grad()
        F.binary_cross_entropy_with_logits(D(fake), torch.ones(20, 1)).backward()
        for_g.step()
"""
WRONG = {  # the script, an edit, the cause; what the report says of the data
    "broadcast": (LOADER, (".squeeze(-1)", ""), "broadcast", "the DataLoader's dataset, 60 rows"),
    "other rows": (SLICES, ("labels[rows]", "labels[torch.arange(60).flip(0)[rows]]"), "labels of other rows", ""),
    "not reset": (SLICES, ("            optimizer.zero_grad()\n", ""), "not reset", "x, labels, 60 rows"),
    "eval": (AUGMENTED, ("    net.train()\n", ""), "inference mode", "the 240 rows that the model is given"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_right_script_is_clean_and_a_wrong_one_is_not(name, audit):
    text, edit, cause, data = WRONG[name]
    code, out, _ = audit(text)
    assert (code, "Nothing found in " in out) == (0, True), out
    assert data in out
    assert edit[0] in text
    code, out, _ = audit(text.replace(*edit))
    assert (code, f"\n{cause}." in f"\n{out}".lower()) == (1, True), out


def test_several_modules_are_judged_but_for_the_form_of_their_losses(audit):
    code, out, _ = audit(GAN)
    assert code == 2
    assert (
        out.count("Not judged: the form of the loss is not known. Nothing found in the other stages of 9 updates") == 2
    ), out
    assert "module: G" in out
    assert "module: D" in out


def test_a_script_ends_when_enough_was_seen_and_json_has_the_report(audit):
    code, out, err = audit(LOADER, "--json", "--updates", 12, "--", "--json")
    told = json.loads(out)
    assert (code, told["has_seen"], told["causes"], told["engine"]) == (0, True, [], "torch")
    assert "12 updates" in told["looked_at"]
    assert "the end" not in err
    assert any("it was ended when enough was seen" in each for each in told["unseen"])
    _, out, err = audit(LOADER, "--json", "--updates", 1000, "--", "--json")
    assert "the end ['--json']" in err
    assert not any("it was ended" in each for each in json.loads(out)["unseen"])


def test_the_report_of_a_script_s_own_audit_is_shown(audit):
    text = LOADER.replace("range(50)", "range(12)")
    loop = text[text.index("for epoch") : text.index("print(")]
    indented = "".join(f"    {line}" for line in loop.splitlines(keepends=True))
    own = f"import stepcheck\nwith stepcheck.watch(model, (x, y), loss_fn) as report:\n{indented}"
    code, out, _ = audit(text.replace(loop, own))
    assert (code, out.count("Nothing found in 48 updates")) == (0, 1), out


def test_a_script_without_a_step_or_with_an_error_is_not_seen(audit, tmp_path):
    code, out, _ = in_a_process(f"{DRAWN}\nwith torch.no_grad():\n    nn.Linear(4, 1)(x)", tmp_path, "keras")
    assert code == 2
    assert "any update: no call of a trainable module of PyTorch with an optimizer step was seen" in out
    code, out, _ = audit(f"{LOADER}\nraise ValueError('its own')".replace("range(50)", "range(2)"))
    assert code == 2
    assert "the rest of the loop: the script ended with an error, ValueError" in out


def in_a_process(text, folder, *forbidden):
    """Return (exit code, what it printed) of the command in a process where some modules cannot be imported."""
    (folder / "train.py").write_text(text)
    code = f"import sys; sys.modules |= dict.fromkeys({forbidden}); from wholestep.cli import main; "
    code += "code = main(['audit', 'train.py', '--html', 'out.html']); print('torch' in sys.modules); sys.exit(code)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    return ran.returncode, ran.stdout, ran.stderr


def test_keras_jax_and_tensorflow_are_not_imported(tmp_path):
    code, out, err = in_a_process(LOADER.replace(".squeeze(-1)", ""), tmp_path, "keras", "jax", "tensorflow")
    assert (code, "\nBroadcast." in out) == (1, True), err
    assert "Broadcast" in (tmp_path / "out.html").read_text()


KERAS = """
import keras, numpy as np
x = np.ones((8, 3), "float32")
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
"""


def test_pytorch_is_not_imported_for_a_script_of_keras(tmp_path):
    _, out, err = in_a_process(KERAS, tmp_path)
    assert "Looked at 4 updates" in out, err
    assert out.endswith("False\n")


def test_training_is_the_same_bit_for_bit(tmp_path):
    text = LOADER.replace("range(50)", "range(5)").replace("print(", "print(model[0].weight.double().sum().item(), ")
    (tmp_path / "train.py").write_text(text)
    plain, watched = (
        subprocess.run([sys.executable, *how, "train.py", *more], capture_output=True, text=True, cwd=tmp_path).stdout
        for how, more in (([], []), (["-m", "stepcheck", "run"], ["--updates", "1000"]))
    )
    assert plain.split()[0] == watched.split()[0] != ""


FOLDS = f"""{DRAWN}
for fold in range(2):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.arange(60)[torch.arange(60) % 2 == fold].tolist()
    for epoch in range(3):
        for batch, labels in DataLoader(TensorDataset(x, y), 10, sampler=torch.utils.data.SubsetRandomSampler(rows)):
            optimizer.zero_grad()
            F.mse_loss(model(batch)[:, 0], labels).backward()
            optimizer.step()
"""


def test_modules_that_are_trained_one_after_the_other_are_each_judged(audit):
    code, out, _ = audit(FOLDS)
    assert (code, out.count("Nothing found in 9 updates: rows, mode, gradient, step, state were judged.")) == (0, 2), (
        out
    )


PADDED = f"""{DRAWN}
texts = [torch.randint(1, 15, (int(torch.randint(3, 9, ())),)) for _ in range(60)]
def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.where(ids > 0, ids % 4, -1)
model = nn.Sequential(nn.Embedding(15, 8, padding_idx=0), nn.Linear(8, 4))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
for epoch in range(4):
    for ids, labels in DataLoader(texts, 10, shuffle=True, collate_fn=collate):
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=-1).backward()
        optimizer.step()
"""


def test_batches_may_be_padded_to_their_longest_row(audit):
    code, out, _ = audit(PADDED)
    assert (code, "Nothing found in 24 updates: rows, mode, gradient" in out) == (0, True), out


def test_an_error_of_the_audit_does_not_end_the_script(audit, monkeypatch):
    def failing(*_):
        raise ArithmeticError("none")

    monkeypatch.setattr("stepcheck.torch.hooks.split", failing)
    code, out, _ = audit(LOADER.replace("range(50)", "range(2)"))
    assert (code, "the end" in out, "an error of its own (ArithmeticError: none)" in out) == (2, True, True), out


def test_a_dataset_that_is_too_large_is_not_read(audit, monkeypatch):
    monkeypatch.setattr("stepcheck.torch.conclusion._MOST_BYTES", 100)
    code, out, _ = audit(LOADER, "--updates", 8)
    assert (code, "data: x, y, 60 rows" in out) == (0, True), out


SUMMED = f"""{DRAWN}
model, loss_fn = nn.Linear(4, 1), nn.MSELoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(6):
    num = 0
    for i, rows in enumerate(torch.randperm(60).split(8)):
        loss_fn(model(x[rows])[:, 0], y[rows]).backward()
        num += len(rows)
        if i % 2:
            for p in model.parameters():
                p.grad.div_(num)  # the rows of both microbatches
            optimizer.step()
            optimizer.zero_grad()
            num = 0
"""


@pytest.mark.parametrize("has_divided", [True, False])
def test_a_sum_may_be_divided_in_the_gradients_or_not_at_all(has_divided, audit):
    code, out, _ = audit(SUMMED if has_divided else SUMMED.replace("div_(num)", "div_(1)"))
    assert (code, "Nothing found in 24 updates: rows, mode, gradient" in out) == (0, True), out
    assert ("the sums of this loss are divided by the rows" in out) is has_divided
    code, out, _ = audit(SUMMED.replace("div_(num)", "div_(16)").replace("split(8)", "split(9)"))
    assert (code, out.startswith("Nothing found")) == (1, False), out


PLAIN = f"""{DRAWN}
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
MADE
for epoch in range(8):
    place, order = 0, torch.randperm(60)
    for rows in torch.randperm(60).split(10):
        optimizer.zero_grad()
        out, labels = model(x[rows])[:, 0], y[rows]
        LOSS.backward()
        optimizer.step()
        MORE
END
"""
MSE = "F.mse_loss(out, labels)"
FIRST = "first = nn.Linear(4, 4); optimizer.add_param_group({'params': first.parameters()})"
TWINS = {  # the parts of the right script, those of the wrong one, and the words with which its report begins
    "a loss of numbers": (
        {"LOSS": "torch.stack([F.mse_loss(a, b) for a, b in zip(out, labels)]).mean()"},
        {
            "LOSS": "torch.tensor([F.mse_loss(a, b).item() for a, b in zip(out, labels)], requires_grad=True).mean()",
        },
        "No gradient reaches the model: the loss is cut off from its outputs",
    ),
    "a rate of counts": (
        {"LOSS": "nn.PoissonNLLLoss(log_input=False)(out.exp(), labels.abs())"},
        {"LOSS": "nn.PoissonNLLLoss()(out.exp(), labels.abs())"},
        "PoissonNLLLoss takes logarithms, and gets the outputs of `exp`",
    ),
    "a state that is kept by reference": (
        {
            "MORE": "best = {k: v.clone() for k, v in model.state_dict().items()} if epoch == 1 else best",
            "MADE": "best = None",
            "END": "model.load_state_dict(best); model.load_state_dict(model.state_dict())",
        },
        {
            "MORE": "best = {k: v for k, v in model.state_dict().items()} if epoch == 1 else best",
            "MADE": "best = None",
            "END": "model.load_state_dict(best)",
        },
        "`load_state_dict` gets the module's own parameters, and restores nothing",
    ),
    "a misspelt flag": (
        {"MADE": "for p in model[0].parameters(): p.requires_grad = False"},
        {"MADE": "for p in model[0].parameters(): p.require_grad = False"},
        "`require_grad` is set to False on 2 of the parameters, and has no effect",
    ),
    "a flag of a module": (
        {"MADE": "model[0].requires_grad_(False); model[0].requires_grad = False"},
        {"MADE": "model[0].requires_grad = False"},
        "`requires_grad` is set to False on the module `0`, and has no effect",
    ),
    "a rate that is 0": (
        {"MORE": "optimizer.param_groups[0]['lr'] += 1e-3", "MADE": "optimizer.param_groups[0]['lr'] = 0.0"},
        {
            "MORE": "num += 1; optimizer.param_groups[0]['lr'] = num // 12 * 1e-2",
            "MADE": "optimizer.param_groups[0]['lr'] = num = 0",
        },
        "The learning rate is 0 in updates 1 to 12, which move no weight",
    ),
    "groups that begin later": (
        {
            "MADE": "groups = [{'params': model[i].parameters()} for i in (0, 2)]\n"
            "optimizer = torch.optim.Adam(groups, lr=1e-2)\noptimizer.param_groups[0]['lr'] = 0.0",
            "MORE": "optimizer.param_groups[0]['lr'] = 1e-2 * (epoch > 1)",
        },
        {"MADE": "optimizer.param_groups[0]['lr'] = 0.0"},
        "The learning rate is 0 in updates 1 to ",
    ),
    "a part without a gradient": (
        {
            "MADE": FIRST,
            "LOSS": "F.mse_loss(model(first(x[rows]))[:, 0], labels)",
            "END": "with torch.no_grad(): first(x)",
        },
        {
            "MADE": f"{FIRST}\ncall = torch.no_grad()(first)",
            "LOSS": "F.mse_loss(model(call(x[rows]))[:, 0], labels)",
        },
        "`Linear` is called under `no_grad()` (",
    ),
    "labels shuffled apart": (
        {
            "LOSS": "F.cross_entropy(F.pad(out[:, None], (1, 0)), (y > 0).long()[rows])",
            "MADE": "whole = (y > 0).long()",
        },
        {
            "MADE": "whole = (y > 0).long()",
            "LOSS": "F.cross_entropy(F.pad(out[:, None], (1, 0)), whole[order[place:place + 10]])",
            "MORE": "place += 10",
        },
        "The loss gets the labels of whole, but in ",
    ),
    "a penalty without a gradient": (
        {"LOSS": "(F.mse_loss(out, labels) + 0.01 * sum(p.square().sum() for p in model.parameters()))"},
        {"LOSS": "((out - labels).square().mean() + 0.01 * sum(p.data.square().sum() for p in model.parameters()))"},
        "The number that `backward()` is called on is ",
    ),
    "a constant": (
        {"LOSS": "(F.mse_loss(out, labels) + 0.5)"},
        {"LOSS": "(F.mse_loss(out, labels) + 0.01 * sum(p.detach().abs().sum() for p in model.parameters()))"},
        "The number that `backward()` is called on is ",
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_script_is_told_from_its_right_twin(name, audit):
    right, wrong, told = TWINS[name]

    def of(parts):
        text = PLAIN
        for part, own in ({"MADE": "", "LOSS": MSE, "MORE": "", "END": ""} | parts).items():
            text = text.replace(part, own)
        return text

    code, out, _ = audit(of(right))
    assert code != 1, out
    code, out, _ = audit(of(wrong))
    assert (code, out[: len(told)]) == (1, told), out
    assert "one by one" not in out


GROWING = f"""{DRAWN}
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def endless():
    while True:
        yield from torch.randperm(60).split(4)
stream = endless()
for update in range(14):
    optimizer.zero_grad()
    num = NUM
    for _ in range(num):
        rows = next(stream)
        (F.mse_loss(model(x[rows])[:, 0], y[rows]) / num).backward()
    optimizer.step()
"""


def test_places_that_rows_are_filled_up_with_and_that_count(audit):
    text = PADDED.replace("ids % 4, -1)", "ids % 3 + 1, 0)")
    code, out, _ = audit(text.replace(", ignore_index=-1", ""))
    assert (code, out.count("The loss counts the padding: ")) == (1, 1), out
    assert out.startswith("All rows of labels end with zeros"), out
    code, out, _ = audit(text.replace("ignore_index=-1", "ignore_index=0"))
    assert (code, "The loss counts the padding" in out) == (0, False), out


def test_a_window_whose_size_the_author_changes_is_not_carried_over(audit):
    code, out, _ = audit(GROWING.replace("NUM", "1 + update // 6"))
    assert (code, "carried over" in out) == (0, False), out
    code, out, _ = audit(GROWING.replace("NUM", "4"))
    assert (code, out.startswith("Window carried over the epoch.")) == (1, True), out
