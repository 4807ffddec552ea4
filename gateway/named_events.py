"""Server-sent events that carry their name, as OpenAI's Responses and Anthropic's Messages have them."""

from gateway.bounded_writer import BoundedWriter


class NamedEvents:
    """The events of one HTTP answer, gathered until `flush`. HTTP/1.1 gets chunked framing, HTTP/1.0 bare events."""

    def __init__(self, writer: BoundedWriter, *, is_chunked: bool) -> None:
        self._writer = writer
        self._is_chunked = is_chunked
        self._gathered: list[bytes] = []

    @property
    def num_bytes(self) -> int:
        """Written so far."""
        return self._writer.num_bytes

    def add(self, name: bytes, data: bytes) -> None:
        """data: JSON, in one line."""
        self._gathered.append(b"event: %b\ndata: %b\n\n" % (name, data))

    def comment(self, text: bytes) -> None:
        self._gathered.append(b": %b\n\n" % text)

    def flush(self) -> None:
        """What was gathered goes out in one write."""
        if self._gathered:
            events = b"".join(self._gathered)
            self._gathered.clear()
            self._writer.write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)
