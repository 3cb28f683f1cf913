"""PyTorch behind the port of the audit: a watcher that fills the log, and a model as a function of recorded values."""
