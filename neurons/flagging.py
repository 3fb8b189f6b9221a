"""Whom CLASP flags, from the sealed record alone: the same for the validator that posts and for who checks (trust.md 4).

Losses fall while a run trains, and an epoch has few samples; so the newest epochs are pooled, and blocks of time within them are
a factor of their own beside the stages.

Where stages train apart nobody is judged: a sample's loss is the word of the one miner that worked on it, and no other has a
share in it. There audits alone protect, and they recompute every loss they look at.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from incentives.clasp import Batch
from incentives.config import ClaspConfig
from incentives.flags import Attribution, Flag, attribute, flags, to_batches
from subnet.config import RunConfig
from subnet.lanes import lanes
from subnet.orchestration.accounts import Accounts
from subnet.types import Epoch, Hotkey, PathwayLoss

BLOCKS_PER_EPOCH = 4
"""Within a block the loss is taken to be level."""


WORST = 2.0
"""Largest loss that counts, over that of guessing any token alike."""


class Window(NamedTuple):
    """What the record says of the samples that are looked at together. `stages` lists the hotkeys that worked in each stage."""

    epochs: tuple[Epoch, ...]
    stages: Sequence[Sequence[Hotkey]]
    attribution: Attribution


def find_flags(accounts: Accounts, epoch: Epoch, config: ClaspConfig) -> tuple[Flag, ...]:
    """Miners whose samples lose more than chance explains, in the window's published epochs up to `epoch`; none without any."""
    window = open_window(accounts, epoch, config)
    return flags(window.attribution, window.stages, config) if window else ()


def open_window(accounts: Accounts, epoch: Epoch, config: ClaspConfig) -> Window | None:
    """Effects fitted to the window's published epochs up to `epoch`; None when no sample has a loss, or no loss is shared."""
    first, run = _window_start(epoch, config), _run_config(accounts)
    found = [account for account in accounts.published() if first <= account.epoch <= epoch]
    window = [account.pathway_losses() for account in found]
    losses = [_bounded(loss, run) for epoch_losses in window for loss in epoch_losses]
    if not losses or lanes(run).count > 1:
        return None
    blocks = [
        BLOCKS_PER_EPOCH * at + place * BLOCKS_PER_EPOCH // len(epoch_losses)
        for at, epoch_losses in enumerate(window)
        for place in range(len(epoch_losses))
    ]
    stages = _stages(losses)
    sizes = (*map(len, stages), BLOCKS_PER_EPOCH * len(window))
    if len(losses) < sum(sizes):
        return None  # fewer samples than effects: nothing could be told apart, at the price of a large inverse
    epoch_of_block = [block // BLOCKS_PER_EPOCH for block in range(sizes[-1])]
    attribution = attribute(
        lambda: _timed(losses, stages, blocks),
        sizes,
        num_stages=len(stages),
        epoch_of_block=epoch_of_block,
        usual_wander=config.wander,
    )
    return Window(epochs=tuple(account.epoch for account in found), stages=stages, attribution=attribution)


def _run_config(accounts: Accounts) -> RunConfig:
    return msgspec.json.decode(accounts.created.config_json, type=RunConfig) if accounts.created else RunConfig()


def _bounded(said: PathwayLoss, run: RunConfig) -> PathwayLoss:
    """A loss is its last miner's word and may be any number: two of 1e308 have no sum, one of 1e200 hides all others' harm.

    From twice as bad as not knowing anything on, worse makes no difference; whoever says so often is flagged all the same.
    """
    loss = min(max(said.loss, 0.0), WORST * math.log(run.model.vocab_size))
    return said if loss == said.loss else msgspec.structs.replace(said, loss=loss)


def _window_start(epoch: Epoch, config: ClaspConfig) -> int:
    """A test that may be repeated has to look at the same samples and more each time, so its windows begin at fixed epochs."""
    return epoch - epoch % config.window_epochs if config.sequential else epoch - config.window_epochs + 1


def _stages(losses: Sequence[PathwayLoss]) -> list[list[Hotkey]]:
    """Hotkeys that worked in each stage, sorted; one that moved stands in both."""
    return [sorted(set(hotkeys)) for hotkeys in zip(*(loss.pathway for loss in losses), strict=True)]


def _timed(losses: Sequence[PathwayLoss], stages: Sequence[Sequence[Hotkey]], blocks: Sequence[int]) -> Iterator[Batch]:
    """Samples with their block of time as the last factor."""
    at = 0
    for batch in to_batches(losses, stages):
        count = len(batch.loss_k)
        times_k = np.array(blocks[at : at + count], dtype=np.int64)
        yield Batch(members_kf=np.column_stack([batch.members_kf, times_k]), loss_k=batch.loss_k)
        at += count
