"""Why a way is taken or not: one sentence each, the first that holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.plan.costs.facts import Choice, Prediction
from shoal.plan.costs.sentences import gigabytes, milliseconds, percent, times

Known = Mapping[Choice, Prediction]


def for_it(it: Prediction, known: Known) -> str:
    """Of the one that is taken."""
    if it.choice.workers == 1:
        return _alone(it, known)
    one = _alone_like(it.choice, known)
    if one is None:
        return f"compute {milliseconds(it.compute_s)}, exchange {milliseconds(it.exchange_s)}"
    if one.step_s < it.step_s:
        return f"one worker alone would take {milliseconds(one.step_s)}, but cannot be taken"
    compute = f"compute {milliseconds(it.compute_s)} instead of {milliseconds(one.compute_s)}"
    hidden = f" and {milliseconds(it.hidden_s)} beside computing" if it.hidden_s else ""
    exchange = f"exchange {milliseconds(it.exchange_s + it.encode_s)}{hidden}"
    return f"{times(one.step_s / it.step_s)} as fast as one worker: {compute}, {exchange}"


def against(it: Prediction, pick: Prediction | None, known: Known, *, needs: Sequence[str]) -> str:
    """Of one that is not taken. `needs` are the words that the job would have to allow."""
    if it.refused:
        return it.refused
    if it.choice.shard != "none" and pick is None:
        return f"fits: {gigabytes(it.memory_bytes)} on the fullest machine"
    if said := _codec(it, known):
        return said
    if pick is not None and needs and it.step_s < pick.step_s:
        how = f"shard: {it.choice.shard}" if "shard" in needs else f"needs allow [{', '.join(needs)}]"
        return f"{_faster(it, pick)}, with another result: {how}"
    for why in (_worse_than_alone, _server):
        if said := why(it, known):
            return said
    if pick is None:
        return ""
    if it.step_s < pick.step_s:
        return f"{_faster(it, pick)}: not worth more processes"
    return _slower(it, pick)


def _alone(it: Prediction, known: Known) -> str:
    """One worker is taken: what the best of more would have spent."""
    like = [p for c, p in known.items() if c.workers > 1 and _kind(c) == _kind(it.choice)]
    if not like:
        return f"compute {milliseconds(it.compute_s)}, and nothing to exchange"
    more = min(like, key=lambda p: p.step_s)
    if more.step_s < it.step_s:
        return f"{more.choice.workers} workers would be only {_faster(more, it)}"
    return f"one worker is faster: with {more.choice.workers}, {_spent(more, it)}"


def _codec(it: Prediction, known: Known) -> str:
    plain = known.get(replace(it.choice, codec="none"))
    if it.choice.codec == "none" or plain is None or plain.step_s > it.step_s:
        return ""
    if not plain.sent_bytes:
        return f"on one host nothing is sent: {it.choice.codec} is only work, {milliseconds(it.encode_s)}"
    saved = max(plain.exchange_s - it.exchange_s, 0.0)
    cost = milliseconds(it.encode_s + it.compute_s - plain.compute_s)
    return f"{it.choice.codec} costs more than it saves on this link: {cost} for {milliseconds(saved)}"


def _worse_than_alone(it: Prediction, known: Known) -> str:
    one = _alone_like(it.choice, known)
    if it.choice.workers == 1 or one is None or one.step_s > it.step_s:
        return ""
    return f"one worker is faster: {_spent(it, one)}"


def _server(it: Prediction, known: Known) -> str:
    plain = known.get(replace(it.choice, sync="lanes", servers=0, staleness=0))
    if it.choice.sync != "server" or plain is None or plain.step_s > it.step_s:
        return ""
    spent = milliseconds(it.exchange_s + it.apply_s), milliseconds(plain.exchange_s + plain.apply_s)
    return f"lanes are faster: servers take {spent[0]} for exchange and update instead of {spent[1]}"


def _alone_like(choice: Choice, known: Known) -> Prediction | None:
    """One worker that does the same, or else one that does it plainly."""
    same = replace(choice, workers=1, hosts=1)
    return (
        known.get(same)
        or known.get(Choice(threads=choice.threads, codec=choice.codec))
        or known.get(Choice(threads=choice.threads))
    )


def _spent(it: Prediction, one: Prediction) -> str:
    """What more workers take, beside what one does."""
    parts = [f"exchange {milliseconds(it.exchange_s + it.encode_s)}"]
    if it.apply_s - one.apply_s > it.exchange_s + it.encode_s:
        parts = [f"updates {milliseconds(it.apply_s)} instead of {milliseconds(one.apply_s)}"]
    return ", ".join([*parts, f"compute {milliseconds(it.compute_s)} instead of {milliseconds(one.compute_s)}"])


def _faster(it: Prediction, than: Prediction) -> str:
    ratio = than.step_s / it.step_s
    return f"{times(ratio)} as fast" if ratio > 1.5 else f"{percent(1 - 1 / ratio)} faster"


def _slower(it: Prediction, than: Prediction) -> str:
    ratio = it.step_s / than.step_s if than.step_s else 1.0
    return f"takes {times(ratio)} as long" if ratio > 1.5 else f"{percent(ratio - 1)} slower"


def _kind(choice: Choice) -> tuple[str, str, int, int, str]:
    return choice.sync, choice.codec, choice.threads, choice.every, choice.shard
