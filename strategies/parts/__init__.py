"""What is added to a run beside its algorithm; no part knows a method."""

from hedgerow.strategies.parts.compression import CompressedChanges, ErrorFeedback
from hedgerow.strategies.parts.part import Part

__all__ = ["CompressedChanges", "ErrorFeedback", "Part"]
