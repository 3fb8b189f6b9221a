"""TOML tables, variables and flags -> frozen records, with messages for people.

Every value is kept under its dotted key (`training.num_stages`) with the place it came from, so that a message can name
key, place and allowed range. The range is read from the record's own type: it is written down once.
"""

import difflib
import enum
import json
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import msgspec

from subnet.errors import InvalidConfig

R = TypeVar("R", bound=msgspec.Struct)


class Setting(NamedTuple):
    """A value and where it was set. `is_text`: typed as text (flag, variable), to be read as the knob's type."""

    value: object
    origin: str
    is_text: bool = False


class Knob(NamedTuple):
    """One key that exists: its type as declared, and as msgspec describes it."""

    declared: object
    kind: msgspec.inspect.Type


def knobs(record: type[msgspec.Struct], prefix: str = "") -> dict[str, Knob]:
    """Every key of `record` and of the records in it, dotted, in the order of declaration."""
    found: dict[str, Knob] = {}
    for field in msgspec.structs.fields(record):
        key = prefix + field.name
        kind = msgspec.inspect.type_info(field.type)
        if isinstance(kind, msgspec.inspect.StructType):
            found |= knobs(kind.cls, key + ".")
        else:
            found[key] = Knob(declared=field.type, kind=kind)
    return found


def flatten(table: Mapping[str, object], origin: str, prefix: str = "") -> dict[str, Setting]:
    """Dotted keys of a decoded TOML table."""
    found: dict[str, Setting] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flatten(value, origin, f"{prefix}{name}.")
        else:
            found[prefix + name] = Setting(value, origin)
    return found


def refuse_unknown(settings: Mapping[str, Setting], known: Mapping[str, Knob]) -> None:
    """Raise InvalidConfig for the first key that does not exist, with the nearest one that does."""
    sections = {key.rsplit(".", 1)[0] for key in known}
    for key, setting in settings.items():
        if key in known:
            continue
        if key in sections:
            raise InvalidConfig(
                f"{key} in {setting.origin} must be a table, written [{key}], got {_shown(setting.value)}"
            )
        raise InvalidConfig(f"unknown key {key} in {setting.origin}{_hint(key, known)}")


def _hint(key: str, known: Mapping[str, Knob]) -> str:
    last = key.rsplit(".", 1)[-1]
    same_name = [other for other in known if other.rsplit(".", 1)[-1] == last]
    near = same_name or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        by_last = {other.rsplit(".", 1)[-1]: other for other in known}
        near = [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)]
    if near:
        return f"; did you mean {near[0]}?"
    section = key.rsplit(".", 1)[0]
    names = [other.rsplit(".", 1)[-1] for other in known if other.rsplit(".", 1)[0] == section]
    return f"; [{section}] has {', '.join(names)}" if names else ""


def build(record: type[R], settings: Mapping[str, Setting], prefix: str = "") -> R:
    """`record` from the settings under `prefix`; what is not set keeps its default. Raises InvalidConfig."""
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(record):
        key = prefix + field.name
        kind = msgspec.inspect.type_info(field.type)
        if isinstance(kind, msgspec.inspect.StructType):
            values[field.name] = build(kind.cls, settings, key + ".")
        elif key in settings:
            values[field.name] = _converted(key, settings[key], Knob(field.type, kind))
    return record(**values)


def _converted(key: str, setting: Setting, knob: Knob) -> object:
    value = setting.value
    if setting.is_text and isinstance(knob.kind, msgspec.inspect.VarTupleType):
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    try:
        result: object = msgspec.convert(value, knob.declared, strict=not setting.is_text)
    except msgspec.ValidationError:
        raise InvalidConfig(_refusal(key, setting, knob)) from None
    if isinstance(result, float) and not math.isfinite(result):
        raise InvalidConfig(_refusal(key, setting, knob))
    return result


def _refusal(key: str, setting: Setting, knob: Knob) -> str:
    return f"{key} in {setting.origin} must be {described(knob.kind)}, got {_shown(setting.value)}"


def _shown(value: object) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)


def described(kind: msgspec.inspect.Type) -> str:
    """What a value of this type is allowed to be, in words."""
    match kind:
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType():
            multiple = f", a multiple of {kind.multiple_of}" if kind.multiple_of is not None else ""
            return "a whole number" + _interval(kind) + multiple
        case msgspec.inspect.FloatType():
            return "a number" + _interval(kind)
        case msgspec.inspect.StrType():
            return "text" + (f" that matches {kind.pattern}" if kind.pattern else "")
        case msgspec.inspect.EnumType():
            return "one of " + ", ".join(str(member.value) for member in kind.cls)
        case msgspec.inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in kind.values)
        case msgspec.inspect.VarTupleType():
            return f"a list, each entry {described(kind.item_type)}"
        case msgspec.inspect.UnionType():
            return " or ".join(described(option) for option in kind.types)
        case _:
            return type(kind).__name__.removesuffix("Type").lower()


def _interval(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    low = f"[{kind.ge:g}" if kind.ge is not None else f"({kind.gt:g}" if kind.gt is not None else None
    high = f"{kind.le:g}]" if kind.le is not None else f"{kind.lt:g})" if kind.lt is not None else None
    if low and high:
        return f" in {low}, {high}"
    if low:
        return f" of at least {low[1:]}" if low[0] == "[" else f" above {low[1:]}"
    if high:
        return f" of at most {high[:-1]}" if high[-1] == "]" else f" below {high[:-1]}"
    return ""


def lines(record: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """`record` as TOML: its own keys, then a table for each record in it. None is left out: TOML has no word for it."""
    inner: list[tuple[str, msgspec.Struct]] = []
    if prefix:
        yield f"[{prefix}]"
    for field in msgspec.structs.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, msgspec.Struct):
            inner.append((f"{prefix}.{field.name}" if prefix else field.name, value))
        elif value is not None:
            yield f"{field.name} = {_toml(value)}"
    yield ""
    for name, value in inner:
        yield from lines(value, name)


def _toml(value: object) -> str:
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
