"""What hospitals, devices and edges of HSGD and the server call the same things."""

__all__ = ["CALIBRATION_BINS", "EVALUATED", "INTRODUCTIONS", "MALFORMED", "REFUSED", "ROLES"]

ROLES = ("hospital", "device", "edge")
# Records beside a message and in an answer, where links are sealed.
INTRODUCTIONS, REFUSED = "introductions", "refused"
# What sealed encodings of evaluated people are called, none of which are training's.
EVALUATED = "evaluated-zeta2"
# Why a share is refused that was sealed by its sender, and is not what was agreed on.
MALFORMED = "malformed contents"
# Bins of the probability of the predicted class, where people are evaluated.
CALIBRATION_BINS = 15
