"""Data: a source, a sampler and a position in it, on their way to the device."""
