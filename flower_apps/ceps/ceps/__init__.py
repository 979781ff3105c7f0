"""CEPS: sparse decentralised learning as a Flower App."""
