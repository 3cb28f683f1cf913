"""A run of one process does not compare, wait or notify."""

import inspect

import pytest

from wholestep.processes import Exchange, Processes, SingleProcess


def test_one_process_has_nobody_to_agree_with():
    alone = SingleProcess()
    assert (alone.index, alone.count) == (0, 1)
    assert (alone.broadcast(3, "sharing"), alone.all_gather(3, "sharing")) == (3, [3])
    alone.check_equal({"the model": "a", "the data": "b"})
    alone.barrier("before epoch 1")
    alone.fail(ValueError("lost"))


@pytest.mark.parametrize("context", [SingleProcess.dispatching, SingleProcess.waiting])
def test_an_error_is_raised_as_it_is_and_the_status_stays(context):
    alone = SingleProcess()
    assert alone.doing == "starting"
    alone.set_status("computing update 7")
    with pytest.raises(ValueError, match="as it is"), context(alone, "computing"):
        raise ValueError("as it is")
    assert alone.doing == "computing update 7"
    assert SingleProcess().doing == "starting"


def test_it_has_every_member_that_a_run_asks_of_its_processes():
    asked = [name for name in {**vars(Exchange), **vars(Processes)} if not name.startswith("_")]
    assert len(asked) == 11
    for name in asked:
        member = getattr(Processes, name)
        own = getattr(SingleProcess, name)
        if callable(member):
            assert list(inspect.signature(own).parameters) == list(
                inspect.signature(member).parameters
            ), name
