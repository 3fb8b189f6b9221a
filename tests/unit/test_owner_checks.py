"""What an owner hears about a configuration that is allowed and hardly ever meant."""

import msgspec
import pytest

from neurons import settings
from neurons.owner_checks import config_findings, require_usable
from subnet.config import Bottleneck, ModelConfig, OptimizerKind, RunConfig, TrainingConfig
from subnet.errors import InvalidConfig

NARROW = RunConfig(
    model=ModelConfig(bottleneck=Bottleneck.RESBM, bottleneck_width=1),
    training=TrainingConfig(optimizer=OptimizerKind.ADAMW),
)


def codes(run: RunConfig) -> list[str]:
    found = config_findings(run)
    assert all(finding.remedy for finding in found)
    return [finding.code for finding in found]


def test_one_channel_with_adamw_may_collapse() -> None:
    assert codes(NARROW) == ["collapsing_cut"]
    assert not codes(msgspec.structs.replace(NARROW, training=TrainingConfig(optimizer=OptimizerKind.MUON)))
    assert not codes(msgspec.structs.replace(NARROW, model=ModelConfig(bottleneck_width=2)))
    assert not codes(msgspec.structs.replace(NARROW, model=ModelConfig(bottleneck=Bottleneck.NONE)))
    alone = TrainingConfig(optimizer=OptimizerKind.ADAMW, num_stages=1)
    assert not codes(msgspec.structs.replace(NARROW, training=alone)), "nothing is cut"


def test_a_control_is_no_run_to_pay_for() -> None:
    control = RunConfig(model=ModelConfig(bottleneck=Bottleneck.K0))
    assert codes(control) == ["nothing_crosses"]
    require_usable(control)


def test_no_run_is_created_that_convicts_the_honest() -> None:
    with pytest.raises(InvalidConfig, match=r"one channel and AdamW: .* set model\.bottleneck_width = 2 or more"):
        require_usable(NARROW)


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_no_preset_is_warned_about(preset: str) -> None:
    assert not config_findings(settings.load({}, preset=preset).run)
