"""Log lines as key=value, one line an event: time, level, component, logger, event, then the event's own fields.

    logger = logging.getLogger(__name__)
    logger.info("request ended", extra=fields(request_id=label, reason="stop", num_tokens=17))

Prompts and generated text do not belong in a log line; a request is named by its request id.
"""

import logging
import sys
import time
from typing import TextIO

Value = str | bytes | int | float | bool | None


def fields(**values: Value) -> dict[str, dict[str, Value]]:
    """Fields of one line, for a log call's `extra`. Bytes are written in hex, None is left out."""
    return {"fields": values}


def format_value(value: Value) -> str:
    """One value as it stands behind its `=`: quoted where it has spaces, quotes or `=`, control characters escaped,
    so that no value from outside can begin a line or a field of its own."""
    if isinstance(value, bytes):
        return value.hex() or '""'
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and text.isascii() and all(33 <= ord(char) < 127 and char not in '"=\\' for char in text):
        return text
    escaped = "".join(
        "\\" + char if char in '"\\' else char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )
    return f'"{escaped}"'


class KeyValueFormatter(logging.Formatter):
    """Formats any record, those of other libraries too."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        parts = [
            f"time={stamp}.{int(record.msecs):03d}Z",
            f"level={record.levelname.lower()}",
            f"component={self._component}",
            f"logger={record.name}",
            f"event={format_value(record.getMessage())}",
        ]
        own: dict[str, Value] = record.__dict__.get("fields", {})
        parts += [f"{name}={format_value(value)}" for name, value in own.items() if value is not None]
        if record.exc_info:
            parts.append(f"traceback={format_value(self.formatException(record.exc_info))}")
        return " ".join(parts)


def configure(level: str, component: str, stream: TextIO | None = None) -> None:
    """Send this process's log lines of `level` (debug, info, warning, error) and above to stderr, and only there."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(component))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
