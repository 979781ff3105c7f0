"""Runs and their records: folders, checkpoints, sweeps, comparisons."""
