"""What tokens attend to when they are run over stored KV: a question's, and those that it finds."""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import squared_attention
from workbench.quality.network import Model
from workbench.quality.passes import Seen, cache_of, columns_of, fill, read
from workbench.quality.precomputed import Stored
from workbench.quality.questions import Questions


def question_looks(model: Model, questions: Questions, stored: Stored) -> list[Tensor]:
    """For each prompt, what its question gives each candidate, [layers, candidates]."""
    rows, prompts, _ = questions.tokens.shape
    length, seen = questions.length, Seen()
    cache = cache_of(stored.kv, prompts * length)
    asked = questions.tokens[:, :, :length]
    read(model, cache, questions.contexts.lengths, asked, seen=seen)
    causal = torch.ones(length, length).tril().bool()
    found = []
    for row in range(rows):
        at = stored.candidates(row)
        visible = torch.cat((torch.ones(length, len(at)).bool(), causal), dim=1)
        for prompt in range(prompts):
            own = torch.arange(prompt * length, (prompt + 1) * length)
            found.append(_attention(stored, seen, row, row, own, visible))
    return found


def picked_look(
    model: Model, states: Tensor, prompts: int, stored: Stored, picked: list[Tensor]
) -> list[Tensor]:
    """For each prompt, what the tokens that were picked for it give each candidate, [layers, candidates].

    Args:
        states: the tokens' embeddings, [contexts, split, hidden].
        prompts: of each context.
        picked: columns, for each prompt.
    """
    seen = Seen()
    cache = cache_of(stored.kv, 0, prompts)
    columns = columns_of(picked, states.shape[1])
    fill(model, cache, states.repeat_interleave(prompts, 0), columns, seen=seen)
    found = []
    for index, looking in enumerate(picked):
        row = index // prompts
        at = stored.candidates(row)
        visible = torch.cat(
            (
                (at < looking[:, None]) & ~torch.isin(at, looking),
                looking <= looking[:, None],
            ),
            dim=1,
        )
        if len(looking):
            own = torch.arange(len(looking))
            found.append(_attention(stored, seen, row, index, own, visible))
        else:
            found.append(torch.zeros(len(model.layers), len(at)))
    return found


def _attention(
    stored: Stored, seen: Seen, row: int, index: int, own: Tensor, visible: Tensor
) -> Tensor:
    """Of the tokens `own` of row `index` of a pass, over context `row`'s candidates and themselves."""
    at = stored.candidates(row)
    by_layer = [
        squared_attention(
            query[index][:, own].transpose(0, 1),
            torch.cat((keys[row][:, at], key[index][:, own]), dim=1).transpose(0, 1),
            visible,
            scale=query.shape[-1] ** -0.5,
        )[: len(at)]
        for query, key, (keys, _) in zip(seen.queries, seen.keys, stored.kv, strict=True)
    ]
    return torch.stack(by_layer).sqrt()
