"""Lowers JAX functions to HLO. JAX starts no backend for it, and so touches no accelerator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax._src.lib import xla_client


@functools.cache
def _host() -> Any:
    # Use a client of our own: asking JAX for a device starts all backends, also a TPU's.
    return xla_client.make_cpu_client().local_devices()[0]


def lowered(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], str]],
    *,
    platform: str,
    scope: str,
) -> bytes:
    """The serialised HLO module of `function` for arrays of these shapes and dtypes.

    `scope`, one of JAX's, names its operations: torch_xla's scopes aren't kept in a fold.

    It is lowered as for an export, which writes Pallas kernels in the older Mosaic version that
    libtpu 0.0.21 reads: otherwise it refuses programs of jax 0.7.1 with "expected <= 7 but got 8".
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
