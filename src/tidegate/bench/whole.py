"""A receiver of a short answer that is wanted whole."""

_SHOWN_BYTES = 200


class Whole:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def begin(self, status: int) -> None:
        self.status = status

    def receive(self, data: bytes, now: float) -> None:
        self.body += data

    @property
    def text(self) -> str:
        """Its beginning, for people."""
        return self.body[:_SHOWN_BYTES].decode(errors="replace")
