"""The example of `make train`: one table that shows the promise kept, and a picture."""

import digits
import pytest
from shares import on

from wholestep import __version__, cli


@on("jax")
@pytest.mark.slow
def test_the_promise_is_kept(tmp_path, capsys):
    rows = digits.run(12, tmp_path)
    whole, *ours, keras_whole, keras_accumulated = rows
    assert whole.accuracy >= 0.97
    assert all(len(row.losses) == 12 for row in rows)
    assert ours[-1].name == "wholestep fit, killed (SIGKILL), resumed"
    assert set(ours[-1].differences) == {0.0}
    assert ours[-1].losses == whole.losses
    for row in (*ours, keras_whole):
        assert max(row.differences) < 2e-5, row.name
    assert keras_accumulated.differences[-1] > 1e-3
    for row in ours:
        assert row.losses == pytest.approx(whole.losses, rel=1e-5)
    assert list(tmp_path.glob("*.png"))
    assert "accuracy" in capsys.readouterr().out


def test_the_command_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert __version__ in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["launch", "-n", "0", "script.py"])
