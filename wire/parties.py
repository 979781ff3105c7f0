"""Names shared by HSGD's parties and the server."""

ROLES = ("hospital", "device", "edge")
# Records of a message and of a reply on sealed links.
INTRODUCTIONS, REFUSED = "introductions", "refused"
# The name of sealed encodings for evaluation, different from that for training.
EVALUATED = "evaluated-zeta2"
# Why a share with a valid seal is refused.
MALFORMED = "malformed contents"
# Bins of the probability of the predicted class in an evaluation.
CALIBRATION_BINS = 15
