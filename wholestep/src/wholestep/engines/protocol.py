"""The protocol of an engine: its parts, and for each verb of a part one line of contract.

`tests/engines/test_engines.py` tests both engines. Outside this folder, only `processes.group` and
`.store` import a backend.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import keras
import numpy as np
from keras.optimizers import Optimizer

from wholestep.processes import Processes
from wholestep.state import State, TableRows, Variables
from wholestep.tree import Tensor, Tree

Note = Callable[[keras.Variable], None]
Function = TypeVar("Function", bound=Callable)
Found = TypeVar("Found")  # by the function
Carried = TypeVar("Carried")
Data = TypeVar("Data")
Alike = TypeVar("Alike")


class Compiled(NamedTuple):
    """A compiled function.

    Args:
        call: the function.
        memory: the bytes that it needs in addition to its arguments and results; None if unknown.
        how: how it is executed, as text; "" if there is one way.
    """

    call: Callable
    memory: int | None = None
    how: str = ""


class Shares(NamedTuple):
    """Loaded rows, each on the replica that computes on it: leaves (replicas, rows of a replica,
    ...).
    """

    leaves: Tree


class VariableAccess(Protocol):
    """The values of Keras variables, between programs and in them.

    Attributes:
        shows_changes: whether a changed variable has another value object; else seeing a change
            would wait for the device.
    """

    shows_changes: bool

    def read(self, variables: Variables) -> tuple[list, list, list]:
        """Return the values of (params, slots, buffers), to be spent; [] if kept in variables."""

    def values(self, variables: list) -> list:
        """Return the values of these variables, such as the metrics', which may be spent."""

    def captured(self, variables: list, state: State) -> list:
        """Return the newest values of variables that no program reads itself; never spent."""

    def params(self, state: State, apart: Collection[int] = ()) -> list:
        """Return the parameters after the last update; `apart` need not be read in full."""

    def replica_params(self, params: list) -> list:
        """Return a replica's values of the parameters; unchanged outside of replicas."""

    def are_current(self, variables: Variables, state: State) -> bool:
        """False only if the next program would use another value of a changed variable."""

    def changed_outside(self, variables: list) -> list:
        """Return the variables, except any that certainly still hold the values of `write`."""

    def between_programs(self, state: State) -> State:
        """Return the state without the values that stay in variables between programs."""

    def load_and_store(self, function: Callable, variables: Variables | None = None) -> Callable:
        """Return a program of the kept state; given `variables`, one that only stores."""

    def write(self, variables: Variables, state: State) -> None:
        """Write a state that a program has returned to the Keras variables, without waiting."""

    def assign(self, variables: list, values: list) -> None:
        """Write these values to these variables, without waiting."""

    def sharded(self, variables: list) -> list[str]:
        """Return the paths of the sharded variables, with the axes along which they are cut."""


class OptimizerStep(Protocol):
    """The update of parameters and slots by a Keras optimizer.

    Attributes:
        keeps_assigned: true if an update starts from the value that the forward pass assigned to a
            parameter.
    """

    keeps_assigned: bool

    def clipped(self, grads: list) -> list:
        """Return the gradients, dense, as the optimizer clips them."""

    def apply(
        self,
        state: State,
        new: State,
        grads: list,
        ok: Tensor,
        assigned: dict[int, Tensor],
        touched: Sequence[TableRows] = (),
        twin: Optimizer | None = None,
    ) -> State:
        """Return `new` after Keras' update where `ok`, else `state`; `twin` updates rows."""


class StepCalls(Protocol):
    """Calls of the custom steps of a model."""

    def call(
        self,
        step: Callable,
        groups: Sequence[list],
        values: Sequence[list],
        num: int,
        data: Tree,
        note: Note,
    ) -> tuple[Tree, list[list]]:
        """Call a step with `num` groups; return results and groups. The last is read only."""

    def attempt(
        self,
        function: Callable[[State], tuple[State, Tensor, Found]],
        state: State,
        variables: Variables,
    ) -> tuple[State, Tensor, Found]:
        """Return the results of (state) -> (state, is_good, results); undone unless good."""


class Programs(Protocol):
    """Functions that are traced and compiled, unless the engine is eager.

    Attributes:
        is_eager: true if nothing is traced or compiled: all functions are called with values,
            visible to the user.
        always_xla: true if the user asked for XLA, and the engine could do without it.
        loops_once: true if a single update should be compiled as a loop as well.
        why_no_xla: the reason why XLA compiles no more programs; "" if it does.
    """

    is_eager: bool
    always_xla: bool
    loops_once: bool
    why_no_xla: str

    def compile(
        self, function: Callable, examples: tuple, *, spends: bool = True, repeats: bool = False
    ) -> Compiled:
        """Compile the function for such arguments; a call loses the first if it `spends`."""

    def loops_slowly(self, function: Callable, *arguments: Tree) -> bool:
        """True only if the function is known to be slower inside a loop, or is eager."""

    def traced(self, function: Function) -> Function:
        """Return a function with the same results; traced once a shape, unless split."""

    def inlined(self, function: Function) -> Function:
        """Return a function with the traced function's results, differentiable anywhere."""

    def shapes(self, function: Callable[..., Found], *arguments: Tree) -> Found:
        """Return the shapes and dtypes of the function's results; no variable changes."""


