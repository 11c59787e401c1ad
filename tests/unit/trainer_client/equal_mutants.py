"""Changes that change nothing, each with its reason: (module, line, change, which of the line's equal changes)."""

from __future__ import annotations

EQUAL: dict[tuple[str, str, str, int], str] = {
    (
        "loss",
        "floor_M = torch.where(batch.advantages_M < 0, self.clip_dual * batch.advantages_M, -math.inf)",
        "Lt to LtE",
        0,
    ): "a token without an advantage has no loss to cap",
    (
        "aem",
        "scores = np.exp(-strength * (entropies - low) / (high - low))",
        "Sub to Add",
        0,
    ): "the scores are divided by their mean, so a shift of all entropies cancels",
    (
        "aepo",
        "held_M = terms.clipped_M & (batch.advantages_M > 0)",
        "Gt to GtE",
        0,
    ): "a token without an advantage is never clipped",
    (
        "archer",
        "drawn = np.random.default_rng(step.number).random(len(step.turns)) < 0.5",
        "Lt to LtE",
        0,
    ): "no drawn number is exactly .5",
    (
        "cm2",
        "counts &= np.bincount(alike[judged], minlength=alike.max() + 1)[alike] > self.least",
        "1 to 2",
        0,
    ): "one more count, which no turn asks for",
    (
        "epo",
        "total, count = self.history.get(str(index), (0.0, 0))",
        "0.0 to 1.0",
        0,
    ): "the sum is not read where the count is 0",
    (
        "ssp",
        "alone = np.bincount(step.groups)[step.groups] == 1 if len(step.groups) else np.zeros(0, bool)",
        "0 to 1",
        0,
    ): "of an empty step: one value spread over none",
}
