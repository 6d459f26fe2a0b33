"""Chat templates as transformers renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.chat_template import ChatTemplate
from coordinator.model_folder import ModelText
from kvpact.errors import BadRequest
from tests.coordinator_fakes import make_text_folder

HELLO = [{"role": "user", "content": "hello <b>"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    """What a template makes of messages."""
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or HELLO, add_generation_prompt=True, variables=variables)


def test_a_template_sees_messages_special_tokens_and_variables() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}{{ mode }}"
    assert render(source, mode="!") == "<s>user:hello <b>!"


def test_variables_of_a_request_do_not_replace_the_messages() -> None:
    assert render("{{ messages|length }}", messages=HELLO, add_generation_prompt=False) == "1"


def test_json_is_written_without_html_escapes() -> None:
    assert render("{{ messages[0]|tojson }}") == '{"role": "user", "content": "hello <b>"}'


def test_loop_controls_and_generation_spans_are_known() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y')|length }}"
    )
    assert render(source, messages=HELLO * 2) == "user4"


def test_a_template_may_refuse_and_its_words_are_told() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as refusal:
        render("{{ raise_exception('roles must alternate') }}")
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"])
def test_a_template_stays_in_its_sandbox(source: str) -> None:
    with pytest.raises(BadRequest):
        render(source)


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    model = ModelText(make_text_folder(tmp_path, template=None))
    with pytest.raises(BadRequest, match="no chat template"):
        model.render_chat(HELLO, add_generation_prompt=True, variables={})
