"""`dtron memory RUN`: who held a run's memory (`metrics.memory_snapshot`), next to the plan."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dtron.config import RunConfig
from dtron.errors import ArgumentParser, ConfigError
from dtron.faults.memory_table import read_table
from dtron.plan.memory import RankMemory, memory
from dtron.plan.memory_page import page
from dtron.plan.output_file import check_target, write_target
from dtron.plan.run_shape import Resolved
from dtron.run.directory import RunDir

_OTHERS = ("gathered", "reduction", "working", "logits")
"""The planner's classes of tensors that a table does not attribute."""


def main(arguments: Sequence[str]) -> int:
    """Print the tables of a run; return the exit status."""
    parser = ArgumentParser(prog="dtron memory", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write them as an HTML page")
    given = parser.parse_args(list(arguments))
    run = RunDir(given.run)
    check_target("--page", given.page)
    tables = [read_table(path) for path in sorted(run.memory.glob("rank-*.json"))]
    if not tables:
        raise ConfigError(
            f"{run.memory} has no tables; set metrics.memory_snapshot to a step of the run"
        )
    try:
        config = RunConfig.load(run.config)
        plans = memory(Resolved.of(config, tables[0].world_size))
    except ConfigError as error:
        plans = ()
        print(f"no plan: {error}")
    ranks = [
        (table, planned(plans[table.pp_rank]) if plans else {})
        for table in sorted(tables, key=lambda each: each.rank)
    ]
    for table, plan in ranks:
        print("\n".join(table.lines(plan)))
    if given.page:
        write_target("--page", given.page, page(given.run.name, ranks))
        print(f"the page is written to {given.page}")
    return 0


def planned(rank: RankMemory) -> Mapping[str, float]:
    """Return the planner's bytes of a rank under the names of a table's rows."""
    own = {name: n for name, n in rank.classes.items() if name not in (*_OTHERS, "buffers")}
    others = sum(rank.classes[name] for name in (*_OTHERS, "buffers"))
    return {**own, "not attributed": others, "peak": rank.peak}
