"""`strata eval`: which figures it prints for which run, and what it refuses."""

import msgspec
import numpy as np
import pytest
from rich.console import Console

from neurons.evaluation import Report, block_figures, evaluate, show, trained_samples
from neurons.published import Published
from subnet.adapters.corpus import make_corpus
from subnet.config import BlockTrainConfig, Bottleneck, ModelConfig, Objective, RunConfig, RunKind, TrainingConfig
from subnet.errors import InvalidConfig, StartupRefused
from subnet.inference.evaluate_blocks import DenoisingEvaluation
from subnet.model.init import initial_params
from subnet.orchestration.accounts import Accounts, EpochAccount
from subnet.training.outer import encode_snapshot
from subnet.types import Epoch, Hotkey, SampleId, StageIndex

ALICE, BOB, CAROL = (Hotkey(name) for name in ("alice", "bob", "carol"))


def run_of(kind: RunKind, objective: Objective = Objective.GREEDY) -> RunConfig:
    return RunConfig(
        kind=kind,
        model=ModelConfig(width=32, num_layers=2, ffn_width=48, bottleneck=Bottleneck.RESBM, bottleneck_width=4),
        training=TrainingConfig(num_stages=2, microbatch_size=2, num_tokens=16),
        blocktrain=BlockTrainConfig(objective=objective),
    )


def published(config: RunConfig) -> tuple[Published, list[bytes]]:
    vectors = [initial_params(config, StageIndex(stage)) for stage in range(2)]
    return (
        Published(run_id="run", config=config, corpus_digest=make_corpus(config).digest, epoch=Epoch(1), snapshots=()),
        [encode_snapshot(vector, np.zeros_like(vector)) for vector in vectors],
    )


def accounts() -> Accounts:
    """Two epochs; Bob alone in stage 1 in the second."""
    samples = [dict.fromkeys(map(SampleId, ids)) for ids in ((0, 1), (2, 3), (4,))]
    first = EpochAccount(
        epoch=Epoch(0), stage_of={ALICE: StageIndex(0), BOB: StageIndex(1)}, units={ALICE: samples[0], BOB: samples[1]}
    )
    second = EpochAccount(epoch=Epoch(1), stage_of={BOB: StageIndex(1)}, units={BOB: samples[2]})
    later = EpochAccount(epoch=Epoch(2), stage_of={CAROL: StageIndex(0)}, units={CAROL: samples[1] | samples[0]})
    return Accounts(epochs={Epoch(0): first, Epoch(1): second, Epoch(2): later})


def test_the_text_is_that_of_the_stage_with_most_of_it() -> None:
    assert trained_samples(accounts(), Epoch(1)) == [(0, 2), (0, 3), (1, 4)]
    assert trained_samples(Accounts(), Epoch(1)) == []


def test_a_pipeline_isshown_with_and_without_its_wires() -> None:
    known, snapshots = published(run_of(RunKind.PIPELINE))
    found = evaluate(known, snapshots, accounts(), count=2, blocks=False)
    assert [one.name for one in found.figures] == ["held-out", "wires zeroed", "unigram", "trigram table"]
    assert found.leak_test is None and found.num_trained_tokens == 3 * 32
    assert all(one.bits == pytest.approx(one.nats / 0.6931, rel=1e-3) for one in found.figures)


def test_without_credited_work_there_is_no_table_to_compare_with() -> None:
    known, snapshots = published(run_of(RunKind.PIPELINE))
    found = evaluate(known, snapshots, Accounts(), count=1, blocks=False)
    assert [one.name for one in found.figures] == ["held-out", "wires zeroed", "unigram"]


def test_stages_that_trained_alone_by_depth() -> None:
    known, snapshots = published(run_of(RunKind.BLOCKTRAIN))
    short = evaluate(known, snapshots, accounts(), count=1, blocks=False)
    assert [one.name for one in short.figures][:2] == ["held-out", "first stage alone"]
    found = evaluate(known, snapshots, accounts(), count=1, blocks=True)
    assert [one.name for one in found.figures][:3] == ["block 0 alone", "depth 1", "composition gain"]
    assert found.leak_test is True


def test_denoising_stages_have_leaky_figures_that_say_so() -> None:
    known, snapshots = published(run_of(RunKind.BLOCKTRAIN, Objective.DIFFUSION))
    found = evaluate(known, snapshots, accounts(), count=1, blocks=True)
    honest = [one.name for one in found.figures if not one.is_leaky]
    assert honest == ["H0", "H1", "H4", "H16", "composition gain", "unigram", "trigram table"]
    assert [one.name for one in found.figures if one.is_leaky][-1] == "L, mean"
    out = Console(record=True, width=140)
    show(found, out)
    text = out.export_text()
    assert text.count("LEAKY") == 6 and "leak test passed" in text
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


def test_gain_is_what_later_stages_add() -> None:
    found = DenoisingEvaluation(
        leaky=((1.0, 2.0), (2.0, 4.0)), first_stage=3.0, one_path=3.5, mixtures=((4, 2.9), (16, 2.75))
    )
    by_name = {one.name: one.nats for one in block_figures(found)}
    assert by_name["composition gain"] == 0.25 and by_name["L, mean"] == 3.0


def test_blocks_of_a_pipeline_and_a_foreign_text_are_refused() -> None:
    known, snapshots = published(run_of(RunKind.PIPELINE))
    with pytest.raises(InvalidConfig, match="--blocks is for runs of kind blocktrain"):
        evaluate(known, snapshots, accounts(), count=1, blocks=True)
    foreign = Published(run_id="run", config=known.config, corpus_digest="0" * 64, epoch=Epoch(1), snapshots=())
    with pytest.raises(StartupRefused, match="is not on this machine"):
        evaluate(foreign, snapshots, accounts(), count=1, blocks=False)
