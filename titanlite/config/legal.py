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


def legal_words(annotation: Any) -> list[str]:
    """Return the words that a type allows, if it is a choice of words."""
    if get_origin(annotation) is not Literal:
        return []
    return [each for each in get_args(annotation) if isinstance(each, str)]


def lists_words(annotation: Any) -> bool:
    """Whether a type is a list of text, free or of choices."""
    item = None
    if get_origin(annotation) is list:
        item = get_args(annotation)[0]
    return item is str or get_origin(item) is Literal


def legal(annotation: Any, metadata: tuple[Any, ...] | list[Any] = ()) -> str:
    """Describe the values that a type allows."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return legal(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        values = []
        for value in arguments:
            if isinstance(value, str):
                values.append(f'"{value}"')
            else:
                values.append(f"{value}")
        if len(values) == 1:
            return values[0]
        return "one of " + ", ".join(values)
    if origin is list:
        return f"a list of {legal(*arguments).removeprefix('one of ').replace('a list', 'lists')}"
    if origin is dict:
        return "a table"
    if arguments:  # a union
        return " or ".join(map(legal, arguments))
    bounds = []
    for constraint in metadata:
        for part in (constraint, *getattr(constraint, "metadata", [])):
            for attribute, sign in _SIGNS.items():
                if hasattr(part, attribute):
                    bounds.append(f"{sign} {getattr(part, attribute)}")
    name = _TYPE_NAMES.get(annotation) or f"tables with {', '.join(annotation.model_fields)}"
    return f"{name} {' and '.join(bounds)}".strip()
