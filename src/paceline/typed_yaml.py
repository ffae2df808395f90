"""Reads a YAML file plus ``section.key=value`` overrides into a typed struct, and knows where every key was set.

Scalars follow YAML 1.2: ``5e-4`` is a number, ``true`` and ``false`` alone are truth values, ``no`` is text.
"""

import difflib
import importlib
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import yaml

from paceline.files import FileReadError, expanded, named, read_text
from paceline.schema import PacelineError
from paceline.terminal import printable

#: Largest configuration that is read, in bytes.
MAX_BYTES = 1 << 20
# Most values in it, where each alias counts as what it stands for.
_MAX_VALUES = 20_000
# Longer than any integer of 64 bits in any notation that YAML has.
_MAX_INTEGER_CHARS = 80
StructT = TypeVar("StructT", bound=msgspec.Struct)


class ConfigError(PacelineError, ValueError):
    """A setting that cannot be honoured; the message is one line."""


_TAG = "tag:yaml.org,2002:"
_KINDS = {"bool", "int", "float", "null", "str", "seq", "map", "merge"}
#: What plain text a kind of scalar has, an explicit tag or not.
_PATTERNS: dict[str, re.Pattern[str]] = {}


def _at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2's plain scalars."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  declared by the base class

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of ``node``; a tag that no setting has, or that its text does not fit, is an error of YAML."""
        kind = node.tag.removeprefix(_TAG)
        if kind == node.tag or kind not in _KINDS:
            raise _at(node, f"the tag {printable(node.tag, 80)}, and settings are plain: remove it")
        if isinstance(node, yaml.ScalarNode):
            pattern = _PATTERNS.get(kind)
            if pattern is not None and pattern.fullmatch(node.value) is None:
                raise _at(node, f"{printable(repr(node.value), 80)} is no {kind}")
            if not node.value.isascii() and any("\ud800" <= char <= "\udfff" for char in node.value):
                raise _at(node, f"{printable(repr(node.value), 80)} holds half of a character")
        return super().construct_object(node, deep)


class _Dumper(yaml.SafeDumper):
    """The safe dumper; quotes text that either YAML 1.1 or 1.2 would read as something else."""


_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", ["<"]),
):
    _PATTERNS[_tag] = re.compile(_pattern)
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"{_TAG}{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def load(kind: type[StructT], path: str | Path | None, overrides: Sequence[str]) -> StructT:
    """A ``kind`` from the file at ``path`` (None: only defaults) and overrides of the form ``section.key=value``.

    Raises ConfigError with one line for anything that cannot be honoured, an unreadable file included.
    """
    tree: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if path is not None:
        tree = _read_file(expanded(path), origin)
    for override in overrides:
        _apply_override(tree, override, origin)
    built = _Builder(kind, origin).build(kind, tree, "")
    assert isinstance(built, kind)
    return built


def convert(kind: type[StructT], tree: dict[str, Any], place: str) -> StructT:
    """A ``kind`` from a tree of plain values that was found at ``place``. Raises ConfigError as ``load`` does."""
    built = _Builder(kind, {"": place}).build(kind, tree, "")
    assert isinstance(built, kind)
    return built


def dump(tree: dict[str, Any]) -> str:
    """``tree`` as YAML text that ``load`` reads back to the same values."""
    options: Any = {"Dumper": _Dumper, "sort_keys": False, "default_flow_style": None, "width": 120}
    text: str = yaml.dump(tree, allow_unicode=True, **options)
    # What a terminal would act on is written as YAML's own escapes.
    return (
        text if text == printable(text, None, keep_lines=True) else str(yaml.dump(tree, allow_unicode=False, **options))
    )


def known_keys(kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Every dotted key of ``kind``; a name that the user chooses is written ``*``."""
    keys = []
    for name, hint in typing.get_type_hints(kind).items():
        inner, dotted = _without_none(hint), f"{prefix}{name}"
        keys.append(dotted)
        if _is_struct(inner):
            keys += known_keys(inner, f"{dotted}.")
        elif element := _named_struct(inner):
            keys += known_keys(element, f"{dotted}.*.")
    return keys


