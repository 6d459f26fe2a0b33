"""A model's chat template, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvpact.clock import wall_time_s
from kvpact.errors import BadRequest


class _GenerationTag(Extension):
    """Lets {% generation %} ... {% endgeneration %} through; it marks training spans and changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """Compiled once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles. Raises jinja2.TemplateError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. `variables` are the request's own and don't override messages.

        Raises:
            BadRequest: the template refuses these messages; carries its words.
        """
        known = {"tools": None, "documents": None} | self._special_tokens | dict(variables)
        try:
            return self._template.render(
                known | {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return time.strftime(form, time.localtime(wall_time_s()))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)
