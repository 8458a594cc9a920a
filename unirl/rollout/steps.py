"""From one sample per episode to one sample per step."""

from dataclasses import replace

from unirl.types import Part


def split_steps(part: Part, *, max_turns: int) -> Part:
    """Each turn of each sample as a sample of its own: the tokens before the turn as its prompt, the turn generated.

    Rows of an episode come in the order of its turns and bear its `episode_ids`, `group_ids`, status, reward and
    record, and what was computed for their own turn's tokens. The step of turn t of sample s has the sample id
    s * max_turns + t, so that ids stay unique over a run. Samples without a generated token have no step.

    Raises ValueError where a sample has more than `max_turns` turns.
    """
    text = part.text
    ends = text.turn_ends
    sample, turn = text.token_sample_index[ends], text.turn_ids[ends]
    if bool((turn >= max_turns).any()):
        raise ValueError(f"split_steps: found a sample of {int(turn.max()) + 1} turns, expected at most {max_turns}")
    lengths = ends + 1 - text.cu_seqlens[:-1][sample]
    rows = part.select(sample, lengths)
    row_of_token = rows.text.token_sample_index
    rows = rows.masked(rows.text.turn_ids == turn[row_of_token])
    split = replace(
        rows.text,
        turn_ids=rows.text.turn_ids.clamp(max=0),  # a row has one turn, number 0
        sample_ids=text.sample_ids[sample] * max_turns + turn,
    )
    return replace(rows, text=split)
