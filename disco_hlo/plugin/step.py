"""Recognising the training step: capture a compile's module, decide by rule, say why.

The rule (:func:`choose`): more than one device, a collective that reduces a computed value, more than a single
op, neither an evaluation nor an initialization, the largest such module so far. An evaluation returns single numbers
alone, its loss and accuracy; an initialization makes the parameters, so it takes none. ``DISCO_MODULE`` names the step
instead, by its name or, where several modules share one (all of pmap are called ``jit__fun``), by its key.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from disco_hlo.errors import DiscoError, UnsupportedError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.collectives import moved_bytes
from disco_hlo.hlo.graph import Graph, Kind, Shape
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.regions import inner_collectives, reducing_kernels
from disco_hlo.plan.check_module import faults
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles, jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.job import device_facts
from disco_hlo.printable import counted, size_text

_FEWEST_INSTRUCTIONS = 8
"""A sum over a sharded array, compiled by itself where no ``jit`` is around it, has four."""

_LARGEST_KEYS_BYTES = 64
"""Of an argument that holds random keys: four of the largest kind (rbg)."""
Capture = Callable[[CompileRequest], bytes]
_MOST_TOLD = 3
"""Modules of one name that a user is told to be left alone. An index into a sharded array, outside of any ``jit``, is
compiled anew for each shape; there are tens."""


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """What the choice depends on."""

    name: str
    device_count: int
    reducing_collective_count: int
    """All-reduces and reduce-scatters whose operand is computed, not a parameter or constant; where a plan may move any
    collective, those that XLA made kernels of count, too."""
    collective_bytes: int
    """Bytes of all collectives together, on one device."""
    instruction_count: int
    inner_collective_count: int = 0
    """Collectives inside loops and branches that stay as XLA compiled them."""
    numbers_only: bool = False
    """Whether all results are single numbers, as a loss is."""
    keys_only: bool = False
    """Whether all arguments are single numbers and random keys."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether a module is the training step, and why, as a sentence's end."""

    chosen: bool
    reason: str


def facts_of(
    graph: Graph,
    device_count: int,
    inner_collective_count: int = 0,
    regions: Sequence[Graph] = (),
    reducing_kernel_count: int = 0,
) -> ModuleFacts:
    """The facts of a canonical graph that runs on ``device_count`` devices, and runs these regions."""
    graphs = (graph, *regions)
    own_kernels = reducing_kernel_count if any(one.collectives for one in graphs) else 0
    return ModuleFacts(
        name=graph.module_name,
        device_count=device_count,
        reducing_collective_count=own_kernels
        + sum(
            COLLECTIVE[one.nodes[node].opcode].reduces and _is_computed(one, node)
            for one in graphs
            for node in one.collectives
        ),
        collective_bytes=sum(int(moved_bytes(one).sum()) for one in graphs),
        instruction_count=sum(map(len, graphs)),
        inner_collective_count=inner_collective_count,
        numbers_only=all(array.element_count == 1 for array in _arrays(graph.nodes[graph.root].shape)),
        keys_only=all(_is_number_or_key(node.shape) for node in graph.nodes if node.kind is Kind.PARAMETER),
    )


def choose(facts: ModuleFacts, seen: Iterable[ModuleFacts], *, named: bool | None = None) -> Choice:
    """Decide about a module, given the qualifying modules ``seen`` before it.

    ``named`` is None where the user named no module, else whether the name is this module's.
    """
    if named is not None:
        return Choice(named, "named by DISCO_MODULE" if named else "DISCO_MODULE names another")
    if facts.device_count < 2:
        return Choice(False, "runs on one device")
    if facts.reducing_collective_count == 0:
        return Choice(False, "has no all-reduce or reduce-scatter of a computed value" + outside_loops(facts))
    if facts.instruction_count < _FEWEST_INSTRUCTIONS:
        return Choice(False, f"is a single op ({_describe(facts)})")
    if why := _unlike_a_step(facts):
        return Choice(False, f"{why} ({_describe(facts)})")
    steps = (other for other in seen if qualifies(other) and not _unlike_a_step(other))
    largest = max(steps, key=_size, default=None)
    if largest is not None and _size(facts) <= _size(largest):
        return Choice(False, f"not larger than {largest.name} ({_describe(largest)})")
    return Choice(True, f"the largest module so far that reduces a computed value ({_describe(facts)})")


def qualifies(facts: ModuleFacts) -> bool:
    """Whether a module could be a data-parallel step: several devices, several ops, a reduced computed value."""
    return (
        facts.device_count > 1
        and facts.reducing_collective_count > 0
        and facts.instruction_count >= _FEWEST_INSTRUCTIONS
    )