class Traces(Protocol):
    """The current trace, and what separately traced functions see of it.

    Attributes:
        freezes_reads: true if a variable that a function reads is a constant of the program.
        closes_over: true if the gradient of a separately traced function may use values of the
            enclosing program.
    """

    freezes_reads: bool
    closes_over: bool

    def frame(self, value: Tensor | None = None) -> object:
        """Return the identity of the current trace: another in a loop or under a map."""

    def is_kept(self, frame: object) -> bool:
        """True if a separately compiled function in the frame keeps its trace for others."""

    def tracing_anew(self) -> AbstractContextManager:
        """Return a context in which separately compiled functions are traced anew."""


class Operations(Protocol):
    """Operations inside a program.

    Attributes:
        has_slices: true if a gradient may be `Slices`, as `keras.Model.fit` hands it to the
            optimizer on this engine.
    """

    has_slices: bool

    def differentiate(
        self,
        function: Callable[[list], tuple[Tensor, Found]],
        params: list,
        *,
        slices: bool = False,
    ) -> tuple[list, Found]:
        """Return gradients of params -> (scalar, auxiliary), dense or `slices`; and auxiliary."""

    def fold(
        self, function: Callable[[Carried, Any], Carried], carry: Carried, pieces: Tree, num: int
    ) -> Carried:
        """Fold (carry, piece) -> carry over the pieces, (num, ...), in order."""

    def repeat(
        self,
        function: Callable[[Any, State], tuple[State, Found]],
        num: Tensor,
        state: State,
        reports: Found,
    ) -> tuple[State, Found]:
        """Call (i, state) -> (state, report) for i < num until stopped; keep the reports."""

    def gather(self, data: Data, rows: Tensor) -> Data:
        """Return these rows of every leaf, in this order; row numbers are in range."""

    def lookup(self, table: Tensor, places: Tensor) -> Tensor:
        """Return the table's rows at these places; NaN for a place beyond the last."""

    def is_finite(self, values: list) -> Tensor:
        """True if every number is finite, also if there are none."""


class RandomWords(Protocol):
    """Random numbers of rows, equal on every engine.

    Attributes:
        shuffles_slices: true if `keras.random.shuffle` moves whole slices, rather than to shuffle
            each vector apart.
    """

    shuffles_slices: bool

    def words(
        self, seed: Tensor, stream: Tensor | int, first: Tensor | int, num_rows: int, num_words: int
    ) -> Tensor:
        """Return the uint32 words of places first + i; another `num_words` gives others."""

    def gamma_slope(self, alpha: Tensor, sample: Tensor) -> Tensor:
        """Return the derivatives of gamma samples by their parameter, for constant random words."""


class Devices(Protocol):
    """The devices of the run: values go to them and come back.

    Attributes:
        num_replicas: the number of replicas that share the rows of a batch.
        local_replicas: the replicas whose rows this process loads; a single process loads all rows.
    """

    num_replicas: int
    local_replicas: list[int]

    def memory(self) -> int | None:
        """Return the free bytes of the device's memory; None where it is the host's."""

    def place(self, data: Data) -> Data:
        """Return every leaf on the device, with the same numbers, nesting and Nones."""

    def resident(self, data: Data) -> tuple[Data, Callable[[], None]]:
        """Return (data whose rows are gathered repeatedly, a function that waits for them)."""

    def stage(self, data: Tree, shares: np.ndarray | None = None) -> Tree:
        """Return host arrays as a program takes them fastest; replica i gets shares[i]."""

    def fetch(self, values: Tree) -> Any:
        """Return every leaf as numpy, after one wait."""

    def is_ready(self, values: Tree) -> bool:
        """True only if the values can be fetched without waiting for a device."""


class Replicas(Protocol):
    """The replicas in a program: each has its part of the rows.

    Attributes:
        is_split: true if each replica always sees its rows alone; else arrays are global, unless
            `total` splits them.
        can_split: true if several replicas may compute on their rows separately.
        coupling_layers: the layers in which the replicas of a split engine communicate where
            `total` syncs.
    """

    is_split: bool
    can_split: bool
    coupling_layers: Collection[keras.layers.Layer]

    def total(
        self,
        function: Callable[[Tree, Carried, Data], tuple[Found, Carried, Alike]],
        data: Tree,
        carried: Carried,
        given: Data,
        *,
        syncs: bool,
    ) -> tuple[Found, Carried, Alike]:
        """Run (data, carried, given) -> (sums, carried, alike) on replicas; add up sums."""

    def batch(self, data: Tree, rows: Tensor) -> Any:
        """Return these rows, and to a replica its equal part; `Shares` have rows of shares."""

    def part(self, rows: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return a replica's slice of a vector over the rows, and its start; else all and 0."""


@dataclass(frozen=True, eq=False)
class Engine:
    """Runs one model and one optimizer on the devices of this process.

    Args:
        processes: the processes of the run, also if there is only one.
        evaluation: the engine for evaluation, with the same variables and never split; None: this
            one.
    """

    variables: VariableAccess
    optimizer: OptimizerStep
    steps: StepCalls
    programs: Programs
    traces: Traces
    ops: Operations
    random: RandomWords
    devices: Devices
    replicas: Replicas
    processes: Processes
    evaluation: "Engine | None" = None


PARTS = (
    VariableAccess,
    OptimizerStep,
    StepCalls,
    Programs,
    Traces,
    Operations,
    RandomWords,
    Devices,
    Replicas,
)
