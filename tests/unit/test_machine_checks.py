"""The doctor's findings about the machine, from a look that is made up and from one at this machine."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from neurons.findings import Finding, Level, Role, problems_first
from neurons.machine_checks import Arithmetic, MachineFacts, machine_findings, read_machine, stage_bytes
from neurons.settings import NodeSettings
from subnet.config import OptimizerKind, RunConfig
from subnet.model.partition import num_elements
from subnet.types import NumericMode, StageIndex

GIB = 1 << 30
NODE = NodeSettings()
RUN = RunConfig()


def facts(**fields: Any) -> MachineFacts:
    """A machine on which every stage runs well."""
    arithmetic = Arithmetic(
        version="2.13.0", instruction_set="AVX2", num_threads=4, flops=1e11, gpus=(), has_fast_bf16=False
    )
    inner = {name: fields.pop(name) for name in list(fields) if name in Arithmetic.__dataclass_fields__}
    made: dict[str, Any] = {
        "ram_bytes": 32 * GIB,
        "free_ram_bytes": 20 * GIB,
        "free_disk_bytes": 100 * GIB,
        "disk_path": Path("/data"),
        "num_cores": 4,
        "arithmetic": dataclasses.replace(arithmetic, **inner),
    }
    return MachineFacts(**{**made, **fields})


def problems(found: list[Finding]) -> dict[str, str]:
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return {finding.code: finding.text for finding in found if finding.level is not Level.OK}


def test_a_good_machine_hears_what_it_can_do() -> None:
    found = {finding.code: finding.text for finding in machine_findings(facts(), RUN, NODE, Role.MINER)}
    assert set(found) == {"disk", "ram", "speed", "gpu"}
    assert "4 threads, AVX2" in found["speed"] and "100 GFLOP/s" in found["speed"]
    assert "0: 0." in found["ram"] and "none is needed" in found["gpu"]


@pytest.mark.parametrize(
    ("changed", "role", "code", "words"),
    [
        ({"free_disk_bytes": GIB}, Role.MINER, "disk_small", "1.0 GiB free for /data; 2."),
        ({"free_ram_bytes": GIB // 4}, Role.MINER, "ram_small", "at least, by stage"),
        ({"free_ram_bytes": GIB // 2}, Role.OWNER, "ram_small", "the orchestrator needs 1.0 GiB"),
        ({"flops": 1e7}, Role.MINER, "too_slow", "a merge asks for 8 of them in 1200 s"),
        ({"flops": 1e7}, Role.VALIDATOR, "too_slow", "a verdict has 300 s for 16 of them"),
        ({"num_threads": 9}, Role.MINER, "threads", "9 threads on 4 cores"),
        ({"arithmetic": None, "torch_error": "no torch"}, Role.MINER, "torch", "cannot be used: no torch"),
    ],
)
def test_what_is_missing_is_named(changed: dict[str, Any], role: Role, code: str, words: str) -> None:
    found = problems(machine_findings(facts(**changed), RUN, NODE, role))
    assert list(found) == [code] and words in found[code]


def test_numeric_modes_are_the_runs_choice_and_the_processors() -> None:
    node = NodeSettings(mode=NumericMode.BF16_AUTOCAST)
    assert list(problems(machine_findings(facts(), RUN, node, Role.MINER))) == ["mode_slow"]
    assert not problems(machine_findings(facts(has_fast_bf16=True), RUN, node, Role.MINER))
    strict = msgspec.structs.replace(RUN, training=msgspec.structs.replace(RUN.training, modes=(NumericMode.FP32,)))
    assert list(problems(machine_findings(facts(), strict, node, Role.MINER))) == ["mode"]


def test_a_gpu_is_named() -> None:
    found = machine_findings(facts(gpus=("H200",)), RUN, NODE, Role.MINER)
    assert any("GPU: H200" in finding.text for finding in found)


def test_adamw_needs_a_vector_more_than_muon() -> None:
    training = msgspec.structs.replace(RUN.training, optimizer=OptimizerKind.ADAMW)
    adamw = msgspec.structs.replace(RUN, training=training)
    stage = StageIndex(0)
    assert stage_bytes(adamw, stage) - stage_bytes(RUN, stage) == 4 * num_elements(RUN, stage)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    node = NodeSettings(data_dir=str(tmp_path / "not" / "there" / "yet"), num_threads=1)
    found = read_machine(node, Role.MINER)
    assert found.disk_path == tmp_path and found.free_disk_bytes > 0
    assert 0 < found.free_ram_bytes < found.ram_bytes and found.num_cores >= 1
    assert found.arithmetic is not None and found.arithmetic.flops > 1e6 and found.arithmetic.num_threads == 1
    assert read_machine(node, Role.OWNER).arithmetic is None


def test_problems_come_first() -> None:
    found = [Finding("a", Level.OK, ""), Finding("b", Level.PROBLEM, "", "x"), Finding("c", Level.WARNING, "", "x")]
    assert [finding.code for finding in problems_first(found)] == ["b", "c", "a"]
