"""The engine: a grid that runs the nodes in this process."""
