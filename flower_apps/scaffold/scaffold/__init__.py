"""SCAFFOLD as a Flower App."""