def _unlike_a_step(facts: ModuleFacts) -> str:
    """What a module that could be a step by its collectives does instead; empty where nothing says so."""
    if facts.keys_only:
        return "takes nothing but single numbers and random keys, as an initialization does"
    if facts.numbers_only:
        return "returns nothing but single numbers, as an evaluation does"
    return ""


def outside_loops(facts: ModuleFacts) -> str:
    """As the end of "no all-reduce or reduce-scatter of a computed value": where those are that nothing can be done
    about, and the way out."""
    count = facts.inner_collective_count
    if not count:
        return ""
    collectives = f"{counted(count, 'collective')} inside"
    return (
        f" outside loops and branches that stay as XLA compiled them ({collectives}); what a plan may change must "
        "stand elsewhere: one step a call, gradients averaged after the loop, layers unrolled"
    )


def _arrays(shape: Shape) -> Iterator[Shape]:
    if shape.dtype != "tuple":
        yield shape
    for element in shape.elements:
        yield from _arrays(element)


def _is_number_or_key(shape: Shape) -> bool:
    return shape.element_count == 1 or (shape.dtype == "u32" and shape.size_bytes <= _LARGEST_KEYS_BYTES)


def _is_computed(graph: Graph, node: int) -> bool:
    pending = list(graph.nodes[node].operands)
    while pending:
        operand = graph.nodes[pending.pop()]
        if operand.kind is Kind.FREE:
            pending.extend(operand.operands)
        elif operand.kind not in (Kind.PARAMETER, Kind.CONSTANT):
            return True
    return False


def _size(facts: ModuleFacts) -> tuple[int, int]:
    return facts.instruction_count, facts.collective_bytes


def _describe(facts: ModuleFacts) -> str:
    count = facts.reducing_collective_count
    reducing = f"{counted(count, 'collective')} that reduce{'s' * (count == 1)}"
    return (
        f"{counted(facts.instruction_count, 'instruction')}, {reducing}, {size_text(facts.collective_bytes)}"
    )


@dataclass
class _History:
    """The modules so far."""

    seen: list[ModuleFacts] = field(default_factory=list)
    taken: dict[str, bool] = field(default_factory=dict)
    """Fingerprints of the steps, and whether each was chosen (see :class:`Step`)."""
    left: set[tuple[str, str]] = field(default_factory=set)
    """Names and fingerprints of what was left alone: of such a module, compiled again, the rule says the same."""
    told: Counter[str] = field(default_factory=Counter)
    """How many modules of a name the user was told of that they were left alone."""


_histories: defaultdict[tuple[int, tuple[int, ...]], _History] = defaultdict(_History)
"""By the job and the processes that take part. The rule has to say the same on all of these, so what one process
compiles for its own devices does not count among what all compile: the others would wait for it in vain. Nor does what
it compiled in an earlier job, which those that were started again do not know."""


@dataclass(frozen=True)
class Step:
    """A compile whose module is at hand."""

    module: bytes
    """XLA's own, scheduled."""
    source: CanonicalModule
    again: bool = False
    """This very step was compiled before in this job: JAX compiles anew when arrays come in other
    shardings, as they do when the first call takes fresh parameters and the second a step's output."""
    chosen: bool = True
    """False: it could be a training step, but another is the one by rule. It is enacted if it has a plan."""


def captured(request: CompileRequest, capture: Capture = compiles.capture) -> Step | None:
    """The request's module in canonical form; None, with a log line, where it cannot be read."""
    try:
        module = capture(request)
        return Step(module, canonicalize(module))
    except DiscoError as error:
        LOGGER.warning("%s runs as XLA compiles it: %s", request.module_name, one_line(error))
        return None


def training_step(
    request: CompileRequest,
    settings: Settings,
    *,
    or_planned: bool = False,
    capture: Capture = compiles.capture,
) -> Step | None:
    """The request's module if it is the training step (see ``select``), else None.

    Args:
        or_planned: also give modules that could be one, not chosen, for which a plan may have been saved: a
            script may have several steps, and JAX compiles one step anew for a batch of another size.
        capture: what gives the module.
    """
    by_name = settings.names(request.module_name)
    if settings.module is not None and not by_name and not settings.may_be_key:
        return None
    step = captured(request, capture)
    if step is None:
        return None
    key, fingerprint = step.source.graph.key, step.source.graph.fingerprint
    history = _histories[jaxlink.job_number(), request.process_indices]
    if fingerprint in history.taken and (history.taken[fingerprint] or or_planned):
        LOGGER.debug("%s (%s) is compiled again", request.module_name, key[:16])
        return replace(step, again=True, chosen=history.taken[fingerprint])
    if (request.module_name, fingerprint) in history.left:
        LOGGER.debug("%s (%s) is left alone again", request.module_name, key[:16])
        return None
    facts, named = _facts(request, step), _named(request, settings, step)
    choice = choose(facts, history.seen, named=named)
    history.seen.append(facts)
    # On one device only what shares its name with a plan comes here.
    waits = or_planned and named is None and (qualifies(facts) or facts.device_count == 1)
    _tell(request, key, facts, choice, history, named is not None, waits)
    if not choice.chosen and not waits:
        history.left.add((request.module_name, fingerprint))
        return None
    if wrong := _wrong_numbers(request, step):
        LOGGER.warning("%s", wrong)
        history.left.add((request.module_name, fingerprint))
        return None
    history.taken[fingerprint] = choice.chosen
    return replace(step, chosen=choice.chosen)


