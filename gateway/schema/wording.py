"""What came from outside, in the words of a refusal."""


def kind(value: object) -> str:
    """How JSON calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {str: "text", int: "a whole number", float: "a number", list: "a list", dict: "an object", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def short(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # an integer with too many digits to print
        return "a very large number"
    return text if len(text) <= 60 else text[:57] + "..."
