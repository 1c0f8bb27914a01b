"""What a search for a tool alone takes: configs whose export has no deviation."""

from dataclasses import replace

import pytest

from autofit.api.tool_workload import for_tool
from autofit.core.environment import versions
from autofit.core.errors import InputError
from autofit.core.hardware import GIB, Hardware
from autofit.core.options import search_options
from autofit.core.workload import Workload
from autofit.export.exactness import rules_of
from autofit.export.from_result import layer_names
from autofit.export.importers import IMPORTERS
from autofit.export.source import ExportSource
from autofit.export.tool import write
from autofit.export.tools import tool_named
from autofit.search.enumeration import Enumeration
from autofit.techniques import all_techniques, constraints
from autofit.tuning.space import space_for
from tests import tiny

TOOLS = [importer.tool.name for importer in IMPORTERS if importer.pictures is None]
CARD = Hardware("cuda", "a card", 80 * GIB, 80 * GIB, 80 * GIB, 8, capability=(9, 0))


def configs_of(workload: Workload, hardware: Hardware) -> Enumeration:
    space = space_for(search_options(), workload, hardware)
    return Enumeration(space.knobs, constraints(workload, hardware))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("hardware", [tiny.CPU, CARD], ids=lambda hardware: hardware.device)
def test_exports_of_what_is_searched_have_no_deviations(tool: str, hardware: Hardware) -> None:
    plain = tiny.llama_workload(effective_batch_size=8)
    workload = for_tool(plain, tool_named(tool), hardware.device)
    enumeration = configs_of(workload, hardware)
    found = enumeration.configs(seed=1, most=60)
    assert len(found) > 10
    assert enumeration.count().configs < configs_of(plain, hardware).count().configs

    off = {technique.name: technique.off for technique in all_techniques()}
    for config in found:
        names = layer_names(workload.model, config, workload.task)
        source = ExportSource(
            model=workload.name,
            config=config,
            hardware=hardware.to_dict(),
            task=workload.task,
            sequence_length=workload.sequence_length,
            effective_batch_size=workload.effective_batch_size,
            versions=versions(),
            off=off,
            own_loss=getattr(workload.loss, "tool", None),
            **names,
        )
        departures = write(tool_named(tool), source).departures
        assert departures == (), config


def test_a_rule_reads_few_knobs_so_that_a_space_is_counted_at_once() -> None:
    workload = for_tool(tiny.llama_workload(), tool_named("axolotl"), "cuda")
    calls = 0

    def counted(rule):  # type: ignore[no-untyped-def]
        def call(config):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return rule(config)

        return call

    rules = {name: counted(rule) for name, rule in workload.rules.items()}
    configs_of(replace(workload, rules=rules), CARD).count()
    assert calls < 2000


def test_a_tool_that_does_not_train_the_task_is_refused() -> None:
    workload = tiny.preference_workload()
    source = ExportSource("tiny", {}, {"device": "cpu"}, task=workload.task)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="litgpt trains causal-lm"):
        rules_of(tool_named("litgpt"), workload, source)
