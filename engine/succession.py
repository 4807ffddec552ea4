"""Whether a stream that nobody here knows may still be on its way from an earlier engine.

A gateway gives a new engine what it has of the earlier ones; its Hello says that it will, and HandedOver that it has.
So of the gateways that are there it is known exactly. One that was there before and has not come back yet may bring
something, too: for as long as a silent gateway counts as there, from when this engine began to listen, which is well
before its model is loaded. That only holds where an engine has been before: a file beside the socket says so, or a
gateway does.
"""


class Succession:
    """What one engine life knows of those before it."""

    def __init__(self, epoch: int, *, follows: bool, until_s: float) -> None:
        """epoch: this engine's. follows: whether it is known that an engine was here before. until_s: by when a gateway
        that was there before has come back."""
        self._epoch = epoch
        self._follows = follows
        self._until_s = until_s
        self._bringing: set[bytes] = set()
        """Gateways that have not given all they have."""

    def greet(self, gateway_id: bytes, epoch: int) -> None:
        """It has said Hello; epoch: as there. With this engine's own there is nothing more to come, also where its
        HandedOver was lost."""
        if epoch == self._epoch:
            self._bringing.discard(gateway_id)
        if epoch not in (0, self._epoch):
            self._follows = True
            self._bringing.add(gateway_id)

    def handed_over(self, gateway_id: bytes) -> None:
        self._bringing.discard(gateway_id)

    def lose(self, gateway_id: bytes) -> None:
        """It was silent for too long. If it comes back it says Hello again."""
        self._bringing.discard(gateway_id)

    def may_bring(self, now_s: float) -> bool:
        return bool(self._bringing) or (self._follows and now_s < self._until_s)
