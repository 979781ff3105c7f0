"""Arrays that no training changes, on a node."""

import pytest
import torch

from hedgerow.clients.frozen import check_unchanged


def usable(dtype: torch.dtype) -> bool:
    """Return whether this torch makes and copies tensors of a dtype."""
    try:
        torch.zeros(3, dtype=dtype).clone().to("cpu")
    except (RuntimeError, NotImplementedError):
        return False
    return not str(dtype).startswith(("torch.q", "torch.bits"))


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype) and usable(d)}, key=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 2)], ids=str)
def test_an_array_of_any_dtype_is_unchanged_unless_a_bit_of_it_is(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    width = torch.zeros(1, dtype=dtype).view(torch.uint8).numel()
    # All bits set is NaN in every floating-point dtype, which is not equal to itself.
    fill = 1 if dtype is torch.bool else 255
    size = int(torch.tensor(shape).prod()) * width
    value = torch.full((size,), fill, dtype=torch.uint8).view(dtype).reshape(shape)
    check_unchanged({"w": value}, {"w": value.clone()})
    if size:
        changed = value.clone()
        changed.reshape(-1).view(torch.uint8)[-1] = 0
        with pytest.raises(ValueError, match="training must leave 'w' as it is"):
            check_unchanged({"w": value}, {"w": changed})
