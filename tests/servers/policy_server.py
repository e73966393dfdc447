"""A small policy that answers as vLLM's and SGLang's servers do: real draws, and the log-prob of each."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

END = 2


@dataclass
class Policy:
    """The next token's distribution follows from the last token and `weights`; a draw from (`salt`, seed, prompt).

    `version` is told as weight_version; None tells none.
    """

    vocab_size: int = 15
    weights: int = 0
    salt: object = ""
    version: str | None = None

    def distribution(self, last: int, temperature: float = 1.0) -> list[float]:
        table = random.Random(f"{self.weights} {last}")
        logits = [table.gauss(0, 1) / temperature for _ in range(self.vocab_size)]
        logits[0] = logits[1] = -math.inf  # neither padding nor begin is drawn
        total = sum(math.exp(x) for x in logits)
        return [math.exp(x) / total for x in logits]

    def draw(
        self, prompt: Sequence[int], seed: int, most: int, temperature: float = 1.0
    ) -> tuple[list[int], list[float]]:
        dice, tokens, logprobs = random.Random(f"{self.salt} {seed} {list(prompt)}"), [], []
        last = prompt[-1]
        for _ in range(most):
            chances = self.distribution(last, temperature or 1.0)
            likeliest = chances.index(max(chances))
            last = dice.choices(range(self.vocab_size), chances)[0] if temperature else likeliest
            tokens.append(last)
            logprobs.append(math.log(chances[last]))
            if last == END:
                break
        return tokens, logprobs


def openai(policy: Policy, body: dict, *, ids: str = "token_ids") -> dict:
    """An answer of /v1/completions; the token ids in choices[].token_ids or in logprobs.tokens."""
    choices = []
    for index, prompt in enumerate(body["prompt"]):
        tokens, logprobs = policy.draw(prompt, body["seed"], body["max_tokens"], body["temperature"])
        named = [f"token_id:{token}" for token in tokens] if ids == "tokens" else [f"<{token}>" for token in tokens]
        choices.append(
            {
                "index": index,
                "text": "",
                "finish_reason": "stop" if tokens[-1] == END else "length",
                "logprobs": {"token_logprobs": logprobs, "tokens": named, "top_logprobs": [], "text_offset": []},
                **({"token_ids": tokens} if ids == "token_ids" else {}),
            }
        )
    random.Random(0).shuffle(choices)  # the order is that of `index`
    meta = {} if policy.version is None else {"metadata": {"weight_version": policy.version}}
    return {"object": "text_completion", "model": body["model"], "choices": choices, **meta}


def native(policy: Policy, body: dict) -> list[dict]:
    """An answer of SGLang's /generate."""
    found = []
    for prompt, params in zip(body["input_ids"], body["sampling_params"], strict=True):
        tokens, logprobs = policy.draw(prompt, params["sampling_seed"], params["max_new_tokens"], params["temperature"])
        reason = {"type": "stop", "matched": END} if tokens[-1] == END else {"type": "length", "length": len(tokens)}
        pairs = [[logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)]
        meta = {"finish_reason": reason, "output_token_logprobs": pairs, "completion_tokens": len(tokens)}
        meta |= {} if policy.version is None else {"weight_version": policy.version}
        found.append({"text": "", "output_ids": tokens, "meta_info": meta})
    return found


def answer(policy: Policy, body: dict) -> dict | list[dict]:
    """Whichever was asked."""
    return openai(policy, body) if "prompt" in body else native(policy, body)
