"""What an owner should know about a configuration before a run is created with it: what is allowed and hardly ever meant."""

from neurons.findings import Finding, Level
from subnet.config import Bottleneck, OptimizerKind, RunConfig, RunKind
from subnet.errors import InvalidConfig


def config_findings(run: RunConfig) -> list[Finding]:
    """What a run's own knobs would come to; empty when there is nothing to say, or nothing crosses from stage to stage anyway.

    No run is created with a problem among them.
    """
    model, training = run.model, run.training
    if run.kind is not RunKind.PIPELINE or training.num_stages == 1:
        return []
    found = []
    if model.bottleneck is Bottleneck.K0:
        text = "model.bottleneck = k0 sends nothing from stage to stage: audits see neither activations nor gradients"
        found.append(Finding("nothing_crosses", Level.WARNING, text, "it is a control: use resbm, or iota"))
    is_narrow = model.bottleneck in (Bottleneck.RESBM, Bottleneck.IOTA) and model.bottleneck_width == 1
    if is_narrow and training.optimizer is OptimizerKind.ADAMW:
        text = (
            "one channel and AdamW: a stage may come to send nearly one value for all tokens; then neither replays nor losses"
            " tell whether its miner left out part of the work, and honest work can fail its replay"
        )
        remedy = "set model.bottleneck_width = 2 or more, or training.optimizer = muon"
        found.append(Finding("collapsing_cut", Level.PROBLEM, text, remedy))
    return found


def require_usable(run: RunConfig) -> None:
    """Raise InvalidConfig for what no run should be created with."""
    for finding in config_findings(run):
        if finding.level is Level.PROBLEM:
            raise InvalidConfig(f"{finding.text}; {finding.remedy}")
