"""GossipGraD: average gradients within a node and with one other node per step.

Daily, Vishnu, Siegel, Warfel and Amatya, "GossipGraD: scalable deep learning using gossip
communication based asynchronous gradient descent" (2018). Partners follow a dissemination or
hypercube pattern: after log2(nodes) steps, rounded up, each gradient has influenced every node
(with the hypercube, if the number of nodes is a power of two). Then the nodes are renumbered at
random, identically on all ranks, so that over time all pairs exchange directly (section 4 of the
paper).
"""

from __future__ import annotations

import enum
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

from torchrelay._names import names_options
from torchrelay.errors import ArgumentError
from torchrelay.training import _comm_hooks as hooks

__all__ = ["GossipGraDState", "GossipTopology", "get_num_modules", "gossip_grad_hook", "partners"]


class GossipTopology(enum.Enum):
    """Partners of a node at step k.

    CUBE: pairwise, across bit k. DISSEMINATION: to the node at distance 2^k in a ring.
    """

    CUBE = "cube"
    DISSEMINATION = "dissemination"


_ONE_OF = f"be one of {', '.join(map(str, GossipTopology))}"


def partners(
    topology: GossipTopology, nodes: int, position: int, step: int
) -> tuple[int, int] | None:
    """Return the positions that ``position`` sends to and receives from at ``step``.

    None if it skips the step: a hypercube of a number of nodes that is no power of two lacks
    corners.
    """
    distance = 2 ** (step % period(nodes))
    if nodes == 1:
        return None
    if topology is GossipTopology.DISSEMINATION:
        return (position + distance) % nodes, (position - distance) % nodes
    peer = position ^ distance
    return (peer, peer) if peer < nodes else None


def period(nodes: int) -> int:
    """Return after how many steps a gradient has influenced all nodes: log2(nodes), rounded up."""
    return max(1, (nodes - 1).bit_length())


class GossipGraDState:
    """State of :func:`gossip_grad_hook`. Creation is collective, with equal arguments.

    Args:
        num_modules: calls of the hook per backward pass under FSDP, see :func:`get_num_modules`.
            DDP marks its last call itself.
        topology: the exchange pattern; default ``DISSEMINATION``.
        local_process_group: this rank's node, together with ``num_nodes``; default: the ranks that
            share a host. All nodes have equally many ranks.
        num_nodes: the number of nodes.
        master_process_group: the first ranks of all nodes, which exchange; default: a new group.
        proc_per_node: ranks per node; default: the size of ``local_process_group``.
        random_seed: of the renumbering of nodes.

    Raises:
        ArgumentError: there is no such topology, the nodes do not divide the ranks evenly, or only
            one of ``local_process_group`` and ``num_nodes`` is given.
    """

    @names_options()
    def __init__(
        self,
        num_modules: int = 1,
        topology: GossipTopology | None = None,
        local_process_group: dist.ProcessGroup | None = None,
        num_nodes: int | None = None,
        master_process_group: dist.ProcessGroup | None = None,
        proc_per_node: int | None = None,
        random_seed: int = 2403,
    ) -> None:
        hooks.check_setting(self, "num_modules", num_modules, num_modules >= 1, "be at least 1")
        self.topology = GossipTopology.DISSEMINATION if topology is None else topology
        is_topology = isinstance(self.topology, GossipTopology)
        hooks.check_setting(self, "topology", topology, is_topology, _ONE_OF)
        if (local_process_group is None) != (num_nodes is None):
            raise ArgumentError(
                "GossipGraDState: give both local_process_group and num_nodes, or neither"
            )
        if local_process_group is None or num_nodes is None:
            hosts = hooks.ranks_by_host()
            local_process_group, num_nodes = hooks.subgroup_of(hosts), len(hosts)
        self.num_modules = num_modules
        self.local_process_group = local_process_group
        self.num_nodes = num_nodes
        self.proc_per_node = proc_per_node or dist.get_world_size(local_process_group)
        self.random_seed = random_seed
        self.calls = 0
        self.iteration = 0
        if self.num_nodes * self.proc_per_node != dist.get_world_size():
            raise ArgumentError(
                f"GossipGraDState: {num_nodes} nodes of {self.proc_per_node} ranks are not the "
                f"{dist.get_world_size()} ranks there are; nodes must have equally many"
            )
        self.masters = _masters(local_process_group)
        self.node = self.masters.index(dist.get_process_group_ranks(local_process_group)[0])
        self.is_master = dist.get_rank(local_process_group) == 0
        self.master_process_group = master_process_group
        if master_process_group is None and num_nodes > 1:
            self.master_process_group = dist.new_group(self.masters)

    def numbering(self) -> list[int]:
        """Return the node at each position: unpermuted for log2(nodes) steps, then shuffled."""
        nodes, epoch = list(range(self.num_nodes)), self.iteration // period(self.num_nodes)
        if epoch > 0:
            random.Random(f"{self.random_seed}/{epoch}").shuffle(nodes)
        return nodes

    def peers(self) -> tuple[int, int] | None:
        """Return the ranks that this node's master sends to and receives from; None if it skips."""
        numbering = self.numbering()
        step = self.iteration % period(self.num_nodes)
        found = partners(self.topology, self.num_nodes, numbering.index(self.node), step)
        if found is None:
            return None
        to, origin = (self.masters[numbering[position]] for position in found)
        return to, origin

    def count_call(self, is_last: bool) -> None:
        """Count a call of the hook; the last of a backward pass ends the iteration."""
        self.calls = 0 if is_last else self.calls + 1
        self.iteration += is_last


