"""JAX functions, lowered to HLO. JAX starts no backend for it, and so touches no accelerator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax._src.lib import xla_client


@functools.cache
def _host() -> Any:
    # Of a client of our own: asking JAX for a device starts all of its backends, a TPU's too.
    return xla_client.make_cpu_client().local_devices()[0]


def lowered(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], str]],
    *,
    platform: str,
    scope: str,
) -> bytes:
    """The serialised HLO module of `function` of arrays of these shapes and dtypes.

    Its operations are named by `scope`, one of JAX's: those of torch_xla aren't kept in a fold.

    As for an export, which writes Pallas kernels in the older Mosaic version that libtpu 0.0.21
    reads: it answers what jax 0.7.1 lowers otherwise with "expected <= 7 but got 8".
    """
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with jax.default_device(_host()):
        module: Any = (
            jax.jit(jax.named_scope(scope)(function), keep_unused=True)
            .trace(*arguments)
            .lower(
                lowering_platforms=(platform,),
                _private_parameters=mlir.LoweringParameters(
                    for_export=True, hoist_constants_as_args=False
                ),
            )
            .compiler_ir()
        )
    made = xla_client._xla.mlir.mlir_module_to_xla_computation(
        mlir.module_to_string(module), use_tuple_args=False, return_tuple=True
    )
    return made.as_serialized_hlo_module_proto()
