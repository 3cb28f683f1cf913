"""PyTorch: the hooks and the reference."""
