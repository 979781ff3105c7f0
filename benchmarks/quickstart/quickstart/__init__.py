"""A plain Flower app with an ordinary PyTorch loop."""
