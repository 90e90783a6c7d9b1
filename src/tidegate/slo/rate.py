"""How many prompt tokens fit into a slice: the simplest latency model, corrected by what is observed."""


class PrefillRate:
    """Tokens per second that a lane prefills on the whole device, as an exponential average.

    Compute grows linearly with the share, so a batch observed on a share s counts as ``tokens / (seconds * s)``.
    """

    WEIGHT = 0.3  # of a new observation

    def __init__(self, initial_tokens_per_s: float, quantum_tokens: int) -> None:
        """Slices are whole multiples of ``quantum_tokens``; shorter ones tell nothing about the rate."""
        self.tokens_per_s = initial_tokens_per_s
        self.batch_s = 0.0  # that batches took, on average of late
        self.decodes = 0  # rows of the last batch: so many fewer of its tokens were prompts'
        self._quantum = quantum_tokens

    def observe(self, new: int, decodes: int, seconds: float, share: float) -> None:
        """A batch with ``new`` prompt tokens."""
        tokens, self.decodes = new + decodes, decodes
        self.batch_s += self.WEIGHT * (seconds - self.batch_s)
        if tokens >= self._quantum and seconds > 0:
            self.tokens_per_s += self.WEIGHT * (tokens / (seconds * share) - self.tokens_per_s)

    def tokens_within(self, seconds: float, share: float, least: int, most: int) -> int:
        """The slice predicted to take at most ``seconds`` on ``share``, between ``least`` and ``most`` tokens."""
        fit = int(self.tokens_per_s * share * seconds)
        return max(least, min(most, fit - fit % self._quantum))
