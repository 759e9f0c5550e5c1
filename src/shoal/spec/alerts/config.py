"""The fields of a rule in `alerts`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from shoal.spec.base import Spec, parse_size

AlertWhen = Literal["finished", "failed", "stalled", "straggler", "nan", "metric", "memory", "disk"]
OWN_FIELDS: dict[str, tuple[str, ...]] = {
    "stalled": ("after_s",),
    "straggler": ("share",),
    "metric": ("metric", "above", "below"),
    "disk": ("free", "hours"),
}
"""Fields that only rules of this kind have."""
_WEBHOOK = re.compile(r"https?://[^\s/]+(/\S*)?|env:[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"""(webhook["']?:\s*)(?:(["'])(https?://)(?:\\.|(?!\2).|\2\2)*\2|(https?://)\S*)""", re.DOTALL)


def hide_webhooks(text: str) -> str:
    """Job text without the addresses of webhooks, which are secrets."""
    return _SECRET.sub(lambda found: f"{found[1]}{found[2] or ''}{found[3] or found[4]}…{found[2] or ''}", text)


class AlertConfig(Spec):
    """A rule, judged by the driver. `webhook`: an address that gets the alert as JSON, or `env:NAME` for one in the
    driver's environment. `command`: words of a program that gets it on standard input. Without both, the alert is an
    event of the run only. `cooldown_s`: seconds before the same rule speaks of the same worker or metric again.
    """

    when: AlertWhen
    after_s: PositiveFloat | None = None
    share: Annotated[float, Field(gt=0, lt=1)] | None = None
    metric: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    above: float | None = None
    below: float | None = None
    free: str | None = None
    hours: PositiveFloat | None = None
    webhook: Annotated[str, Field(max_length=2000)] | None = None
    command: Annotated[list[str], Field(min_length=1, max_length=50)] | None = None
    cooldown_s: Annotated[float, Field(ge=0)] = 600.0

    @field_validator("free")
    @classmethod
    def _known_size(cls, free: str | None) -> str | None:
        if free is not None:
            parse_size(free)
        return free

    @field_validator("webhook")
    @classmethod
    def _known_address(cls, webhook: str | None) -> str | None:
        if webhook is not None and not _WEBHOOK.fullmatch(webhook):
            raise ValueError("write https://…, http://… or env:NAME")
        return webhook

    @model_validator(mode="after")
    def _fits_its_kind(self) -> AlertConfig:
        for kind, names in OWN_FIELDS.items():
            given = [name for name in names if getattr(self, name) is not None]
            if given and kind != self.when:
                raise ValueError(f"`{given[0]}` is for `when: {kind}`, not for `when: {self.when}`")
        if self.when == "metric" and (self.metric is None or (self.above is None and self.below is None)):
            raise ValueError("`when: metric` needs `metric`, and `above` or `below`")
        return self

    @property
    def stalled_after_s(self) -> float:
        return 300.0 if self.after_s is None else self.after_s

    @property
    def straggler_share(self) -> float:
        return 0.3 if self.share is None else self.share

    @property
    def free_bytes(self) -> int:
        """0 if only `hours` is given."""
        return parse_size(self.free) if self.free else 0 if self.hours is not None else 2 * 10**9
