"""SD-FEEL as a Flower App."""
