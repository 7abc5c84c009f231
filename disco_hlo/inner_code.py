"""Code that only compiled functions call: no machine code of its own, but a part of what Python calls.

Numba links the functions that a function calls into its module, to inline them, optimizes the whole and makes machine
code of it. It does so for each of them on its own as well, with all that they call, and again one level up: of the
search's functions Python calls one in ten. Here the others stay as they are, and what Python calls is linked with all
that it calls, directly or not, and optimized once. That takes two thirds of the time, and a third of the space on disk.

These are inner parts of numba, as they are in the versions for which ``compiled`` imports this module.
"""

from __future__ import annotations

from inspect import iscode
from typing import Any

from llvmlite.binding import Linkage
from numba.core import codegen, compiler
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import NativeLowering
from numba.core.untyped_passes import InlineClosureLikes

_ENVIRONMENT = "_ZN08NumbaEnv"
"""How the variables are called through which functions find what they have of Python."""


class _InnerLibrary(codegen.JITCodeLibrary):
    """A function's code as it is linked into others, never into this process; without the code of what it calls."""

    def finalize(self) -> None:
        """Make it fit for being linked."""
        for library in self._linking_libraries:
            self._reload_init.update(library._reload_init)
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        self._shared_module = self._final_module
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return _NothingToSet(self._codegen)


class _OuterLibrary(codegen.JITCodeLibrary):
    """The code of a function that Python calls, with all of the inner functions that it needs."""

    def finalize(self) -> None:
        """Link, optimize and make machine code."""
        needed = dict.fromkeys(self._linking_libraries)
        pending = list(needed)
        while pending:  # ends: each is met once
            library = pending.pop()
            fresh = [one for one in library._linking_libraries if one not in needed]
            if isinstance(library, _InnerLibrary):
                needed |= dict.fromkeys(fresh)
                pending += fresh
        self._linking_libraries = list(needed)
        super().finalize()


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
        state.library = _InnerLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return bool(super().run_pass(state))


@register_pass(mutates_CFG=True, analysis_only=False)
class _OuterLowering(NativeLowering):
    _name = "disco_hlo_outer_lowering"

    def run_pass(self, state: Any) -> bool:
        state.library = _OuterLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
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
        has_closures = any(map(iscode, self.state.func_id.func.__code__.co_consts))
        for define in (
            parts.define_untyped_pipeline,
            parts.define_typed_pipeline,
            parts.define_nopython_lowering_pipeline,
        ):
            for one, text in define(self.state).passes:
                if has_closures or one is not InlineClosureLikes:
                    passes.add_pass(self.lowering if one is NativeLowering else one, text)
        passes.finalize()
        return [passes]


class OuterCompiler(InnerCompiler):
    """And for one that Python calls, which may call such functions."""

    lowering = _OuterLowering
