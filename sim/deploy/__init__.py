"""Flower's own programs: SuperLink, SuperNodes, and its command line."""
