"""The last check, kind by kind, on modules small enough to read."""

from __future__ import annotations

import re

import pytest

from disco_hlo.errors import ModuleError, PlanError
from disco_hlo.hlo import proto
from disco_hlo.plan.check_module import check_module, faults
from tests.modules import module


def said(data: bytes, backend: str = "cpu") -> str:
    return "; ".join(faults(data, backend))


def read_late(reader: str, value: str, writer: str, where: str = "entry") -> str:
    """What is said of a value that is read behind what is written over it."""
    return f"{reader} reads {value}, which {writer} has overwritten before, in {where}"


MADE = "x = f32[8] parameter\ny = f32[8] negate x\n"
BEGIN = MADE + "i = s32[] constant value=3\nu = f32[1] constant\n"
"""What most steps begin with: a value, and what is written into it."""

# --- one value after the other in a buffer -----------------------------------------------------------


def test_a_reader_after_an_update_in_place_is_refused_and_one_before_it_is_not() -> None:
    late = BEGIN + "w = f32[8] dynamic-update-slice y u i\ns = f32[8] add y w"
    early = f"""{BEGIN}
        r = f32[8] exponential y
        w = f32[8] dynamic-update-slice y u i
        s = f32[8] add r w
    """
    assert said(module(late)) == read_late("s", "y", "w")
    assert said(module(early)) == ""


def test_a_copy_in_between_makes_a_late_reader_right() -> None:
    assert said(module(f"""{BEGIN}
        c = f32[8] copy y
        w = f32[8] dynamic-update-slice c u i
        s = f32[8] add y w
    """)) == ""  # fmt: skip


@pytest.mark.parametrize("hands_on", ["bitcast y", "opt-barrier y", "get-tuple-element t", "copy-done d"])
def test_a_value_is_the_same_under_each_of_its_names(hands_on: str) -> None:
    text = f"""{MADE}
        t = (f32[8]) tuple y
        d = (f32[8],f32[8],u32[]) copy-start x
        n = f32[8] {hands_on}
        i = s32[] constant value=3
        u = f32[1] constant
        w = f32[8] dynamic-update-slice n u i
        s = f32[8] add n w
    """
    assert "which w has overwritten before" in said(module(text))


def test_a_fusion_with_an_update_at_its_root_writes_in_place_through_bitcasts_and_tuples() -> None:
    called = {"update": """
        p = f32[8] parameter
        u = f32[1] parameter number=1
        i = s32[] parameter number=2
        b = f32[8] bitcast p
        w = f32[8] dynamic-update-slice b u i
        c = f32[8] bitcast w
        n = f32[1] negate u
        t = (f32[1],f32[8]) tuple n c
    """}  # fmt: skip
    text = f"""{BEGIN}
        f = (f32[1],f32[8]) fusion y u i calls=update
        w = f32[8] get-tuple-element f number=1
        s = f32[8] add y w
    """
    assert said(module(text, called)) == read_late("s", "y", "f{1}")


def test_a_scatter_and_a_custom_call_that_says_so_write_in_place() -> None:
    text = """
        x = f32[8] parameter
        i = s32[1] parameter number=1
        u = f32[1] parameter number=2
        y = f32[8] negate x
        {}
        s = f32[8] add y w
    """
    assert said(module(text.format("w = f32[8] scatter y i u"))) == read_late("s", "y", "w")
    call = "w = f32[8] custom-call y target=library"
    assert said(module(text.format(f"{call} aliases=:0"))) == read_late("s", "y", "w")
    assert said(module(text.format(call))) == ""


def test_a_donated_argument_is_read_before_the_result_that_may_lie_in_its_buffer() -> None:
    text = """
        x = f32[8] parameter
        r = f32[8] negate x
        s = f32[8] exponential x
        t = (f32[8],f32[8]) tuple r s
    """
    assert said(module(text)) == ""
    assert said(module(text, aliases=[(1, 0)])) == ""
    assert said(module(text, aliases=[(0, 0)])) == read_late("s", "x", "r")


def test_nothing_is_written_over_a_constant_or_an_argument_that_was_not_donated() -> None:
    text = """
        x = f32[8] parameter
        i = s32[] constant value=3
        u = f32[1] constant
        w = f32[8] dynamic-update-slice x u i
    """
    assert said(module(text)) == "w is written over x, which must not change"
    assert said(module(text, aliases=[(0, 0)])) == ""


