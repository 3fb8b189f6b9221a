"""The house's rules that no other tool checks."""

import ast
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from neurons import cli
from neurons.exit_codes import RESTART_IS_USELESS, ExitCode

ROOT = Path(cli.__file__).parents[1]
PACKAGES = ("neurons", "subnet", "incentives")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
LINES_LIMIT = 400
LONGER = {"subnet/wire.py": "every message in one table, so that both sides are read side by side"}
"""Modules over the limit, each with the reason why cutting it would make it worse."""
OUTSIDE = {"subnet.adapters", "subnet.devnet", "subnet.sim"}
"""Folders that touch the outside world."""
TORCH = {"subnet.model", "subnet.training", "subnet.inference", "subnet.validation"}
"""Folders that compute with tensors."""


def contracts() -> dict[str, dict[str, list[str]]]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return {contract["id"]: contract for contract in document["tool"]["importlinter"]["contracts"]}


def children_of_subnet() -> set[str]:
    return {
        f"subnet.{path.stem}"
        for path in (ROOT / "subnet").iterdir()
        if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }


def test_a_new_folder_of_subnet_is_bound_by_the_contracts_too() -> None:
    assert set(contracts()["edges"]["source_modules"]) == children_of_subnet() - OUTSIDE | {"incentives"}
    assert set(contracts()["torch-free"]["source_modules"]) == children_of_subnet() - OUTSIDE - TORCH | {"incentives"}
    assert set(contracts()["adapters"]["protected_modules"]) == OUTSIDE


def test_packages_are_imported_from_the_module_that_defines_a_name() -> None:
    full = [path for path in ROOT.glob("*/**/__init__.py") if ".venv" not in path.parts and path.stat().st_size]
    assert not full


def test_folders_are_named_for_what_they_hold() -> None:
    vague = {"utils", "util", "common", "helpers", "base", "misc"}
    assert not [path for path in MODULES if vague & {path.stem, *path.relative_to(ROOT).parts}]


def test_a_module_is_one_idea() -> None:
    long = {str(path.relative_to(ROOT)) for path in MODULES if len(path.read_text().splitlines()) > LINES_LIMIT}
    assert not long - set(LONGER)


def _swallowers(path: Path) -> Iterator[str]:
    """Handlers that catch everything and do not hand it on."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            names = (
                {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else {"Exception"}
            )
            last = node.body[-1]
            if names & {"Exception", "BaseException"} and not (isinstance(last, ast.Raise) and last.exc is None):
                yield str(path.relative_to(ROOT))


def test_one_broad_except_in_the_whole_project() -> None:
    assert [where for path in MODULES for where in _swallowers(path)] == ["neurons/lifecycle.py"]


def test_nothing_is_left_for_later_and_no_test_is_excused() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "mark.sk" + "ip", "xf" + "ail(", "pytest.sk" + "ip")
    sources = [
        *MODULES,
        *(ROOT / "tests").rglob("*.py"),
        *(path for path in (ROOT / "scripts").iterdir() if path.is_file()),
    ]
    assert not [(str(path.relative_to(ROOT)), word) for path in sources for word in words if word in path.read_text()]


def test_supervisors_stay_down_after_the_codes_that_need_a_person() -> None:
    useless = sorted(code.value for code in RESTART_IS_USELESS)
    unit = re.search(
        r"^RestartPreventExitStatus=(.*)$", (ROOT / "deploy" / "strata@.service").read_text(), re.MULTILINE
    )
    pm2 = re.search(r"stop_exit_codes: \[0, (.*)\]", (ROOT / "deploy" / "ecosystem.config.js").read_text())
    assert unit is not None and pm2 is not None
    assert [int(code) for code in unit[1].split()] == useless
    assert [int(code) for code in pm2[1].split(",")] == useless
    readme = (ROOT / "README.md").read_text()
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", readme, re.MULTILINE)} == {
        *(code.value for code in ExitCode),
        2,
    }


def test_every_link_of_a_guide_leads_somewhere() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", path.read_text()):
            name, _, anchor = target.partition("#")
            found = path.parent / name if name else path
            assert found.exists(), f"{path.name}: {target}"
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not anchor or anchor in slugs, f"{path.name}: {target}"


def test_a_decision_that_is_named_is_written_down() -> None:
    design = (ROOT / "DESIGN.md").read_text()
    decided = set(re.findall(r"^## (D\d+)\.", design, re.MULTILINE))
    for path in [*MODULES, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert set(re.findall(r"\bD\d\d\b", path.read_text())) <= decided, path


def imported(code: str, *names: str) -> list[str]:
    """Which of `names` are loaded after `code` ran in a fresh interpreter."""
    show = f"{code}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    return ran.stdout.splitlines()[-1].split()


@pytest.mark.parametrize("package", ["incentives", "subnet.orchestration", "subnet.merging", "subnet.dashboard"])
def test_pay_record_merge_and_page_run_without_torch(package: str) -> None:
    folder = ROOT / package.replace(".", "/")
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(folder.rglob("*.py"))]
    code = "\n".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    assert imported(code, "torch", "transformers", "bittensor", "aiohttp") == []


def test_the_command_line_answers_at_once() -> None:
    assert (
        imported("import neurons.cli", "torch", "transformers", "bittensor", "aiohttp", "numpy", "asyncio", "structlog")
        == []
    )
    # processor time: what other processes of a busy machine take is not the command's
    took_s = min(_help_s() for _ in range(3))
    assert took_s < 0.4


def _help_s() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "neurons.cli", "--help"], capture_output=True, timeout=60, check=True, cwd=ROOT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
