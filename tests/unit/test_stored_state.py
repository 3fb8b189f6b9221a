"""The state as bytes: the same again, damage and other versions told apart, and no change of it without a new version.

That a state read back goes on as the one stored would have is held to in test_machine_stateful, at every point of random runs.
"""

import dataclasses
import enum
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from neurons.exit_codes import ExitCode, exit_code_of
from subnet.errors import DamagedState, OtherVersion
from subnet.frames import digest
from subnet.orchestration import stored
from subnet.orchestration.state import State
from subnet.orchestration.stored import VERSION, decode_state, encode_state
from tests.unit.orchestration import CONFIG, NINE, Run

FIELDS = {1: "c1f4", 2: "eb5d"}
"""By version of the stored state: how the digest of all its fields begins."""


CONFIG_NINE = msgspec.structs.replace(
    CONFIG,
    training=msgspec.structs.replace(CONFIG.training, min_miners=9),
    merge=msgspec.structs.replace(CONFIG.merge, audit_fraction=1.0),
)


@pytest.fixture(scope="module")
def run() -> Run:
    """A run that uploads in its second epoch: audits are open, and agreeing shards of the first wait to be recomputed."""
    run = Run(config=CONFIG_NINE)
    run.begin(*NINE)
    run.train()
    run.commit()
    run.upload()
    run.merge()
    run.ready(*NINE)
    run.train()
    run.commit()
    return run


def test_a_state_comes_back_with_all_it_holds_in_the_same_order(run: Run) -> None:
    data = encode_state(run.state, written_by="0.1.0")
    again = decode_state(data)
    assert again == run.state
    assert again.ledger.tail and again.ledger.tail == run.state.ledger.tail, "what is not sealed yet is there too"
    assert encode_state(again, written_by="0.1.0") == data
    assert decode_state(encode_state(State(), written_by="")) == State()


def test_audits_of_one_merge_share_its_plan(run: Run) -> None:
    audits = run.state.shard_audits
    merges = {(epoch, stage) for epoch, stage, _ in audits}
    assert len(audits) > len(merges) > 1
    again = decode_state(encode_state(run.state, written_by="")).shard_audits
    assert len({id(audit.plan) for audit in again.values()}) == len(merges)


def test_what_was_stored_is_not_changed_by_what_follows(run: Run) -> None:
    data = encode_state(run.state, written_by="")
    again = decode_state(data)
    again.members[NINE[0]].is_live = False
    again.current.commits.clear()
    assert again != run.state
    assert encode_state(run.state, written_by="") == data


@pytest.mark.parametrize("place", [0, 4, 35, 36, 38, 40, 45, 2000, -1])
def test_any_changed_byte_is_damage(run: Run, place: int) -> None:
    data = bytearray(encode_state(run.state, written_by="0.1.0"))
    data[place] ^= 1
    with pytest.raises(DamagedState, match="Restore the state store") as found:
        decode_state(bytes(data))
    assert exit_code_of(found.value) == ExitCode.DAMAGED_STATE


@pytest.mark.parametrize("size", [0, 3, 4, 30, 36, 40, 3000])
def test_so_is_a_missing_end(run: Run, size: int) -> None:
    with pytest.raises(DamagedState):
        decode_state(encode_state(run.state, written_by="0.1.0")[:size])


def test_another_version_says_who_wrote_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stored, "VERSION", VERSION + 1)
        newer = encode_state(run.state, written_by="7.3.0")
    with pytest.raises(OtherVersion, match=rf"of version {VERSION + 1}, written by Strata 7\.3\.0") as found:
        decode_state(newer)
    assert exit_code_of(found.value) == ExitCode.VERSION_MISMATCH


def test_a_state_of_the_version_before_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 1 knew nothing of deletions."""
    again = dataclasses.replace(run.state, deletions={})
    older = msgspec.msgpack.decode(encode_state(again, written_by="")[40:])
    del older[0]["deletions"]
    with monkeypatch.context() as patch:
        patch.setattr(stored, "VERSION", 1)
        patch.setattr(stored, "_Stored", lambda **parts: older)
        data = encode_state(run.state, written_by="0.1.0")
    assert decode_state(data) == again


def test_a_state_that_does_not_fit_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(stored, "_Stored", lambda **parts: [None, {}, {}])
        foreign = encode_state(State(), written_by="0.0.9")
    with pytest.raises(OtherVersion, match=r"written by Strata 0\.0\.9 .*\$\[0\]"):
        decode_state(foreign)


def test_whoever_changes_the_state_gives_it_a_new_version() -> None:
    """Raise VERSION in subnet/orchestration/stored.py, see whether READABLE keeps the old one, and add what is shown here."""
    found = digest("\n".join(sorted(fields_of(State, {}).values())).encode())[:4]
    assert FIELDS[VERSION] == found, f"{VERSION}: {found}"


def fields_of(kind: Any, known: dict[Any, str]) -> dict[Any, str]:
    """Every class that a value of this type may hold, with its fields and their types, or its members."""
    for part in get_args(kind):
        fields_of(part, known)
    if not isinstance(kind, type) or kind in known:
        return known
    if issubclass(kind, enum.Enum):
        known[kind] = f"{kind.__name__}: " + ", ".join(repr(member.value) for member in kind)
    elif dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        known[kind] = f"{kind.__name__}: " + ", ".join(f"{name} {spelled(hint)}" for name, hint in hints.items())
        for hint in hints.values():
            fields_of(hint, known)
    return known


def spelled(hint: Any) -> str:
    """A type, spelled alike by every Python."""
    if not get_args(hint):
        return str(getattr(hint, "__name__", hint))
    is_union = get_origin(hint) in (Union, types.UnionType)
    return f"{'Union' if is_union else spelled(get_origin(hint))}[{', '.join(map(spelled, get_args(hint)))}]"


def test_the_fields_of_everything_in_the_state_are_looked_at() -> None:
    names = {kind.__name__ for kind in fields_of(State, {})}
    assert {
        "State",
        "Ledger",
        "Entry",
        "Leased",
        "Case",
        "Receipt",
        "Joined",
        "BlobRef",
        "Sample",
        "MergePlan",
    } <= names
