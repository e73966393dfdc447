"""The drawings: the law on two ranks, tokens on a layout, four policies."""

from __future__ import annotations

import torch

from parallel_rl import NLLLoss
from tools.figures.svg import BLUE, GREEN, GREY, ORANGE, RED, Drawing

TOKENS = (10, 6)  # of the two ranks
LOSSES = (1.0, 3.0)  # of each token there


def the_law() -> Drawing:
    """Two ranks with ten and six tokens, and three ways to divide; the last is computed by a loss."""
    drawing = Drawing(720, 250, "Two ranks with ten and six tokens: three ways to divide the loss")
    for rank, (count, value, fill) in enumerate(zip(TOKENS, LOSSES, (BLUE, ORANGE), strict=True)):
        y = 24 + 40 * rank
        drawing.text(16, y + 17, f"rank {rank}", bold=True)
        drawing.row(80, y, 30, [f"{value:g}"] * count, fill)
        drawing.text(400, y + 17, f"{count} tokens, sum {count * value:g}")
    sums = [count * value for count, value in zip(TOKENS, LOSSES, strict=True)]
    local = [total / count for total, count in zip(sums, TOKENS, strict=True)]
    ours = [contribution(rank) for rank in (0, 1)]
    ways = (
        (
            "mean of local means",
            f"({local[0]:g} + {local[1]:g}) / 2 = {sum(local) / 2:g}",
            RED,
            "weighs a token of rank 1 more",
        ),
        ("sum of local means", f"{local[0]:g} + {local[1]:g} = {sum(local):g}", RED, "grows with the number of ranks"),
        ("sum of contributions", f"{ours[0]:g} + {ours[1]:g} = {sum(ours):g}", GREEN, "the same on every layout"),
    )
    for place, (name, formula, fill, remark) in enumerate(ways):
        y = 120 + 42 * place
        drawing.box(16, y, 180, 30, name, fill)
        drawing.text(212, y + 20, formula)
        drawing.text(470, y + 20, remark)
    return drawing


def contribution(rank: int) -> float:
    """Compute a rank's contribution to the mean over the tokens of both."""
    logprobs = torch.full((1, TOKENS[rank]), -LOSSES[rank])
    data = {"response_mask": torch.ones_like(logprobs)}
    loss, _ = NLLLoss().from_logprobs(logprobs, data=data, global_valid_seqs=2, global_valid_toks=sum(TOKENS))
    return round(loss.item(), 4)


def tokens() -> Drawing:
    """One row of eight tokens: which logits score which token, and where the row lies under zigzag and packing."""
    drawing = Drawing(720, 330, "Tokens, the positions that score them, and where they lie")
    ids = [f"t{place}" for place in range(8)]
    drawing.text(16, 41, "input_ids", bold=True)
    drawing.row(130, 24, 60, ids, GREY)
    drawing.text(16, 81, "token_mask", bold=True)
    drawing.row(130, 64, 60, ["0", "0", "0", "1", "1", "1", "1", "0"])
    drawing.text(16, 131, "logits at", bold=True)
    drawing.row(130, 114, 60, [str(place) for place in range(8)], BLUE)
    for place in range(2, 6):
        drawing.arrow(158 + 60 * place, 114, 212 + 60 * place, 90)
    drawing.text(16, 160, "Position t predicts token t + 1: positions 2 to 5 carry the loss of tokens 3 to 6.")
    drawing.text(16, 201, "zigzag, CP 2", bold=True)
    for chunk, fill in enumerate((BLUE, ORANGE, ORANGE, BLUE)):
        drawing.row(130 + 120 * chunk, 184, 60, ids[2 * chunk : 2 * chunk + 2], fill)
    drawing.text(16, 230, "Rank 0 (blue) holds the first and the last chunk, rank 1 the two in the middle: equal work.")
    drawing.text(16, 271, "packed", bold=True)
    drawing.row(130, 254, 60, ["a0", "a1", "a2"], BLUE)
    drawing.row(310, 254, 60, ["b0", "b1"], ORANGE)
    drawing.row(430, 254, 60, ["c0", "c1", "c2"], GREEN)
    drawing.text(16, 300, "Sequences stand one after the other: cu_seqlens = [0, 3, 5, 8]. Position a2 predicts no b0.")
    return drawing


def policies() -> Drawing:
    """The four policies of an RL step and the names of their log-probs."""
    drawing = Drawing(720, 250, "Four policies: who computes their log-probs, and when")
    boxes = (
        (16, "sampler", "generation_logprobs", "while it samples,", "its own precision", ORANGE),
        (194, "old policy", "prev_logprobs", "before the first update,", "by the trainer", BLUE),
        (372, "policy", "computed by the loss", "in each update,", "with a gradient", GREEN),
        (550, "reference", "reference_policy_logprobs", "before the first update,", "frozen weights", GREY),
    )
    for x, name, field, when, how, fill in boxes:
        drawing.box(x, 24, 154, 34, name, fill)
        for line, text in enumerate((field, when, how)):
            drawing.text(x + 77, 78 + 18 * line, text, anchor="middle")
    for x, wide, text in ((93, 178, "importance weight"), (271, 178, "ratio ρ"), (449, 178, "KL penalty")):
        drawing.arrow(x + 8, 150, x + wide - 8, 150)
        drawing.text(x + wide / 2, 170, text, anchor="middle")
    drawing.text(16, 206, "importance weight = old / sampler: sampler and trainer differ in precision, kernels or age.")
    drawing.text(16, 228, "ratio = policy / old: 1 in the first update. KL = policy against reference.")
    return drawing
