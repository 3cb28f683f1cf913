"""The script that shows which laws hold to the bit on a device: on a CPU all do, and it sees a bit
that differs.
"""

import bits


def test_all_laws_hold_on_a_cpu():
    case = bits.Case(bits.MODELS["dense"])
    whole = case.fit()
    assert set(bits.laws(case, whole).values()) == {0}
    assert bits.differing_bits(bits.of_integers(16), bits.of_integers(4)) == 0
    assert bits.differing_bits(whole, case.unshuffled()) > 0
    assert bits.largest(case.keras(), case.unshuffled()) < 1e-5
