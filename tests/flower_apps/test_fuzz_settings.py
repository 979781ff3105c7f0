"""Whatever a user writes into a run config is either run, or refused by one error that says what is valid."""

import math
import random
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from tests.flower_apps.cases import CASES, AppCase

from hedgerow.sim import SettingsError, plan_run
from hedgerow.sim.runs.kinds import MAX_INT64
from hedgerow.sim.runs.plan import toml_text

INTEGERS = (
    *(0, 1, -1, 2, 3, 5, 7, 10, 16, 17, 50, 100, 1000, 2**20, 2**31),
    *(MAX_INT64, 2**63, -(2**63), 10**400),
)
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 0.1, 0.999999, 1.0000001, 2.0, 17.5, 1e-5, 1e-9, 1e9, 1e-30, 1e30),
    *(1e200, 1e308, 1e-300, 5e-324, math.inf, -math.inf, math.nan),
)
TEXTS = (
    *("", " ", "x", "x:", ":", "os:sep", "os.path:join", "math:sqrt", "nomodule:f", "~nosuchuser"),
    *(
        "\x00",
        "\x1b[2J",
        "a\nb",
        "\u202e",
        "\udc80",
        "größer",
        "🌱",
        "x" * 10_000,
        "/dev/null",
        "/dev/null/x",
    ),
    *("auto", "none", "cuda:99999999999999999999", "cuda:٣", "meta", "iid", "ring", "ring(2)", "labels(3)"),
)
ARGUMENTS = (
    *("", "0", "-1", "1", "2", "3", "0.4", "1e308", "nan", "inf", "1,2", "2,8", "a,b", "9" * 400, "(", "²"),
)
NAMES = (
    *("dirichlet", "capped-dirichlet", "shards", "labels", "ring", "iid", "pairs", "rates", "regular"),
    *("erdos-renyi", "geometric", "torus", "complete", "star", "topk", "randk", "auto", "fixed"),
)
# Beyond it a scheme may draw for minutes before it gives up, as it says.
MOST_NODES = 64


def near(rng: random.Random, word: str) -> str:
    place = rng.randrange(len(word) + 1)
    return rng.choice((word[:place] + word[place + 1 :], word[:place] + "x" + word[place:], word.upper()))


def text(rng: random.Random, valid: str) -> str:
    match rng.randrange(5):
        case 0:
            return rng.choice(TEXTS)
        case 1 | 2:
            return f"{rng.choice(NAMES)}({rng.choice(ARGUMENTS)})"
        case 3:
            return f"{rng.choice(NAMES)}{rng.choice((':', '(', ''))}{rng.choice(ARGUMENTS)}"
        case _:
            words = valid.replace("'", "").replace(",", " ").split()
            word = rng.choice(words)
            return word if rng.random() < 0.5 else near(rng, word)


def value(rng: random.Random, default: Any, valid: str) -> Any:
    if rng.random() < 0.1:
        default = rng.choice((True, 1, 1.0, ""))
    if isinstance(default, bool):
        return rng.random() < 0.5
    if isinstance(default, int):
        return rng.choice(INTEGERS) if rng.random() < 0.7 else rng.randrange(1, 40)
    if isinstance(default, float):
        return rng.choice(FLOATS) if rng.random() < 0.7 else rng.random()
    return text(rng, valid)


def draws(case: AppCase, seed: int, count: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"{case.name}-{seed}")
    keys = list(case.settings.SETTINGS)
    for number in range(count):
        # Each key in turn, mostly alone: of many wild values one is refused.
        chosen = {keys[number % len(keys)], *rng.choices(keys, k=rng.choice((0, 0, 1, 2)))}
        method = {case.method: rng.choice(case.methods)}
        changes = {
            key: value(rng, setting.default, setting.kind.valid)
            for key, setting in case.settings.SETTINGS.items()
            if key in chosen
        }
        yield {**case.small, **method, **changes}


def check(case: AppCase, changes: dict[str, Any]) -> bool:
    """Return whether it would run; all is built but the run itself."""
    experiment = import_module(f"{case.name}.server_app").experiment
    try:
        values = case.settings.read({**case.defaults, **changes})
        if values.num_clients > MOST_NODES:
            return True
        experiment(values)
    except SettingsError as error:
        first, *problems = str(error).splitlines()
        clear = first == "Bad settings:" and problems and all(len(problem) < 1500 for problem in problems)
        if not clear or not str(error).replace("\n", "").isprintable():
            raise AssertionError("not one clear error") from error
        return False
    return True


def run_of(case: AppCase, seed: int, count: int) -> None:
    ran = 0
    for changes in draws(case, seed, count):
        try:
            ran += check(case, changes)
        except BaseException:
            print({key: changes[key] if len(repr(changes[key])) < 200 else "…" for key in changes})
            raise
    assert 0 < ran < count


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_wild_settings_run_or_are_one_clear_error(case: AppCase) -> None:
    run_of(case, seed=0, count=100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 3))
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_many_wild_settings_run_or_are_one_clear_error(case: AppCase, seed: int) -> None:
    run_of(case, seed, count=1000)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_wild_settings_on_the_command_line_are_one_clear_error(case: AppCase, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "wild.toml"
    for changes in draws(case, seed=9, count=30):
        writable = {k: v for k, v in changes.items() if not (isinstance(v, str) and "\udc80" in v)}
        file.write_text(toml_text(writable), encoding="utf-8")
        try:
            plan_run(case.spec, [str(file)])
        except ValueError as error:
            said = str(error)
        else:
            said = ""
        assert said.replace("\n", "").isprintable()