def called_step(request: CompileRequest, settings: Settings) -> Step:
    """The module of what is known to be a step by its calls.

    Raises:
        UnsupportedError: no plan can be made for it, by the rules of ``select``, or XLA's own module is wrong.
        DiscoError: it cannot be read.
    """
    module = compiles.capture(request)
    step = Step(module, canonicalize(module))
    facts, named = _facts(request, step), _named(request, settings, step)
    # By its calls it is the step; by what it communicates none on one device is.
    choice = choose(facts, (), named=True if named is None and facts.device_count == 1 else named)
    if not choice.chosen:
        raise UnsupportedError(f"{request.module_name}: {choice.reason}")
    if wrong := _wrong_numbers(request, step):
        raise UnsupportedError(wrong)
    return step


def _facts(request: CompileRequest, step: Step) -> ModuleFacts:
    source = step.source
    regions = [region.source.graph for region in source.regions]
    return facts_of(
        source.graph, len(request.devices), inner_collectives(source), regions, reducing_kernels(source)
    )


def _named(request: CompileRequest, settings: Settings, step: Step) -> bool | None:
    """Whether ``DISCO_MODULE`` names it; None where that names none."""
    wanted = settings.module
    if wanted is None:
        return None
    return settings.names(request.module_name) or step.source.graph.key.startswith(wanted)


def _wrong_numbers(request: CompileRequest, step: Step) -> str:
    """What is wrong with XLA's own module; empty where nothing is."""
    own_faults = faults(step.module, step.source.graph.backend)
    if not own_faults:
        return ""
    return f"{request.module_name} runs as XLA compiles it, whose numbers may be wrong: {own_faults[0]}"


def _tell(
    request: CompileRequest,
    key: str,
    facts: ModuleFacts,
    choice: Choice,
    history: _History,
    named: bool,
    waits: bool,
) -> None:
    leads = device_facts(request).process_index == 0
    communicates = facts.reducing_collective_count or facts.inner_collective_count
    told = leads and (choice.chosen or communicates)
    verdict = "is left alone unless a plan was saved for it" if waits else "is left alone"
    verdict = "is the training step" if choice.chosen else verdict
    could_be = not choice.chosen and not waits and not named and qualifies(facts)
    hint = f"; DISCO_MODULE={key[:16]} searches it instead" if could_be else ""
    if told and not choice.chosen:
        history.told[request.module_name] += 1
        told = history.told[request.module_name] <= _MOST_TOLD
        if history.told[request.module_name] == _MOST_TOLD:
            hint += "; more of this name are told of with DISCO_LOG=debug only"
    LOGGER.log(
        20 if told else 10,
        "%s (%s) %s: %s%s",
        request.module_name,
        key[:16],
        verdict,
        choice.reason,
        hint,
    )


def why_none(settings: Settings) -> str:
    """Why no module so far was the training step; empty where one was."""
    seen = [facts for history in _histories.values() for facts in history.seen]
    if settings.module is not None:
        listed = ", ".join(facts.name for facts in seen[:8])
        return (
            ""
            if any(any(history.taken.values()) for history in _histories.values())
            else f"no module is called {settings.module} or has a key that begins so (DISCO_MODULE); compiled "
            f"were {listed or 'none'}"
        )
    if not seen or any(map(qualifies, seen)) or any(history.taken for history in _histories.values()):
        return ""
    largest = max(seen, key=lambda facts: (facts.inner_collective_count > 0, facts.instruction_count))
    if largest.inner_collective_count:
        return (
            f"{largest.name} has no all-reduce or reduce-scatter of a computed value{outside_loops(largest)}"
        )
    return (
        f"of {counted(len(seen), 'module')} on several devices none has an all-reduce or reduce-scatter of a computed "
        f"value (the largest is {largest.name}, {counted(largest.instruction_count, 'instruction')}); "
        "DISCO_MODULE=name names one"
    )
