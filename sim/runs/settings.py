"""An app's settings as a pydantic model: each field has a default, a range, one sentence of help and a role.

From the model follow the check of a whole run config before any work starts (one error that lists every bad
key, its value and what it must be), typed values, ``hedgerow settings`` and the files of ``settings_files``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from flwr.app import UserConfigValue
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from hedgerow.sim.runs.kinds import Kind, choice, text
from hedgerow.wire.checks import did_you_mean, plain_name
from hedgerow.wire.limits import MAX_SAMPLES, MAX_STEPS
from hedgerow.wire.printable import quoted, reason, shown

# Conditions between settings: whether one holds, a key, and what its value must be. Without a key the text is
# the whole message.
Rules = Iterator[tuple[bool, str, str]]
# In display order.
GROUPS = ("method", "data", "training", "privacy", "robustness", "deployment", "run")

# Names of keys in other libraries and papers (by ``plain_name``), and the keys here, the likeliest first.
_LENGTHS = ("num-rounds", "iterations", "num-server-rounds")
_SYNONYMS: Sequence[tuple[Sequence[str], Sequence[str]]] = (
    (("lr", "stepsize", "eta"), ("learning-rate", "lr", "fixed-c", "inner-lr")),
    (("epochs", "numepochs", "localepochs"), ("local-epochs", "local-iters", "local-steps", *_LENGTHS)),
    (("localsteps", "steps"), ("local-steps", "local-iters", "tau1", "local-interval", *_LENGTHS)),
    (("rounds", "numrounds", "numserverrounds", "iterations", "iters"), _LENGTHS),
    (("clients", "nodes", "numnodes", "workers", "numsupernodes"), ("num-clients",)),
    (("servers", "edges", "numedges"), ("num-servers",)),
    (("bs", "batch"), ("batch-size",)),
    (("data",), ("dataset",)),
    (("randomseed", "randomstate"), ("seed",)),
)


class SettingsError(ValueError):
    """One or more settings are invalid; the message lists them all."""


class Role(StrEnum):
    """How a setting affects a run's results."""

    # Determines what a round does: must not change when a run is resumed or kept as finished.
    RESULTS = "decides results"
    # Finished rounds do not depend on it; later rounds may.
    RESUME = "may change on resume"
    # Where a run is computed and stored.
    IRRELEVANT = "irrelevant to results"
    # Affects the bits of results, but does not distinguish experiments.
    REPETITION = "not part of the experiment"

    @property
    def may_change(self) -> bool:
        """Whether a run may be resumed with another value."""
        return self in (Role.RESUME, Role.IRRELEVANT)

    @property
    def is_experiment(self) -> bool:
        """Whether runs with different values are different experiments."""
        return self in (Role.RESULTS, Role.RESUME)


@dataclass(frozen=True)
class Setting:
    """One key of a run config.

    Parameters
    ----------
    default : bool, int, float or str
        Its default value.
    kind : Kind
        Its valid values.
    help : str
        One sentence of markdown.
    role : Role (default: ``Role.RESULTS``)
        How it affects results.
    group : str (default: "method")
        One of ``GROUPS``.
    first : bool (default: False)
        Whether it is among the few most important ones, which are shown first.
    own_data : bool or None (default: None)
        Whether only runs with ``partition = "own"`` read it (True), only others (False), or both (None).
    """

    default: UserConfigValue
    kind: Kind
    help: str
    role: Role = Role.RESULTS
    group: str = "method"
    first: bool = False
    own_data: bool | None = None


def setting(
    default: UserConfigValue,
    help: str | None = None,
    group: str | None = None,
    *,
    role: Role | None = None,
    first: bool | None = None,
    own_data: bool | None = None,
) -> Any:
    """Return a field of an ``AppSettings``; parameters as in ``Setting``.

    A subclass's field inherits omitted parameters from its base's. The default group is the class's
    ``GROUP``.
    """
    options: dict[str, Any] = {"group": group, "role": role, "first": first, "own_data": own_data}
    given = {key: value for key, value in options.items() if value is not None}
    return Field(default, description=help, json_schema_extra=given)


