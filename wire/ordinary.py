"""How large and small the inputs of a formula may be, so that its powers and quotients stay in float64."""

from hedgerow.wire.checks import is_real, require

SMALLEST, LARGEST = 1e-18, 1e18
ORDINARY = f"0, or a number whose size is from {SMALLEST:g} to {LARGEST:g}"


def is_ordinary(value: float) -> bool:
    """Whether a number is 0 or of such a size; NaN is not."""
    return is_real(value) and (value == 0 or SMALLEST <= abs(value) <= LARGEST)


def check_ordinary(**numbers: float) -> None:
    """Raise ValueError unless each number is ordinary."""
    for key, value in numbers.items():
        require(key, value, ORDINARY, is_ordinary(value))
