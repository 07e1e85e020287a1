"""A candidate's memory and time by plan and rates: what the search begins with.

None of it is shown as a result. It orders candidates, and what compilers say of some of them
corrects it for the others, see `_learnt.py`. So each figure below is a guess that has to be right
within a factor, and none is fitted.
"""

from dataclasses import dataclass

from torch import nn

from spmdzero.config import load_config
from spmdzero.engine import plan_of
from spmdzero.errors import SpmdZeroConfigError
from spmdzero.explain import Chip, Topology
from spmdzero.plan import MemoryReport, Role
from spmdzero.search._asked import Asked
from spmdzero.search._knobs import Candidate, Stays
from spmdzero.search._model import Forward

# Shares of a chip's peak rates that products, and everything else, are taken to reach.
_PRODUCTS, _PASSES = 0.6, 0.5
# How often forward and backward read or write each byte that is kept between them.
_TIMES_READ = 4
# Of what autograd keeps, the share that is left where a block's products are.
_DOTS = 0.6
# The part of the wire that is waited for, by the set of flags.
_EXPOSED = {"none": 0.6}
_EXPOSED_BY_FLAGS = 0.3
# The part of a chip's links that go along one axis of a slice.
_LINKS = 0.5
# How often a loop over blocks passes over the stack of what they keep: it copies into it and out of
# it.
_STACKED = 4


@dataclass(frozen=True, kw_only=True)
class Rough:
    """An expectation of the bytes and seconds of a candidate.

    Attributes:
        states: bytes that rest there between steps, by the plan.
        rest: bytes of everything else at the peak.
        seconds: of a step.
    """

    states: int
    rest: float
    seconds: float