def load_by_path(path: str, what: str = "class") -> Any:
    """The callable that a setting names as ``module:name``, found from the working directory too.

    Raises ConfigError in one line where there is none; ``what`` says what was wanted.
    """
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's own module runs here; the cause stays attached
        raise ConfigError(f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        known = [entry for entry in vars(module) if not entry.startswith("_")]
        raise ConfigError(f"module {module_name} has no {what} {name!r}{nearest(name, known)}")
    return getattr(module, name)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: the one that looks most like it, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(names)}" if names else "; it knows none"


def _read_file(path: Path, origin: dict[str, str]) -> dict[str, Any]:
    try:
        text = read_text(path, MAX_BYTES)
    except FileReadError as error:
        raise ConfigError(str(error)) from None
    value = _parse(text, "", lambda line: f"{named(path)}:{line}", origin)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{named(path)}:1: the file must be a mapping of sections, such as 'policy:'")
    return value


def _parse(text: str, key: str, place: Callable[[int], str], origin: dict[str, str]) -> Any:
    """The value of a YAML text; notes in ``origin`` where each key below ``key`` stands."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        for dotted, line in _walk(node, f"{key}." if key else "", place, (), itertools.count(1)):
            origin[dotted] = place(line)
        return None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{place(line)}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place(1)}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{place(1)}: not valid YAML: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # an explicit tag on text that does not fit it, such as !!int abc
        raise ConfigError(f"{place(1)}: not valid YAML: {error}") from None


def _walk(
    node: yaml.Node | None,
    prefix: str,
    place: Callable[[int], str],
    above: tuple[yaml.Node, ...],
    values: Iterator[int],
) -> Iterator[tuple[str, int]]:
    """Every key of nested mappings with its line; a key set twice or an alias to its own parent is refused.

    So is a text that aliases make larger than any configuration: ``values`` counts what was walked.
    """
    if node is None:
        return
    if next(values) > _MAX_VALUES:
        raise ConfigError(
            f"{place(node.start_mark.line + 1)}: more than {_MAX_VALUES} values, aliases counted; shorten it"
        )
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > _MAX_INTEGER_CHARS:
            raise ConfigError(
                f"{place(node.start_mark.line + 1)}: an integer of {len(node.value)} characters; 64 bits is all"
            )
        return
    if node in above:
        raise ConfigError(
            f"{place(node.start_mark.line + 1)}: an alias points at what contains it; write the value out"
        )
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            # Keys inside a list have no dotted name of their own, yet one set twice is refused all the same.
            list(_walk(item, prefix, place, above, values))
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        dotted, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if dotted in seen:
            raise ConfigError(f"{place(line)}: {dotted} was set already in line {seen[dotted]}; keep one of the two")
        seen[dotted] = line
        yield dotted, line
        yield from _walk(value, f"{dotted}.", place, above, values)


def _apply_override(tree: dict[str, Any], override: str, origin: dict[str, str]) -> None:
    place = f"the override {override}"
    dotted, equals, text = override.partition("=")
    *parents, leaf = dotted.split(".")
    if not equals or not all((*parents, leaf)):
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    here, above = tree, ""
    for parent in parents:
        above = f"{above}.{parent}" if above else parent
        below = here.get(parent)
        if below is None:
            below = here[parent] = {}
            origin[above] = place
        elif not isinstance(below, dict):
            raise ConfigError(f"{place}: {above} is {below!r} ({origin[above]}), not a section with keys")
        here = below
    for stale in [key for key in origin if key.startswith(f"{dotted}.")]:
        del origin[stale]
    origin[dotted] = place
    here[leaf] = _parse(text, dotted, lambda _line: place, origin)


class _Builder:
    """Converts a parsed tree to structs and names the key and its origin in every error."""

    def __init__(self, root: type[msgspec.Struct], origin: dict[str, str]) -> None:
        self.root = root
        self.origin = origin

    def build(self, kind: Any, value: Any, key: str) -> Any:
        inner = _without_none(kind)
        if value is None and inner is not kind:
            return None
        if _is_struct(inner):
            return self._struct(inner, self._mapping(value, key), key)
        if element := _named_struct(inner):
            entries = self._mapping(value, key).items()
            return {str(name): self.build(element, below, f"{key}.{name}") for name, below in entries}
        try:
            if type(value) is int and not -(1 << 63) <= value < 1 << 64:
                raise ConfigError(f"{self._where(key)}: {key}: must fit into 64 bits, got {printable(value, 40)}")
            return msgspec.convert(value, inner)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self._where(key)}: {key}: {_mismatch(inner, value, str(error))}") from None

    def _mapping(self, value: Any, key: str) -> dict[Any, Any]:
        if value is None:  # a section whose keys are all commented out
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self._where(key)}: {key} must be a section with keys, got {value!r}")
        return value

    def _struct(self, kind: type[msgspec.Struct], value: dict[Any, Any], key: str) -> msgspec.Struct:
        hints = typing.get_type_hints(kind)
        built = {}
        for name, below in value.items():
            dotted = f"{key}.{name}" if key else str(name)
            if name not in hints:
                raise ConfigError(f"{self._where(dotted)}: unknown key {dotted}{self._nearest(str(name), key, hints)}")
            try:
                built[name] = self.build(hints[name], below, dotted)
            except ConfigError:
                # A struct that says what it takes beside its own types takes the same from a file as from Python.
                taken = getattr(kind, "taken", None)
                if taken is None or _is_struct(_without_none(hints[name])):
                    raise
                try:
                    built[name] = taken(name, below)
                except ValueError:
                    taken = None
                if taken is None:
                    raise
        for field in msgspec.structs.fields(kind):
            if field.required and field.name not in built:
                raise ConfigError(f"{self._where(key)}: {key}.{field.name} is missing")
        try:
            return kind(**built)
        except ConfigError:
            raise
        except ValueError as error:
            raise self._blame(str(error), key) from None

    def _blame(self, message: str, key: str) -> ConfigError:
        """The error of a struct's own check, whose message starts with the name of a key below ``key``."""
        message = message.removeprefix("sampling parameter ")
        name = re.match(r"[\w.]+(?=[:=])", message)
        dotted = ".".join(part for part in (key, name and name[0]) if part)
        rest = message[name.end() :] if name else f": {message}"
        return ConfigError(f"{self._where(dotted)}: {dotted or 'the file'}{rest}")

    def _where(self, key: str) -> str:
        while key and key not in self.origin:
            key = key.rpartition(".")[0]
        return self.origin.get(key, "the configuration")

    def _nearest(self, name: str, key: str, siblings: dict[str, Any]) -> str:
        """A hint at the known key that looks most like ``name``, those of the same section first."""
        if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
            return f"; did you mean {key}.{close[0]}?" if key else f"; did you mean {close[0]}?"
        keys = known_keys(self.root)
        by_leaf = {known.rpartition(".")[2]: known for known in reversed(keys)}
        if close := difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.7):
            return f"; did you mean {by_leaf[close[0]]}?"
        return f"; known {f'in {key}' if key else 'sections and keys'}: {', '.join(siblings)}"


def _mismatch(kind: Any, value: Any, message: str) -> str:
    """What was wanted and what came, in plain words; ``message`` is msgspec's own."""
    if typing.get_origin(kind) is Literal:
        allowed = [str(choice) for choice in typing.get_args(kind)]
        close = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"must be one of {', '.join(allowed)}; got {value!r}{hint}"
    wanted = {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(kind)
    if wanted:
        hint = "; quote it" if kind is str and isinstance(value, bool | int | float) else ""
        return f"must be {wanted}, got {value!r}{hint}"
    return f"{message.replace('`', '')}, got {value!r}"


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        arms = [arm for arm in typing.get_args(kind) if arm is not type(None)]
        if len(arms) == 1:
            return arms[0]
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _named_struct(kind: Any) -> Any:
    """The struct S of ``dict[str, S]``, else None."""
    arguments = typing.get_args(kind)
    return arguments[1] if typing.get_origin(kind) is dict and _is_struct(arguments[1]) else None
