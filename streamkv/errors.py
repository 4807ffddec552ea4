"""Exceptions that both sides know."""


class StreamKVError(Exception):
    """Base of every error that is meant for a person's eyes: its text is complete on its own."""


class InvalidField(StreamKVError, ValueError):
    """A value that came from outside breaks a rule. `field` is its name as the sender wrote it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class ConfigError(InvalidField):
    """A setting from a flag, the environment or the configuration file breaks its rule."""


class WireDecodeError(StreamKVError):
    """Bytes that are no message of this wire."""


class ModelError(StreamKVError):
    """The model's files are missing, damaged or of a kind that is not supported."""