# --- computations that are called -------------------------------------------------------------------

BODY = """
p = (s32[],f32[8],f32[8]) parameter
k = s32[] get-tuple-element p number=0
a = f32[8] get-tuple-element p number=1
b = f32[8] get-tuple-element p number=2
{}
t = (s32[],f32[8],f32[8]) tuple k {}
"""
CONDITION = """
p = (s32[],f32[8],f32[8]) parameter
k = s32[] get-tuple-element p number=0
c = pred[] is-finite k
"""
LOOP = """
k = s32[] parameter
x = f32[8] parameter number=1
a = f32[8] negate x
b = f32[8] exponential x
t = (s32[],f32[8],f32[8]) tuple k a b
w = (s32[],f32[8],f32[8]) while t calls=body,condition
r = f32[8] get-tuple-element w number=1
{}
"""


def loop(lines: str, returned: str, after: str = "s = f32[8] negate r") -> bytes:
    return module(LOOP.format(after), {"body": BODY.format(lines, returned), "condition": CONDITION})


def test_a_loops_body_reads_what_it_was_given_before_it_writes_what_comes_next() -> None:
    assert said(loop("n = f32[8] sine a\nr = f32[8] cosine a", "n r")) == read_late("r", "p{1}", "n", "body")
    assert said(loop("n = f32[8] sine b\nm = f32[8] cosine b", "m b")) == ""
    assert said(loop("r = f32[8] cosine a\nn = f32[8] sine r", "n b")) == ""


def test_what_a_body_hands_on_untouched_is_not_written_over() -> None:
    lines = "i = s32[] constant value=1\nu = f32[1] constant\nn = f32[8] dynamic-update-slice b u i"
    assert read_late("t", "b", "n", "body") in said(loop(lines, "n b"))


def test_a_body_that_exchanges_two_values_without_a_copy_is_refused() -> None:
    assert "into one buffer" in said(loop("", "b a"))


CARRIES = """
p = (f32[8],f32[8],f32[8]) parameter
a = f32[8] get-tuple-element p number=0
b = f32[8] get-tuple-element p number=1
c = f32[8] get-tuple-element p number=2
n = f32[8] negate c
t = (f32[8],f32[8],f32[8]) tuple {}
"""


def _carried(begin: str, returned: str) -> str:
    text = f"""
        x = f32[8] parameter
        y = f32[8] parameter number=1
        c = f32[8] negate x
        t = (f32[8],f32[8],f32[8]) tuple {begin} c
        w = (f32[8],f32[8],f32[8]) while t calls=turn,go
        a = f32[8] get-tuple-element w number=0
        r = f32[8] get-tuple-element w number=2
        s = f32[8] add r a
    """
    go = "p = (f32[8],f32[8],f32[8]) parameter\ng = pred[] constant"
    return said(module(text, {"turn": CARRIES.format(returned), "go": go}))


def test_what_a_loop_only_moves_among_equals_is_what_it_began_with() -> None:
    assert _carried("x x", "b a n") == ""
    assert _carried("x x", "b b n") == ""
    assert "y, which must not change" in _carried("x y", "b a n")
    assert "over x, which must not change" in _carried("x x", "c a n")
    assert "over x, which must not change" in _carried("x x", "b c n")


def test_what_a_loop_begins_with_is_gone_after_it_unless_the_body_hands_it_on() -> None:
    after = "s = f32[8] add r a"
    assert said(loop("n = f32[8] sine a", "n b", after)) == read_late("s", "a", "w{1}")
    assert said(loop("n = f32[8] sine a", "n b", "s = f32[8] add r b")) == ""


def test_loops_inside_of_loops_are_checked() -> None:
    inner = "w = (s32[],f32[8],f32[8]) while p calls=inner,inside\nn = f32[8] get-tuple-element w number=1"
    called = {
        "body": BODY.format(inner, "n b"),
        "condition": CONDITION,
        "inner": BODY.format("n = f32[8] sine a\nr = f32[8] cosine a", "n r"),
        "inside": CONDITION,
    }
    found = said(module(LOOP.format("s = f32[8] negate r"), called))
    assert found.startswith("r reads p{1}, which n has overwritten")


CHOICE = "p = s32[] parameter\nx = f32[8] parameter number=1\ny = f32[8] negate x\n"
BRANCHES = {
    "one": "v = f32[8] parameter\ni = s32[] constant value=1\nu = f32[1] constant\n"
    "n = f32[8] dynamic-update-slice v u i",
    "two": "v = f32[8] parameter\ne = f32[8] exponential v",
}


