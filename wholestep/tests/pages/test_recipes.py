"""Every recipe runs unchanged, and reads its variables outside of the model anew."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
START, *SECTIONS = TEXT.split("\n## ")
RECIPES = {section.split("\n")[0]: section for section in SECTIONS}


def cook(title):
    """Return the names that a recipe leaves behind."""
    names: dict = {}
    for text in (START, RECIPES[title]):
        (block,) = re.findall(r"```python\n(.*?)```", text, re.S)
        exec(compile(block, "recipes.md", "exec"), names)
    return names


def test_every_recipe_is_tested():
    assert set(re.findall(r'= cook\("(.*?)"\)', Path(__file__).read_text())) == set(RECIPES)


def test_a_variational_autoencoder_draws_anew_and_learns():
    names = cook("Variational autoencoder")
    history = names["history"].history
    assert history["loss"][-1] < history["loss"][0]
    assert np.add(history["reconstruction"], history["divergence"]) == pytest.approx(
        history["loss"], rel=1e-4
    )
    seeds = [v for v in names["vae"].non_trainable_variables if "seed" in v.name]
    assert np.any(seeds[0].numpy() != keras.random.SeedGenerator(1).state.numpy())


def test_a_coefficient_counts_as_it_is_now():
    names = cook("A coefficient that changes while training")
    first, *later = names["history"].history["size"]
    assert first == 0 < min(later)
    x, y, trainer = (names[k] for k in ("x", "y", "trainer"))
    one, five = (
        (names["beta"].assign(value), trainer.evaluate(x, y, verbose=0, return_dict=True))[1]
        for value in (1, 5)
    )
    assert five["size"] == pytest.approx(5 * one["size"], rel=1e-5)
    assert five["loss"] == pytest.approx(five["error"] + five["size"], rel=1e-5)


def test_both_sides_of_a_gan_see_the_other_as_it_is_now():
    names = cook("Generative adversarial network")
    fooling, telling, batch = (names[k] for k in ("fooling", "telling", "batch"))
    generator = names["generator"]
    discriminator = names["discriminator"]
    held = discriminator.get_weights()
    assert fooling.update(batch)["loss"] != pytest.approx(np.log(2), rel=1e-4)
    for ours, theirs in zip(discriminator.get_weights(), held, strict=True):
        np.testing.assert_array_equal(ours, theirs)  # not trained by the other's trainer
    discriminator.set_weights([np.zeros_like(value) for value in held])
    assert fooling.update(batch)["loss"] == pytest.approx(np.log(2), rel=1e-6)
    discriminator.set_weights(held)
    generator.set_weights([np.zeros_like(value) for value in generator.get_weights()])
    expected = np.log1p(np.exp(float(discriminator.predict(np.zeros((1, 8)), verbose=0)[0, 0])))
    assert telling.update(batch)["made"] == pytest.approx(expected, rel=1e-5)


def test_a_step_of_ones_own_moves_both_sides_by_their_own_optimizers():
    names = cook("A custom `train_step` with several optimizers")
    gan = names["gan"]
    history = names["history"].history
    assert [int(o.iterations) for o in (gan.d_optimizer, gan.g_optimizer)] == [20, 20]
    assert history["d_loss"][-1] < history["d_loss"][0]
    assert history.keys() == {"d_loss", "g_loss"}
    held = gan.generator.get_weights()
    names["trainer"].fit(names["x"], epochs=1, verbose=0)
    assert any(np.any(a != b) for a, b in zip(held, gan.generator.get_weights(), strict=True))
    assert "own train_step is run whole" in names["trainer"].explain()


def test_a_teacher_is_followed_where_it_is_now():
    names = cook("Teacher that follows by a moving average")
    student = names["student"]
    teacher = names["teacher"]

    def agreement():
        return names["trainer"].evaluate(names["x"], names["y"], verbose=0, return_dict=True)[
            "agreement"
        ]

    apart = student.predict(names["x"], verbose=0) - teacher.predict(names["x"], verbose=0)
    assert np.any(apart)
    assert agreement() == pytest.approx(np.mean(apart**2), rel=1e-4)
    teacher.set_weights(student.get_weights())
    assert agreement() == pytest.approx(0, abs=1e-12)


def test_rows_that_meet_in_a_contrastive_loss_stay_together():
    names = cook("Contrastive loss with negatives from the batch")
    assert "16 rows in 4 microbatches" in names["trainer"].explain()
    assert (
        names["history"].history["loss"][-1] < names["history"].history["loss"][0] < 2 * np.log(16)
    )


@pytest.mark.slow
def test_a_policy_learns_from_episodes_of_any_length():
    names = cook("Policy gradient")
    assert np.mean(names["rewards"][-10:]) > np.mean(names["rewards"][:5]) + 0.15
    assert len(names["trainer"].executor.planner.programs) <= 3


def test_lora_trains_beside_the_kernels():
    names = cook("LoRA")
    for before, layer in zip(names["before"], names["model"].layers, strict=True):
        np.testing.assert_array_equal(before, layer._kernel.numpy())
        assert np.any(layer.lora_kernel_b.numpy() != 0)


def test_augmentation_on_the_device_is_off_in_evaluation_and_that_of_a_row_is_the_same_again():
    names = cook("Custom augmentation")
    model, x, y = (names[k] for k in ("model", "x", "y"))
    assert np.any(
        names["jitter"].seeds.state.numpy() != keras.random.SeedGenerator(1).state.numpy()
    )
    plain = names["ws"].Trainer(model).evaluate(x, y, verbose=0)
    assert plain == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-5)
    one, other = (names["shifted"].in_order().load(0, 0)[0] for _ in range(2))
    np.testing.assert_array_equal(one, other)