def _masters(local_process_group: dist.ProcessGroup) -> list[int]:
    """Return the first rank of every node, in order. Collective over the default group."""
    firsts: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(firsts, dist.get_process_group_ranks(local_process_group)[0])
    return sorted(set(firsts))


# DDP looks for the name bucket, and takes no annotation of it or of the result but its own.
def gossip_grad_hook(state: GossipGraDState, bucket, output=None):  # type: ignore[no-untyped-def]
    """Average a gradient within the node, then with one other node. A communication hook.

    Register it with ``register_comm_hook`` of DDP or of FSDP with ``NO_SHARD``. Blocks until the
    exchange is done.

    Returns a future of the averaged flat gradient under DDP, and None under FSDP.

    Args:
        state: of this rank.
        bucket (GradBucket or torch.Tensor): DDP's bucket, or FSDP's flat gradient, which is
            averaged in place.
        output (None): FSDP passes it when it shards gradients, which is refused.

    Raises:
        UnsupportedError: FSDP shards its gradients.
    """
    hooks.refuse_sharded("gossip_grad_hook", output)
    if isinstance(bucket, GradBucket):
        _gossip(state, bucket.buffer())
        state.count_call(bucket.is_last())
        return noop_hook(None, bucket)
    _gossip(state, bucket)
    state.count_call(state.calls + 1 == state.num_modules)
    return None


def _gossip(state: GossipGraDState, grad: torch.Tensor) -> None:
    """Reduce within the node, exchange between masters, broadcast within the node. In place."""
    local = state.local_process_group
    alone = state.proc_per_node == 1
    if not alone:
        dist.all_reduce(grad.div_(state.proc_per_node), group=local)
    if state.num_nodes == 1:
        return
    if state.is_master:
        _exchange(state, grad)
    if not alone:
        dist.broadcast(grad, state.masters[state.node], group=local)


def _exchange(state: GossipGraDState, grad: torch.Tensor) -> None:
    peers = state.peers()
    if peers is None:
        return
    received = torch.empty_like(grad)
    sends = dist.P2POp(dist.isend, grad, peers[0], state.master_process_group)
    receives = dist.P2POp(dist.irecv, received, peers[1], state.master_process_group)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    grad.div_(2).add_(received.div_(2))  # the sum of two float16 may overflow


def get_num_modules(module: nn.Module) -> int:
    """Count the FSDP modules in ``module`` that reduce gradients.

    An FSDP module whose parameters all belong to inner ones reduces none.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - takes long, and few need it

    count, owned = 0, set[nn.Parameter]()
    for child in reversed(list(module.modules())):  # inner ones first
        if isinstance(child, FullyShardedDataParallel):
            mine = {param for param in child.parameters() if param.requires_grad} - owned
            count += bool(mine)
            owned |= mine
    return count
