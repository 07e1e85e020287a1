"""What spmdzero replaces in torch; modes and tables of torch's functions take it for torch's."""

import copy
import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spmdzero.backend import current, runtime
from tests.support.processes import run_python

pytestmark = pytest.mark.backends("jax", test_all="torch_xla")

_NUMBER = "C++ takes a number for a CUDA device, and here a local rank, 0, is the devices"
_CUDA = "it names NVIDIA's driver, or turns mixed precision off, where there is no CUDA"
_NCCL = "scripts for GPUs make their process group by NCCL, which needs CUDA"
_POINTER = "savers ask which tensors share memory, and torch_xla has no address, or 0 for each"
_TEXT = "torch reads a tensor on the devices for its text, past the places that know it is read"
REPLACED = {
    "torch.Tensor.to": _NUMBER,
    "torch.nn.modules.module.Module.to": _NUMBER,
    "torch.tensor": _NUMBER,
    "torch.as_tensor": _NUMBER,
    "torch.Generator": "C++ has no generator for a device of the type of the devices",
    "torch.cuda._lazy_init": _CUDA,
    "torch.cuda.set_device": _CUDA,
    "torch.amp.autocast_mode.autocast.__init__": _CUDA,
    "torch.amp.grad_scaler.GradScaler.__init__": _CUDA,
    "torch.distributed.init_process_group": _NCCL,
    "torch.distributed.new_group": _NCCL,
    "torch.distributed.distributed_c10d.init_process_group": _NCCL,
    "torch.distributed.distributed_c10d.new_group": _NCCL,
    "torch.cuda.manual_seed_all": "torch.manual_seed and torch.seed call it, also those imported "
    "by name before",
}
OF_TORCH_XLA = {
    "torch._tensor_str._str": _TEXT,
    "torch.Tensor.__format__": _TEXT,
    "torch.Tensor.data_ptr": _POINTER,
    "torch.storage.UntypedStorage.data_ptr": _POINTER,
}


def test_no_other_function_or_attribute_of_torch_is_replaced() -> None:
    said = run_python("-m", "tests.engine.replaced_functions", devices=8, fresh=True)
    result = json.loads(said.splitlines()[-1])
    expected = REPLACED if current().name == "jax" else REPLACED | OF_TORCH_XLA
    assert result["noted"] == expected
    assert set(result["found"]) == set(expected)


MAKES: dict[str, Callable[[], torch.Tensor]] = {
    "torch.tensor": lambda: torch.tensor([1.0]),
    "torch.tensor of an array": lambda: torch.tensor(np.ones(1)),
    "torch.as_tensor": lambda: torch.as_tensor([1.0]),
    "torch.as_tensor of an array": lambda: torch.as_tensor(np.ones(1)),
}


@pytest.fixture(autouse=True)
def _started() -> None:
    runtime.start()


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_device_mode_and_a_default_device_reach_it(make: Callable[[], torch.Tensor]) -> None:
    for device in ("meta", "cpu", str(runtime.device())):
        with torch.device(device):
            assert str(make().device) == device
        torch.set_default_device(device)
        try:
            assert str(make().device) == device
        finally:
            torch.set_default_device(None)
            # torch 2.9 keeps the empty context, of which its own get_default_device asks a device.
            vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    assert make().device.type == "cpu"


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


# As a table of before has them.
_TENSOR, _AS_TENSOR = torch._C._VariableFunctions.tensor, torch._C._VariableFunctions.as_tensor
CALLS: dict[str, tuple[Callable[[], Any], Any, Callable[[], Any]]] = {
    "tensor": (lambda: torch.tensor, _TENSOR, lambda: torch.tensor([1.0])),
    "as_tensor": (lambda: torch.as_tensor, _AS_TENSOR, lambda: torch.as_tensor([1.0])),
    "to": (lambda: torch.Tensor.to, torch._C.TensorBase.to, lambda: torch.ones(1).to(torch.half)),
}


@pytest.mark.parametrize(("now", "before", "call"), CALLS.values(), ids=CALLS)
def test_a_function_mode_gets_what_stands_at_its_name_and_in_tables_of_before(
    now: Callable[[], Any], before: Any, call: Callable[[], Any]
) -> None:
    with Seen() as outer, Seen() as inner:
        call()
    for seen in (outer, inner):
        function = seen.functions[-1]
        assert function is now()
        assert function == before
        assert function in {before}
        assert before in {function}
    assert function.__name__ == before.__name__
    assert pickle.loads(pickle.dumps(function)) == before
    assert copy.deepcopy(function) == before


class Answers(torch.Tensor):
    """A tensor that answers `to` by a table, as classes of quantized tensors do."""

    table: ClassVar[dict[Any, str]] = {torch._C.TensorBase.to: "before"}

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls.table:
            return cls.table[func]
        return super().__torch_function__(func, types, args, kwargs)


def test_a_class_of_tensors_answers_its_calls_by_a_table_of_before_or_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = torch.ones(1).as_subclass(Answers)
    plain = torch.ones(1)
    assert [made.to("cpu"), plain.to(made), plain.to(other=made)] == ["before"] * 3
    monkeypatch.setattr(Answers, "table", {torch.Tensor.to: "after"})
    assert made.to("cpu") == "after"
    overrides = torch.overrides
    assert overrides.is_tensor_method_or_property(torch.Tensor.to)
    assert overrides.resolve_name(torch.Tensor.to) == "torch.Tensor.to"
    assert torch.tensor in overrides.get_ignored_functions()


def test_a_dispatch_mode_and_a_traced_function_reach_what_it_makes() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            self.seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Operations() as mode:
        torch.tensor([1.0])
        torch.as_tensor([1.0])
        torch.ones(1).to(torch.half)
    assert mode.seen == ["aten::lift_fresh", "aten::lift_fresh", "aten::ones", "aten::_to_copy"]
    graph = make_fx(lambda x: x + torch.tensor([1.0]), tracing_mode="fake")(torch.ones(1))
    assert torch.equal(graph(torch.ones(1)), torch.full((1,), 2.0))
    assert any("lift_fresh" in str(node.target) for node in graph.graph.nodes)


class Holds:
    make = torch.tensor


def _plus_one(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) + torch.tensor([1.0]) + torch.as_tensor([1.0])


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.torch.jit.script. is dep:FutureWarning"
)
def test_torchscript_and_a_class_that_holds_it_take_it_for_torchs() -> None:
    assert torch.equal(_scripted()(torch.ones(1)), torch.full((1,), 3.0, dtype=torch.float64))

    class HoldsNow:
        make = torch.tensor

    for holds in (Holds, HoldsNow):
        assert torch.equal(holds().make([1.0]), torch.ones(1))
    assert inspect.unwrap(torch.tensor) == torch.tensor


def _scripted() -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.jit.script(_plus_one)
