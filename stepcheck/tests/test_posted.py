"""Five public questions as they were posted, run by the command: what is meant is stated by the script's names."""

import subprocess
import sys
from pathlib import Path

import keras
import pytest

POSTED = Path(__file__).parent / "posted"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow",
        reason="the loops are TensorFlow's",
    ),
]
PADDED = """
sources, targets = (
    keras.utils.pad_sequences([np.append(pair[i], 1) for pair in pairs], padding="post", dtype="int64") for i in (0, 1)
)
rows = [sources, np.pad(targets, [(0, 0), (1, 0)])[:, :-1]]
def meant(labels, logits):
    return padded_cross_entropy_loss(logits, labels, SMOOTHING, VOCAB_SIZE)
strategy ="""
QUESTIONS = {
    "glove_loop": (
        "--model glove_model --data pairs,index_data --loss glove_model.glove_loss",
        "broadcast",
    ),
    "accumulation_in_fit": ("", "summed over microbatches"),
    "sgd_by_hand": (
        "--model model --data x_train,y_train --loss loss_fn",
        "inference mode",
    ),
    "replicas_tutorial": (
        "--model model --data train_images,train_labels --loss loss_object --updates 9",
        "divided by the full batch",
    ),
    "transformer_on_replicas": (
        "--model model --data rows,targets --loss meant --updates 9",
        "mean of means",
    ),
}


# As many devices as in the other tests.
COMMAND = """
import sys
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
devices = [tf.config.LogicalDeviceConfiguration()] * 8
tf.config.set_logical_device_configuration(cpu, devices)
from stepcheck.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(script, options):
    """Run the command in a new process, which has its own devices."""
    command = [sys.executable, "-c", COMMAND, "run", str(script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_as_it_was_posted(name, tmp_path):
    options, cause = QUESTIONS[name]
    script = tmp_path / f"{name}.py"
    text = (POSTED / script.name).read_text()
    script.write_text(
        text.replace("\nstrategy =", PADDED) if "pairs = [" in text else text
    )
    code, out, err = run(script, options.split())
    assert code == 1, out + err
    assert cause in out.lower(), out
