"""Federated learning without data similarity as a Flower App."""
