"""One generated sequence, from the engine's outputs to text: detokenized, cut at stop strings, counted."""

import msgspec

from tidegate.base.errors import EngineDead, Overloaded
from tidegate.base.request import Output, RequestSpec, TokenLogprob
from tidegate.node.engine import Engine, OutputStream
from tidegate.server.detokenizer import Detokenizer
from tidegate.server.errors import ApiError, bad_request
from tidegate.server.stop_strings import StopStrings
from tidegate.server.times import RequestTimes


class Delta(msgspec.Struct, gc=False):
    """What one token adds. ``text`` may be empty: half a character, or what may become a stop string.

    ``offset``: where the token's own text begins, in characters from the beginning of the choice's text.
    ``token`` is None only where a sequence ends without a further token. ``count``: tokens so far, this one included.
    """

    token: int | None
    text: str
    offset: int
    count: int
    logprob: TokenLogprob | None


class Choice:
    """Sequence ``index`` of an answer. ``finish`` is set once it is complete: "stop" or "length".

    ``stop_reason``: the stop string, or the stop id other than end-of-sequence, that ended it.
    ``echo``: text to put before the generated text. ``keep_stop``: show what ended the sequence.
    """

    def __init__(
        self,
        index: int,
        spec: RequestSpec,
        detokenizer: Detokenizer,
        times: RequestTimes,
        *,
        stop_strings: list[str],
        keep_stop: bool = False,
        eos_ids: tuple[int, ...] = (),
        echo: str = "",
    ) -> None:
        self.index = index
        self.spec = spec
        self.times = times
        self.finish: str | None = None
        self.stop_reason: str | int | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self._stream: OutputStream | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_strings, keep_stop)
        self._keep_stop = keep_stop
        self._eos_ids = eos_ids
        self._echo = echo
        self._offset = len(echo)

    def start(self, engine: Engine) -> None:
        """Submits the request. Raises EngineDead."""
        self._stream = engine.submit(self.spec)

    def outputs(self) -> OutputStream:
        assert self._stream is not None, "start comes first"
        return self._stream

    def leave(self, engine: Engine) -> None:
        """Call exactly once, however the answer ended: frees the engine's request if it still runs."""
        if self._stream is not None and not self._stream.ended:
            if engine.alive:
                engine.abort(self.spec.id)
            self.times.ended(self.finish or "abort")
        else:
            self.times.ended(self.finish or "error")

    def accept(self, output: Output) -> list[Delta]:
        """One Delta a token, in order. Raises ApiError or Overloaded if the request failed."""
        if output.finish is not None and output.finish not in ("stop", "length"):
            if output.finish == "invalid":
                self.times.refused()
            raise _failure(output)
        if self.num_tokens == 0:
            self.cached_tokens = output.cached_tokens
        self.times.saw(len(output.tokens))
        deltas = []
        last = len(output.tokens) - 1
        for i, token in enumerate(output.tokens):
            ends = output.finish if i == last else None
            logprob = output.logprobs[i] if output.logprobs else None
            deltas.append(self._take(token, ends, logprob))
            if self.finish is not None:
                break
        if output.finish is not None and self.finish is None:  # an end without a token
            text = self._show(self._detokenizer.flush())
            deltas.append(Delta(None, text + self._close(output.finish), self._offset, self.num_tokens, None))
        return deltas

    def _take(self, token: int, ends: str | None, logprob: TokenLogprob | None) -> Delta:
        offset = self._offset
        is_stop_id = ends == "stop"
        text = "" if is_stop_id and not self._keep_stop else self._detokenizer.feed(token)
        if ends is not None:
            text += self._detokenizer.flush()
        self.num_tokens += 1
        self._offset += len(text)
        text = self._show(text)
        if ends is not None and self.finish is None:
            text += self._close(ends)
            if is_stop_id and token not in self._eos_ids:
                self.stop_reason = token
        if self._echo:
            text, self._echo = self._echo + text, ""
        return Delta(token, text, offset, self.num_tokens, logprob)

    def _show(self, text: str) -> str:
        if self.num_tokens <= self.spec.sampling.min_tokens:
            return text  # stop strings count only once the least number of tokens is out
        shown = self._stops.feed(text)
        if self._stops.found is not None:
            self.finish, self.stop_reason = "stop", self._stops.found
        return shown

    def _close(self, finish: str) -> str:
        """Ends the sequence, unless a stop string already has. The text that was held back till now."""
        self.finish = self.finish or finish
        return self._stops.flush()


def _failure(output: Output) -> Exception:
    reason = output.reason
    match output.finish:
        case "rejected":
            full = "The server has as many requests as it can queue: try again later."
            return Overloaded(reason or full, output.retry_after_s or 1.0)
        case "invalid":
            return bad_request(reason or "This request can never be served here.")
        case "abort":
            return ApiError(503, reason or "The request was aborted: the server is shutting down.", code="aborted")
        case "error":
            return ApiError(500, reason or "The engine could not finish this request.", code="engine_error")
    return EngineDead(f"it answered with an unknown finish {output.finish!r}")
