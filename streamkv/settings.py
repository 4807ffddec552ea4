"""What a setting is, and how its value is found: flag, variable or file; checked, or refused by name.

Knows no setting itself: config.py declares them as structs whose fields are `Annotated[type, Rule(...)]`.
"""

import difflib
import functools
import math
import shutil
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import msgspec

from streamkv.errors import ConfigError

Value = str | int | float | bool
Kind = type[msgspec.Struct]

ENV_PREFIX = "STREAMKV_"
OTHER_VARIABLES = frozenset(
    {
        "STREAMKV_CONFIG",
        "STREAMKV_CACHE",
        "STREAMKV_API_KEY",
        "STREAMKV_API_KEYS",
        "STREAMKV_EXIT_WITH_PARENT",
    }
)
"""Variables of ours that are no setting: the file, the cache folder, our clients' key, a gateway's keys, and what a
supervisor tells."""


class Rule(NamedTuple):
    """What a setting's declaration says besides its type and default. A bound of None is none."""

    group: str
    """The heading under which help lists it."""
    text: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None


class Setting(NamedTuple):
    """One field of a struct, as flags, variables, files and help see it."""

    name: str
    kind: type
    """str, int, float or bool."""
    choices: tuple[str, ...]
    """Of text that has a closed list of values; otherwise empty."""
    rule: Rule
    default: Value

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """What is allowed, in words that can follow `must be`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else "text"
        number = "a whole number" if self.kind is int else "a number"
        if self.rule.gt is not None:
            return f"{number} over {_digits(self.rule.gt)} and at most {_digits(self.rule.le)}"
        return f"{number} from {_digits(self.rule.ge)} to {_digits(self.rule.le)}"

    def as_flag(self, value: Value) -> str:
        """The one command-line word that sets it."""
        if self.kind is bool:
            return self.flag if value else self.off_flag
        return f"{self.flag}={value}"

    def checked(self, value: object, key: str, where: str = "") -> Value:
        """The value, when it has the right type and keeps the rule. `key` is its name as the user wrote it."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind or not self._allows(value):
            near = _near(value, self.choices) if isinstance(value, str) else ""
            raise ConfigError(key, f"must be {self.allowed}, got {value!r}{near}{where}")
        assert isinstance(value, str | int | float)
        return value

    def from_text(self, text: str, key: str) -> Value:
        """A flag's or a variable's text → its value. Raises ConfigError."""
        value: Value = text
        try:
            if self.kind is bool:
                value = _BOOLS.get(text.lower(), text)
            elif self.kind is not str:
                value = self.kind(text)
        except ValueError:
            pass  # checked() says what is allowed instead
        return self.checked(value, key)

    def _allows(self, value: object) -> bool:
        if self.choices:
            return value in self.choices
        if isinstance(value, str | bool):
            return True
        ge, gt, le = self.rule.ge, self.rule.gt, self.rule.le
        return (
            isinstance(value, int | float)
            and math.isfinite(value)
            and (ge is None or value >= ge)
            and (gt is None or value > gt)
            and (le is None or value <= le)
        )


_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _digits(number: float | None) -> str:
    if number is None:
        return "any"
    return str(int(number)) if number == int(number) else repr(number)


@functools.cache
def settings(kind: Kind) -> Mapping[str, Setting]:
    """A struct's fields by name, in the order in which they are declared."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(kind):
        plain, rule = get_args(hints[field.name])
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        found[field.name] = Setting(field.name, str if choices else plain, choices, rule, field.default)
    return found


def merged(kinds: Iterable[Kind]) -> dict[str, Setting]:
    """The settings of several structs; one that two have counts once, as the first declares it."""
    found: dict[str, Setting] = {}
    for kind in kinds:
        for name, setting in settings(kind).items():
            found.setdefault(name, setting)
    return found


def check(struct: msgspec.Struct) -> None:
    """Hold every field of a settings struct to its rule. Raises ConfigError with the field's name."""
    for name, value in msgspec.structs.asdict(struct).items():
        settings(type(struct))[name].checked(value, name)


def choose(
    kinds: Sequence[Kind], processes: Mapping[str, Kind], argv: Sequence[str], environ: Mapping[str, str]
) -> list[dict[str, Value]]:
    """The values given for each of `kinds`, by precedence; fields that nobody gave are left out.

    processes: every process's table in the file and its struct, so that a setting of another process is known
    as such. Prints help and raises SystemExit(0) for --help. Raises ConfigError.
    """
    known = merged(kinds)
    flags, path = _from_flags(known, processes, argv)
    variables = _from_environ(known, processes, environ)
    in_file = _from_file(kinds, processes, path or environ.get("STREAMKV_CONFIG", ""))
    given = variables | flags
    return [
        values | {name: value for name, value in given.items() if name in settings(kind)}
        for kind, values in zip(kinds, in_file, strict=True)
    ]