def test_exclusive_branches_do_not_meet() -> None:
    text = f"""{CHOICE}
        c = f32[8] conditional p y y calls=one,two
    """
    assert said(module(text, BRANCHES)) == ""
    assert said(module(f"{text}s = f32[8] add c y", BRANCHES)) == read_late("s", "y", "c")


def test_a_branch_that_hands_its_operand_on_makes_it_the_conditionals_result() -> None:
    text = CHOICE + "c = f32[8] conditional p y y calls=one,two\ns = f32[8] add c y"
    handing_on = "v = f32[8] parameter\nb = f32[8] bitcast v"
    called = {"one": "v = f32[8] parameter\ne = f32[8] exponential v", "two": handing_on}
    assert said(module(text, called)) == read_late("s", "y", "c")
    assert said(module(text, {"one": handing_on, "two": handing_on})) == ""


def test_a_call_works_on_the_buffers_of_its_caller() -> None:
    text = MADE + "c = f32[8] call y calls=one\ns = f32[8] add c y"
    assert said(module(text, {"one": BRANCHES["one"]})) == read_late("s", "y", "n")


def test_a_computation_that_is_called_twice_has_one_set_of_buffers() -> None:
    text = (
        "x = f32[8] parameter\nc = f32[8] call x calls=two\nd = f32[8] call c calls=two\ns = f32[8] add c d"
    )
    found = said(module(text, {"two": BRANCHES["two"]}))
    assert found.startswith("s reads e, which e has overwritten before")


# --- asynchronous ops -------------------------------------------------------------------------------

GATHER = {"gathering": "v = f32[8] parameter\ng = f32[16] all-gather v"}


def test_an_async_op_reads_until_it_is_done() -> None:
    text = f"""{BEGIN}
        g = ((f32[8]),f32[16]) async-start y calls=gathering
        {{}}
        e = f32[8] exponential w
    """
    write, wait = "w = f32[8] dynamic-update-slice y u i", "d = f32[16] async-done g"
    assert said(module(text.format(f"{wait}\n{write}"), GATHER), "gpu") == ""
    assert said(module(text.format(f"{write}\n{wait}"), GATHER), "gpu") == read_late("d", "y", "w")


@pytest.mark.parametrize(
    ("started", "waits", "reads"),
    [
        ("g = (f32[8],f32[16]) all-gather-start y", "d = f32[16] all-gather-done g", True),
        ("g = f32[16] all-gather y", "d = f32[16] negate g", False),
    ],
    ids=["started", "at once"],
)
def test_what_an_all_gather_reads_is_there_until_it_is_done(started: str, waits: str, reads: bool) -> None:
    text = f"""{BEGIN}
        {started}
        w = f32[8] dynamic-update-slice y u i
        {waits}
        e = f32[8] exponential w
    """
    assert ("d reads y" in said(module(text), "gpu")) is reads


def test_an_async_start_in_place_overwrites_what_it_reads_but_for_itself() -> None:
    called = {"reducing": "v = f32[8] parameter\nr = f32[8] all-reduce v"}
    text = f"""{MADE}
        g = ((f32[8]),f32[8]) async-start y calls=reducing aliases=1:0
        d = f32[8] async-done g
        {{}}
    """
    assert said(module(text.format("s = f32[8] negate d"), called), "gpu") == ""
    assert "s reads y, which g{1} has" in said(module(text.format("s = f32[8] add d y"), called), "gpu")


def test_an_all_reduce_writes_over_its_operand_on_gpu_and_nowhere_else() -> None:
    text = "x = f32[8] parameter\nr = f32[8] all-reduce x"
    assert said(module(text, aliases=[(0, 0)]), "gpu") == ""
    assert said(module(text, aliases=[(0, 0)]), "cpu").startswith("r writes r over x and reads that at other")


# --- kernels ----------------------------------------------------------------------------------------

TWO_NAMES = """
x = f32[4,4] parameter
g = f32[4,4] negate x
h = f32[4,4]{0,1} bitcast g
f = f32[4,4] fusion g h calls=sum
"""
SUM = "a = f32[4,4] parameter\nb = f32[4,4]{0,1} parameter number=1\ns = f32[4,4] add a b"


