"""An app that measures exchanges."""
