"""Rendering a conversation to the text that a model was trained on, as transformers' ``apply_chat_template`` does.

Templates come with models, so they run in a sandbox. The names they may use are those that transformers offers.
"""

import json
import time
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidegate.base.clock import wall_s
from tidegate.base.errors import ConfigError, RequestError

_OPEN_END = "\ue0d0open-end\ue0d0 "  # stands where the last message is left open; never in the result


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks text for training; when serving it is only text."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(layout: str) -> str:
    # The one thing a template may ask about the outside: the date, for people ("Today Date: ...").
    return time.strftime(layout, time.localtime(wall_s()))


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """``special_tokens``: what the template may name, such as ``bos_token``, as text.

    Raises ConfigError if ``source`` is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"The chat template can't be parsed: {error}.") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str:
        """``messages``: with text contents. ``continue_final_message``: leave the last message open at its end.

        Raises RequestError where the template refuses the conversation.
        """
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if continue_final_message:
            messages[-1]["content"] = messages[-1].get("content", "") + _OPEN_END
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise RequestError(f"The model's chat template refuses these messages: {error}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RequestError(f"The model's chat template can't render these messages: {error}") from error
        if not continue_final_message:
            return text
        kept, found, rest = text.rpartition(_OPEN_END.strip())
        if not found:
            raise RequestError("continue_final_message: this chat template drops the last message.")
        return kept if rest.startswith(" ") else kept.rstrip()  # the template trims, so white space is trimmed here too