def test_a_value_enters_a_kernel_by_one_name_where_it_dies_with_it() -> None:
    assert said(module(TWO_NAMES, {"sum": SUM})) == "f reads g by two names and may write f over it, in entry"
    assert said(module(f"{TWO_NAMES}e = f32[4,4] add f g", {"sum": SUM})) == ""  # g outlives it


def test_two_names_are_no_matter_where_all_is_read_where_it_is_written_or_nothing_fits() -> None:
    called = {"sum": "a = f32[4,4] parameter\nb = f32[4,4] parameter number=1\ns = f32[4,4] add a b"}
    alike = TWO_NAMES.replace("{0,1}", "")
    assert said(module(alike, called)) == ""
    summed = f"{SUM}\nz = f32[4] slice s"
    assert said(module(TWO_NAMES.replace("f = f32[4,4]", "f = f32[4]"), {"sum": summed})) == ""


def test_two_names_are_no_matter_to_a_kernel_whose_result_takes_no_operands_place() -> None:
    """A product of a value with itself: XLA lets no result take the place of what a product reads."""
    product = f"{SUM.rsplit(chr(10), 1)[0]}\ns = f32[4,4] dot a b"
    assert said(module(TWO_NAMES, {"sum": product})) == ""
    beside = f"{product}\nr = f32[4,4] add s a"
    assert said(module(TWO_NAMES, {"sum": beside})) == ""
    only_one = f"{SUM.rsplit(chr(10), 1)[0]}\nt = f32[4,4] reverse a dims=0\nr = f32[4,4] add t b"
    # On CPU the result takes no other layout's place.
    assert said(module(TWO_NAMES, {"sum": only_one})) == ""
    alike, only_one = TWO_NAMES.replace("{0,1}", ""), only_one.replace("{0,1}", "")
    assert "by two names" in said(module(alike, {"sum": only_one}))


def test_a_branch_has_its_operands_by_as_many_names_as_it_likes_since_they_outlive_it() -> None:
    """Run on XLA:CPU: 2048 of 4096 elements are wrong where the kernel stands in the entry, none in a branch."""
    text = """
        p = s32[] parameter
        x = f32[4,4] parameter number=1
        y = f32[4,4] negate x
        c = f32[4,4] conditional p y y calls=one,two
    """
    one = TWO_NAMES.replace("g = f32[4,4] negate x\n", "").replace("g", "x")
    called = {"one": one, "two": "v = f32[4,4] parameter\ne = f32[4,4] exponential v", "sum": SUM}
    assert said(module(text, called)) == ""
    made_inside = {**called, "one": TWO_NAMES}
    assert said(module(text, made_inside)) == "f reads g by two names and may write f over it, in one"


@pytest.mark.parametrize(
    ("name", "of_g", "of_h", "is_right"),
    [
        # XLA looks at both: one of them cannot be shared.
        ("opt-barrier g", "copy p", "reverse q dims=0,1", True),
        ("get-tuple-element t", "reverse p dims=0,1", "copy q", True),
        ("get-tuple-element o", "reverse p dims=0,1", "copy q", True),
        # At one of them.
        ("bitcast g", "copy p", "reverse q dims=0,1", False),
        ("bitcast g", "reverse p dims=0,1", "copy q", False),
        ("bitcast b", "reverse p dims=0,1", "copy q", False),
    ],
)
def test_of_two_names_that_a_tuple_gives_xla_looks_at_both(
    name: str, of_g: str, of_h: str, is_right: bool
) -> None:
    """Run on XLA:CPU: 2048 of 4096 elements are wrong in those that are refused, none in the others."""
    text = f"""
        x = f32[4,4] parameter
        g = f32[4,4] negate x
        t = (f32[4,4],f32[4,4]) tuple g x
        o = (f32[4,4],f32[4,4]) opt-barrier t
        b = f32[4,4] get-tuple-element o
        h = f32[4,4] {name}
        f = f32[4,4] fusion g h calls=sum
    """
    kernel = f"""
        p = f32[4,4] parameter
        q = f32[4,4] parameter number=1
        a = f32[4,4] {of_g}
        b = f32[4,4] {of_h}
        s = f32[4,4] add a b
    """
    for backend in ("cpu", "gpu"):
        assert (said(module(text, {"sum": kernel}), backend) == "") is is_right


