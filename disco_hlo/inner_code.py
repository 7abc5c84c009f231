"""Code that only compiled functions call: no machine code of its own, but a part of what Python calls.

Numba links the functions that a function calls into its module, to inline them, optimizes the whole and makes machine
code of it. It does so for each of them on its own as well, with all that they call, and again one level up: of the
search's functions Python calls one in four. Here the others are linked alone, and what Python calls is optimized once.
That takes two thirds of the time, and a third of the space on disk.

These are inner parts of numba, as they are in the versions for which ``compiled`` imports this module.
"""

from __future__ import annotations

from typing import Any

from numba.core import codegen, compiler
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import NativeLowering

_ENVIRONMENT = "_ZN08NumbaEnv"
"""How the variables are called through which functions find what they have of Python."""


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


class InnerCompiler(compiler.CompilerBase):
    """Numba's ``pipeline_class`` for a function that only compiled functions call."""

    lowering: type[NativeLowering] = _InnerLowering

    def define_pipelines(self) -> list[Any]:
        """Numba's own passes, but for how machine code is made."""
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


class OuterCompiler(InnerCompiler):
    """And for one that Python calls, which may call such functions."""

    lowering = _OuterLowering
