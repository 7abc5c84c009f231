"""Code that only compiled functions call, kept as LLVM's bitcode until a function that Python calls takes it in.

Numba links the functions that a function calls into its module, to inline them, optimizes the whole and makes machine
code of it. It does so for each of them on its own as well, with all that they call, and again one level up: of the
search's hundreds of functions Python calls thirty. Here the others are linked alone, and what Python calls is
optimized once. That takes two thirds of the time, and a third of the space on disk.

These are inner parts of numba, as they are from 0.61 to 0.68; of a later one nothing is asked that is not public.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.core import codegen, compiler
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import NativeLowering

_KNOWN = ((0, 61), (0, 68))
_ENVIRONMENT = "_ZN08NumbaEnv"
"""How the variables are called through which functions find what they have of Python."""


def options_of_inner() -> dict[str, Any]:
    """What ``numba.njit`` needs for a function that only compiled functions call."""
    return {"pipeline_class": _InnerCompiler} if _is_known() else {}


def options_of_outer() -> dict[str, Any]:
    """What it needs for one that Python calls, which may call such functions."""
    return {"pipeline_class": _OuterCompiler} if _is_known() else {}


def _is_known() -> bool:
    first, last = _KNOWN
    short: tuple[int, int] = numba.version_info.short
    return first <= short <= last


class _LinkedLibrary(codegen.JITCodeLibrary):
    """A function's code as it is linked into others, never into this process."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return _NothingToSet(self._codegen)


class _NothingToSet:
    """Numba's code generator for a function that has no variables in this process."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def set_env(self, _name: str, _environment: Any) -> None:
        pass


@register_pass(mutates_CFG=True, analysis_only=False)
class _InnerLowering(NativeLowering):
    _name = "disco_hlo_inner_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _LinkedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class _OuterLowering(NativeLowering):
    _name = "disco_hlo_outer_lowering"

    def run_pass(self, state: Any) -> bool:
        changed = bool(super().run_pass(state))
        for variable in state.library._final_module.global_variables:
            if variable.name.startswith(_ENVIRONMENT):
                environment = lookup_environment(variable.name)
                if environment is not None:
                    state.library.codegen.set_env(variable.name, environment)
        return changed


class _InnerCompiler(compiler.CompilerBase):
    lowering: type[NativeLowering] = _InnerLowering

    def define_pipelines(self) -> list[Any]:
        parts = compiler.DefaultPassBuilder
        passes = PassManager("disco_hlo")
        for define in (
            parts.define_untyped_pipeline,
            parts.define_typed_pipeline,
            parts.define_nopython_lowering_pipeline,
        ):
            for one, text in define(self.state).passes:
                passes.add_pass(self.lowering if one is NativeLowering else one, text)
        passes.finalize()
        return [passes]


class _OuterCompiler(_InnerCompiler):
    lowering = _OuterLowering
