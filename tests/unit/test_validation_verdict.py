"""From measures to an outcome."""

import re
import subprocess
import sys

import msgspec
import pytest

from subnet.config import AuditConfig
from subnet.types import Measures, Outcome
from subnet.validation.distance import Distance
from subnet.validation.verdict import is_backward_failing, is_forward_failing, judge, published_rule

GOOD = Measures(
    num_passes=16,
    num_failing=0,
    rel_d=0.004,
    rel_d_max=0.01,
    rel_d_token=0.05,
    rel_d_backward=0.006,
    rel_dw=0.1,
    loss_error=1e-4,
    cosine=0.9999,
    norm_ratio=1.0,
)


@pytest.mark.parametrize(
    ("changes", "outcome", "reason"),
    [
        ({}, Outcome.PASS, "16 passes replayed, median distance 0.004"),
        ({"rel_d_max": 0.51}, Outcome.FAIL, r"a pass lies 0\.51 from its replay, limit 0\.5"),
        ({"rel_d_max": 0.49, "num_failing": 1}, Outcome.PASS, ""),
        ({"num_failing": 2, "rel_d_max": 0.3}, Outcome.FAIL, r"2 micro-batches out of bounds: furthest pass 0\.3"),
        ({"rel_d": 0.041}, Outcome.FAIL, r"median distance 0\.041, limit 0\.04"),
        ({"rel_d_backward": 0.041}, Outcome.FAIL, r"median distance of gradients 0\.041"),
        ({"rel_d_token": 0.26}, Outcome.FAIL, r"worst token 0\.26, limit 0\.25"),
        ({"rel_d": 0.06, "num_passes": 2, "num_failing": 1}, Outcome.PASS, ""),
        ({"rel_dw": 0.26}, Outcome.FAIL, r"params moved apart by 0\.26, limit 0\.25"),
        ({"rel_dw": 1.0, "num_passes": 0}, Outcome.FAIL, "params moved apart"),
        ({"rel_d": 0.2, "rel_dw": 1.0}, Outcome.FAIL, "params moved apart by 1, limit 0.25; median distance 0.2"),
    ],
)
def test_judge(changes: dict[str, float], outcome: Outcome, reason: str) -> None:
    found, text = judge(msgspec.structs.replace(GOOD, **changes), AuditConfig())
    assert found is outcome
    assert re.search(reason, text)


@pytest.mark.parametrize(
    ("cosine", "norm_ratio", "passes"), [(0.91, 0.81, True), (0.9, 1.0, False), (1.0, 0.8, False), (0.95, 5.0, True)]
)
def test_published_rule(cosine: float, norm_ratio: float, passes: bool) -> None:
    assert published_rule(msgspec.structs.replace(GOOD, cosine=cosine, norm_ratio=norm_ratio)) is passes


@pytest.mark.parametrize(
    ("rel_d", "token", "norm_ratio", "forward", "backward"),
    [
        (0.01, 0.1, 1.0, False, False),
        (0.07, 0.4, 1.0, False, False),
        (0.09, 0.1, 1.0, True, False),
        (0.17, 0.1, 1.0, True, True),
        (0.01, 0.6, 1.0, True, False),
        (0.01, 0.1, 1.2, True, True),
        (0.01, 0.1, 0.8, True, True),
    ],
)
def test_a_pass_alone(rel_d: float, token: float, norm_ratio: float, forward: bool, backward: bool) -> None:
    found = Distance(rel_d=rel_d, rel_d_token=token, cosine=1.0, norm_ratio=norm_ratio)
    assert is_forward_failing(found, AuditConfig()) is forward
    assert is_backward_failing(found, AuditConfig()) is backward


def test_judging_needs_no_torch() -> None:
    code = "import sys; import subnet.validation.verdict; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
