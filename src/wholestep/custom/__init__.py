"""A model's own `train_step`, `test_step` and `predict_step`, run as they are."""
