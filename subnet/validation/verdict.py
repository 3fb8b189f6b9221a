"""What follows from a replay's measures (trust.md 2). No torch here."""

from subnet.config import AuditConfig
from subnet.types import Measures, Outcome
from subnet.validation.distance import Distance

PUBLISHED_COSINE = 0.9
PUBLISHED_NORM_RATIO = 0.8
MIN_FAILING = 2
"""Micro-batches that must be out of bounds."""
LONE_PASS_SLACK = 2.0
"""How much further than the median one pass may lie. Honest bf16 passes reach 1.5 times the median's limit at times, at a
128x cut with few channels; the nearest cheat begins at 3 times."""

LONE_GRADIENT_SLACK = 4.0
"""The same for a gradient: where it has shrunk to a tenth on its way, honest bf16 work reaches three times the limit (LOG)."""


def is_forward_failing(found: Distance, audit: AuditConfig) -> bool:
    """Whether what one forward pass sent is out of bounds, taken alone."""
    is_far = found.rel_d > LONE_PASS_SLACK * audit.max_rel_d
    return is_far or found.rel_d_token > LONE_PASS_SLACK * audit.max_rel_d_token or not _has_right_norm(found, audit)


def is_backward_failing(found: Distance, audit: AuditConfig) -> bool:
    """The same for a gradient, where single tokens carry next to nothing and tell nothing."""
    return found.rel_d > LONE_GRADIENT_SLACK * audit.max_rel_d or not _has_right_norm(found, audit)


def _has_right_norm(found: Distance, audit: AuditConfig) -> bool:
    return audit.min_norm_ratio <= found.norm_ratio <= audit.max_norm_ratio


def judge(measures: Measures, audit: AuditConfig) -> tuple[Outcome, str]:
    """Outcome and its reason.

    The medians stand for the segment and are held to the limits themselves; work that is bad now and then shows in single
    micro-batches, of which one gross or two failing ones are enough.
    """
    if measures.rel_d_max > audit.max_single_rel_d:
        return Outcome.FAIL, f"a pass lies {measures.rel_d_max:.3g} from its replay, limit {audit.max_single_rel_d:g}"
    over = _medians_over(measures, audit)
    if over:
        return Outcome.FAIL, "; ".join(over)
    if measures.num_failing >= MIN_FAILING:
        return Outcome.FAIL, (
            f"{measures.num_failing} micro-batches out of bounds: furthest pass {measures.rel_d_max:.3g} from its replay,"
            f" largest error of a loss {measures.loss_error:.3g}"
        )
    return Outcome.PASS, f"{measures.num_passes} passes replayed, median distance {measures.rel_d:.3g}"


def _medians_over(measures: Measures, audit: AuditConfig) -> list[str]:
    """What stands for the whole segment and is over its limit, in words."""
    bounds = [
        ("params moved apart by", measures.rel_dw, audit.max_rel_dw),
    ]
    if measures.num_passes >= 2 * MIN_FAILING:
        bounds += [
            ("median distance", measures.rel_d, audit.max_rel_d),
            ("median distance of gradients", measures.rel_d_backward, audit.max_rel_d),
            ("median distance of the worst token", measures.rel_d_token, audit.max_rel_d_token),
        ]
    return [f"{what} {value:.3g}, limit {limit:g}" for what, value, limit in bounds if value > limit]


def published_rule(measures: Measures) -> bool:
    """Whether the published rule accepts the same segment: cosine > 0.9 and norm ratio > 0.8 (papers.md A3)."""
    return measures.cosine > PUBLISHED_COSINE and measures.norm_ratio > PUBLISHED_NORM_RATIO
