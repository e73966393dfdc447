"""Answers of a conversation in a chat template's output, located by renderings of its prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel_rl.training.tokenizer.chat_template import ChatTemplate
from parallel_rl.training.tokenizer.protocol import Message, Tools


def turns(
    template: ChatTemplate, messages: Sequence[Message], answers: Sequence[Message], tools: Tools = None
) -> Iterator[tuple[str, str]]:
    """Iterate over answers as the template writes them, each with the text up to the next ("" at the end).

    An answer is what the rendering up to it adds to that of its prompt. Both must be prefixes of the whole rendering; then the
    answer's tokens are those that the policy would sample.

    >>> template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    ...                         "{% if add_generation_prompt %}a{% endif %}", "this example")
    >>> said = [{"role": role, "content": text} for role, text in (("assistant", "4"), ("user", "+2"), ("assistant", "6"))]
    >>> list(turns(template, [{"role": "user", "content": "2+2"}], said))
    [('4;', 'u+2;a'), ('6;', '')]

    Raises:
        ValueError: a template that writes a conversation in another way when it goes on, or refuses it.
    """
    conversation = [*messages, *answers]
    places = [place for place, one in enumerate(conversation) if place >= len(messages) and one["role"] == "assistant"]
    prefixes = [
        (conversation[: place + said], bool(said))
        for place in places
        for said in (0, 1)
        if not said or place < len(conversation) - 1
    ]
    whole, *texts = template.render_all([(conversation, True), *prefixes], tools)
    found: list[tuple[int, int]] = []
    for place, asked, said in zip(places, texts[::2], [*texts[1::2], whole], strict=False):
        if not said.startswith(asked):
            raise ValueError(
                f"{template.where} does not write an answer behind its own prompt: {_end_of(asked)} is not where the answer "
                "begins in the whole conversation; fix the template, or set tokenizer.variables"
            )
        if not whole.startswith(said) or (found and len(asked) < found[-1][1]):
            raise ValueError(
                f"{template.where} writes messages[{place}], an answer, in another way when the conversation goes on: "
                f"{_end_of(said)} does not begin the whole, so that not every answer can be learned in one sequence. "
                "data.mask_history: true learns the last one only; tokenizer.template names one that keeps earlier answers"
            )
        found.append((len(asked), len(said)))
    for (begin, end), following in zip(found, [*found[1:], None], strict=True):
        yield whole[begin:end], "" if following is None else whole[end : following[0]]


def _end_of(text: str) -> str:
    return repr(text if len(text) <= 40 else f"…{text[-40:]}")
