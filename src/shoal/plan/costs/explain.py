"""The reason why a candidate is chosen or not: one sentence, the first that applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shoal.plan.costs.model import CostPrediction, RunChoice
from shoal.plan.costs.units import format_gigabytes, format_milliseconds, format_percent, format_times

KnownPredictions = Mapping[RunChoice, CostPrediction]


def why_chosen(it: CostPrediction, known: KnownPredictions) -> str:
    """The reason for the chosen candidate."""
    if it.choice.workers == 1:
        return _why_one_worker(it, known)
    one = _single_worker_equivalent(it.choice, known)
    if one is None:
        return f"compute {format_milliseconds(it.compute_s)}, exchange {format_milliseconds(it.exchange_s)}"
    if one.step_s < it.step_s:
        return f"one worker alone would take {format_milliseconds(one.step_s)}, but cannot be taken"
    compute = f"compute {format_milliseconds(it.compute_s)} instead of {format_milliseconds(one.compute_s)}"
    hidden = f" and {format_milliseconds(it.hidden_s)} beside computing" if it.hidden_s else ""
    exchange = f"exchange {format_milliseconds(it.exchange_s + it.encode_s)}{hidden}"
    return f"{format_times(one.step_s / it.step_s)} as fast as one worker: {compute}, {exchange}"


def why_not_chosen(
    it: CostPrediction, pick: CostPrediction | None, known: KnownPredictions, *, needs: Sequence[str]
) -> str:
    """The reason against a candidate. `needs` are the words that the job would have to allow."""
    if it.refused:
        return it.refused
    if it.choice.shard != "none" and pick is None:
        return f"fits: {format_gigabytes(it.memory_bytes)} on the fullest machine"
    if reason := _why_not_codec(it, known):
        return reason
    if pick is not None and needs and it.step_s < pick.step_s:
        how = f"shard: {it.choice.shard}" if "shard" in needs else f"needs allow [{', '.join(needs)}]"
        return f"{_faster(it, pick)}, with another result: {how}"
    for why in (_why_not_more_workers, _why_not_servers):
        if reason := why(it, known):
            return reason
    if pick is None:
        return ""
    if it.step_s < pick.step_s:
        return f"{_faster(it, pick)}: not worth more processes"
    return _slower(it, pick)


def _why_one_worker(it: CostPrediction, known: KnownPredictions) -> str:
    """One worker is chosen: compare with the best candidate with more workers."""
    like = [p for c, p in known.items() if c.workers > 1 and _comparison_key(c) == _comparison_key(it.choice)]
    if not like:
        return f"compute {format_milliseconds(it.compute_s)}, and nothing to exchange"
    more = min(like, key=lambda p: p.step_s)
    if more.step_s < it.step_s:
        return f"{more.choice.workers} workers would be only {_faster(more, it)}"
    return f"one worker is faster: with {more.choice.workers}, {_time_spent(more, it)}"


def _why_not_codec(it: CostPrediction, known: KnownPredictions) -> str:
    plain = known.get(replace(it.choice, codec="none"))
    if it.choice.codec == "none" or plain is None or plain.step_s > it.step_s:
        return ""
    if not plain.sent_bytes:
        return f"on one host nothing is sent: {it.choice.codec} is only work, {format_milliseconds(it.encode_s)}"
    saved = max(plain.exchange_s - it.exchange_s, 0.0)
    cost = format_milliseconds(it.encode_s + it.compute_s - plain.compute_s)
    return f"{it.choice.codec} costs more than it saves on this link: {cost} for {format_milliseconds(saved)}"


def _why_not_more_workers(it: CostPrediction, known: KnownPredictions) -> str:
    one = _single_worker_equivalent(it.choice, known)
    if it.choice.workers == 1 or one is None or one.step_s > it.step_s:
        return ""
    return f"one worker is faster: {_time_spent(it, one)}"


def _why_not_servers(it: CostPrediction, known: KnownPredictions) -> str:
    plain = known.get(replace(it.choice, sync="lanes", servers=0, staleness=0))
    if it.choice.sync != "server" or plain is None or plain.step_s > it.step_s:
        return ""
    spent = format_milliseconds(it.exchange_s + it.apply_s), format_milliseconds(plain.exchange_s + plain.apply_s)
    return f"lanes are faster: servers take {spent[0]} for exchange and update instead of {spent[1]}"


def _single_worker_equivalent(choice: RunChoice, known: KnownPredictions) -> CostPrediction | None:
    """The same choice with one worker, or plain lanes with one worker."""
    same = replace(choice, workers=1, hosts=1)
    return (
        known.get(same)
        or known.get(RunChoice(threads=choice.threads, codec=choice.codec))
        or known.get(RunChoice(threads=choice.threads))
    )


def _time_spent(it: CostPrediction, one: CostPrediction) -> str:
    """The times with more workers, compared with one worker."""
    parts = [f"exchange {format_milliseconds(it.exchange_s + it.encode_s)}"]
    if it.apply_s - one.apply_s > it.exchange_s + it.encode_s:
        parts = [f"updates {format_milliseconds(it.apply_s)} instead of {format_milliseconds(one.apply_s)}"]
    return ", ".join(
        [*parts, f"compute {format_milliseconds(it.compute_s)} instead of {format_milliseconds(one.compute_s)}"]
    )


def _faster(it: CostPrediction, than: CostPrediction) -> str:
    ratio = than.step_s / it.step_s
    return f"{format_times(ratio)} as fast" if ratio > 1.5 else f"{format_percent(1 - 1 / ratio)} faster"


def _slower(it: CostPrediction, than: CostPrediction) -> str:
    ratio = it.step_s / than.step_s if than.step_s else 1.0
    return f"takes {format_times(ratio)} as long" if ratio > 1.5 else f"{format_percent(ratio - 1)} slower"


def _comparison_key(choice: RunChoice) -> tuple[str, str, int, int, str]:
    return choice.sync, choice.codec, choice.threads, choice.every, choice.shard