def test_of_one_operand_twice_xla_looks_at_the_first_place() -> None:
    """Run on XLA:CPU: 2048 of 4096 elements are wrong where the first is added, none where the second is."""
    text = "x = f32[4,4] parameter\ng = f32[4,4] negate x\nf = f32[4,4] fusion g g calls=sum"
    moved = "p = f32[4,4] parameter\nq = f32[4,4] parameter number=1\nr = f32[4,4] reverse {} dims=0,1\n"
    first = f"{moved.format('q')}s = f32[4,4] add p r"
    second = f"{moved.format('p')}s = f32[4,4] add q r"
    assert "by two names" in said(module(text, {"sum": first}))
    assert said(module(text, {"sum": second})) == ""


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_sort_has_copied_each_operand_before_it_begins(backend: str) -> None:
    text = f"""{MADE}
        s = (f32[8],f32[8]) sort y y
        a = f32[8] get-tuple-element s number=0
        b = f32[8] get-tuple-element s number=1
        t = f32[8] add a b
    """
    assert said(module(text), backend) == ""


@pytest.mark.parametrize("by", ["sort {}", "fusion {} calls=sorting"])
@pytest.mark.parametrize(
    ("returned", "read", "is_right"),
    [
        (0, "x x", True),  # it lies there already; of it the other is made, before anything is sorted
        (1, "x x", True),
        (0, "x h", True),  # by a bitcast
        (0, "x y", True),
        (1, "x y", False),  # y is copied there while x is still needed
        (0, "y x", False),
    ],
)
def test_a_sort_may_be_written_over_what_lies_in_its_place(
    by: str, returned: int, read: str, is_right: bool
) -> None:
    """Run on XLA:CPU, which sorts by either of two equal operands."""
    text = f"""
        x = f32[8] parameter
        h = f32[8] bitcast x
        y = f32[8] negate x
        s = (f32[8],f32[8]) {by.format(read)}
        r = f32[8] get-tuple-element s number={returned}
    """
    sorting = "p = f32[8] parameter\nq = f32[8] parameter number=1\ns = (f32[8],f32[8]) sort p q"
    assert (said(module(text, {"sorting": sorting}, [(0, 0)]), "gpu") == "") is is_right


def test_a_sort_of_numbers_that_it_makes_itself_may_be_written_over_its_other_operand() -> None:
    """What XLA:GPU makes of a stable sort in a loop that keeps its result."""
    text = "x = f32[8] parameter\ns = (f32[8],s32[8]) fusion x calls=sorting\n"
    sorting = "p = f32[8] parameter\n{} = s32[8] {}\ns = (f32[8],s32[8]) sort p n"
    first, second = f"{text}r = f32[8] get-tuple-element s", f"{text}r = s32[8] get-tuple-element s number=1"
    made, computed = sorting.format("n", "iota"), sorting.format("n", "convert p")
    assert said(module(first, {"sorting": made}, [(0, 0)]), "gpu") == ""
    assert "other elements" in said(module(second, {"sorting": made}, [(0, 0)]), "gpu")
    assert "other elements" in said(module(first, {"sorting": computed}, [(0, 0)]), "gpu")


ELSEWHERE = "f writes f over p and reads that at other elements than it writes, in entry"


def fused(
    kernel: str, backend: str = "cpu", *, donated: bool = True, copied: bool = False, kind: str = "kLoop"
) -> str:
    """What is said of a step that is one kernel, whose (first) result takes the place of its first argument if that is
    donated; or that reads a copy of it."""
    lines = [line.strip() for line in kernel.splitlines() if line.strip()]
    entry = [line for line in lines if line.split()[3] == "parameter"]
    read = [line.split()[0] for line in entry]
    if copied:
        entry.append(f"c = {entry[0].split()[2]} copy {read[0]}")
        read[0] = "c"
    shape = lines[-1].split()[2]
    entry.append(f"f = {shape} fusion {' '.join(read)} calls=kernel kind={kind}")
    if shape.startswith("("):
        members = re.findall(r"\w+\[[\d,]*\]", shape)
        entry += [f"m{i} = {one} get-tuple-element f number={i}" for i, one in enumerate(members)]
        entry.append(f"t = {shape} tuple {' '.join(f'm{i}' for i in range(len(members)))}")
    return said(module("\n".join(entry), {"kernel": kernel}, [(0, 0)] * donated), backend)


