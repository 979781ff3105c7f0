"""Modules that ``hedgerow new`` copies into an app: a user's model and data, with an example that runs."""
