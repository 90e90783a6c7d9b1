"""What every route of one server shares."""

from collections.abc import Sequence

from tidegate.base.clock import wall_s
from tidegate.node.engine import Engine
from tidegate.server.detokenizer import Detokenizer, NoDetokenizer
from tidegate.server.errors import ApiError
from tidegate.server.feed import Feed
from tidegate.server.live import Recorder
from tidegate.server.metrics import Metrics
from tidegate.server.settings import ServerSettings
from tidegate.server.tokenizer import Tokenizer


class Context:
    """``tokenizer`` None: a model without one, whose prompts are token ids and whose texts are empty."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.recorder = Recorder(settings.slo)
        self.metrics = Metrics(settings.model_names[0], self.recorder)
        self.feed = Feed(engine, self.recorder)
        self.created = int(wall_s())
        from_model = engine.info.model.eos_ids
        self.eos_ids = tuple(dict.fromkeys((*from_model, *(tokenizer.eos_ids if tokenizer else ()))))

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises a 404 for a model that is not served here."""
        if asked is None:
            return self.settings.model_names[0]
        if asked not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise ApiError(
                404,
                f"The model '{asked}' does not exist here. This server has: {served}.",
                param="model",
                code="model_not_found",
            )
        return asked

    def needs_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer, or a 400 that says how to go without."""
        if self.tokenizer is None:
            raise ApiError(
                400,
                "This model has no tokenizer: send /v1/completions a prompt of token ids.",
                param=param,
                code="no_tokenizer",
            )
        return self.tokenizer

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool) -> Detokenizer:
        if self.tokenizer is None:
            return NoDetokenizer()
        return self.tokenizer.detokenizer(prompt, skip_special_tokens)
