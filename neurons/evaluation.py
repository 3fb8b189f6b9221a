"""`strata eval`: how good a run's published model is on text nobody trained on, with what a reader needs to judge the figure.

For a pipeline that is the loss without its wires; for stages that trained alone, with `--blocks`, every figure of papers.md B4
that needs no second training: honest ones apart from leaky ones, a trigram table on the same text, and the test for leaks.
"""

import asyncio

import msgspec
from rich.console import Console
from rich.table import Table

from neurons.exit_codes import ExitCode
from neurons.local.report import console
from neurons.published import Published, find_published, read_snapshots, stage_params
from neurons.sources import open_record, read_segments
from subnet.adapters.corpus import SotuCorpus, make_corpus
from subnet.config import RunKind
from subnet.errors import InvalidConfig, StartupRefused
from subnet.inference.evaluate import unigram_entropy
from subnet.inference.evaluate_blocks import BlockEvaluation, DenoisingEvaluation, bits, evaluate_blocks, leak_test
from subnet.inference.ngrams import TrigramTable
from subnet.inference.published import published_loss
from subnet.orchestration.accounts import Accounts
from subnet.types import Epoch, SampleId, StageIndex
from subnet.types import Record as Value

_ZEROED = ("wires zeroed", "zeros at every cut: what ids alone tell the last stage")


class Figure(Value, frozen=True):
    """One loss. A leaky one was computed with its target in the input and says nothing about the model's predictions."""

    name: str
    meaning: str
    nats: float
    bits: float
    is_leaky: bool = False


class Report(Value, frozen=True):
    """What `--json` prints. `leak_test` is None for a pipeline, whose stages get no target before its loss."""

    run_id: str
    epoch: Epoch
    kind: RunKind
    num_heldout_tokens: int
    num_trained_tokens: int
    figures: tuple[Figure, ...]
    leak_test: bool | None = None


def figure(name: str, meaning: str, nats: float, *, is_leaky: bool = False) -> Figure:
    """With its bits."""
    return Figure(name=name, meaning=meaning, nats=nats, bits=bits(nats), is_leaky=is_leaky)


def block_figures(found: BlockEvaluation) -> list[Figure]:
    """Honest figures first, each with what it means."""
    if not isinstance(found, DenoisingEvaluation):
        last = len(found.at_depth) - 1
        return [
            figure(
                "block 0 alone" if depth == 0 else f"depth {depth}",
                "whole stack" if depth == last else "that far",
                loss,
            )
            for depth, loss in enumerate(found.at_depth)
        ] + [figure("composition gain", "block 0 alone less the whole stack", found.composition_gain)]
    return [
        figure("H0", "block 0 alone, from pure noise", found.first_stage),
        figure("H1", "whole chain from pure noise, one path", found.one_path),
        *(figure(f"H{count}", f"mean probability of {count} paths", loss) for count, loss in found.mixtures),
        figure("composition gain", f"H0 - H{found.mixtures[-1][0]}", found.composition_gain),
        *(figure(f"L({sigma:g})", "target visible in noise", loss, is_leaky=True) for sigma, loss in found.leaky),
        figure("L, mean", "target visible in noise", found.leaky_mean, is_leaky=True),
    ]


def trained_samples(accounts: Accounts, last: Epoch) -> list[tuple[Epoch, SampleId]]:
    """Samples credited up to `last`, of the stage with most of them: as much text as any part of the model has seen."""
    by_stage: dict[StageIndex, list[tuple[Epoch, SampleId]]] = {}
    for epoch, account in sorted(accounts.epochs.items()):
        if epoch > last:
            continue
        for hotkey, samples in sorted(account.units.items()):
            by_stage.setdefault(account.stage_of[hotkey], []).extend((epoch, sample) for sample in samples)
    return max(by_stage.values(), key=len, default=[])


def _controls(
    published: Published, corpus: SotuCorpus, samples: list[tuple[Epoch, SampleId]], count: int
) -> list[Figure]:
    """Tables of counts over the text that was trained on."""
    vocab_size = published.config.model.vocab_size
    found = [figure("unigram", "control: how often each token occurs", unigram_entropy(corpus, vocab_size))]
    if samples:
        table = TrigramTable(vocab_size)
        table.fit(corpus.tokens(epoch, sample) for epoch, sample in samples)
        loss = table.loss(corpus.heldout(index) for index in range(count))
        found.append(figure("trigram table", "control: counts of the text trained on", loss))
    return found


def evaluate(published: Published, snapshots: list[bytes], accounts: Accounts, *, count: int, blocks: bool) -> Report:
    """Over the first `count` held-out microbatches. Raises StartupRefused, InvalidConfig."""
    config = published.config
    if blocks and config.kind is not RunKind.BLOCKTRAIN:
        raise InvalidConfig("--blocks is for runs of kind blocktrain; this one is a pipeline: leave it out")
    corpus = make_corpus(config)
    if corpus.digest != published.corpus_digest:
        raise StartupRefused(
            f"the text of this run, corpus {published.corpus_digest[:16]}, is not on this machine.",
            ExitCode.DAMAGED_STATE,
        )
    params = stage_params(config, snapshots)
    samples = trained_samples(accounts, published.epoch)
    if blocks:
        figures = block_figures(evaluate_blocks(config, params, corpus, count))
    else:
        found = published_loss(config, params, corpus, count)
        less = ("first stage alone", "the others add the rest") if config.kind is RunKind.BLOCKTRAIN else _ZEROED
        figures = [figure("held-out", "the whole model", found.loss), figure(*less, found.loss_wires_zeroed)]
    num_tokens = config.training.microbatch_size * config.training.num_tokens
    return Report(
        run_id=published.run_id,
        epoch=published.epoch,
        kind=config.kind,
        num_heldout_tokens=count * num_tokens,
        num_trained_tokens=len(samples) * num_tokens,
        figures=(*figures, *_controls(published, corpus, samples, count)),
        leak_test=leak_test(config, params, corpus).is_passed if blocks else None,
    )


def run_eval(target: str, blocks: bool, epoch: int | None, count: int, is_json: bool) -> int:
    """Print the report; returns the exit code: CHECK_FAILED when the leak test does. Raises StartupRefused, InvalidConfig."""
    record = open_record(asyncio.run(read_segments(target)))
    published = find_published(record, epoch)
    snapshots = asyncio.run(read_snapshots(target, published.snapshots))
    found = evaluate(published, snapshots, record.accounts, count=count, blocks=blocks)
    if is_json:
        Console(soft_wrap=True, highlight=False).print(msgspec.json.encode(found).decode(), markup=False)
    else:
        show(found, console())
    return ExitCode.CHECK_FAILED if found.leak_test is False else ExitCode.OK


def show(found: Report, out: Console) -> None:
    """The report as text."""
    out.print(
        f"Run {found.run_id} ({found.kind}), epoch {found.epoch}: {found.num_heldout_tokens} held-out tokens, "
        f"at most {found.num_trained_tokens} trained on by a stage",
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("nats/token", justify="right")
    table.add_column("bits/token", justify="right")
    table.add_column("what it is")
    for one in found.figures:
        meaning = f"LEAKY: {one.meaning}, no loss of the model" if one.is_leaky else one.meaning
        table.add_row(one.name, f"{one.nats:.4f}", f"{one.bits:.4f}", meaning)
    out.print(table)
    if found.leak_test is not None:
        control = ", and the control that must leak does" if any(one.is_leaky for one in found.figures) else ""
        said = f"passed: no logit knows what comes after it{control}" if found.leak_test else "FAILED"
        out.print(f"leak test {said}", markup=False, soft_wrap=True)
