"""Changes that change nothing, each with its reason: (module, line, change, which of the line's equal changes)."""

from __future__ import annotations

EQUAL: dict[tuple[str, str, str, int], str] = {
    (
        "estimators",
        "np.abs(values - average) <= EQUAL_WITHIN * np.maximum(np.abs(average), LEAST_SIZE), 0.0, values - average",
        "LtE to Lt",
        0,
    ): "which side of the bound is equal is a matter of rounding",
    (
        "loss",
        "sums = torch.zeros(len(members), dtype=difference_M.dtype, device=difference_M.device)",
        "without device",
        0,
    ): "on a CPU the default is the tensor's",
    (
        "loss",
        "floor_M = torch.where(batch.advantages_M < 0, self.clip_dual * batch.advantages_M, -math.inf)",
        "Lt to LtE",
        0,
    ): "a token without an advantage has no loss to cap",
    (
        "scoring",
        "return not all_equal([record.reward for record in baseline(group) if record.reward is not None])",
        "without the filter",
        0,
    ): "all rollouts of a baseline have a reward",
    (
        "step",
        "(record.reward or 0.0) if reward is None else reward(record),",
        "without operand 1",
        0,
    ): "all rollouts of a baseline have a reward",
    ("step", "np.concatenate([none > 0, segment.loss_mask]),", "0 to 1", 0): "zeros are above neither",
    (
        "aem",
        "scores = np.exp(-strength * (entropies - low) / (high - low))",
        "the left operand alone",
        0,
    ): "the scores are divided by their mean, so a shift of all entropies cancels",
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
        "dart",
        'kept[own[np.argsort(-entropies[own], kind="stable")[:count]]] = 1',
        "without kind",
        0,
    ): "the paper does not say which of turns with equal entropy to keep; stable makes it the same on all machines",
    (
        "epo",
        "total, count = self.history.get(str(index), (0.0, 0))",
        "0.0 to 1.0",
        0,
    ): "the sum is not read where the count is 0",
}
