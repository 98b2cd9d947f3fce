"""No module of the package needs, when it runs, one that needs it."""

from __future__ import annotations

import grimp


def test_no_import_leads_back_to_where_it_stands() -> None:
    graph = grimp.build_graph("torchrelay", exclude_type_checking_imports=True)
    cycles = [
        " imports ".join((importer, *chain))
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (chain := graph.find_shortest_chain(imported, importer)) is not None
    ]
    assert not cycles, "\n".join(cycles)
