"""A Ray cluster of several nodes on this machine, in processes of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

SMALL = {"object_store_memory": 80 * 2**20}
# Ray has its workers yield to all else on a machine: beside other tests they import for minutes.
NO_YIELDING = {"RAY_worker_niceness": "0"}


@contextmanager
def cluster(nodes: int, processors: int = 1) -> Iterator[Any]:
    """Inside, RAY_ADDRESS leads to a cluster of so many nodes, each with so many processors."""
    pytest.importorskip("ray", reason="pip install 'torch-autofit[cluster]'")
    from ray.cluster_utils import Cluster

    with mock.patch.dict("os.environ", NO_YIELDING):
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": processors, "include_dashboard": False, **SMALL},
        )
    try:
        with mock.patch.dict("os.environ", NO_YIELDING):
            for _ in range(nodes - 1):
                made.add_node(num_cpus=processors, **SMALL)
        with mock.patch.dict("os.environ", {"RAY_ADDRESS": made.address}):
            yield made
    finally:
        made.shutdown()
