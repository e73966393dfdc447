"""Convert records in other frameworks' forms to the fields of this package."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from parallel_rl.config.json_text import brief
from parallel_rl.training.data.format import Fields, Row, text_of

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
_HUMAN, _ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def alpaca(row: Row) -> Fields:
    """Join the instruction and its input by a line break."""
    context = row.get("input")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"'input' = {brief(context)} is not valid; a text is needed")
    prompt = text_of(row, "instruction") + (f"\n{context}" if context else "")
    return {"prompt": prompt, "answer": row["output"], **_kept(row, "system")}


def sharegpt(row: Row) -> Fields:
    """Convert turns of {from, value} to messages."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"'conversations' = {brief(turns)} is not valid; a list of {{from, value}} is needed")
    messages = []
    for index, turn in enumerate(turns):
        role = _SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, Mapping) else None
        if role is None:
            raise ValueError(
                f"conversations[{index}] = {brief(turn)} is not valid; {{from, value}} with from one of "
                f"{', '.join(_SHAREGPT_ROLES)} is needed"
            )
        messages.append({"role": role, "content": turn.get("value"), **_kept(turn, "weight")})
    return {"messages": messages, **_kept(row, "system", "tools")}


def renamed(names: Mapping[str, str], row: Row) -> Fields:
    return {ours: row[theirs] for theirs, ours in names.items() if theirs in row}


def _kept(row: Row, *names: str) -> Fields:
    return {name: row[name] for name in names if name in row}


def texts_alone(row: Row) -> bool:
    return "prompt" not in row and isinstance(row["chosen"], str) and isinstance(row["rejected"], str)


def dialogues(row: Row) -> Fields:
    """Split two dialogues into turns by Anthropic's marks, or else after their common beginning, as TRL."""
    chosen, rejected = text_of(row, "chosen"), text_of(row, "rejected")
    both = [_turns(chosen), _turns(rejected)]
    if bool(both[0]) != bool(both[1]):
        raise ValueError(
            "one of 'chosen' and 'rejected' has the marks \"Human:\" and \"Assistant:\"; both or none must"
        )
    if both[0]:
        return {"chosen": both[0], "rejected": both[1], **_kept(row, "system")}
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if 0 < shared < min(len(chosen), len(rejected)) and chosen[shared - 1] == " ":
        shared -= 1
    if shared == 0:
        raise ValueError(
            "'chosen' and 'rejected' begin with different texts; without a 'prompt' both begin with the same"
        )
    return {
        "prompt": chosen[:shared],
        "chosen": chosen[shared:],
        "rejected": rejected[shared:],
        **_kept(row, "system"),
    }


def _turns(text: str) -> list[dict[str, str]]:
    """Split a "Human:" and "Assistant:" dialogue into messages, a text before it as system; else []."""
    before, *parts = ("\n\n" + text.replace("\r\n", "\n").lstrip("\n")).split(_HUMAN)
    messages: list[dict[str, str]] = []
    if parts and before.strip():
        messages.append({"role": "system", "content": before.strip()})
    for part in parts:
        question, *answers = part.split(_ASSISTANT)
        messages.append({"role": "user", "content": question.strip()})
        messages += [{"role": "assistant", "content": answer.strip()} for answer in answers]
    return messages


def ranked(row: Row) -> Fields:
    """Convert NeMo-RL's preferences: the completion of the lower rank is preferred."""
    completions = row["completions"]
    ranks = (
        [entry.get("rank") for entry in completions if isinstance(entry, Mapping)]
        if isinstance(completions, list)
        else []
    )
    if not isinstance(completions, list) or len(ranks) != 2 or len(completions) != 2:
        raise ValueError(f"'completions' = {brief(completions)} is not valid; two of {{rank, completion}} are needed")
    if not all(isinstance(rank, int) for rank in ranks) or ranks[0] == ranks[1]:
        raise ValueError(
            f"'completions' has the ranks {ranks}; two different integers are needed, the lower is preferred"
        )
    best, worst = sorted(completions, key=lambda entry: entry["rank"])
    return {"prompt": row["context"], "chosen": best.get("completion"), "rejected": worst.get("completion")}


def verl(row: Row) -> Fields:
    """Convert verl's rows for rule-based rewards: conversation, ground truth, and the reward's source."""
    truth = row["reward_model"]
    if not isinstance(truth, Mapping) or truth.get("ground_truth") is None:
        raise ValueError(f"'reward_model' = {brief(truth)} is not valid; {{ground_truth: ...}} is needed")
    return {"prompt": row["prompt"], "answer": truth["ground_truth"], "source": row["data_source"]}
