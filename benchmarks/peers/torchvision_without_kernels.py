"""Imports torchvision where its compiled operators do not load (PyPI's build beside a CPU-only torch).

fluke needs torchvision's data sets and model classes to be importable, none of its operators. torchvision
describes its operators to torch on import, which fails where they are not there: they are left out.
"""

import torch

_register = torch.library.register_fake
torch.library.register_fake = lambda *_, **__: lambda function: function
try:
    import torchvision  # noqa: F401
finally:
    torch.library.register_fake = _register
