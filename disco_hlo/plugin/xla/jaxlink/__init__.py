"""Where the plugin meets JAX: the files of this package alone touch private jax names.

Six things of stock JAX are used, without a fork:

* ``jax._src.compiler.compile_or_get_cached``, which every ``jit``, ``shard_map`` and ``pmap`` compile goes
  through, is wrapped: a compile becomes a :class:`CompileRequest`, handed to the plugin's handler (``requests``).
* the HLO hook (``jax.extend.xla``, stage POST_SCHEDULER) shows a module just before code generation and may
  replace it. It does nothing except during a compile of ours (``compiles``). Where the structure of a step is to
  change, it is also registered at stage PRE_SCHEDULER: on GPU after sharding and before layouts and fusion, on CPU
  after the last pass, so that there the fusing and combining passes are off for such compiles alone.
* ``compiler.backend_compile_and_load`` compiles past the persistent compilation cache, whose key knows
  nothing of hooks.
* ``pxla.UnloadedMeshExecutable.load`` gives what JAX will call. Only where calls are watched (``calls``), a
  stand-in for its executable sees each call; how that is kept off JAX's C++ path, and given back to it, is told in
  ``docs/calls.md``.
* what the user's code has set in JAX for its thread (``jax.set_mesh``, guards, precision) is off where work of ours
  runs there, and on where the user's module is compiled (``contexts``).
* ``distributed.State.initialize``, by which a process joins a job, is wrapped: ranks say that they have the plugin.

(DisCo, section 5: the module that enacts the optimized strategy inside the framework's compiler.)
"""

from disco_hlo.plugin.xla.jaxlink.calls import Execute, LoadedModule, shards_of, unwatch_calls, watch_calls
from disco_hlo.plugin.xla.jaxlink.profiling import OwnTrace
from disco_hlo.plugin.xla.jaxlink.requests import (
    CompileRequest,
    DistributedJob,
    Handler,
    array_handler,
    compiler_module,
    distributed_job,
    install,
    jit_is_disabled,
    job_number,
    keep_tuner_results,
    keeps_donation,
    on_joining,
    only_compiles,
    ours,
    process_count,
    profiler_runs,
    uninstall,
)

__all__ = [
    "CompileRequest", "DistributedJob", "Execute", "Handler", "LoadedModule", "OwnTrace", "array_handler",
    "compiler_module", "distributed_job", "install", "jit_is_disabled", "job_number",
    "keep_tuner_results", "keeps_donation", "on_joining", "only_compiles", "ours", "process_count", "profiler_runs",
    "shards_of", "uninstall", "unwatch_calls", "watch_calls",
]  # fmt: skip
