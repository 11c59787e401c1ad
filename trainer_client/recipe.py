"""From the settings of a loss to what computes it."""

from __future__ import annotations

from rolltap.trainer_client.advantages import advantage_method
from rolltap.trainer_client.loss import Correction, PolicyLoss
from rolltap.trainer_client.packing import Packer
from rolltap.trainer_client.scoring import Overlong, Scorer
from rolltap.trainer_client.settings import ComputeSettings, LossSettings


def scorer(settings: LossSettings) -> Scorer:
    """Groups to rollouts with advantages and weights."""
    overlong = None
    if settings.overlong_limit:
        overlong = Overlong(settings.overlong_limit, min(settings.overlong_buffer, settings.overlong_limit))
    return Scorer(advantage_method(settings.advantage), settings.normalise, settings.length, overlong)


def packer(loss: LossSettings, compute: ComputeSettings, ranks: int) -> Packer:
    """Rollouts to packs; a ratio over whole rollouts needs each of them in one pack."""
    return Packer(compute.token_budget, compute.share_prefixes, whole=loss.ratio == "sequence", ranks=ranks)


def objective(settings: LossSettings) -> PolicyLoss:
    """Predictions to a loss."""
    return PolicyLoss(
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        clip_dual=settings.clip_dual,
        ratio=settings.ratio,
        correction=Correction(settings.correction, settings.importance_cap, settings.importance_band),
        kl=settings.kl,
    )
