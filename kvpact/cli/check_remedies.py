"""Remedies in the words of `contract check`, which has --writer-set and --reader-set and no deployment."""

from __future__ import annotations

import re
from dataclasses import replace

from kvpact.types import Verdict

DEPLOYMENT_WORDS = (
    (
        re.compile(
            r"prefill\.cache\.(\w+) and decode\.cache\.\w+ in the config file, "
            r"or --prefill-cache \w+=\.\.\. and --decode-cache \w+=\.\.\."
        ),
        r"--writer-set cache.\1=... and --reader-set cache.\1=...",
    ),
    (
        re.compile(
            r"prefill\.override and decode\.override in the config file and at "
            r"--prefill-override and --decode-override"
        ),
        "--writer-set and --reader-set",
    ),
    (
        re.compile(r"prefill\.override and decode\.override \(--prefill-override, --decode-override\)"),
        "--writer-set and --reader-set",
    ),
    (re.compile(r" \(model in the config file, --model\)"), ""),
    (re.compile(r"\(max_model_len\)"), "(--writer-set and --reader-set max_model_len=...)"),
)
"""Words that name settings of `kvpact up`, and what stands for them here."""


def with_check_flags(verdict: Verdict) -> Verdict:
    """The verdict with remedies that name flags of `contract check`."""
    return replace(
        verdict,
        differences=tuple(replace(each, remedy=_reworded(each.remedy)) for each in verdict.differences),
    )


def _reworded(remedy: str) -> str:
    for words, instead in DEPLOYMENT_WORDS:
        remedy = words.sub(instead, remedy)
    return remedy