@pytest.mark.parametrize(
    ("lines", "is_right"),
    [
        ("f = f32[4,4] negate p", True),
        ("b = f32[16] bitcast p\nn = f32[16] negate b\nf = f32[4,4] bitcast n", True),
        ("t = f32[4,4]{0,1} transpose p dims=1,0\nb = f32[4,4] bitcast t\nf = f32[4,4] add b p", True),
        ("t = f32[4,4] transpose p dims=1,0\nf = f32[4,4] add t p", False),
        ("r = f32[4,4] reverse p dims=0\nf = f32[4,4] add r p", False),
        ("c = f32[4,4]{0,1} copy p\nf = f32[4,4] bitcast c", False),
        ("s = f32[1,4] slice p starts=1,0\nb = f32[4,4] broadcast s dims=0,1\nf = f32[4,4] add b p", False),
        ("z = f32[] constant\nr = f32[4] reduce p z\nb = f32[4,4] broadcast r dims=0\nf = f32[4,4] add b p", False),
    ],
)  # fmt: skip
def test_a_kernel_reads_what_it_must_write_over_only_where_it_writes(lines: str, is_right: bool) -> None:
    kernel = f"p = f32[4,4] parameter\n{lines}"
    assert fused(kernel) == ("" if is_right else ELSEWHERE)
    assert fused(kernel, donated=False) == ""


@pytest.mark.parametrize(
    ("cut", "is_right"),
    [("dynamic-slice p i j", True), ("dynamic-slice p j i", False), ("slice p starts=0,0", False)],
)
def test_an_update_may_be_made_of_what_it_replaces(cut: str, is_right: bool) -> None:
    kernel = f"""
        p = f32[4,4] parameter
        i = s32[] parameter number=1
        j = s32[] parameter number=2
        s = f32[2,1] {cut}
        u = f32[2,1] sine s
        w = f32[4,4] dynamic-update-slice p u i j
    """
    assert fused(kernel) == ("" if is_right else ELSEWHERE)


def test_an_update_at_constant_places_may_be_made_of_a_slice_there() -> None:
    kernel = """
        p = f32[4] parameter
        i = s32[] constant value={}
        s = f32[1] slice p starts=2
        u = f32[1] sine s
        o = f32[1] cosine u
        w = f32[4] dynamic-update-slice p o i
        n = f32[4] negate w
    """
    assert fused(kernel.format(2)) == ""
    assert fused(kernel.format(1)) == ELSEWHERE


@pytest.mark.parametrize(
    ("cut", "at", "is_right"),
    [
        ("c = f32[4] slice p starts=4", "one zero", True),  # what is replaced
        ("c = f32[4] slice p starts=2", "one zero", False),  # half of it
        ("c = f32[4] slice p starts=8", "i zero", True),  # it or another row
        ("c = f32[4] slice p starts=6", "i zero", False),
        ("c = f32[4] slice p starts=0", "i j", True),  # a whole row begins where it begins
        ("r = f32[3,4] bitcast p\nc = f32[1,4] dynamic-slice r j zero", "i zero", True),
        ("r = f32[3,4] bitcast p\nc = f32[1,4] dynamic-slice r zero j", "zero zero", True),  # there is one such place
        ("r = f32[4,3] bitcast p\nm = f32[2,2] dynamic-slice r j zero\nc = f32[4] bitcast m", "i zero", False),
    ],
)  # fmt: skip
def test_a_row_may_be_made_of_itself_or_of_another_row_by_any_shape(
    cut: str, at: str, is_right: bool
) -> None:
    kernel = f"""
        p = f32[12] parameter
        i = s32[] parameter number=1
        j = s32[] parameter number=2
        one = s32[] constant value=1
        zero = s32[] constant value=0
        {cut}
        e = f32[4] sine c
        u = f32[1,4] bitcast e
        b = f32[3,4] bitcast p
        w = f32[3,4] dynamic-update-slice b u {at}
    """.replace("sine c", "bitcast c" if "f32[1,4] dyn" in cut else "sine c")
    assert fused(kernel) == ("" if is_right else ELSEWHERE)


