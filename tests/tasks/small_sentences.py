"""Makes tasks/sentences_small.npz of the four published files: ``python -m tests.tasks.small_sentences DIR``.

1,000 sentences of each source at random, in ids of their 1,999 most frequent words; id 0 is every other word.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from hedgerow.tasks.text import CLASSES, read_rated, words

_PER_SOURCE, _WORDS, _LENGTH = 1000, 2000, 48


def small_sentences(folder: Path) -> dict[str, Any]:
    """Return the arrays of the file: ids of all rows, one after the other, their lengths, labels, sources."""
    sentences, ratings, sources = read_rated(folder)
    labels = np.digitize(ratings, (-0.5, 0.5))
    assert len(CLASSES) == 3
    rng = np.random.default_rng(5_000)
    names, number = np.unique(sources, return_inverse=True)
    chosen = np.concatenate(
        [rng.permutation(np.flatnonzero(number == at))[:_PER_SOURCE] for at in range(names.size)]
    )
    rows = [words(sentences[at])[:_LENGTH] for at in chosen]
    # Ties in the order of the words, so that the ids are the same everywhere.
    counted = sorted(Counter(word for row in rows for word in row).items(), key=lambda one: (-one[1], one[0]))
    ids = {word: at for at, (word, _) in enumerate(counted[: _WORDS - 1], 1)}
    return {
        "ids": np.array([ids.get(word, 0) for row in rows for word in row], np.uint16),
        "lengths": np.array([len(row) for row in rows], np.uint8),
        "labels": labels[chosen].astype(np.uint8),
        "sources": number[chosen].astype(np.uint8),
    }


if __name__ == "__main__":
    np.savez_compressed(Path("tasks/sentences_small.npz"), **small_sentences(Path(sys.argv[1])))
