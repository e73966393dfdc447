"""A stranger's chat template is bounded in characters, memory and time, in every filter and while it is compiled."""

from __future__ import annotations

import os
import signal

import pytest

from parallel_rl.training.tokenizer.chat_template import ChatTemplate

LOOP, END = "{% for i in range(100000) %}", "{% endfor %}"
USER = [{"role": "user", "content": "How many?"}]
WIDTH = 2_000_000_000
LARGE = [
    f"{{{{ {expression} }}}}"
    for expression in (
        f"'a'|center({WIDTH})", f"'a'.zfill({WIDTH})", f"'\\t'.expandtabs({WIDTH})", f"'%{WIDTH}d' % 1",
        f"'%0{WIDTH}d'|format(1)", f"'{{:{WIDTH}}}'.format(1)", f"'a\\na'|indent({WIDTH})", f"[1]|batch({WIDTH}, 0)|list",
        f"[1]|tojson(indent={WIDTH})",
        f"'a' * {WIDTH}", f"[1] * {WIDTH}", "range(100000)|join('b' * 100000)", "('a' * 16000000)|replace('a', 'b' * 1000)",
        "(messages[0].content * 2000000) ~ 'a'", "raise_exception('a' * 900000000)",
    )
] + [LOOP + "{{ 'a' * 1000 }}" + END]  # fmt: skip
DOUBLED = [
    "{% set n = namespace(x=" + start + ") %}" + LOOP + "{% set n.x = " + step + " %}" + END
    for start, step in (
        ("'ab'", "n.x ~ n.x"), ("[1]", "n.x + n.x"), ("'ab'", "[n.x, n.x]|join"), ("'ab'", "'%s%s'|format(n.x, n.x)"),
        ("[1]", "[n.x, n.x]|sum(start=[])"),
    )
]  # fmt: skip
SHARED = (
    "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}"
    + END
)
LONG = [
    f"{LOOP}{LOOP}{END}{END}", f"{LOOP}x{LOOP}y{END}{END}", SHARED + "{{ n.x }}", SHARED + "{{ n.x == n.y }}",
    "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(90) }}",
    "{{ (messages|length)|round(900000000, 'ceil') }}",
]  # fmt: skip
#: of each filter or method that passes one of the bounds another is quick: characters at once and in a loop, memory, seconds,
#: and a compilation
QUICK = [
    LARGE[0],
    LARGE[3],
    LARGE[6],
    LARGE[8],
    LARGE[12],
    LARGE[15],
    DOUBLED[0],
    DOUBLED[4],
    LONG[1],
    LONG[2],
    LONG[5],
]
CONSTANTS = ["{{ 2 ** 4000000000 }}", "{{ [1]|slice(200000000)|list }}"]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(source, marks=() if source in (*QUICK, CONSTANTS[0]) else pytest.mark.slow)
        for source in (*LARGE, *DOUBLED, *LONG, *CONSTANTS)
    ],
)
def test_every_template_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In time and memory, whatever it computes, and while Jinja folds its constants; the next rendering has a new process."""
    monkeypatch.setattr("parallel_rl.training.tokenizer.chat_template.SECONDS", 0.1 if source in LONG else 60.0)
    message = (
        "takes more than 0.1 seconds" if source in LONG else "makes a text of more than 16,777,216 characters, or needs"
    )
    if source in CONSTANTS:
        message = "takes more than a second to compile|makes a text of more than"
    with pytest.raises(ValueError, match=message):
        ChatTemplate("{% if messages[0].content != 'fine' %}" + source + "{% endif %}", "here").render(
            USER, answered=True
        )


def test_a_process_renders_until_its_template_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the signals of a preempted run, a fork has its own, and a rendering after a refused one is whole."""
    monkeypatch.setattr("parallel_rl.training.tokenizer.chat_template.SECONDS", 0.5)
    template = ChatTemplate(
        "{{ messages[0].content }}{% if messages|length > 1 %}" + f"{LOOP}{LOOP}{END}{END}" + "{% endif %}", ""
    )
    first = template._process
    assert first is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        first.send_signal(number)
    assert template.render_all([(USER, True), (USER, False)]) == ["How many?"] * 2 and template._process is first
    with pytest.raises(ValueError, match=r"takes more than 0\.5 seconds"):
        template.render(USER * 2, answered=True)
    text = "é\ud800\U0001f600" * 100_000
    assert (
        template.render([{"role": "user", "content": text}], answered=True) == text and template._process is not first
    )
    if not (child := os.fork()):
        os._exit(template.render(USER, answered=True) != "How many?")
    assert os.waitpid(child, 0)[1] == 0 and template.render(USER, answered=True) == "How many?"
    last = template._process
    del template
    assert last is not None and last.returncode == -signal.SIGKILL