class Estimate:
    """Estimates candidates of one model on one slice."""

    def __init__(
        self, asked: Asked, model: nn.Module, forward: Forward, topology: Topology
    ) -> None:
        self._asked, self._model = asked, model
        self._forward, self._topology = forward, topology
        self._known: dict[Candidate, tuple[MemoryReport, int] | str] = {}
        self.refused: dict[str, Candidate] = {}
        """Why a candidate can't be -> the first such candidate."""

    def __call__(self, candidate: Candidate) -> Rough | None:
        """The candidate's figures; None if the config refuses it."""
        found = self._placed(candidate.placing)
        if isinstance(found, str):
            return None
        memory, elements = found
        return Rough(
            states=memory.total - memory[Role.GRADIENT],
            rest=self._rest(candidate, memory),
            seconds=self._seconds(candidate, memory, elements),
        )

    def _placed(self, placing: Candidate) -> tuple[MemoryReport, int] | str:
        if placing not in self._known:
            try:
                config = self._asked.config_of(placing.keys(blocks=self._forward.blocks))
                devices = self._topology.devices
                plan = plan_of(load_config(config), self._model, devices=devices)
                elements = sum(t.elements_of_part(plan.mesh) for t in plan if t.param.trainable)
                self._known[placing] = plan.memory(), elements
            except SpmdZeroConfigError as error:
                self._known[placing] = f"{error.key}: {error.reason}"
                self.refused.setdefault(f"{error.key}: {error.reason}", placing)
        return self._known[placing]

    def _share(self, candidate: Candidate) -> int:
        return candidate.sequence * candidate.tensor

    def _kept_by_blocks(self, candidate: Candidate) -> float:
        """Bytes that a device keeps of a micro-batch's forward in all blocks."""
        forward, blocks = self._forward, self._forward.blocks
        whole, inputs = self._held(candidate), forward.block_inputs
        policy = candidate.recompute
        if isinstance(policy, Stays):
            again = inputs + (0.0 if policy.on_host else forward.kept_of(policy.names))
        else:
            again = {
                "nothing": whole,
                "dots": max(inputs, _DOTS * whole),
                "everything": inputs,
                "offload": inputs / max(blocks.count, 1),
            }[policy]
        part = candidate.kept / blocks.count if blocks.count else 0.0
        return candidate.rows * (part * whole + (1 - part) * again) / self._share(candidate)

    def _kept(self, candidate: Candidate) -> float:
        """Bytes that a device keeps of a micro-batch's forward, with one block's own again."""
        forward, blocks = self._forward, self._forward.blocks
        outside = forward.kept - (forward.logits if candidate.fused_loss else 0.0)
        if candidate.recompute != "nothing" and blocks.count:
            outside += self._held(candidate) / blocks.count
        own = candidate.rows * outside / self._share(candidate)
        return self._kept_by_blocks(candidate) + own

    def _held(self, candidate: Candidate) -> float:
        """Bytes that autograd would keep of a row in all blocks, if nothing were computed again."""
        pairs = self._forward.pairs if candidate.attention == "plain" else 0.0
        return self._forward.block_kept + pairs

    def _rest(self, candidate: Candidate, memory: MemoryReport) -> float:
        gathered = 0.0
        if candidate.stage == 3:
            # Two blocks' parameters are whole at once, and what is outside of blocks.
            whole = memory[Role.PARAMETER] * self._shards(candidate)
            gathered = 2 * whole / max(self._forward.blocks.count, 1)
        return self._kept(candidate) + max(memory[Role.GRADIENT], 0) + gathered

    def _shards(self, candidate: Candidate) -> int:
        """Devices over which parameters are sharded at stage 3."""
        if candidate.group > 1:
            return candidate.group
        return self._topology.devices // (candidate.data * self._share(candidate))

    def _seconds(self, candidate: Candidate, memory: MemoryReport, elements: int) -> float:
        chip, forward, steps = self._topology.chip, self._forward, candidate.accumulation
        share, rows = self._share(candidate), candidate.rows * candidate.accumulation
        products = 3 * forward.flops
        if candidate.recompute not in ("nothing", "dots"):
            part = candidate.kept / max(forward.blocks.count, 1)
            policy = candidate.recompute
            spared = forward.flops_of(policy.names) if isinstance(policy, Stays) else 0.0
            products += (1 - part) * (forward.block_flops - spared)
        compute = rows * products / share / (_PRODUCTS * chip.bf16_flops)
        # What goes to the host is written and read on the device all the same.
        passed = _TIMES_READ * (steps * self._kept(candidate) + self._on_host(candidate))
        if candidate.recompute != "nothing":
            passed += _TIMES_READ * rows * forward.block_kept / share
        # Each micro-batch reads every weight in forward and twice in backward, 2 bytes an element.
        passed += 3 * 2 * steps * elements
        # The update reads and writes masters and moments; an accumulator is for each micro-batch.
        passed += 2 * (memory[Role.MASTER] + memory[Role.MOMENT])
        passed += 2 * steps * memory[Role.ACCUMULATOR]
        if candidate.scan:
            stacks = steps * self._kept_by_blocks(candidate) + self._on_host(candidate)
            passed += _STACKED * stacks
        compute += passed / (_PASSES * chip.hbm_rate)
        wire = self._wire(candidate, elements) / chip.ici_rate
        exposed = _EXPOSED.get(candidate.flags, _EXPOSED_BY_FLAGS) * wire
        # What comes next waits for what crosses, and an axis has a part of the links.
        exposed += self._crossing(candidate) / (_LINKS * chip.ici_rate)
        # What rests there comes in and goes out, each way by itself.
        exposed += memory.host_total / chip.host_rate
        return compute + exposed + self._moved(candidate, chip, hidden=compute / 3)

    def _wire(self, candidate: Candidate, elements: int) -> float:
        """Bytes that a device sends in a step, 2 for each element."""
        steps, devices = candidate.accumulation, self._topology.devices
        # Gradients are reduced to where the states are, which a group has none of its own of.
        states = devices // (candidate.data * candidate.tensor)
        micro = steps if candidate.stage > 1 else 1
        sent = 2 * elements * micro * (states - 1) / states
        if candidate.stage == 3:
            # Forward and backward gather each weight.
            n = self._shards(candidate)
            sent += 2 * elements * 2 * steps * (n - 1) / n
            copies = states // n
        else:
            sent += 2 * elements * (states - 1) / states
            copies = 1
        # What was updated goes to the other groups, and gradients to the other replicas of states.
        sent += 2 * elements / (states // copies) * (copies - 1) / copies
        sent += 2 * 2 * elements / states * (candidate.data - 1) / candidate.data
        return sent

    def _crossing(self, candidate: Candidate) -> float:
        """Bytes of activations that a device sends along the axes that share a replica's work.

        In each block the devices of a tensor axis sum twice in forward and twice in backward what
        all of them hold; those of a sequence axis exchange parts of what each has its own part of.
        """
        whole = self._forward.block_inputs * candidate.rows * candidate.accumulation
        tensor, sequence = candidate.tensor, candidate.sequence
        summed = 8 * whole * (tensor - 1) / tensor
        return summed + 4 * whole / sequence * (sequence - 1) / sequence

    def _moved(self, candidate: Candidate, chip: Chip, *, hidden: float) -> float:
        """Seconds that the chip waits for what blocks keep in host memory.

        Args:
            candidate: any.
            chip: its rate each way.
            hidden: seconds of each way that a loop hides, which fetches what its next turn needs.
        """
        one_way = self._on_host(candidate) / chip.host_rate
        return 2 * max(one_way - hidden, 0.0) if candidate.scan else one_way

    def _on_host(self, candidate: Candidate) -> float:
        """Bytes of a step that a device's blocks keep in host memory."""
        policy, kept = candidate.recompute, 0.0
        if policy == "offload":
            kept = self._forward.block_inputs
        elif isinstance(policy, Stays) and policy.on_host:
            kept = self._forward.kept_of(policy.names)
        return kept * candidate.rows * candidate.accumulation / self._share(candidate)