class AppSettings(BaseModel):
    """Settings of an app, or shared by apps; a key is a field's name with dashes."""

    model_config = ConfigDict(
        strict=True, frozen=True, alias_generator=lambda name: name.replace("_", "-"), protected_namespaces=()
    )

    GROUP: ClassVar[str] = "method"
    # Valid texts, in words and as a check, of fields that are declared in a module that cannot know them.
    TEXTS: ClassVar[Mapping[str, tuple[str, Callable[[str], object]]]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        # pydantic reports an integer beyond the range of float with another error than ValidationError.
        if isinstance(value, int) and value.bit_length() > 1000:
            raise ValueError
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _valid(cls, value: Any, info: ValidationInfo) -> Any:
        cls.table()[str(info.field_name).replace("_", "-")].kind.check(value)
        return value

    @classmethod
    @cache
    def table(cls) -> Mapping[str, Setting]:
        """Return every setting by key, ordered by group, then by importance, then the class's own first."""
        own = list(cls.__annotations__)
        found = {
            name.replace("_", "-"): cls._setting(name)
            for name in dict.fromkeys((*own, *cls.model_fields))
            if name in cls.model_fields
        }
        return dict(sorted(found.items(), key=lambda item: (GROUPS.index(item[1].group), not item[1].first)))

    @classmethod
    def _setting(cls, name: str) -> Setting:
        bases = [base for base in cls.__mro__ if issubclass(base, AppSettings) and name in base.model_fields]
        fields = [base.model_fields[name] for base in bases]
        options: dict[str, Any] = {"group": vars(bases[-1]).get("GROUP", AppSettings.GROUP)}
        for field in reversed(fields):
            options |= field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        return Setting(
            fields[0].default,
            cls._kind(name, fields),
            next((field.description for field in fields if field.description), ""),
            options.get("role", Role.RESULTS),
            options["group"],
            options.get("first", False),
            options.get("own_data"),
        )

    @classmethod
    def _kind(cls, name: str, fields: Sequence[FieldInfo]) -> Kind:
        for field in fields:
            if kinds := [one for one in field.metadata if isinstance(one, Kind)]:
                return kinds[0]
            if get_origin(field.annotation) is Literal:
                return choice(*get_args(field.annotation))
        if fields[0].annotation is bool:
            return Kind("true or false", (False, True))
        if fields[0].annotation is not str:
            raise TypeError(f"{cls.__name__}.{name} must declare its valid values")
        valid, check = cls.TEXTS.get(name.replace("_", "-"), ("a text", lambda _: None))
        return text(valid, check)

    @classmethod
    def defaults(cls) -> dict[str, UserConfigValue]:
        """Return each setting's default by key."""
        return {key: one.default for key, one in cls.table().items()}

    @classmethod
    def read(cls, run_config: Mapping[str, UserConfigValue]) -> Self:
        """Return the checked values; the engine's keys ``fault-…`` are ignored.

        Raises
        ------
        SettingsError
            With every bad, missing or unknown key, its value and what it must be.
        """
        values, problems = cls.checked_alone(run_config)
        refuse(list(problems.values()))
        assert values is not None
        values.hold(*values.rules())
        return values

    @classmethod
    def key_problems(
        cls, run_config: Mapping[str, UserConfigValue], besides: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the error of each bad key, except ``besides``, ignoring ``rules``."""
        return {
            key: problem for key, problem in cls.checked_alone(run_config)[1].items() if key not in besides
        }

    @classmethod
    def checked_alone(cls, run_config: Mapping[str, UserConfigValue]) -> tuple[Self | None, dict[str, str]]:
        """Return the values (None if any is bad) and the error of each bad key, without ``rules``."""
        table = cls.table()
        values, wrong = None, set[str]()
        try:
            values = cls.model_validate({key: value for key, value in run_config.items() if key in table})
        except ValidationError as error:
            wrong = {str(one["loc"][0]) for one in error.errors()}
        problems = {
            key: _problem(key, run_config[key], table[key].kind)
            if key in wrong
            else f"{key} must be {table[key].kind.valid}, got none"
            for key in table
            if key in wrong or key not in run_config
        }
        problems |= {
            key: unknown_key(key, run_config[key], table)
            for key in sorted(set(run_config) - set(table))
            if not key.startswith("fault-")
        }
        return values, problems

    @property
    def run_config(self) -> dict[str, UserConfigValue]:
        """The values by key."""
        return self.model_dump(by_alias=True)

    def of(self, key: str) -> Any:
        """Return the value of a key."""
        return getattr(self, key.replace("-", "_"))

    def rules(self) -> Rules:
        """Yield the conditions between values that are each valid."""
        yield from ()

    def hold(self, *rules: tuple[bool, str, str]) -> None:
        """Raise one SettingsError that lists each rule that does not hold."""
        wrong = [(key, valid) for holds, key, valid in rules if not holds]
        refuse([_must_be(key, valid, self.of(key)) if key else valid for key, valid in wrong])

    def at_most(self, key: str, most: str) -> tuple[bool, str, str]:
        """Return the rule that one value is at most another."""
        return self.of(key) <= self.of(most), key, f"at most {most} = {self.of(most)}"

    def both_or_neither(self, clip: str, noise: str) -> tuple[bool, str, str]:
        """Return the rule that a noise multiplier and its clipping norm are both > 0 or both 0."""
        bound = self.of(clip)
        return bool(bound) == bool(self.of(noise)), noise, f"{'> 0' if bound else '0'} with {clip} = {bound}"

    def usual(self, where: str, *keys: str) -> Rules:
        """Yield the rule that each key has its default; ``where`` says under which condition."""
        for key in keys:
            usual = self.table()[key].default
            yield self.of(key) == usual, key, f"{usual!r} {where}"


def _must_be(key: str, valid: str, value: UserConfigValue, because: str = "") -> str:
    return f"{key} must be {valid}, got {quoted(value)}{because}"


def _problem(key: str, value: UserConfigValue, kind: Kind) -> str:
    because = ""
    if isinstance(value, str):
        try:
            kind.check(value)
        except ValueError as error:
            because = f" ({shown(error, 300)})" if str(error) else ""
    return _must_be(key, kind.valid, value, because)


def refuse(problems: Sequence[str], cause: Exception | None = None) -> None:
    """Raise one SettingsError with all problems, if there are any."""
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise SettingsError(f"Bad settings:\n{lines}") from cause


def check_node_keys(configs: Sequence[Mapping[str, UserConfigValue]], known: Sequence[str]) -> None:
    """Raise SettingsError if a node's config has a key that no node of an app reads."""
    unknown = {key: value for config in configs for key, value in config.items() if key not in known}
    problems = []
    for key, value in unknown.items():
        meant = did_you_mean(key, known)
        problems.append(
            f"{shown(key)} = {quoted(value)} is not a key of a node config{f' ({meant})' if meant else ''}; "
            f"valid keys: {', '.join(known)}"
        )
    refuse(problems)


def check_work(said: str, steps: int, samples: int) -> None:
    """Raise SettingsError if nodes would refuse this many local steps or epochs of this many samples each.

    ``said`` names the settings and their values.
    """
    most = max(1, min(MAX_STEPS, MAX_SAMPLES // samples))
    if steps > most:
        refuse([f"{said} must be at most {most} steps of {samples} samples, drawn at once, got {steps}"])


def meant_key(key: str, known: Iterable[str]) -> str:
    """Return a suggestion ("did you mean …?") for an unknown run-config key; "" if there is none."""
    keys = list(known)
    for names, meant in _SYNONYMS:
        if plain_name(key) in names and (there := [one for one in meant if one in keys]):
            return f"did you mean {there[0]!r}?"
    return did_you_mean(key, keys)


def unknown_key(key: str, value: object, settings: Mapping[str, object]) -> str:
    """Return the error for an unknown key."""
    meant = meant_key(key, settings)
    return (
        f"{shown(key)} = {quoted(value)} is not a setting of this app{f' ({meant})' if meant else ''}; "
        f"valid keys: {', '.join(sorted(settings))}"
    )


@contextmanager
def as_settings_errors() -> Iterator[None]:
    """Raise errors of the library as SettingsError while it builds what the settings describe."""
    try:
        yield
    except SettingsError:
        raise
    except (ValueError, OSError, OverflowError, ZeroDivisionError, MemoryError) as error:
        refuse([reason(error) or type(error).__name__], error)
