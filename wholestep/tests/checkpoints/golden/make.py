"""Write the golden checkpoint of a release: `KERAS_BACKEND=jax python tests/checkpoints/golden/make.py 0.1.0`,
once, and kept.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "support"))

import keras  # noqa: E402
from runs import SIZE, X, Y, small  # noqa: E402

import wholestep as ws  # noqa: E402


class Leave(keras.callbacks.Callback):
    """Leaves in the update after the eighth, in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 9:
            raise KeyboardInterrupt


if __name__ == "__main__":
    folder = ws.Checkpoints(HERE / sys.argv[1], every_steps=4, every_seconds=None, keep=1)
    try:
        ws.Trainer(small()).fit(
            X, Y, batch_size=SIZE, epochs=3, callbacks=[Leave()], checkpoints=folder, verbose=0
        )
    except KeyboardInterrupt:
        (HERE / sys.argv[1] / "lock").unlink()
