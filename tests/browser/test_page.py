"""The page as a person sees it: a real browser on a real listener, which shows a real state of the orchestrator."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from neurons.page import offer_page
from subnet import wire
from subnet.adapters.listener import Listener
from subnet.adapters.memory_chain import MemoryChain, MemoryChainConfig, MemoryChainState
from subnet.adapters.system import SystemClock
from subnet.config import RunKind
from subnet.dashboard.views import run_view
from subnet.types import Hotkey, Outcome, Phase
from tests.unit.orchestration import FIRST, MINERS, RUN, VALIDATORS, Run

pytestmark = pytest.mark.xdist_group("browser")

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


class Shown:
    """A page in the browser and the run behind it."""

    def __init__(self, chrome: Chrome, run: Run, listener: Listener) -> None:
        self.chrome = chrome
        self.run = run
        self.listener = listener

    async def open(self) -> None:
        """Load the page."""
        await asyncio.to_thread(self.chrome.get, f"http://127.0.0.1:{self.listener.port}/")

    def text(self, part: str) -> str:
        """What a person reads in one part of the page."""
        return self.chrome.find_element(By.ID, part).text

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the page shows something; it looks at the run once a second."""
        await asyncio.to_thread(WebDriverWait(self.chrome, 60, 0.1).until, lambda _: holds())


@pytest.fixture
async def shown(browser: Chrome) -> AsyncIterator[Shown]:
    """An epoch that was worked, audited, merged, measured and scored, with the next one begun."""
    run = _worked()

    async def public(name: str) -> bytes | None:
        return wire.encode(run_view(run.state)) if name == "status" else None

    listener = Listener()
    offer_page(listener, public, _chain())
    await listener.start("127.0.0.1", 0)
    _complaints(browser)  # what an earlier test left
    yield Shown(browser, run, listener)
    await listener.stop()


def _worked() -> Run:
    run = Run()
    run.begin(*MINERS)
    run.train()
    run.commit()
    for miner, outcome in ((MINERS[0], Outcome.PASS), (MINERS[1], Outcome.FAIL)):
        run.done(miner, run.answer(miner))
        verdict = run.verdict(run.state.cases[FIRST, miner].asked[-1], miner, outcome).verdict
        run.done(verdict.validator, wire.PostVerdict(verdict=msgspec.structs.replace(verdict, reason=HOSTILE)))
    run.upload()
    run.merge()
    evaluator = run.state.evaluations[FIRST].validator
    run.done(evaluator, wire.PostEvaluation(epoch=FIRST, loss=2.5, loss_wires_zeroed=2.75))
    scores = {miner: 1.0 for miner in MINERS if miner != MINERS[1]}
    weights = dict.fromkeys(scores, 0.2)
    run.done(
        VALIDATORS[0], wire.PostScores(segment=0, ledger_head=run.state.ledger.head, scores=scores, weights=weights)
    )
    return run


def _chain() -> MemoryChain:
    state = MemoryChainState(SystemClock(), MemoryChainConfig(netuid=7), owner_hotkey=Hotkey("owner"))
    for miner in MINERS[:5]:
        state.register(miner, f"cold-{miner}", stake=12.5)
    return state.view(Hotkey("owner"))


def _complaints(chrome: Chrome) -> list[str]:
    """What the browser's console said since it was last asked; an answer that did not come is no fault of the page."""
    console = chrome.get_log("browser")  # type: ignore[no-untyped-call]
    return [line["message"] for line in console if line["source"] != "network"]


async def test_every_part_shows_the_run(shown: Shown) -> None:
    await shown.open()
    await shown.until(lambda: "2.500 after epoch 0" in shown.text("loss"))
    assert shown.text("run") == RUN
    assert "epoch\n1" in shown.text("now")
    assert [shown.text("stages").count(miner) for miner in MINERS] == [1] * len(MINERS)
    assert "Stage 2" in shown.text("stages")
    rows = {row.split()[0]: row for row in shown.text("standings").splitlines()[1:]}
    assert "20.00 %" in rows[MINERS[0]] and "12.500" in rows[MINERS[0]], "by the record, and by the chain"
    assert "nothing that counts" in rows[MINERS[1]]
    assert "not registered" in rows[MINERS[5]]
    assert "netuid 7" in shown.text("record") and f"{VALIDATORS[0]} to segment 0" in shown.text("record")
    assert _complaints(shown.chrome) == []


async def test_a_run_of_stages_apart_that_has_ended_says_so(shown: Shown) -> None:
    shown.run.state.kind, shown.run.state.phase = RunKind.BLOCKTRAIN, Phase.FINISHED
    await shown.open()
    await shown.until(lambda: "2.500 after epoch 0" in shown.text("loss"))
    assert shown.text("dashed") == "the first stage alone"
    assert "the run has ended" in shown.text("now") and "at the latest" not in shown.text("now")
    assert len(shown.chrome.find_elements(By.CSS_SELECTOR, "#loss circle")) == 2
    assert _complaints(shown.chrome) == []


async def test_what_a_peer_wrote_is_text(shown: Shown) -> None:
    await shown.open()
    await shown.until(lambda: HOSTILE in shown.text("audits"))
    assert not shown.chrome.find_elements(By.CSS_SELECTOR, "#audits img, #audits script")
    assert shown.chrome.title == "Strata: epoch 1, published"
    assert _complaints(shown.chrome) == []


async def test_an_orchestrator_that_is_gone_is_said_and_what_was_seen_stays(shown: Shown) -> None:
    await shown.open()
    await shown.until(lambda: "2.500" in shown.text("loss"))
    await shown.listener.stop()
    await shown.until(lambda: "does not answer" in shown.text("gone"))
    assert "this is how things stood at" in shown.text("gone")
    assert "2.500" in shown.text("loss")


async def test_a_telephone_need_not_scroll_sideways(shown: Shown) -> None:
    shown.chrome.set_window_size(390, 800)
    try:
        await shown.open()
        await shown.until(lambda: "2.500" in shown.text("loss"))
        width, seen = shown.chrome.execute_script(
            "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert width <= seen
    finally:
        shown.chrome.set_window_size(1200, 1400)