@pytest.mark.parametrize(
    ("kernel", "again"),
    [
        (  # what is not replaced, where nothing else is written
            """
        p = f32[12] parameter
        one = s32[] constant value=4
        c = f32[4] slice p starts=0
        w = f32[12] dynamic-update-slice p c one
        """,
            "n = f32[12] negate w",
        ),
        (  # all that was there, where one element is written
            """
        p = f32[4] parameter
        i = s32[] parameter number=1
        z = f32[] constant
        r = f32[] reduce p z
        u = f32[1] broadcast r dims=
        w = f32[4] dynamic-update-slice p u i
        """,
            "v = f32[4] dynamic-update-slice w u i",
        ),
    ],
)
def test_an_update_may_be_made_of_other_elements_that_nothing_else_writes(kernel: str, again: str) -> None:
    assert fused(kernel) == ""
    assert fused(f"{kernel.rstrip()}\n{again}") == ELSEWHERE


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("beside", ["negate p", "reverse p dims=0"])
def test_results_beside_an_update_are_written_in_its_loop_on_gpu(backend: str, beside: str) -> None:
    kernel = f"""
        p = f32[8] parameter
        u = f32[2] parameter number=1
        i = s32[] parameter number=2
        m = f32[8] {beside}
        w = f32[8] dynamic-update-slice p u i
        t = (f32[8],f32[8]) tuple m w
    """
    is_right = backend == "gpu" and beside == "negate p"
    assert (fused(kernel, backend, donated=False, copied=True) == "") is is_right


def test_an_update_cut_from_a_result_beside_it_is_refused_on_gpu() -> None:
    """XLA:GPU makes such kernels: one loop, in which threads read what others write. The nine that the fuzzer saw come
    out right have 64 elements at most, few enough for one warp: that says nothing of larger ones."""
    kernel = """
        p = f32[64] parameter
        i = s32[] parameter number=1
        m = f32[64] negate p
        u = f32[8] slice m starts=0
        w = f32[64] dynamic-update-slice p u i
        t = (f32[64],f32[64]) tuple m w
    """
    found = fused(kernel, "gpu", donated=False, copied=True)
    assert found.startswith("f writes f{1} over c and reads that at other")


def test_a_reduction_beside_the_result_reads_where_that_is_written_on_gpu() -> None:
    kernel = """
        p = f32[4,4] parameter
        z = f32[] constant
        n = f32[4,4] negate p
        r = f32[4] reduce n z
        t = (f32[4,4],f32[4]) tuple n r
    """
    assert fused(kernel, "gpu", kind="kInput") == ""
    assert fused(kernel, "cpu", kind="kInput") == ELSEWHERE.replace("f over p", "f{0} over p")


# --- results, and modules that make no sense ---------------------------------------------------------


def test_results_have_buffers_of_their_own() -> None:
    text = "x = f32[8] parameter\ny = f32[8] negate x\nb = f32[2,4] bitcast y\n"
    for results, wrong in (
        ("t = (f32[8],f32[2,4]) tuple y b", "y and b, which are in one buffer"),
        ("t = (f32[8],f32[8]) tuple y x", "x, which is the unchangeable x"),
        ("c = f32[8] constant\nt = (f32[8],f32[8]) tuple y c", "c, which is the unchangeable c"),
    ):
        assert said(module(text + results)) == f"t returns {wrong}"


def test_what_takes_no_memory_is_written_over_by_nobody() -> None:
    text = "x = f32[0,4] parameter\ny = f32[0,4] negate x\nz = f32[0,4] negate x\nt = (f32[0,4],f32[0,4]) tuple y y"
    assert said(module(text, aliases=[(0, 0)])) == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = f32[8] parameter\ny = f32[8] add x x", "entry has no schedule"),
        ("x = f32[8] parameter\ny = f32[8] call x calls=one", "one has no schedule"),
    ],
)
def test_what_runs_needs_a_schedule(text: str, sentence: str) -> None:
    left_out = sentence.split()[0]
    assert said(module(text, {"one": BRANCHES["two"]}, unscheduled=[left_out])) == sentence


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("y = f32[8] negate nobody", "y in entry reads instruction 999, which is not there"),
        ("y = f32[8] imagined x", "y has the opcode 'imagined', whose buffers are not known"),
        ("y = f32[8] get-tuple-element x number=3", "y reads member 3 of a tuple that does not have it"),
        ("y = f32[4] tuple x x", "y in entry has another shape than its value"),
        ("y = f32[8] call x calls=entry", "y calls entry, which is being called"),
        ("y = f32[8] while x calls=entry,entry", "y calls entry, which is being called"),
        ("y = f32[8] bitcast", "y in entry reads nothing"),
        ("y = f32[8] custom-call x aliases=:7", "y aliases operand 7, which it does not have"),
        (
            "y = f32[8] custom-call x aliases=1.2:0",
            "y names the index [1, 2] of a shape that does not have it",
        ),
    ],
)
def test_a_module_that_makes_no_sense_is_refused_in_a_sentence(line: str, sentence: str) -> None:
    assert said(module(f"x = f32[8] parameter\n{line}")) == sentence