def _from_flags(
    known: Mapping[str, Setting], processes: Mapping[str, Kind], argv: Sequence[str]
) -> tuple[dict[str, Value], str]:
    """Values by name, and the path given with --config. The last of a repeated flag counts."""
    by_flag = {setting.flag: setting for setting in known.values()}
    by_off_flag = {setting.off_flag: setting for setting in known.values() if setting.kind is bool}
    chosen: dict[str, Value] = {}
    path = ""
    words = list(reversed(argv))
    while words:
        word = words.pop()
        if word in ("-h", "--help"):
            print(settings_help(known.values()))
            raise SystemExit(0)
        flag, equals, text = word.partition("=")
        setting = by_flag.get(flag)
        if flag in by_off_flag and not equals:
            chosen[by_off_flag[flag].name] = False
        elif setting is not None and setting.kind is bool and not equals:
            chosen[setting.name] = True
        elif setting is None and flag != "--config":
            _refuse_flag(flag, [*by_flag, *by_off_flag, "--config", "--help"], processes)
        else:
            if not equals:
                if not words or words[-1].startswith("--"):
                    raise ConfigError(flag, f"needs a value: {setting.allowed if setting else 'path of a TOML file'}")
                text = words.pop()
            if setting is None:
                path = text
            else:
                chosen[setting.name] = setting.from_text(text, flag)
    return chosen, path


def _refuse_flag(flag: str, allowed: Sequence[str], processes: Mapping[str, Kind]) -> NoReturn:
    if not flag.startswith("-"):
        raise ConfigError(repr(flag), "is no flag; settings are given as --name VALUE (see --help)")
    for process, kind in processes.items():
        if flag in {setting.flag for setting in settings(kind).values()}:
            raise ConfigError(flag, f"is a setting of the {process}, not of this process (see --help)")
    raise ConfigError(flag, f"no such flag{_near(flag.replace('_', '-'), allowed)} (see --help)")


def _from_environ(
    known: Mapping[str, Setting], processes: Mapping[str, Kind], environ: Mapping[str, str]
) -> dict[str, Value]:
    """An empty variable counts as not set. A name of nobody's is refused when it looks like a slip, and ignored
    otherwise: Kubernetes, for one, adds variables of its own for a service called streamkv."""
    ours = {setting.variable for setting in merged(processes.values()).values()} | OTHER_VARIABLES
    for name in environ:
        if name.startswith(ENV_PREFIX) and name not in ours and (near := _near(name, ours, closeness=0.85)):
            raise ConfigError(name, "no such setting" + near)
    return {
        setting.name: setting.from_text(environ[setting.variable], setting.variable)
        for setting in known.values()
        if environ.get(setting.variable)
    }


def _from_file(kinds: Sequence[Kind], processes: Mapping[str, Kind], path: str) -> list[dict[str, Value]]:
    """Each struct's values. Names are checked in the whole file, values where they are used."""
    if not path:
        return [{} for _ in kinds]
    where = f" (in {path})"
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--config", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("--config", f"{path} is not valid TOML: {error}") from error
    tables = {process: content.pop(process) for process in processes if process in content}
    _check_names("", content, [*merged(processes.values()), *processes], where)
    for process, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(process, f"must be a table, [{process}]{where}")
        _check_names(process + ".", table, list(settings(processes[process])), where)
    chosen: list[dict[str, Value]] = []
    for kind in kinds:
        process = next(name for name, of in processes.items() if of is kind)
        known = settings(kind)
        at_top = {name: known[name].checked(v, name, where) for name, v in content.items() if name in known}
        own = tables.get(process, {}).items()
        chosen.append(at_top | {name: known[name].checked(v, f"{process}.{name}", where) for name, v in own})
    return chosen


def _check_names(prefix: str, given: Iterable[str], allowed: Sequence[str], where: str) -> None:
    for name in given:
        if name not in allowed:
            raise ConfigError(prefix + name, f"no such setting{_near(name.replace('-', '_'), allowed)}{where}")


def _near(name: str, allowed: Iterable[str], closeness: float = 0.6) -> str:
    near = difflib.get_close_matches(name, sorted(allowed), n=3, cutoff=closeness)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def settings_help(known: Iterable[Setting]) -> str:
    """The settings as --help shows them: by group, wrapped to the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    lines: list[str] = []
    for group, members in by_group(known).items():
        lines += [f"{group}:", *(line for setting in members for line in _help_entry(setting, width)), ""]
    lines += ["Every flag has a variable and a file key: --block-size 32 is STREAMKV_BLOCK_SIZE=32, and in the TOML"]
    lines += ["file named by --config FILE or STREAMKV_CONFIG it is block_size = 32, at the top or in the table"]
    lines += ["[engine] or [gateway]. A flag wins over a variable, that over the file."]
    return "\n".join(lines)


def by_group(known: Iterable[Setting]) -> dict[str, list[Setting]]:
    """Settings under their headings, both in the order in which they are declared."""
    groups: dict[str, list[Setting]] = {}
    for setting in known:
        groups.setdefault(setting.rule.group, []).append(setting)
    return groups


def _help_entry(setting: Setting, width: int) -> list[str]:
    indent = 32
    if setting.kind is bool:
        flag, default, allowed = f"{setting.flag}, {setting.off_flag}", "on" if setting.default else "off", ""
    else:
        value = "|".join(setting.choices) or {str: "TEXT", int: "N", float: "X"}[setting.kind]
        flag, default = f"{setting.flag} {value}", str(setting.default) or "empty"
        allowed = "" if setting.kind is str else f"; {setting.allowed}"
    wrapped = textwrap.wrap(f"{setting.rule.text}{allowed} (default: {default})", max(width - indent, 30))
    head = f"  {flag}".ljust(indent)
    if len(head) > indent or head[-1] != " ":
        return [head, *(" " * indent + line for line in wrapped)]
    return [head + wrapped[0], *(" " * indent + line for line in wrapped[1:])]
