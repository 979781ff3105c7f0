"""HSGD: hybrid federated learning of hospitals and devices as a Flower App."""