def test_an_op_runs_after_what_it_reads_and_each_runs_once() -> None:
    parsed = proto.parse(module("x = f32[8] parameter\ny = f32[8] negate x\nz = f32[8] sine y"))
    x, y, z = (one.id for one in parsed.computations[0].instructions)
    for order, sentence in (
        ([x, z, y], "z runs before y, which it waits for, in entry"),
        ([x, y, y, z], "the schedule of entry names an instruction twice"),
        ([x, z], "the schedule of entry names 2 instructions, expected each of its 3"),
    ):
        parsed.schedule.sequences[1].instruction_ids[:] = order
        assert said(proto.serialize(parsed)) == sentence


def test_the_error_names_both_values_and_how_many_more() -> None:
    text = "x = f32[8] parameter\nr = f32[8] negate x\ns = f32[8] sine x\nt = (f32[8],f32[8]) tuple r s"
    with pytest.raises(
        PlanError, match="the module would compute wrong numbers: s reads x, which r has over"
    ):
        check_module(module(text, aliases=[(0, 0)]), "cpu")
    with pytest.raises(ModuleError, match="expected"):
        check_module(b"\x00nonsense", "cpu")


def test_an_op_alone_is_a_kernel_that_reads_what_its_operand_is_called_there() -> None:
    text = "x = f32[4,4] parameter\nh = f32[4,4]{0,1} bitcast x\nf = f32[4,4] add x h"
    assert "reads that at other elements" in said(module(text, aliases=[(0, 0)]))
    flat = "x = f32[16] parameter\nh = f32[4,4] bitcast x\nf = f32[4,4] negate h"
    assert said(module(flat, aliases=[(0, 0)])) == ""


def test_an_all_reduce_of_one_value_by_two_names_is_refused_where_it_may_write_over_it() -> None:
    text = f"""{MADE}
        b = f32[2,4] bitcast y
        r = (f32[8],f32[2,4]) all-reduce y b
        m = f32[8] get-tuple-element r number=0
        n = f32[2,4] get-tuple-element r number=1
        t = (f32[8],f32[2,4]) tuple m n
    """
    assert said(module(text), "cpu") == ""
    assert "r reads y by two names and may write r{0} over it, in entry" in said(module(text), "gpu")


def test_what_a_loop_hands_on_twice_is_one_value_inside() -> None:
    body = """
        p = (f32[4,4],f32[4,4]{0,1},f32[4,4]) parameter
        a = f32[4,4] get-tuple-element p number=0
        b = f32[4,4]{0,1} get-tuple-element p number=1
        c = f32[4,4] get-tuple-element p number=2
        f = f32[4,4] fusion a b calls=sum
        t = (f32[4,4],f32[4,4]{0,1},f32[4,4]) tuple a b f
    """
    condition = "p = (f32[4,4],f32[4,4]{0,1},f32[4,4]) parameter\nc = pred[] constant"
    text = """
        x = f32[4,4] parameter
        g = f32[4,4] negate x
        h = f32[4,4]{0,1} bitcast g
        k = f32[4,4] sine x
        t = (f32[4,4],f32[4,4]{0,1},f32[4,4]) tuple g h k
        w = (f32[4,4],f32[4,4]{0,1},f32[4,4]) while t calls=body,condition
        r = f32[4,4] get-tuple-element w number=2
        s = f32[4,4] negate r
    """
    called = {"body": body, "condition": condition, "sum": SUM}
    assert said(module(text, called)) == ""  # what is handed on outlives the kernel
    written = called | {
        "body": body.replace("fusion a b calls=sum", "copy c").replace("tuple a b f", "tuple f b a")
    }
    assert "into one buffer" in said(module(text, written))


def test_results_that_differ_by_dimensions_of_one_are_written_together() -> None:
    """A donated step counter, and random bits that are made of it in the same kernel (a plan of VGG19 on GPU)."""
    kernel = """
        p = s32[] parameter
        one = s32[] constant
        n = s32[] add p one
        b = s32[1] bitcast p
        r = s32[1] multiply b b
        t = (s32[],s32[1]) tuple n r
    """
    assert fused(kernel, "gpu") == ""
