"""The values that a key's type allows, in words."""

from typing import Annotated, Any, Literal, get_args, get_origin

_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): '"none"',
}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "pattern": "matching"}


def choices(annotation: Any) -> list[str]:
    """Return the words that a type allows, if it is a choice of words."""
    return [
        each
        for each in get_args(annotation)
        if get_origin(annotation) is Literal and isinstance(each, str)
    ]


def lists_words(annotation: Any) -> bool:
    """Whether a type is a list of text, free or of choices."""
    item = get_args(annotation)[0] if get_origin(annotation) is list else None
    return item is str or get_origin(item) is Literal


def legal(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """Describe the values that a type allows."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return legal(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        values = [f'"{value}"' if isinstance(value, str) else f"{value}" for value in arguments]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if origin is list:
        return f"a list of {legal(*arguments).removeprefix('one of ').replace('a list', 'lists')}"
    if origin is dict:
        return "a table"
    if arguments:  # a union
        return " or ".join(map(legal, arguments))
    parts = [
        part
        for constraint in metadata
        for part in (constraint, *getattr(constraint, "metadata", []))
    ]
    bounds = [
        f"{sign} {getattr(p, k)}" for p in parts for k, sign in _SIGNS.items() if hasattr(p, k)
    ]
    name = _TYPE_NAMES.get(annotation) or f"tables with {', '.join(annotation.model_fields)}"
    return f"{name} {' and '.join(bounds)}".strip()
