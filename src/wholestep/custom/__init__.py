"""A model's custom `train_step`, `test_step` and `predict_step`, run unchanged."""
